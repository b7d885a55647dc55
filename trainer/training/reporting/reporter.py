"""Tells what happens: writes events to the run directory and hands them to whoever watches this process."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Literal

import torch
from torch.nn import Parameter

from trainer.protocol import commands, events
from trainer.protocol.report import RunReport
from trainer.protocol.run_directory import RunDirectory

# Phase progress more often than this would only make the file grow.
PROGRESS_SECONDS = 0.25
BEAT_SECONDS = 1.0

OnEvent = Callable[[events.Event], None]
OnBeat = Callable[[events.Phase], object]
"""Called with the phase under way when it begins, and then about once a second while it reports progress."""
Learn = Callable[[RunReport], str | None]
"""Called with the report of a finished run, so that later forecasts are better; returns what is to be said of it."""
# How often a check lists the directory, which takes about 10 microseconds on a local disk and far more on a share.
LOOK_SECONDS = 0.05
CHECKS_IN_BACKWARD = 32


def learn_nothing(report: RunReport) -> str | None:
    """Leaves later forecasts as they are."""
    return None


class Reporter:
    """Writes events in order and knows which phase is under way; before a run exists there is no writer."""

    def __init__(self, on_event: OnEvent, learn: Learn = learn_nothing) -> None:
        self.on_event = on_event
        self.learn = learn
        self.on_phase: Callable[[], object] = lambda: None
        """Called whenever a phase is spoken of, before anything is written."""
        self.on_beat: OnBeat = lambda _phase: None
        self.writer: events.EventWriter | None = None
        self._beat = 0.0
        self._phase: events.Phase | None = None
        self._started = 0.0
        self._last = 0.0

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_phase()

    def write(self, event: events.Event) -> None:
        """Writes one event and passes it on; a watcher who has left (a closed terminal or pipe) ends no run."""
        stamped = self.writer.write(event) if self.writer else event
        try:
            self.on_event(stamped)
        except OSError:
            if self.writer is None:
                raise
            self.on_event = lambda _: None  # the run directory has it all

    def phase(self, name: events.Phase, done: int, total: int) -> None:
        """Says how far a phase has come; entering another phase ends the former one."""
        self.on_phase()
        now, entered = time.monotonic(), name != self._phase
        if entered:
            self.end_phase()
            self._phase, self._started, self._last = name, now, now
            self.write(events.PhaseStarted(phase=name, total=total))
        # Training tells its progress through step events.
        elif name != "train" and (done >= total or now - self._last >= PROGRESS_SECONDS):
            self._last = now
            self.write(events.PhaseProgress(phase=name, done=done, total=total))
        if entered or now - self._beat >= BEAT_SECONDS:
            self._beat = now
            self.on_beat(name)

    def end_phase(self) -> None:
        """Ends the phase under way, if any."""
        if self._phase is not None:
            phase, self._phase = self._phase, None
            self.write(events.PhaseFinished(phase=phase, seconds=time.monotonic() - self._started))

    def notice(self, code: str, sentence: str) -> None:
        """Something the user should know that stops nothing."""
        self.write(events.Notice(code=code, sentence=sentence))


Order = Literal["pause", "stop"]


class Interrupted(BaseException):
    """Raised inside unfinished work when a command ends the run.

    Not an Exception, like KeyboardInterrupt: what falls back to another way when a library fails must not catch it.
    """

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.order = order


def answer(reporter: Reporter, command: commands.Command, outcome: commands.CommandOutcome, detail: str) -> None:
    """Report the outcome of a command: to its sender, and as an event."""
    commands.finish(command, outcome, detail)
    reporter.write(events.CommandEvent(name=command.name, outcome=outcome, detail=detail))


def watch(weights: Iterable[Parameter], check: Callable[[], object]) -> None:
    """Call ``check`` several times during each backward pass that computes gradients of ``weights``."""
    learned = list(weights)
    for weight in learned[:: max(1, len(learned) // CHECKS_IN_BACKWARD)]:
        weight.register_post_accumulate_grad_hook(lambda _: check())  # type: ignore[no-untyped-call]


class Control:
    """Looks for commands when asked; the first Ctrl-C is a pause, a second one ends the process at once."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._signaled = False
        self._order: Order | None = None
        self._accepted: list[commands.Command] = []
        self._ending = False
        self._looked = -math.inf

    def check(self) -> None:
        """Raise Interrupted when the run is to end, until `begin_ending`; called from every phase, on any thread."""
        if self._ending or _is_capturing():
            return
        if self._order is None and time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look()
        self._raise()

    def begin_ending(self) -> None:
        """Let the last checkpoint and export be finished: `check` raises no more."""
        self._ending = True

    def requests(self) -> Iterator[commands.Command]:
        """Accept the pending commands after a step, in their order: save and sample are given, others end the run."""
        for command in self._pending():
            if command.name == "save" or command.name == "sample":
                if commands.accept(command):
                    yield command
            elif self._order is None and commands.accept(command):
                self._take(command)
        self._raise()

    def answer(self, reporter: Reporter, outcome: commands.CommandOutcome, detail: str) -> None:
        """Report the outcome of the command that ended the run."""
        for command in self._accepted:
            answer(reporter, command, outcome, detail)
        self._accepted.clear()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turn Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal into a pause while inside; main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP", "SIGUSR1")  # SLURM warns with SIGUSR1 before its limit
        former = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
        for number in former:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _look(self) -> None:
        for command in self._pending():
            if command.name in ("stop", "pause") and commands.accept(command):
                self._take(command)
                return

    def _pending(self) -> list[commands.Command]:
        self._looked = time.monotonic()
        try:
            return commands.pending(self.run.commands)
        except OSError:  # a share that is away for a moment ends no run: the next look finds the command
            return []

    def _take(self, command: commands.Command) -> None:
        """Let an accepted command end the run; the first one counts."""
        self._accepted.append(command)
        self._order = "stop" if command.name == "stop" else "pause"

    def _raise(self) -> None:
        order = self._order or ("pause" if self._signaled else None)
        if order and not self._ending:
            raise Interrupted(order)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._signaled:
            raise KeyboardInterrupt
        self._signaled = True


def _is_capturing() -> bool:
    """Tell whether a CUDA graph is being recorded here: an exception would leave the stream unusable."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()
