"""Tells what happens: writes events to the run directory and hands them to whoever watches this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from trainer.protocol import events
from trainer.protocol.report import RunReport

# Phase progress more often than this would only make the file grow.
PROGRESS_SECONDS = 0.25
BEAT_SECONDS = 1.0

OnEvent = Callable[[events.Event], None]
OnBeat = Callable[[events.Phase], object]
"""Called with the phase under way when it begins, and then about once a second while it reports progress."""
Learn = Callable[[RunReport], str | None]
"""Called with the report of a finished run, so that later forecasts are better; returns what is to be said of it."""


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
