"""Runs that are stopped or paused in each phase: they end at once, and resume to what an undisturbed run leaves."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from tests.train.training.run.test_run import Watcher, run_of, same_lora
from trainer.protocol import commands, events
from trainer.protocol.commands import CommandName
from trainer.protocol.run_directory import RunDirectory
from trainer.training.reporting import reporter
from trainer.training.reporting.reporter import CHECKS_IN_BACKWARD, Control, Interrupted, check_in_backward
from trainer.training.run.resume import resume
from trainer.training.run.start import start

# One thing of everything: every step has a validation and a preview somewhere near it, and the best step is saved.
SETTINGS = ["recipe.layers=attention", "dataset.validation_share=0.2", "recipe.steps=4", "report.validation.every=2"]
SETTINGS += ["report.previews.every=2", "report.saving.every_steps=2", "report.saving.checkpoint_every=3"]

Act = Callable[[], object]


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute a whole forward within the time after which a command is looked for again."""
    monkeypatch.setattr(reporter, "POLL_SECONDS", 0.0)


class Forwards:
    """Counts the forwards of UNets and of both halves of VAEs, and acts in the middle of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[str] = []
        self.act: Callable[[str], object] = lambda kind: None
        for kind, model in (("unet", UNet2DConditionModel), ("encode", Encoder), ("decode", Decoder)):
            monkeypatch.setattr(model, "forward", self._counted(kind, model.forward))

    def _counted(self, kind: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.kinds.append(kind)
            self.act(kind)
            return forward(*args, **kwargs)

        return counted


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopping ü")
    photographs(folder / "pictures")
    return folder


def a_job(shared: Path, folder: Path) -> Path:
    return write_job(folder, tiny_base("sd15", shared / "bases", depth=1), shared / "pictures")


@pytest.fixture(scope="module")
def undisturbed(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    job = a_job(shared, tmp_path_factory.mktemp("undisturbed"))
    assert start(job, SETTINGS, Watcher()) == 0
    return run_of(job)


def validations(run: RunDirectory) -> dict[int, float]:
    written, _ = events.read_events(run.events)
    return {event.step: event.loss for event in written if isinstance(event, events.Validation)}


def assert_alike(run: RunDirectory, other: RunDirectory) -> None:
    """Every LoRA, every preview and every validation of two runs is the same."""
    loras = sorted(path.name for path in other.output.glob("*.safetensors"))
    assert sorted(path.name for path in run.output.glob("*.safetensors")) == loras
    assert all(same_lora(run.output / name, other.output / name) for name in loras)
    previews = {path.name: path.read_bytes() for path in other.samples.iterdir()}
    assert {path.name: path.read_bytes() for path in run.samples.iterdir()} == previews
    assert validations(run) == validations(other)


def send_once(job: Path, name: CommandName) -> Act:
    sent: list[Path] = []
    return lambda: sent or sent.append(commands.send(run_of(job).commands, name))


def at_phase(phase: events.Phase, steps: int, act: Act) -> Watcher:
    """Acts when a phase begins in the first attempt, after so many steps."""
    done = 0

    def watch(event: events.Event) -> None:
        nonlocal done
        done += isinstance(event, events.StepEvent)
        if isinstance(event, events.PhaseStarted) and event.attempt == 1 and (event.phase, done) == (phase, steps):
            act()

    return Watcher(watch)


def resumed_like(job: Path, undisturbed: RunDirectory, kept: int, name: str = "pause") -> None:
    """The run ended as asked, with so many steps kept, and resumes to what the undisturbed run left."""
    run = run_of(job)
    status = run.read_status()
    assert status is not None and (status.state, status.step) == ("paused" if name == "pause" else "stopped", kept)
    assert not run.is_alive() and commands.ending(run.commands) is None
    assert resume(run, Watcher()) == 0
    if name == "stop":  # the LoRA that a stop exports is one more
        (run.output / f"test-step{kept:06d}.safetensors").unlink(missing_ok=kept not in (2, 4))
    assert_alike(run, undisturbed)


PHASES = [
    ("cache_pictures", 0),
    ("cache_texts", 0),
    ("load", 0),
    ("validate", 2),
    ("preview", 2),
    ("save", 2),
]


@pytest.mark.parametrize(("phase", "steps"), PHASES)
def test_a_command_at_the_start_of_any_phase_ends_the_run_there(
    shared: Path,
    tmp_path: Path,
    undisturbed: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    phase: events.Phase,
    steps: int,
) -> None:
    job, forwards = a_job(shared, tmp_path), Forwards(monkeypatch)
    send = send_once(job, "pause")
    after: list[str] = []

    def act() -> None:
        send()
        forwards.kinds = after

    assert start(job, SETTINGS, at_phase(phase, steps, act)) == 75
    assert after == [], "nothing more is computed"
    resumed_like(job, undisturbed, steps)


# In the middle of which forward the command comes, and the steps that are kept. The UNet's first forward validates, two
# denoise the first preview, and each training step has two micro-batches.
MOMENTS: list[tuple[str, str, int, int, CommandName]] = [
    ("encoding the third image", "encode", 3, 0, "pause"),
    ("the first denoising step of the first preview", "unet", 2, 0, "pause"),
    ("decoding the preview after step 2", "decode", 2, 2, "pause"),
    ("the first micro-batch of the second step", "unet", 6, 1, "pause"),
    ("the second micro-batch of the second step", "unet", 7, 1, "stop"),
]


@pytest.mark.parametrize(
    ("kind", "number", "kept", "name"), [moment[1:] for moment in MOMENTS], ids=[m[0] for m in MOMENTS]
)
def test_a_command_in_the_middle_of_a_forward_discards_what_is_not_finished(
    shared: Path,
    tmp_path: Path,
    undisturbed: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    number: int,
    kept: int,
    name: CommandName,
) -> None:
    job, forwards = a_job(shared, tmp_path), Forwards(monkeypatch)
    send = send_once(job, name)

    def act(entered: str) -> None:
        if forwards.kinds.count(kind) == number:
            send()

    forwards.act = act
    assert start(job, SETTINGS, Watcher()) == 75
    assert forwards.kinds.count(kind) == number and forwards.kinds[-1] == kind, "that forward was the last"
    assert not (run_of(job).samples / f"step-{kept:08d}-0.png").exists(), "nor is what it had drawn kept"
    resumed_like(job, undisturbed, kept, name)


def test_ctrl_c_in_a_preview_pauses_the_run_there(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, forwards = a_job(shared, tmp_path), Forwards(monkeypatch)
    forwards.act = lambda kind: signal.raise_signal(signal.SIGINT) if forwards.kinds.count("unet") == 2 else None
    assert start(job, SETTINGS, Watcher()) == 75
    assert forwards.kinds.count("unet") == 2 and not any(run_of(job).samples.iterdir())
    assert run_of(job).state() == "paused"


def test_a_stop_after_the_last_step_finishes_the_run_without_its_previews(
    shared: Path, tmp_path: Path, undisturbed: RunDirectory
) -> None:
    job = a_job(shared, tmp_path)
    assert start(job, SETTINGS, at_phase("preview", 4, send_once(job, "stop"))) == 0
    run = run_of(job)
    assert run.state() == "done" and same_lora(run.output / "test.safetensors", undisturbed.output / "test.safetensors")
    assert not (run.samples / "step-00000004-0.png").exists()


def test_a_withdrawn_command_is_never_carried_out(shared: Path, tmp_path: Path, undisturbed: RunDirectory) -> None:
    job = a_job(shared, tmp_path)
    withdrawn: list[bool] = []

    def change_of_mind() -> None:
        commands.send(run_of(job).commands, "stop")
        withdrawn.append(commands.withdraw(run_of(job).commands, "stop"))

    assert start(job, SETTINGS, at_phase("preview", 2, change_of_mind)) == 0
    assert withdrawn == [True]
    assert_alike(run_of(job), undisturbed)


def test_a_command_that_the_engine_accepted_can_no_longer_be_withdrawn(shared: Path, tmp_path: Path) -> None:
    job = a_job(shared, tmp_path)
    send = send_once(job, "pause")
    late: list[object] = []

    def watch(event: events.Event) -> None:
        if isinstance(event, events.PhaseStarted) and event.phase == "validate":
            send()
        elif isinstance(event, events.CheckpointEvent):
            late.extend((commands.ending(run_of(job).commands), commands.withdraw(run_of(job).commands, "pause")))

    assert start(job, SETTINGS, Watcher(watch)) == 75
    assert late == [commands.Ending("pause", accepted=True), False]


def test_a_request_that_the_end_of_the_run_cuts_short_is_answered(shared: Path, tmp_path: Path) -> None:
    job = a_job(shared, tmp_path)
    sent: list[Path] = []

    def watch(event: events.Event) -> None:
        if isinstance(event, events.StepEvent) and event.step == 1:
            sent.append(commands.send(run_of(job).commands, "sample"))
        elif isinstance(event, events.PhaseStarted) and event.phase == "preview" and sent:
            commands.send(run_of(job).commands, "pause")

    assert start(job, SETTINGS, Watcher(watch)) == 75
    assert commands.answer(sent[0]) == commands.CommandResult("void", "The run ended before this was done.")


def test_a_backward_pass_is_interrupted_between_two_layers() -> None:
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(3 * CHECKS_IN_BACKWARD)]
    model = torch.nn.Sequential(*layers)
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 2:
            raise Interrupted("stop")

    check_in_backward([layer.weight for layer in layers], check)
    with pytest.raises(Interrupted):
        model(torch.ones(1, 2)).sum().backward()
    learned = [layer.weight.grad is not None for layer in layers]
    assert checks == 2 and learned == sorted(learned) and 3 <= sum(learned) <= 6, "the layers before were not reached"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGBREAK"])
def test_each_signal_that_asks_a_program_to_end_pauses_the_run(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip(f"this system has no {name}")
    former = signal.getsignal(number)
    control = Control(RunDirectory.create(tmp_path, "run"))
    with control.signals():
        control.check()
        signal.raise_signal(number)
        with pytest.raises(Interrupted) as caught:
            control.check()
    assert caught.value.order == "pause"
    assert signal.getsignal(number) == former
