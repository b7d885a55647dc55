"""Progress of a run, derived from its events: phases, time left, and the latest figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainer.protocol import events
from trainer.protocol.forecast import expected_step_seconds

# Decay of the moving average that is shown as the loss, because single steps are too noisy.
_DECAY = 0.98
# Number of steps that speed is averaged over: enough to even out buckets, few enough to show changes soon.
_WINDOW = 50


DATA_SHARE = 0.02
"""Share of step time spent waiting for data above which users are advised to change something."""


def data_share(steps: Iterable[events.StepEvent]) -> float | None:
    """Return the share (0 to 1) of the steps' time in which training waited for data; None if no step recorded it.

    The first step of an attempt does not count: nothing can be loaded in advance for it.
    """
    waited = seconds = 0.0
    attempt = None
    for step in steps:
        if step.data_seconds is not None and step.attempt == attempt:
            waited, seconds = waited + step.data_seconds, seconds + step.seconds
        attempt = step.attempt
    return waited / seconds if seconds else None


@dataclass
class PhaseState:
    """Progress of one phase.

    Other phases may interrupt training: `seconds` covers finished periods, `started` is when the current one began.
    """

    done: int = 0
    total: int | None = None
    started: float | None = None
    seconds: float = 0.0

    def elapsed(self, now: float) -> float:
        """Return the seconds spent in the phase so far."""
        return self.seconds + (max(0.0, now - self.started) if self.started is not None else 0.0)


@dataclass
class RunProgress:
    """State of a run, derived from its events, which are passed to `update` in order."""

    phases: dict[events.Phase, PhaseState] = field(default_factory=dict)
    current: events.Phase | None = None
    device: str = ""
    attempt: int = 0
    pid: int = 0
    """Process id of the engine that runs the latest attempt."""
    step: events.StepEvent | None = None
    skipped: int = 0
    finished: events.Finished | None = None
    error: events.ErrorEvent | None = None
    _forecast_seconds: float | None = None
    _average: float = 0.0
    _weight: float = 0.0
    _recent: deque[events.StepEvent] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def update(self, event: events.Event) -> None:
        """Update the state with the next event."""
        match event:
            case events.AttemptStarted():
                self._begin(event)
            case events.PhaseStarted():
                self._enter(event)
            case events.PhaseProgress():
                state = self._phase(event.phase)
                state.done, state.total = event.done, event.total
            case events.PhaseFinished():
                self._leave(event)
            case events.StepEvent():
                self._take_step(event)
            case events.Finished():
                self.finished = event
            case events.ErrorEvent():
                self.error = event

    @property
    def loss(self) -> float | None:
        """Return the bias-corrected moving average of the loss over about 50 steps; None before the first step."""
        return self._average / self._weight if self._weight else None

    @property
    def images_per_second(self) -> float | None:
        """Return the images trained per second, averaged over the last steps; None before the first step."""
        seconds = sum(step.seconds for step in self._recent)
        return sum(step.images for step in self._recent) / seconds if seconds > 0 else None

    @property
    def data_share(self) -> float | None:
        """Return the share (0 to 1) of the last steps' time spent waiting for data; None while unknown."""
        return data_share(self._recent)

    @property
    def step_seconds(self) -> float | None:
        """Return the expected seconds per step, a mean of forecast and recent steps; None if there are neither."""
        return expected_step_seconds(self._forecast_seconds, [step.seconds for step in self._recent])

    def seconds_left(self, phase: events.Phase, now: float) -> float | None:
        """Return the estimated seconds until a phase ends, at its current speed; None while unknown."""
        state = self.phases.get(phase)
        if state is None or state.total is None:
            return None
        left = max(0, state.total - state.done)
        if phase == "train":
            return None if self.step_seconds is None else left * self.step_seconds
        return left * state.elapsed(now) / state.done if state.done else None

    def _begin(self, event: events.AttemptStarted) -> None:
        self.phases.clear()
        self._recent.clear()
        self.current = self.finished = self.error = None
        self.device, self.attempt, self.pid, self._forecast_seconds = (
            event.device,
            event.attempt,
            event.pid,
            event.step_seconds,
        )

    def _enter(self, event: events.PhaseStarted) -> None:
        state = self._phase(event.phase)
        state.total, state.started = event.total, event.time
        if event.phase != "train":  # training steps keep counting; other phases restart each time
            state.done, state.seconds = 0, 0.0
        self.current = event.phase

    def _leave(self, event: events.PhaseFinished) -> None:
        state = self._phase(event.phase)
        state.seconds, state.started = state.seconds + event.seconds, None
        if event.phase != "train" and state.total is not None:
            state.done = state.total
        self.current = None

    def _take_step(self, event: events.StepEvent) -> None:
        self.step = event
        self._phase("train").done = event.step
        self._recent.append(event)
        self.skipped += event.skipped
        if event.loss is not None and not event.skipped:
            self._average = _DECAY * self._average + (1 - _DECAY) * event.loss
            self._weight = _DECAY * self._weight + (1 - _DECAY)

    def _phase(self, phase: events.Phase) -> PhaseState:
        return self.phases.setdefault(phase, PhaseState())
