"""What hangs on the loop, in real runs: wishes, best step, previews, kept files, and the rates of an extended run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from tests.train.training.run.test_run import Watcher, metadata, run_of, same_lora, stop_at, tensors_sha
from trainer.config.base import BaseConfig
from trainer.config.job import PromptConfig
from trainer.memory.planner.request import request_of_job
from trainer.protocol import commands, events
from trainer.protocol.run_directory import RunDirectory
from trainer.render.renderer import LoraUse, render
from trainer.training.reporting import reporter
from trainer.training.run.resume import Extension, resume
from trainer.training.run.start import start

# Nothing that takes time but what a test is about.
BARE = ["recipe.layers=attention", "report.previews.prompts=[]", "report.validation.every=100"]
BARE += ["report.saving.every_steps=100", "report.saving.checkpoint_every=100"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    photographs(folder / "pictures", count=4)
    photographs(folder / "others", count=2)
    return folder


def a_job(shared: Path, folder: Path) -> Path:
    return write_job(folder, tiny_base("sd15", shared / "bases", depth=1), shared / "pictures")


def at_step(step: int, act: Callable[[], object]) -> Watcher:
    """Acts right after a step of the first attempt."""

    def watch(event: events.Event) -> None:
        if isinstance(event, events.StepEvent) and (event.step, event.attempt) == (step, 1):
            act()

    return Watcher(watch)


def test_save_and_sample_are_done_after_the_step_and_the_run_goes_on(shared: Path, tmp_path: Path) -> None:
    job = a_job(shared, tmp_path)
    sent: list[Path] = []

    def ask() -> None:
        sent.extend(commands.send(run_of(job).commands, name) for name in ("save", "sample"))

    watcher = at_step(2, ask)
    prompts = 'report.previews.prompts=[{prompt="a cat", steps=2, width=64, height=64}]'
    assert start(job, [*BARE, prompts, "report.previews.every=100", "recipe.steps=3"], watcher) == 0
    run = run_of(job)
    assert sorted(path.name for path in run.output.glob("*.safetensors")) == [
        "test-step000002.safetensors", "test.safetensors",
    ]  # fmt: skip
    assert sorted(path.name for path in run.samples.iterdir()) == [f"step-0000000{step}-0.png" for step in (0, 2, 3)]
    assert (run.checkpoints / "step-00000002").is_dir()
    assert [commands.answer(path) for path in sent] == [
        commands.CommandResult("done", "test-step000002.safetensors"),
        commands.CommandResult("done", "previews of step 2"),
    ]
    told = [event for event in watcher.of(events.CommandEvent) if isinstance(event, events.CommandEvent)]
    assert [(event.name, event.outcome) for event in told] == [("save", "done"), ("sample", "done")]
    # The picture drawn since lies beside the LoRA that was saved.
    assert (run.output / "test-step000002.png").read_bytes() == (run.samples / "step-00000002-0.png").read_bytes()


@pytest.mark.parametrize(("order", "code"), [("pause", 75), ("stop", 0)])
def test_a_command_during_the_last_step_pauses_or_finishes_the_run(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: commands.CommandName, code: int
) -> None:
    monkeypatch.setattr(reporter, "POLL_SECONDS", 0.0)  # so that the last validation is interrupted
    job = a_job(shared, tmp_path)
    watcher = at_step(2, lambda: commands.send(run_of(job).commands, order))
    assert start(job, [*BARE, "recipe.steps=2"], watcher) == code
    assert run_of(job).state() == ("done" if order == "stop" else "paused")


def test_ctrl_c_twice_ends_at_once_and_nothing_is_lost_that_was_saved(shared: Path, tmp_path: Path) -> None:
    settings = [*BARE, "recipe.steps=4", "report.saving.checkpoint_every=1"]
    whole = a_job(shared, tmp_path / "whole")
    assert start(whole, settings, Watcher()) == 0
    job = a_job(shared, tmp_path / "cut")

    def interrupt() -> None:
        raise KeyboardInterrupt

    assert start(job, settings, at_step(3, interrupt)) == 75
    run = run_of(job)
    assert run.state() == "paused"
    assert resume(run, Watcher()) == 0
    assert same_lora(run_of(whole).output / "test.safetensors", run.output / "test.safetensors")


def held_out(shared: Path) -> str:
    folders = f"{{path='{shared / 'pictures'}'}}, {{path='{shared / 'others'}', kind='validation'}}"
    return f"dataset.folders=[{folders}]"


def test_the_best_step_by_the_held_out_loss_is_kept_whole(shared: Path, tmp_path: Path) -> None:
    job = a_job(shared, tmp_path)
    # At this rate the loss soon rises.
    settings = [*BARE, held_out(shared), "recipe.steps=5", "recipe.learning_rate=0.2", "report.validation.every=1"]
    watcher = Watcher()
    assert start(job, [*settings, "report.saving.checkpoint_keep=1", "report.saving.keep=1"], watcher) == 0
    measured = [event for event in watcher.of(events.Validation) if isinstance(event, events.Validation)]
    assert all(event.held_out for event in measured) and [event.step for event in measured] == list(range(6))
    losses = {event.step: event.loss or math.inf for event in measured if event.step}
    best = min(losses, key=lambda step: losses[step])
    assert best < 5, "the test needs a loss that rises"
    run = run_of(job)
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == [f"step-0000000{best}", "step-00000005"]
    assert (run.output / f"test-step00000{best}.safetensors").exists()
    told = {event.code: event.sentence for event in watcher.of(events.Notice)}  # type: ignore[attr-defined]
    assert told["best"] == f"Suggested LoRA: step {best}, which has the lowest validation loss."


def sentences(watcher: Watcher) -> dict[str, str]:
    return {event.code: event.sentence for event in watcher.of(events.Notice)}  # type: ignore[attr-defined]


def test_the_best_step_on_training_images_is_named_as_such(shared: Path, tmp_path: Path) -> None:
    """At this rate the loss rises, so the best step is not the last."""
    watcher, job = Watcher(), a_job(shared, tmp_path)
    settings = [*BARE, "recipe.steps=4", "recipe.learning_rate=3.0", "report.validation.every=1"]
    assert start(job, settings, watcher) == 0
    measured = [event for event in watcher.of(events.Validation) if isinstance(event, events.Validation)]
    assert not any(event.held_out for event in measured)
    losses = {event.step: event.loss or math.inf for event in measured if event.step}
    best = min(losses, key=lambda step: losses[step])
    assert best < 4, "the test needs a loss that rises"
    assert sentences(watcher)["best"].startswith(f"Step {best} has the lowest loss on training images.")
    assert not any("validation loss" in text for text in sentences(watcher).values())
    assert (run_of(job).output / f"test-step00000{best}.safetensors").exists()


@pytest.mark.parametrize("paused", [False, True])
def test_a_run_stops_early_with_the_lora_of_that_step_and_continues_exactly(
    shared: Path, tmp_path: Path, paused: bool
) -> None:
    settings = [*BARE, held_out(shared), "recipe.steps=8", "recipe.learning_rate=0.2", "report.validation.every=1"]
    whole, watcher = a_job(shared, tmp_path / "whole"), Watcher()
    assert start(whole, [*settings, "report.saving.every_steps=1"], watcher) == 0
    losses = [event.loss or math.inf for event in watcher.of(events.Validation)]  # type: ignore[attr-defined]
    # The first step that is the second one in a row without a new lowest loss, from the events of the whole run.
    end = next(
        step for step in range(3, 9) if min(losses[step - 1 : step + 1]) >= min(losses[1 : step - 1])
    )  # fmt: skip
    assert end < 8, "the test needs a loss that rises"
    job, watcher = a_job(shared, tmp_path / "early"), Watcher()
    early = [*settings, "report.validation.patience=2"]
    if paused:
        assert start(job, early, Watcher(stop_at(end - 1, job))) == 75
        assert resume(run_of(job), watcher) == 0
    else:
        assert start(job, early, watcher) == 0
    run, reference = run_of(job), run_of(whole).output
    assert (run.state(), run.read_status().step) == ("done", end)  # type: ignore[union-attr]
    assert f"Stopped early at step {end} of 8: the validation loss" in sentences(watcher)["early_stopping"]
    assert tensors_sha(run.output / "test.safetensors") == tensors_sha(reference / f"test-step00000{end}.safetensors")
    assert resume(run, Watcher()) == 0
    assert run.read_status().step == end  # type: ignore[union-attr]
    again = Watcher()
    assert resume(run, again, steps=8) == 0
    assert "Early stopping is off" in sentences(again)["early_stopping"]
    assert same_lora(run.output / "test.safetensors", reference / "test.safetensors")


def rates(watcher: Watcher) -> list[float]:
    return [event.learning_rates["unet"] for event in watcher.of(events.StepEvent)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", ["stretch", "hold", "restart"])
def test_the_rates_of_an_extended_run(shared: Path, tmp_path: Path, schedule: Extension) -> None:
    """Half a cosine from 1e-3: over four steps, and over all that there are in the end."""
    job = a_job(shared, tmp_path)
    first, second = Watcher(), Watcher()
    assert start(job, [*BARE, "recipe.steps=4", "recipe.schedule.kind=cosine"], first) == 0
    assert resume(run_of(job), second, steps=6, schedule=schedule) == 0

    def cosine(step: int, steps: int) -> float:
        return 1e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))

    expected = {
        "stretch": [cosine(4, 6), cosine(5, 6)],
        "hold": [cosine(3, 4)] * 2,
        "restart": [cosine(0, 2), cosine(1, 2)],
    }
    assert rates(first) == pytest.approx([cosine(step, 4) for step in range(4)])
    assert rates(second) == pytest.approx(expected[schedule])


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (("report.previews.every_epochs=1",), [0, 2, 4, 5]),
        (("report.previews.every=2", "report.previews.first=false"), [2, 4, 5]),
        (("report.previews.every=1", "report.previews.max_share=1e-9"), [0, 5]),
        (("report.previews.every=2", "report.previews.max_share=0.999"), [0, 2, 4, 5]),
    ],
)
def test_previews_are_rendered_when_the_job_says(
    shared: Path, tmp_path: Path, settings: tuple[str, ...], steps: list[int]
) -> None:
    """An epoch of four images in batches of two has two steps."""
    job, watcher = a_job(shared, tmp_path), Watcher()
    prompt = 'report.previews.prompts=[{prompt="sks", steps=1, width=64, height=64}]'
    whole = [*BARE, prompt, "recipe.steps=5", "recipe.effective_batch=2", *settings]
    assert start(job, whole, watcher) == 0
    assert [event.step for event in watcher.of(events.Preview)] == steps  # type: ignore[attr-defined]
    skipped = [event.sentence for event in watcher.of(events.Notice) if event.code == "previews.skipped"]  # type: ignore[attr-defined]
    assert len(skipped) == (steps == [0, 5]) and all("previews of step 1" in sentence for sentence in skipped)
    if not skipped:  # the forecast counts those that are skipped too
        assert request_of_job(job, whole, "8GB").counts.previews == len(steps)


@pytest.mark.parametrize("live", [False, True])
def test_a_preview_is_what_the_lora_of_its_step_draws(shared: Path, tmp_path: Path, live: bool) -> None:
    """With dropout, which drawing must not know, and averaged weights, which training does not compute with."""
    base = tiny_base("sd15", shared / "bases", prediction="v", depth=1, zero_terminal_snr=True)
    job = write_job(tmp_path, base, shared / "pictures")
    prompts = [
        PromptConfig(prompt="sks, a cat", negative="dog", steps=2, guidance=5.0, seed=3, width=96, height=64),
        PromptConfig(prompt="a dog", steps=1, seed=4, width=64, height=64),
    ]
    settings = [*BARE, "recipe.steps=2", "report.previews.every=1", "report.saving.every_steps=1", "output.dtype=fp32"]
    settings += ["recipe.optimizer.name=schedulefree", "recipe.learning_rate=0.05", "recipe.dropout=0.3"]
    settings += [f"recipe.text_encoder.learning_rate={0.05 if live else 0.0}", "recipe.clip_skip=2"]
    tables = [
        ", ".join(f"{key}={json.dumps(value)}" for key, value in prompt.model_dump(exclude_unset=True).items())
        for prompt in prompts
    ]
    watcher = Watcher()
    words = ", ".join(f"{{{table}}}" for table in tables)
    assert start(job, [*settings, f"report.previews.prompts=[{words}]"], watcher) == 0
    told = [(event.step, event.index, event.file) for event in watcher.of(events.Preview)]  # type: ignore[attr-defined]
    assert told == [(step, index, f"samples/step-0000000{step}-{index}.png") for step in range(3) for index in range(2)]
    run = run_of(job)
    lora = LoraUse(run.output / "test-step000001.safetensors")
    files = render(
        BaseConfig(model=str(base)), [lora], prompts, tmp_path / "drawn", device=torch.device("cpu"),
        dtype=torch.float32, on_drawn=lambda *_: None, on_notice=lambda *_: None, clip_skip=2,
    )  # fmt: skip
    for index, file in enumerate(files):
        before, after, expected = (
            np.asarray(Image.open(path), np.int16)
            for path in (*(run.samples / f"step-0000000{step}-{index}.png" for step in (0, 1)), file)
        )
        assert np.abs(after - expected).max() <= 1
        assert np.abs(before - after).max() > 5


def test_what_a_kill_left_undone_after_a_checkpoint_is_done_at_the_next_start(shared: Path, tmp_path: Path) -> None:
    """One of two previews and the LoRA of the checkpoint's step are missing."""
    job = a_job(shared, tmp_path)
    prompt = '{prompt="a cat", steps=2, width=64, height=64}'
    settings = [*BARE, "recipe.steps=4", f"report.previews.prompts=[{prompt}, {prompt}]", "report.previews.every=3"]
    settings += ["report.saving.every_steps=3", "report.saving.checkpoint_every=3"]

    def kill() -> None:
        raise KeyboardInterrupt

    assert start(job, settings, at_step(4, kill)) == 75
    run = run_of(job)
    picture, lora = run.samples / "step-00000003-1.png", run.output / "test-step000003.safetensors"
    whole, before = picture.read_bytes(), tensors_sha(lora)
    picture.unlink()
    lora.unlink()
    assert resume(run, Watcher()) == 0
    assert picture.read_bytes() == whole
    assert tensors_sha(lora) == before


def test_an_interruption_while_caching_pauses_before_anything_is_loaded(shared: Path, tmp_path: Path) -> None:
    job = a_job(shared, tmp_path)

    def watch(event: events.Event) -> None:
        if isinstance(event, events.PhaseStarted) and event.phase == "cache_texts":
            commands.send(run_of(job).commands, "pause")

    assert start(job, [*BARE, "recipe.steps=2"], watch) == 75
    run = run_of(job)
    status = run.read_status()
    assert status is not None and (status.state, status.step) == ("paused", 0)
    assert not any(run.checkpoints.iterdir())
    assert resume(run, Watcher()) == 0


def test_a_lora_tells_what_it_was_made_of(shared: Path, tmp_path: Path) -> None:
    job = a_job(shared, tmp_path)
    folders = f"{{path='{shared / 'pictures'}', trigger='sks', repeats=2}}, "
    folders += f"{{path='{shared / 'others'}', kind='regularization', trigger='other'}}"
    # Sixteen showings an epoch: six steps of three.
    settings = [*BARE, f"dataset.folders=[{folders}]", "recipe.steps=7", "report.saving.every_steps=6"]
    assert start(job, [*settings, "output.tag_frequency=true"], Watcher(stop_at(6, job))) == 75
    run = run_of(job)
    assert resume(run, Watcher()) == 0
    middle, end = metadata(run.output / "test-step000006.safetensors"), metadata(run.output / "test.safetensors")
    keys = ("ss_steps", "ss_epoch", "ss_num_epochs", "ss_num_train_images", "ss_num_reg_images", "ss_max_train_steps")
    assert [middle[key] for key in keys] == ["6", "1", "2", "4", "2", "7"]
    assert [end[key] for key in keys] == ["7", "2", "2", "4", "2", "7"]
    assert end["modelspec.trigger_phrase"] == "sks"
    tags = json.loads(end["ss_tag_frequency"])["test"]
    assert tags["close-up"] == 1 and "sks" not in tags
    buckets = json.loads(end["ss_bucket_info"])["buckets"]
    assert sum(bucket["count"] for bucket in buckets.values()) == 4
    first = run.attempts()[0]["started"]
    assert len(run.attempts()) == 2
    with (run.output / "test.safetensors").open("rb") as file:
        assert f'"ss_training_started_at":"{first}"'.encode() in file.read(100_000)


def test_without_being_asked_it_tells_no_tags(shared: Path, tmp_path: Path) -> None:
    job = a_job(shared, tmp_path)
    assert start(job, [*BARE, "recipe.steps=1"], Watcher()) == 0
    assert "ss_tag_frequency" not in metadata(RunDirectory.open(run_of(job).path).output / "test.safetensors")
