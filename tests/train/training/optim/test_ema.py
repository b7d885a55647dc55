"""The moving average of the adapter: its formula, files, previews, checkpoints, and runs cut short or out of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from tests.train.dataset.test_cache import prepared, quiet, showings
from tests.train.training.run.test_run import Watcher, metadata, run_of, same_lora, stop_at
from trainer.config.base import BaseConfig
from trainer.config.job import PromptConfig
from trainer.config.lr_schedule import Segment
from trainer.errors import RunError
from trainer.protocol import events
from trainer.protocol.run_directory import RunDirectory
from trainer.render.renderer import LoraUse, render
from trainer.training.build import build_engine
from trainer.training.device.offload import free_weights
from trainer.training.engine import Engine
from trainer.training.run.resume import resume
from trainer.training.run.start import start

DECAY = 0.3
SETTINGS = ["recipe.layers=attention", "recipe.steps=4", f"recipe.ema_decay={DECAY}", "recipe.learning_rate=0.02"]
SETTINGS += ["report.validation.every=2", "report.previews.every=4", "output.dtype=fp32"]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    settings = (f"recipe.ema_decay={DECAY}", "recipe.learning_rate=0.01", "recipe.layers=attention")
    job, images, parts = prepared(tmp_path, settings, "sd15")
    samples = list(showings(job, images, 4))
    parts.cache.ensure_latents(samples, quiet)
    parts.cache.ensure_texts([sample.caption for sample in samples], quiet)
    return build_engine(job, parts, [Segment(0, 8)], fresh=True)


def averages(engine: Engine) -> dict[str, Tensor]:
    assert engine.ema is not None
    return engine.ema.weights


class Unusable:
    """Assembles micro-batches that are not finite."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def assemble(self, *arguments: Any) -> Any:
        micro = self.collator.assemble(*arguments)
        return replace(micro, latents=micro.latents * torch.nan)


def test_the_average_follows_each_step_that_moved(engine: Engine) -> None:
    """A sum in float64; the decays of the first three updates are 1/10, 2/11 and 3/12, then the recipe's."""
    masters = engine.master_weights.masters
    wanted = {key: master.detach().double() for key, master in masters.items()}
    decays, collator = iter([1 / 10, 2 / 11, 3 / 12, DECAY, DECAY]), engine.collator
    for step in range(6):
        engine.collator = Unusable(collator) if step == 1 else collator  # type: ignore[assignment]
        if engine.train_step().skipped:
            continue
        decay = next(decays)
        wanted = {key: decay * wanted[key] + (1 - decay) * masters[key].detach().double() for key in masters}
    assert engine.progress.skipped == 1
    assert any(not torch.equal(averages(engine)[key], masters[key]) for key in masters)
    for key, value in wanted.items():
        torch.testing.assert_close(averages(engine)[key].double(), value, rtol=5e-6, atol=1e-9)


def test_the_model_computes_with_the_average_only_inside_the_block(engine: Engine) -> None:
    for _ in range(2):
        engine.train_step()
    weights, ema = engine.master_weights, engine.ema
    assert ema is not None
    masters = {key: master.detach().clone() for key, master in weights.masters.items()}
    with ema.in_use():
        assert all(torch.equal(weights.working[key], average) for key, average in averages(engine).items())
    assert all(torch.equal(weights.working[key], master) for key, master in masters.items())
    assert all(torch.equal(weights.masters[key], master) for key, master in masters.items())

    def lose_the_unet() -> None:
        with ema.in_use():
            free_weights(engine.models.unet)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        lose_the_unet()


def test_averages_of_another_adapter_are_refused(engine: Engine) -> None:
    assert engine.ema is not None
    before = {key: average.clone() for key, average in averages(engine).items()}
    first, *_ = before
    for other in ({}, {**before, first: torch.ones(3)}):
        with pytest.raises(RunError, match="EMA"):
            engine.ema.load(other)
    assert all(torch.equal(averages(engine)[key], average) for key, average in before.items())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averages ü")
    photographs(folder / "pictures", count=4)
    return folder


def a_job(shared: Path, folder: Path) -> Path:
    return write_job(folder, tiny_base("sd15", shared / "bases", depth=1), shared / "pictures")


@pytest.fixture(scope="module")
def averaged(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, Watcher]:
    job, watcher = a_job(shared, tmp_path_factory.mktemp("averaged")), Watcher()
    assert start(job, [*SETTINGS, "report.saving.keep=1"], watcher) == 0
    return run_of(job), watcher


def test_the_average_is_written_beside_each_lora(averaged: tuple[RunDirectory, Watcher]) -> None:
    """Files that are no longer kept go with their averages; the second step stays because its loss is the lowest."""
    run, watcher = averaged
    names = {path.name for path in run.output.glob("*.safetensors")}
    steps = {event.step for event in watcher.of(events.Saved) if "-step" in event.file}  # type: ignore[attr-defined]
    kept = {name for name in names if "-step" in name and "-ema" not in name}
    assert kept and steps == {2}
    assert names == {"test.safetensors", "test-ema.safetensors", *kept} | {
        name.replace(".safetensors", "-ema.safetensors") for name in kept
    }
    for name in ("test", "test-step000002"):
        raw, average = metadata(run.output / f"{name}.safetensors"), metadata(run.output / f"{name}-ema.safetensors")
        assert average["impasto_ema_decay"] == str(DECAY) and "impasto_ema_decay" not in raw
        assert (raw["ss_output_name"], average["ss_output_name"]) == (name, f"{name}-ema")
        assert (raw["modelspec.title"], average["modelspec.title"]) == ("test", "test (EMA)")
    # The preview shows the average, so it is not shown beside the other file.
    assert (run.output / "test-ema.png").exists() and not (run.output / "test.png").exists()
    written = [(event.file, event.ema) for event in watcher.of(events.Saved)]  # type: ignore[attr-defined]
    assert written[-2:] == [("output/test.safetensors", None), ("output/test-ema.safetensors", True)]


def test_the_file_holds_the_average_of_the_checkpoint(averaged: tuple[RunDirectory, Watcher]) -> None:
    run, _ = averaged
    saved = safetensors.torch.load_file(run.checkpoints / "step-00000004" / "ema.safetensors")
    masters = safetensors.torch.load_file(run.checkpoints / "step-00000004" / "adapter.safetensors")
    exported = safetensors.torch.load_file(run.output / "test-ema.safetensors")
    raw = safetensors.torch.load_file(run.output / "test.safetensors")
    assert saved.keys() == masters.keys()
    for key, average in saved.items():
        assert torch.equal(exported[key], average) and torch.equal(raw[key], masters[key])
    assert any(not torch.equal(saved[key], masters[key]) for key in saved)


def test_previews_show_the_average(averaged: tuple[RunDirectory, Watcher], shared: Path, tmp_path: Path) -> None:
    run, watcher = averaged
    told = [(event.step, event.ema) for event in watcher.of(events.Preview)]  # type: ignore[attr-defined]
    assert told == [(0, True), (4, True)]
    drawn = {}
    for name in ("test", "test-ema"):
        (file,) = render(
            BaseConfig(model=str(tiny_base("sd15", shared / "bases", depth=1))),
            [LoraUse(run.output / f"{name}.safetensors")],
            [PromptConfig(prompt="sks, a cat", steps=2, width=64, height=64)],
            tmp_path / name,
            device=torch.device("cpu"), dtype=torch.float32, on_drawn=lambda *_: None, on_notice=lambda *_: None,
        )  # fmt: skip
        drawn[name] = np.asarray(Image.open(file), np.int16)
    preview = Image.open(run.samples / "step-00000004-0.png")
    assert np.abs(np.asarray(preview, np.int16) - drawn["test-ema"]).max() <= 1
    assert np.abs(drawn["test"] - drawn["test-ema"]).max() > 1
    assert "EMA" in str(preview.info)


def test_the_average_of_another_method_has_a_plain_copy(shared: Path, tmp_path: Path) -> None:
    """Its products are those of the averaged factors: (A B) * (C D) * alpha / rank of LoHa."""
    job, watcher = a_job(shared, tmp_path), Watcher()
    settings = ["recipe.adapter=loha", "recipe.rank=2", "report.previews.prompts=[]", "report.validation.every=9"]
    assert start(job, [*SETTINGS, *settings], watcher) == 0
    output = run_of(job).output
    average, copy, raw = (
        safetensors.torch.load_file(output / f"test{ending}.safetensors") for ending in ("-ema", "-ema-lora", "-lora")
    )
    apart = 0.0
    for layer in sorted({key.partition(".")[0] for key in average}):
        first, second = (average[f"{layer}.hada_w{n}_a"] @ average[f"{layer}.hada_w{n}_b"] for n in (1, 2))
        change = first * second * average[f"{layer}.alpha"] / 2
        changes = [
            each[f"{layer}.lora_up.weight"].flatten(1) @ each[f"{layer}.lora_down.weight"].flatten(1)
            * (each[f"{layer}.alpha"] / len(each[f"{layer}.lora_down.weight"]))
            for each in (copy, raw)
        ]  # fmt: skip
        errors = [float((each - change).norm() / change.norm()) for each in changes]
        assert errors[0] < 2e-3
        apart = max(apart, errors[1])
    assert apart > 0.05
    assert metadata(output / "test-ema-lora.safetensors")["modelspec.title"] == "test (EMA)"
    notices = [event.sentence for event in watcher.of(events.Notice) if event.code == "copy"]  # type: ignore[attr-defined]
    assert [sentence.partition(" ")[0] for sentence in notices] == [
        "test-ema-lora.safetensors",
        "test-lora.safetensors",
    ]


def test_training_is_the_same_as_without(averaged: tuple[RunDirectory, Watcher], shared: Path, tmp_path: Path) -> None:
    """The validation loss, too, stays that of the weights that are trained."""
    run, watcher = averaged
    job, plain = a_job(shared, tmp_path), Watcher()
    bare = [setting for setting in SETTINGS if "ema_decay" not in setting]
    assert start(job, [*bare, "report.previews.prompts=[]"], plain) == 0
    first, second = (safetensors.torch.load_file(each.output / "test.safetensors") for each in (run, run_of(job)))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    losses = [[event.loss for event in each.of(events.Validation)] for each in (watcher, plain)]  # type: ignore[attr-defined]
    assert losses[0] == losses[1]


def test_a_paused_run_continues_its_average(
    averaged: tuple[RunDirectory, Watcher], shared: Path, tmp_path: Path
) -> None:
    job = a_job(shared, tmp_path)
    assert start(job, SETTINGS, Watcher(stop_at(3, job))) == 75
    assert resume(run_of(job), Watcher()) == 0
    for name in ("test", "test-ema", "test-step000002-ema"):
        assert same_lora(averaged[0].output / f"{name}.safetensors", run_of(job).output / f"{name}.safetensors")
