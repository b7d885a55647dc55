"""What a preset would cost on a card is said before it is kept: planned with tiny models of the true classes."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from tests.support.tiny import tiny_configs
from trainer import cli, gpu
from trainer.cli import planning
from trainer.config.presets import library
from trainer.config.presets.preset import Preset, dump_preset
from trainer.errors import ImpastoError
from trainer.memory.planner import request
from trainer.memory.trace import workload
from trainer.training.acceleration import throughput

GIB = 1024**3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the published architecture be a tiny one, so that tracing it takes no time."""
    for module in (request, workload):
        monkeypatch.setattr(module, "bundled_configs", partial(tiny_configs, depth=1))
    # However busy the machine is, every fit is looked at.
    for name in ("PATIENCE", "ALTERNATIVES_PATIENCE"):
        monkeypatch.setattr(planning, name, 600.0)
    # Measuring this takes half a minute of CPU time; tests/train/training/acceleration/test_throughput.py measures it.
    monkeypatch.setattr(throughput, "_operation_seconds", lambda device, threads: 2e-5)
    monkeypatch.chdir(tmp_path)


def write(**recipe: object) -> str:
    stated = {"rank": 4, "resolution": 64, "effective_batch": 2, "steps": 10} | recipe
    made = Preset.model_validate({"schema": 1, "name": "small", "base": {"family": "sd15"}, "recipe": stated})
    Path("small.toml").write_text(dump_preset(made), encoding="utf-8")
    return "small.toml"


def test_a_preset_is_planned_for_the_card_before_it_is_kept(capsys, monkeypatch):
    assert cli.main(["presets", "add", "--yes", write(), "--gpu", "RTX 3060 12GB"]) == 0
    told = capsys.readouterr().out
    assert "On RTX 3060 12GB: bf16 base, both images at once, no checkpointing: " in told
    assert " at most (" in told
    assert told.index("On RTX 3060") < told.index("Added ")

    card = gpu.Gpu(0, "GPU-1", "NVIDIA GeForce RTX 3060", 12 * GIB, 11 * GIB, "581.15", (13, 1), (8, 6), ())
    monkeypatch.setattr(gpu, "list_gpus", lambda: [card])
    assert cli.main(["presets", "check", "small.toml"]) == 0
    assert "On NVIDIA GeForce RTX 3060: bf16 base" in capsys.readouterr().out

    full = dataclasses.replace(card, free_bytes=GIB // 4)
    monkeypatch.setattr(gpu, "list_gpus", lambda: [full])
    assert cli.main(["presets", "check", "small.toml"]) == 0
    assert "Could not plan for NVIDIA GeForce RTX 3060: none of its memory can be used" in capsys.readouterr().out


def test_what_hinders_a_plan_is_told_and_the_preset_is_sound_all_the_same(capsys, monkeypatch):
    unusable = write(learning_rate=0.0, text_encoder_2={"learning_rate": 1e-5})
    assert cli.main(["presets", "check", unusable, "--gpu", "8GB"]) == 0
    assert "Could not plan with this preset alone: " in capsys.readouterr().out

    def broken() -> list[gpu.Gpu]:
        raise ImpastoError("gpu.driver", "The NVIDIA driver does not work: it was updated.", "Start the computer anew.")

    monkeypatch.setattr(gpu, "list_gpus", broken)
    assert cli.main(["presets", "add", "--yes", write()]) == 0
    assert "fp32 base, both images at once, no checkpointing. On the CPU: about " in capsys.readouterr().out
    assert library.find_preset("small").origin == "received"


def test_what_a_fit_holds_is_told_and_planned_with(capsys):
    fit = {"dtype": "bf16", "micro_batch": 1, "gradient_checkpointing": "full"}
    made = Preset.model_validate({"schema": 1, "name": "small", "base": {"family": "sd15"}, "fit": fit})
    Path("fit.toml").write_text(dump_preset(made), encoding="utf-8")
    assert cli.main(["presets", "check", "fit.toml", "--gpu", "GTX 1080"]) == 0
    told = capsys.readouterr().out
    assert 'Its fit:\n  fit.dtype = "bf16"\n  fit.micro_batch = 1\n  fit.gradient_checkpointing = "full"\n' in told
    assert 'GTX 1080 8GB does not support bf16; use "fp16"' in told
    assert request.request_without_job("sd15", None, "8GB", fit=made.fit).written == made.fit


def test_a_card_that_nobody_knows_is_told_and_nothing_is_kept(capsys):
    assert cli.main(["presets", "add", write(), "--gpu", "RTX 99"]) == 2
    assert 'Could not plan for the GPU "RTX 99"' in capsys.readouterr().err
    assert not library.presets_folder().exists()


def test_a_preset_in_a_folder_with_a_long_path_is_planned_under_its_own_name(tmp_path):
    folder = tmp_path / ("long" * 20) / ("path" * 20)
    folder.mkdir(parents=True)
    (folder / "small.toml").write_text(Path(write()).read_text(encoding="utf-8"), encoding="utf-8")
    question = planning.request_for_preset("sd15", str(folder / "small.toml"), "8GB")
    assert question.name == "small"
    assert question.workload.recipe.rank == 4
