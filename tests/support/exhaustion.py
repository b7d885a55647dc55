"""Lets memory run out at a chosen allocation of a real run, and runs that are told in advance to change their plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, get_args

import safetensors
import torch
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.adapter.export import TIME_KEYS
from trainer.config.base import Family
from trainer.config.load import load_job
from trainer.config.resolve import FIT_NUMERICS
from trainer.config.write import dump_job
from trainer.errors import ImpastoError
from trainer.protocol import commands, events
from trainer.protocol.run_directory import RunDirectory
from trainer.training.run.resume import resume
from trainer.training.run.start import Planner, start

Wanted = Callable[[events.Event], bool]


def phase_begins(name: str, turn: int = 1, total: int | None = None) -> Wanted:
    """Whether an event is the ``turn``-th beginning of a phase (of so many units)."""
    seen = 0

    def wanted(event: events.Event) -> bool:
        nonlocal seen
        if isinstance(event, events.PhaseStarted) and event.phase == name and total in (None, event.total):
            seen += 1
            return seen == turn
        return False

    return wanted


def step_begins(step: int) -> Wanted:
    """Whether an event is the one before optimizer step ``step``, 2 or later, of a run that only trains."""
    return lambda event: isinstance(event, events.StepEvent) and event.step == step - 1


def step_ends(step: int) -> Wanted:
    """Whether an event is that of optimizer step ``step``."""
    return step_begins(step + 1)


class Exhaustion(TorchDispatchMode):
    """From a chosen event on: raises torch.OutOfMemoryError at allocation number ``at`` (from 1), ``times`` in all.

    ``later`` is the number for all times but the first.

    An allocation is an operation that returns a tensor with memory of its own; it fails before it does anything. After
    each failure the count begins anew. With ``in_optimizer`` only the optimizer's steps count, but with all they
    compute: operations that work in place may need memory for a moment too. With ``operation`` only those of that name
    count.
    """

    words = "CUDA out of memory. Tried to allocate 20.00 MiB. (injected)"
    kind: type[Exception] = torch.OutOfMemoryError

    def __init__(
        self,
        wanted: Wanted,
        at: int,
        times: int = 1,
        *,
        in_optimizer: bool = False,
        operation: str = "",
        later: int | None = None,
    ) -> None:
        super().__init__()
        self.wanted, self.at, self.left, self.later = wanted, at, times, later or at
        self.count = 0
        self.in_optimizer, self.operation = in_optimizer, operation
        self.counts = not in_optimizer
        self._stack = ExitStack()
        self._entered = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.counts and self.left and self._is_meant(func, args):
            self.count += 1
            if self.count == self.at:
                self.count, self.at = 0, self.later
                self.left -= 1
                raise self.kind(self.words)
        return func(*args, **(kwargs or {}))

    def _is_meant(self, func: Any, args: Any) -> bool:
        if self.operation:
            return bool(func._schema.name == self.operation)
        return (self.in_optimizer and func.namespace != "profiler") or allocates(func, args)

    def tell(self, event: events.Event) -> None:
        """Begins at the wanted event, ends when nothing is left to fail or with the run."""
        if isinstance(event, events.MemoryExhausted):
            self.counts = not self.in_optimizer  # a step that failed told nobody that it ended
        if not self._entered and self.wanted(event):
            self._entered = True
            if self.in_optimizer:
                for hook, counts in (
                    (optimizers.register_optimizer_step_pre_hook, True),
                    (optimizers.register_optimizer_step_post_hook, False),
                ):
                    self._stack.callback(hook(lambda *_, counts=counts: setattr(self, "counts", counts)).remove)
            self._stack.enter_context(self)
        elif self._entered and (not self.left or isinstance(event, events.Finished)):
            self.close()

    def close(self) -> None:
        """Ends at once."""
        self._stack.close()


def allocates(func: Any, args: Any) -> bool:
    """Whether an operation returns memory of its own, by its schema; a tensor of no elements needs none."""
    if func is torch.ops.aten.empty.memory_format and 0 in args[0]:
        return False
    return makes_tensors(func)


@cache
def makes_tensors(func: Any) -> bool:
    """Whether an operation's schema says that it returns a tensor which is none of its arguments."""
    return any("Tensor" in str(value.type) and value.alias_info is None for value in func._schema.returns)


class Counter(Exhaustion):
    """Lets nothing fail, and counts from one event to another: allocations, and what the optimizer does."""

    def __init__(self, wanted: Wanted, until: Wanted) -> None:
        super().__init__(wanted, at=-1, in_optimizer=True)
        self.until = until
        self.allocations = self.of_optimizer = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.allocations += allocates(func, args)
        self.of_optimizer += self.counts
        return func(*args, **(kwargs or {}))

    def tell(self, event: events.Event) -> None:
        """Begins at the one event and ends at the other."""
        if self._entered and self.until(event):
            self.left = 0
        super().tell(event)


class Killed(BaseException):
    """Ends a run as a kill would: nothing of ours gets a word."""


class SharedPlace:
    """Where the runs of a file of tests share their bases, pictures and caches, and the runs they are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pictures = photographs(folder / "pictures")
        self.bases = {family: tiny_base(family, folder / "bases", depth=1) for family in get_args(Family)}
        self.known: dict[object, tuple[str, dict[str, str]]] = {}
        self._number = 0

    def job(self, family: str = "sd15") -> Path:
        """A new job on the shared pictures."""
        self._number += 1
        return write_job(self.folder / f"{self._number}", self.bases[family], self.pictures)


class Trial:
    """One run with the events it wrote."""

    def __init__(
        self,
        job: Path,
        settings: Sequence[str] = (),
        act: Callable[[events.Event], None] | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.job, self.settings, self.act, self.planner = job, list(settings), act, planner
        self.seen: list[events.Event] = []
        self.code: int | None = None
        self.error: ImpastoError | None = None

    def __call__(self, event: events.Event) -> None:
        self.seen.append(event)
        if self.act:
            self.act(event)

    def start(self) -> Trial:
        """Runs the job; a kill leaves ``code`` None, and an ``error`` for users stays here."""
        try:
            self.code = start(self.job, self.settings, self, self.planner)
        except Killed:
            self.code = None
        except ImpastoError as error:
            self.code, self.error = error.exit_code, error
        return self

    def resume(self) -> Trial:
        """Goes on with the run, undisturbed."""
        self.act = None
        self.code = resume(self.run, self)
        return self

    @property
    def run(self) -> RunDirectory:
        """Its directory."""
        return RunDirectory.open(next((self.job.parent / "runs").iterdir()))

    def of(self, kind: type[events.Event]) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.seen if isinstance(event, kind)]

    def lora(self) -> tuple[str, dict[str, str]]:
        """SHA-256 of the finished LoRA's tensors, and its metadata without what tells the time."""
        file = self.run.output / "test.safetensors"
        data = file.read_bytes()
        with safetensors.safe_open(file, framework="pt") as opened:
            told = {key: value for key, value in opened.metadata().items() if key not in TIME_KEYS}
        return hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest(), told


def told_in_advance(job: Path, settings: Sequence[str], changes: Sequence[tuple[int, Mapping[str, Any]]]) -> Trial:
    """A run that knows nothing of recovery: paused before each step (from 0) where its fit changes, edited, resumed."""
    by_step: dict[int, dict[str, Any]] = {}
    for step, changed in changes:
        by_step.setdefault(step, {}).update(changed)
    at_once = [f"fit.{key}={json.dumps(value)}" for key, value in by_step.pop(0, {}).items()]
    trial = Trial(job, [*settings, *at_once])

    def pause_before(step: int) -> Callable[[events.Event], None]:
        def act(event: events.Event) -> None:
            if isinstance(event, events.StepEvent) and event.step == step:
                commands.send(trial.run.commands, "pause")

        return act

    for number, (step, changed) in enumerate(sorted(by_step.items())):
        trial.act = pause_before(step)
        if number == 0:
            trial.start()
        else:
            trial.code = resume(trial.run, trial)
        assert trial.code == 75
        edit(trial.run, changed)
    return trial.resume() if by_step else trial.start()


def edit(run: RunDirectory, changed: Mapping[str, Any]) -> None:
    """Change the fit that a paused run resumes with: in its frozen job, or in its checkpoint what no job may change."""
    if {"quantize", *FIT_NUMERICS} & changed.keys():
        newest = max(run.checkpoints.glob("step-*"))
        state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
        fallback = {"exact": False, **changed}
        state["rungs"].append({"step": state["progress"]["step"], "number": 99, "rung": fallback})
        data = json.dumps(state).encode("utf-8")
        (newest / "state.json").write_bytes(data)
        manifest = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))
        manifest["files"]["state.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (newest / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        return
    job = load_job(run.job)
    run.job.write_text(dump_job(job.replaced(fit=job.fit.replaced(**changed)), comments=False), encoding="utf-8")
