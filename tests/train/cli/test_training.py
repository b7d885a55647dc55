"""The commands that need torch, from the words on: doctor, train, resume, render, prune."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.support.jobs import photographs, write_job
from tests.support.presets import preset
from tests.support.tiny import tiny_base
from trainer import cli, gpu
from trainer.cli import doctor
from trainer.config.load import load_job
from trainer.config.presets import library
from trainer.memory.planner.request import request_of_job
from trainer.protocol import events, places
from trainer.protocol.run_directory import RunDirectory


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command line ü")
    base = tiny_base("sd15", folder / "base", form="single", depth=1)
    return write_job(folder / "job", base, photographs(folder / "pictures", count=4))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(autouse=True)
def shared_traces(traced: Path, per_user_folder: Path) -> Iterator[None]:
    """What one run traces for its forecast serves the others here: each has a user of its own, who knows nothing."""
    known = places.cache_folder() / "traces"
    shutil.copytree(traced, known)
    yield
    shutil.copytree(known, traced, dirs_exist_ok=True)


def entries() -> set[Path]:
    return set(places.cache_folder().glob("*/??/*.safetensors"))


def test_the_doctor_really_computes():
    assert [check.verdict for check in doctor._run_self_test([])] == ["ok", "ok"]


def encoded_at_start(job: Path, card: str | None = None) -> tuple[int, int]:
    """How many pictures and texts a plan foresees to be encoded on a card, encoded as runs on the CPU do."""
    settings = ("recipe.steps=2", "name=whole", "fit.dtype=fp32", "fit.vae_dtype=fp32", "fit.deterministic=true")
    occasions = request_of_job(job, settings, card).counts
    return occasions.images, occasions.texts


def test_a_job_is_trained_drawn_with_and_its_cache_pruned(job, tmp_path, capsys, monkeypatch):
    card = gpu.Gpu(0, "GPU-0", "NVIDIA GeForce RTX 3060", 12 << 30, 9 << 30, "581.15", (13, 0), (8, 6), ())
    monkeypatch.setattr(gpu, "list_gpus", lambda: [card])
    unknown = encoded_at_start(job)
    assert min(unknown) >= 4
    words = ["--set", "recipe.steps=2", "--set", "name=whole", "--memory-snapshot"]
    assert cli.main(["train", str(job), *words]) == 0
    told = capsys.readouterr().out.splitlines()
    assert any("no memory snapshot" in line for line in told)  # on the CPU
    assert "Train: 2" in told
    assert told[-1] == "Done after 2 steps. The LoRA is output/whole.safetensors."
    assert (encoded_at_start(job), encoded_at_start(job, "RTX 3060")) == ((0, 0), unknown)
    run = RunDirectory.open(job.parent / "runs" / "whole")
    lora, base = run.output / "whole.safetensors", next(job.parent.parent.glob("base/*.safetensors"))

    settings = ["--steps", "2", "--width", "64", "--height", "64", "--out", str(tmp_path / "drawn ü")]
    words = ["render", "--base", str(base), "--lora", f"{lora}:0.8", "--prompt", "a cat", "--prompt", "a dog"]
    assert cli.main([*words, *settings]) == 0
    drawn = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.read_bytes()[:4] for path in drawn] == [b"\x89PNG"] * 2

    assert cli.main(["resume", "whole", "--steps", "3", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["type"] == "finished"
    assert lines[-1]["step"] == 3

    before = entries()
    assert before
    assert cli.main(["prune", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"Would delete {len(before)} entries")
    assert entries() == before
    assert cli.main(["prune"]) == 0
    assert entries() == set()
    assert encoded_at_start(job, "here") == unknown


def test_a_new_job_has_images_of_its_class_and_an_interrupted_one_the_same(job, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = next(job.parent.parent.glob("base/*.safetensors"))
    words = ["new", "--base", str(base), "--images", str(job.parent.parent / "pictures"), "--trigger", "sks"]
    with pytest.raises(SystemExit):
        cli.main([*words, "--make-reg", "2", "katze ü"])
    assert "--make-reg needs --class" in capsys.readouterr().err

    library.save_preset(preset(name="tiny", base={"family": "sd15"}, recipe={"resolution": 64}))
    words += ["--class", "a cat", "--make-reg", "2", "--recipe", "tiny", "katze ü"]
    assert cli.main(words) == 0
    made = tmp_path / "katze ü"
    first, second = sorted((made / "regularization").iterdir())
    assert [first.name, second.name] == ["000.png", "001.png"]
    wanted = load_job(made / "job.toml").dataset.folders
    assert [(each.kind, each.class_words) for each in wanted] == [("train", "a cat"), ("regularization", "a cat")]
    assert Path(wanted[1].path) == made / "regularization"
    with Image.open(first) as image:
        assert image.size == (64, 64)

    whole = first.read_bytes(), second.read_bytes()
    assert whole[0] != whole[1]
    first.unlink()  # as after an interruption
    (made / "job.toml").unlink()
    assert cli.main(words) == 0
    assert (first.read_bytes(), second.read_bytes()) == whole


# What libraries have for other ends than a run's, and what only tests need: each would cost a start up to seconds.
NEEDLESS = {
    "torch._inductor.compile_fx", "torch._inductor.lowering", "torch.utils.tensorboard", "networkx",
    "matplotlib", "pandas", "sklearn", "skimage", "torchvision", "pytest", "app",
}  # fmt: skip


def require_quick_start(said: list[str]) -> None:
    """Checks what an engine said until its first step: a word before what takes seconds, and nothing needless."""
    imported = [line.rpartition("|")[2].strip() for line in said]
    word = next(number for number, line in enumerate(said) if line.startswith("{"))
    assert json.loads(said[word])["code"] == "starting"
    assert "torch" not in imported[:word]
    assert {"torch", "bitsandbytes", "trainer.training.run.start"} <= set(imported)
    assert not NEEDLESS & set(imported)


def test_ctrl_c_pauses_and_resume_finishes_with_a_pruned_cache(job, capsys):
    flags = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if sys.platform == "win32" else {}
    rare = [f"report.{rhythm}=1000" for rhythm in ("validation.every", "previews.every", "saving.every_steps")]
    settings = [word for value in ("recipe.steps=1000", "name=paused", *rare) for word in ("--set", value)]
    child = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "trainer", "train", str(job), *settings, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", **flags,
    )  # fmt: skip
    with child:
        said = [child.stdout.readline()]
        while '"type": "step"' not in said[-1]:
            assert child.poll() is None, said
            said.append(child.stdout.readline())
        child.send_signal(signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGINT)
        said += child.stdout.readlines()
    assert child.returncode == 75
    assert [line for line in said if not line.startswith(("{", "import time:"))] == []
    require_quick_start(said)
    last = events.from_line([line for line in said if line.startswith("{")][-1])
    assert isinstance(last, events.Finished)
    assert last.outcome == "paused"

    kept = entries()
    stray = places.cache_folder() / "pictures" / "ab" / ("0" * 64 + ".safetensors")
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"of a run that is over")
    assert cli.main(["prune"]) == 0
    assert entries() == kept
    assert not stray.exists()

    capsys.readouterr()
    assert cli.main(["resume", "paused", "--steps", str(last.step + 1)]) == 0
    assert f"Done after {last.step + 1} steps." in capsys.readouterr().out
    assert cli.main(["train", str(job), *settings, "--resume-if-any"]) == 0
    assert "The run paused is finished; its LoRA is in " in capsys.readouterr().out
    assert not (job.parent / "runs" / "paused-2").exists()


def test_the_same_command_starts_a_run_and_continues_it(job, capsys, monkeypatch):
    command = ["train", str(job), "--resume-if-any", "--set", "name=again", "--set", "recipe.steps=3"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "trainer.training.callbacks.lora_export.export_lora", lambda *_, **__: signal.raise_signal(signal.SIGINT)
        )
        assert cli.main(command) == 75  # by Ctrl-C, while a LoRA is written
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "Continuing the run again." in said and "Done after 3 steps." in said
    assert [each["number"] for each in RunDirectory.open(job.parent / "runs" / "again").attempts()] == [1, 2]
    assert not (job.parent / "runs" / "again-2").exists()


def test_a_reader_that_leaves_ends_no_run(job):
    words = ["--set", "name=unread", "--set", "recipe.steps=3", "--set", "report.previews.prompts=[]"]
    with subprocess.Popen(
        [sys.executable, "-m", "trainer", "train", str(job), *words, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
    ) as child:  # fmt: skip
        while '"type": "attempt_started"' not in child.stdout.readline():
            assert child.poll() is None, child.stderr.read()
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 0
    run = RunDirectory.open(job.parent / "runs" / "unread")
    assert run.state() == "done"
    assert isinstance(events.read_events(run.events)[0][-1], events.Finished)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal that can be closed under a program")
def test_closing_the_terminal_pauses_the_run(job):
    """The system asks whoever the terminal belonged to to end (SIGHUP), and refuses every further word (EIO)."""
    rare = ("validation.every", "previews.every", "saving.every_steps")
    settings = ["recipe.steps=1000", "name=hung-up", *(f"report.{rhythm}=1000" for rhythm in rare)]
    own = "import fcntl, runpy, sys, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    own += "sys.argv[0] = 'trainer'\nrunpy.run_module('trainer', run_name='__main__')"
    terminal, ours = os.openpty()
    words = ["train", str(job), *(word for setting in settings for word in ("--set", setting))]
    streams = {"stdin": ours, "stdout": ours, "stderr": ours, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", own, *words], **streams) as child:
        os.close(ours)
        shown = b""
        while b"learning rate" not in shown:
            shown += os.read(terminal, 4096)
        os.close(terminal)
    assert child.returncode == 75
    run = RunDirectory.open(job.parent / "runs" / "hung-up")
    assert run.state() == "paused"
    log = run.console.read_text(encoding="utf-8")
    assert "Traceback" not in log and "Started on cpu." in log
    assert log.splitlines()[-1].startswith("Paused at step ")


def test_pruning_deletes_nothing_when_a_runs_need_is_unknown(job, capsys):
    folder = places.cache_folder() / "texts" / "ab"
    folder.mkdir(parents=True)
    (folder / ("1" * 64 + ".safetensors")).write_bytes(b"x")
    run = RunDirectory.create(job.parent / "runs", "lost")
    run.begin_attempt({})
    text = job.read_text(encoding="utf-8")
    run.job.write_text(text.replace(".safetensors", "-gone.safetensors"), encoding="utf-8")
    run.listing.write_text("", encoding="utf-8")
    assert cli.main(["prune"]) == 2
    said = capsys.readouterr().err
    assert 'cache entries the run "lost" still needs' in said
    assert str(run.path) in said
    assert len(entries()) == 1


def test_a_broken_job_in_json_is_an_event_too(tmp_path, capsys):
    (tmp_path / "job.toml").write_text("name = 7", encoding="utf-8")
    assert cli.main(["train", str(tmp_path / "job.toml"), "--json"]) == 2
    told = capsys.readouterr()
    (event,) = (events.from_line(line) for line in told.out.splitlines())
    assert isinstance(event, events.ErrorEvent)
    assert event.code == "job.invalid"
    assert "What to do:" in told.err
    assert os.listdir(tmp_path) == ["job.toml"]  # noqa: PTH208 - names are enough
