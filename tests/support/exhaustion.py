"""Make memory run out at a chosen allocation of a real run, and make runs that change their fit at given steps."""

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
    """Return a test for the ``turn``-th beginning of a phase (optionally of ``total`` units)."""
    seen = 0

    def wanted(event: events.Event) -> bool:
        nonlocal seen
        if isinstance(event, events.PhaseStarted) and event.phase == name and total in (None, event.total):
            seen += 1
            return seen == turn
        return False

    return wanted


def step_begins(step: int) -> Wanted:
    """Return a test for the event before optimizer step ``step``, 2 or later, of a run that only trains."""
    return lambda event: isinstance(event, events.StepEvent) and event.step == step - 1


def step_ends(step: int) -> Wanted:
    """Return a test for the event of optimizer step ``step``."""
    return step_begins(step + 1)


class Exhaustion(TorchDispatchMode):
    """From a chosen event on, raises torch.OutOfMemoryError at allocation number ``at`` (from 1), ``times`` in all.

    ``later`` is the number for all times but the first.

    An allocation is an operation that returns a tensor with its own memory; it fails before it does anything. After
    each failure the count restarts. With ``in_optimizer`` only operations of optimizer steps count, but all of them:
    in-place operations may need temporary memory too. With ``operation`` only operations of that name count.
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
        """Start at the chosen event; end when all failures were raised or the run ends."""
        if isinstance(event, events.MemoryExhausted):
            self.counts = not self.in_optimizer  # a step that failed did not report its end
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
        """End at once."""
        self._stack.close()


def allocates(func: Any, args: Any) -> bool:
    """Return whether an operation allocates memory, by its schema; a tensor without elements needs none."""
    if func is torch.ops.aten.empty.memory_format and 0 in args[0]:
        return False
    return makes_tensors(func)


@cache
def makes_tensors(func: Any) -> bool:
    """Return whether an operation returns a tensor that is not one of its arguments, by its schema."""
    return any("Tensor" in str(value.type) and value.alias_info is None for value in func._schema.returns)


class Counter(Exhaustion):
    """Causes no failures, and counts allocations and optimizer operations between two events."""

    def __init__(self, wanted: Wanted, until: Wanted) -> None:
        super().__init__(wanted, at=-1, in_optimizer=True)
        self.until = until
        self.allocations = self.of_optimizer = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.allocations += allocates(func, args)
        self.of_optimizer += self.counts
        return func(*args, **(kwargs or {}))

    def tell(self, event: events.Event) -> None:
        """Start at the first event and end at the second."""
        if self._entered and self.until(event):
            self.left = 0
        super().tell(event)


class Killed(BaseException):
    """Raised to end a run as a kill would: no code of ours handles it."""


class SharedPlace:
    """The folder in which the runs of a test file share bases, images, caches and reference runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pictures = photographs(folder / "pictures")
        self.bases = {family: tiny_base(family, folder / "bases", depth=1) for family in get_args(Family)}
        self.known: dict[object, tuple[str, dict[str, str]]] = {}
        self._number = 0

    def job(self, family: str = "sd15") -> Path:
        """Write a new job on the shared images."""
        self._number += 1
        return write_job(self.folder / f"{self._number}", self.bases[family], self.pictures)


class Trial:
    """A run with the events it wrote."""

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
        """Run the job; a kill leaves ``code`` None, and a user-facing error is stored in ``error``."""
        try:
            self.code = start(self.job, self.settings, self, self.planner)
        except Killed:
            self.code = None
        except ImpastoError as error:
            self.code, self.error = error.exit_code, error
        return self

    def resume(self) -> Trial:
        """Resume the run without disturbing it."""
        self.act = None
        self.code = resume(self.run, self)
        return self

    @property
    def run(self) -> RunDirectory:
        """Return the run's directory."""
        return RunDirectory.open(next((self.job.parent / "runs").iterdir()))

    def of(self, kind: type[events.Event]) -> list[Any]:
        """Return the events of one type."""
        return [event for event in self.seen if isinstance(event, kind)]

    def lora(self) -> tuple[str, dict[str, str]]:
        """Return the SHA-256 of the tensors of the LoRA and its moving average, and its metadata without times."""
        file, digest = self.run.output / "test.safetensors", hashlib.sha256()
        for written in sorted(self.run.output.glob("test*[a-z].safetensors")):
            data = written.read_bytes()
            digest.update(data[8 + int.from_bytes(data[:8], "little") :])
        with safetensors.safe_open(file, framework="pt") as opened:
            metadata = {key: value for key, value in opened.metadata().items() if key not in TIME_KEYS}
        return digest.hexdigest(), metadata


def run_with_changes(job: Path, settings: Sequence[str], changes: Sequence[tuple[int, Mapping[str, Any]]]) -> Trial:
    """Run without recovery: pause before each step (from 0) where the fit changes, edit the fit, resume."""
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
    """Change the fit that a paused run resumes with, in its job, or its checkpoint for keys that are fixed there."""
    if {"quantize", *FIT_NUMERICS} & changed.keys():
        newest = max(run.checkpoints.glob("step-*"))
        state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
        fallback = {"exact": False, **changed}
        state["fallbacks"].append({"step": state["progress"]["step"], "number": 99, "fallback": fallback})
        data = json.dumps(state).encode("utf-8")
        (newest / "state.json").write_bytes(data)
        manifest = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))
        manifest["files"]["state.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (newest / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        return
    job = load_job(run.job)
    run.job.write_text(dump_job(job.replaced(fit=job.fit.replaced(**changed)), comments=False), encoding="utf-8")
