"""Reporting of a run's events to its directory and a watcher, and commands sent to the run."""

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

# Writing phase progress more often would only make the file grow.
PROGRESS_SECONDS = 0.25
BEAT_SECONDS = 1.0

OnEvent = Callable[[events.Event], None]
OnBeat = Callable[[events.Phase], object]
"""Callback that receives the current phase when it begins, then about once a second during progress."""
Learn = Callable[[RunReport], str | None]
"""Callback that calibrates later forecasts with a finished run's report; returns a problem to report, or None."""
# Seconds between two listings of the command folder. Each takes about 10 µs on a local disk, far more on a network
# share.
POLL_SECONDS = 0.05
CHECKS_IN_BACKWARD = 32


def learn_nothing(report: RunReport) -> str | None:
    """Return None without calibrating later forecasts."""
    return None


class Reporter:
    """Writes events in order and tracks the current phase; there is no event file until the run exists."""

    def __init__(self, on_event: OnEvent, learn: Learn = learn_nothing) -> None:
        self.on_event = on_event
        self.learn = learn
        self._on_phase: Callable[[], object] = lambda: None
        self._on_beat: OnBeat = lambda _phase: None
        self._writer: events.EventWriter | None = None
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

    def write_to(self, writer: events.EventWriter) -> None:
        """Write all further events to a run's event file."""
        self._writer = writer

    def watch_phases(self, on_phase: Callable[[], object]) -> None:
        """Call ``on_phase`` whenever a phase is reported, before anything is written."""
        self._on_phase = on_phase

    def send_heartbeats(self, on_beat: OnBeat) -> None:
        """Call ``on_beat`` with the current phase when it begins and regularly while it makes progress."""
        self._on_beat = on_beat

    def write(self, event: events.Event) -> None:
        """Write an event and pass it to `on_event`; a closed terminal or pipe does not end the run."""
        stamped = self._writer.write(event) if self._writer else event
        try:
            self.on_event(stamped)
        except OSError:
            if self._writer is None:
                raise
            self.on_event = lambda _: None  # the run directory has every event

    def phase(self, name: events.Phase, done: int, total: int) -> None:
        """Report the progress of a phase; entering another phase ends the current one."""
        self._on_phase()
        now, entered = time.monotonic(), name != self._phase
        if entered:
            self.end_phase()
            self._phase, self._started, self._last = name, now, now
            self.write(events.PhaseStarted(phase=name, total=total))
        # Training reports its progress through step events.
        elif name != "train" and (done >= total or now - self._last >= PROGRESS_SECONDS):
            self._last = now
            self.write(events.PhaseProgress(phase=name, done=done, total=total))
        if entered or now - self._beat >= BEAT_SECONDS:
            self._beat = now
            self._on_beat(name)

    def end_phase(self) -> None:
        """End the current phase, if any."""
        if self._phase is not None:
            phase, self._phase = self._phase, None
            self.write(events.PhaseFinished(phase=phase, seconds=time.monotonic() - self._started))

    def notice(self, code: str, sentence: str) -> None:
        """Write a message for the user that does not stop the run."""
        self.write(events.Notice(code=code, sentence=sentence))


Order = Literal["pause", "stop"]


class Interrupted(BaseException):
    """Raised inside unfinished work when a command or signal ends the run.

    Like KeyboardInterrupt, it is not an Exception, so code that handles library errors does not catch it.
    """

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.order = order


def answer(reporter: Reporter, command: commands.Command, outcome: commands.CommandOutcome, detail: str) -> None:
    """Report a command's outcome to its sender and as an event."""
    commands.finish(command, outcome, detail)
    reporter.write(events.CommandEvent(name=command.name, outcome=outcome, detail=detail))


def check_in_backward(weights: Iterable[Parameter], check: Callable[[], object]) -> None:
    """Register hooks that call ``check`` several times during each backward pass through ``weights``."""
    learned = list(weights)
    for weight in learned[:: max(1, len(learned) // CHECKS_IN_BACKWARD)]:
        weight.register_post_accumulate_grad_hook(lambda _: check())  # type: ignore[no-untyped-call]


class Control:
    """Handles commands and signals to a run: the first Ctrl-C pauses it, a second one ends the process at once."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._signaled = False
        self._order: Order | None = None
        self._accepted: list[commands.Command] = []
        self._ending = False
        self._polled_at = -math.inf

    def check(self) -> None:
        """Raise Interrupted if the run has to end, unless `begin_ending` was called; used in all phases and threads."""
        if self._ending or _is_capturing():
            return
        if self._order is None and time.monotonic() - self._polled_at >= POLL_SECONDS:
            self._poll()
        self._raise_if_ending()

    def begin_ending(self) -> None:
        """Stop `check` from raising, so that the last checkpoint and export are finished."""
        self._ending = True

    def requests(self) -> Iterator[commands.Command]:
        """Accept the commands pending after a step, in order: yield "save" and "sample"; others end the run."""
        for command in self._pending():
            if command.name == "save" or command.name == "sample":
                if commands.accept(command):
                    yield command
            elif self._order is None and commands.accept(command):
                self._end_run(command)
        self._raise_if_ending()

    def answer(self, reporter: Reporter, outcome: commands.CommandOutcome, detail: str) -> None:
        """Report the outcome of the command that ended the run."""
        for command in self._accepted:
            answer(reporter, command, outcome, detail)
        self._accepted.clear()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turn Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal into a pause inside the block; main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP", "SIGUSR1")  # SLURM sends SIGUSR1 before its time limit
        handlers = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
        for number in handlers:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _poll(self) -> None:
        for command in self._pending():
            if command.name in ("stop", "pause") and commands.accept(command):
                self._end_run(command)
                return

    def _pending(self) -> list[commands.Command]:
        self._polled_at = time.monotonic()
        try:
            return commands.pending(self.run.commands)
        except OSError:  # a network share may be offline for a moment: the next poll finds the command
            return []

    def _end_run(self, command: commands.Command) -> None:
        """Record that an accepted command ends the run."""
        self._accepted.append(command)
        self._order = "stop" if command.name == "stop" else "pause"

    def _raise_if_ending(self) -> None:
        order = self._order or ("pause" if self._signaled else None)
        if order and not self._ending:
            raise Interrupted(order)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._signaled:
            raise KeyboardInterrupt
        self._signaled = True


def _is_capturing() -> bool:
    """Return whether a CUDA graph is being recorded; an exception would then make the stream unusable."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()
