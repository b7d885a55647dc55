"""Watch one run: read its folder in small chunks on a worker and emit its events."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.core.events import Emitter
from app.core.runs.log import read_end
from app.core.runs.series import Series, Track
from app.core.runs.summary import RESUMABLE, RunSummary, summarize
from app.core.tasks import ExclusiveTask, Tasks, iterate_yielding
from trainer.errors import ImpastoError
from trainer.gpu import Gpu, list_gpus
from trainer.protocol import events
from trainer.protocol.files import long_path
from trainer.protocol.forecast import Forecast, read_forecast
from trainer.protocol.progress import PhaseState, RunProgress
from trainer.protocol.run_directory import RunDirectory

if TYPE_CHECKING:
    from trainer.config.job import Job


Kind = Literal["info", "warning", "error"]
_MOST = 200
_DOUBTS = ("doubtful", "checkpoint.damaged", "calibration", "cache.untrimmed")
"""Codes of notices that are shown as warnings."""
# Bytes of events.jsonl read at once: about 1,500 events, which block the main thread for a few ms.
_PORTION = 256 * 1024
_TAIL = 8 * 1024
_LAST_LINES = 12
# Phases that recur during or after training; their time is added to that of the steps.
_SIDE_PHASES = ("validate", "preview", "checkpoint", "save")


@dataclass(slots=True)
class RunRemark:
    """An event worth showing, and how often it occurred."""

    event: events.Event
    """First occurrence."""
    kind: Kind
    times: int = 1
    last: events.Event | None = None
    """Last occurrence; None if there is only one."""


class Remarks:
    """Latest remarks of a run, oldest first."""

    def __init__(self) -> None:
        self.all: deque[RunRemark] = deque(maxlen=_MOST)

    def add_event(self, event: events.Event) -> None:
        """Process the next event."""
        kind = _kind(event)
        if kind is None:
            return
        former = self._former(event)
        if former:
            former.times, former.last = former.times + 1, event
        else:
            self.all.append(RunRemark(event, kind))

    def _former(self, event: events.Event) -> RunRemark | None:
        """Return the earlier remark that an event repeats, or None.

        A notice can repeat any earlier one, since each attempt repeats those about the base and settings; a skipped
        step can only repeat the latest remark.
        """
        if isinstance(event, events.Notice):
            same = (one for one in self.all if isinstance(one.event, events.Notice))
            return next((one for one in same if one.event.sentence == event.sentence), None)  # type: ignore[attr-defined]
        latest = self.all[-1] if self.all else None
        if isinstance(event, events.Skipped) and latest and isinstance(latest.event, events.Skipped):
            return latest if latest.event.reason == event.reason else None
        return None


def _kind(event: events.Event) -> Kind | None:
    match event:
        case events.ErrorEvent():
            return "error"
        case events.MemoryExhausted() | events.SteppedDown() | events.Skipped():
            return "warning"
        case events.Slow() | events.DataWait() | events.MemoryLeak():
            return "warning"
        case events.CommandEvent():
            return None if event.outcome == "done" else "warning"
        case events.Notice():
            return "warning" if event.code in _DOUBTS else "info"
        case events.CachingSpeed():
            return "info"
        case _:
            return None


@dataclass(frozen=True)
class RunSetup:
    """Job and forecast of a run; `stamp` contains the modification times of their files in nanoseconds."""

    stamp: tuple[int, ...]
    job: Job | None
    forecast: Forecast | None
    problem: str


@dataclass(frozen=True)
class RunSnapshot:
    """Result of reading a run's folder once."""

    summary: RunSummary
    arrived: list[events.Event]
    offset: int
    more: bool
    """Whether more events can be read right away."""
    replaced: bool
    """Whether events.jsonl was replaced, which means that all events are read again."""
    setup: RunSetup
    last_words: str
    read: float = field(default_factory=time.monotonic)


class Run:
    """A run with its events and state. Use it only from the thread that created it."""

    def __init__(self, path: Path, tasks: Tasks) -> None:
        self.directory = RunDirectory(path)
        self.summary = RunSummary(path, path.name, "unknown")
        self.job: Job | None = None
        self.forecast: Forecast | None = None
        self.events_arrived: Emitter[list[events.Event]] = Emitter()
        """Emitted with each chunk of new events after processing; an empty list means that all will be read again."""
        self.changed: Emitter[None] = Emitter()
        """Emitted when `summary`, `problem`, `last_words`, `job` or `forecast` changes."""
        self.polled: Emitter[None] = Emitter()
        """Emitted each time the run's folder has been read completely, even if nothing was new."""
        self.loaded = False
        """Whether the initial contents of the folder have been read."""
        self.problem = ""
        """Sentences about problems with the folder, or ""."""
        self.last_words = ""
        """Last console lines of a run that failed or stopped unexpectedly."""
        self.closed = False
        """Whether the run is no longer watched."""
        self._reading = ExclusiveTask(tasks)
        self._setup = RunSetup((), None, None, "")
        self._begin()

    # --- state

    @property
    def phases(self) -> dict[events.Phase, PhaseState]:
        """Return the run's phases with their progress, in order of occurrence."""
        return self.progress.phases

    @property
    def error(self) -> events.ErrorEvent | None:
        """Return the error that ended the latest attempt, or None."""
        return self.progress.error

    @property
    def alive(self) -> bool:
        """Return whether an engine is executing the run."""
        return self.summary.state == "running"

    @property
    def resumable(self) -> bool:
        """Return whether the run can resume from its last checkpoint."""
        return self.summary.state in RESUMABLE

    def now(self) -> float:
        """Return the Unix time by the run's clock, extrapolated from its last event.

        The monotonic clock is used, which makes it independent of changes to the system time.
        """
        return self._last_time + max(0.0, time.monotonic() - self._last_read) if self._last_time else time.time()

    def seconds_left(self) -> float | None:
        """Return the estimated remaining seconds; None if unknown or if the run is not running."""
        if not self.alive:
            return None
        phase, each, whole = self.progress.current, self.progress.step_seconds, self.summary.steps
        if each is None or not whole:
            return None
        left = max(0, whole - self._done) * each + self._besides()
        if phase is None or phase == "train":
            return left
        this = self.progress.seconds_left(phase, self.now())
        return None if this is None else this + left

    # --- reading

    def read(self) -> None:
        """Read what is new in the folder, unless a read is already in progress."""
        if not self.closed:
            path, offset, setup = self.directory.path, self._offset, self._setup
            self._reading.run(lambda: read_snapshot(path, offset, setup), self._take, kept=False)

    def close(self) -> None:
        """Stop reading."""
        self.closed = True

    def _begin(self) -> None:
        self.progress = RunProgress()
        self.series = Series()
        self.remarks = Remarks()
        self.previews: list[events.Preview] = []
        self.saved: list[events.Saved] = []
        self.validations: list[events.Validation] = []
        self.notices: list[events.Notice] = []
        self.unknown = 0
        """Number of events of types that this version does not know."""
        self._offset = 0
        self._last_time = self._last_read = 0.0

    def _take(self, snapshot: RunSnapshot) -> None:
        if self.closed:
            return
        if snapshot.replaced:
            self._begin()
            self.events_arrived.emit([])
        self._offset = snapshot.offset
        for event in snapshot.arrived:
            self._process(event)
        if snapshot.arrived:
            self._last_time, self._last_read = snapshot.arrived[-1].time, snapshot.read
            self.events_arrived.emit(snapshot.arrived)
        first = not self.loaded and not snapshot.more
        self.loaded = self.loaded or first
        self._update_state(snapshot, first)
        if snapshot.more:
            self.read()
        else:
            self.polled.emit(None)

    def _update_state(self, snapshot: RunSnapshot, first: bool) -> None:
        """Update the state that does not come from events.

        Emits `changed` if it changed or if this was the first complete read.
        """
        before = (self.summary, self.problem, self.last_words, self._setup)
        self.summary, self.last_words, self._setup = snapshot.summary, snapshot.last_words, snapshot.setup
        self.job, self.forecast = snapshot.setup.job, snapshot.setup.forecast
        newer = "A newer version of Impasto wrote part of this run. Unknown entries are left out." * bool(self.unknown)
        self.problem = " ".join(filter(None, (self.summary.problem, snapshot.setup.problem, newer)))
        if first or before != (self.summary, self.problem, self.last_words, self._setup):
            self.changed.emit(None)

    def _process(self, event: events.Event) -> None:
        self.progress.update(event)
        self.series.add_event(event)
        self.remarks.add_event(event)
        match event:
            case events.Preview():
                self.previews.append(event)
            case events.Saved():
                self.saved.append(event)
            case events.Validation():
                self.validations.append(event)
            case events.Notice():
                self.notices.append(event)
            case events.UnknownEvent():
                self.unknown += 1

    @property
    def _done(self) -> int:
        """Return the number of completed steps."""
        return self.progress.step.step if self.progress.step else self.summary.step

    def _besides(self) -> float:
        """Return the forecast duration, in seconds, of the remaining previews, validations, checkpoints and saves."""
        if self.forecast is None or not self.summary.steps:
            return 0.0
        left = max(0.0, 1.0 - self._done / self.summary.steps)
        return left * sum(phase.seconds for phase in self.forecast.phases if phase.phase in _SIDE_PHASES)


def read_snapshot(path: Path, offset: int, before: RunSetup) -> RunSnapshot:
    """Read what is new in a run's folder since byte `offset` of its events. Call it on a worker."""
    summary = summarize(path)  # first: if the engine ends after this, the next read gets its last events
    run = RunDirectory(path)
    replaced = _is_file(run.events) and _size(run.events) < offset
    try:
        lines, end = events.read_lines(run.events, 0 if replaced else offset, _PORTION)
    except OSError:
        lines, end, replaced = [], offset, False  # the summary reports the problem
    arrived = [events.from_line(line) for line in iterate_yielding(lines)]
    end = end if replaced else max(end, offset)  # if the folder is gone, keep what was read
    more = bool(arrived) and _size(run.events) > end
    setup = _set_up(run, before)
    words = last_words(run.console) if summary.state in ("interrupted", "failed") and not more else ""
    return RunSnapshot(summary, arrived, end, more, replaced, setup, words)


def last_words(console: Path) -> str:
    """Return the last lines that an engine printed, as a terminal would show them."""
    try:
        lines = read_end(console, torn=True, room=_TAIL).lines
    except OSError:
        return ""
    return "\n".join([line for line in lines if line][-_LAST_LINES:])


def _set_up(run: RunDirectory, before: RunSetup) -> RunSetup:
    """Return the run's job and forecast, reading them again only if their files changed."""
    stamp = (_written(run.job), _written(run.forecast))
    if stamp == before.stamp:
        return before
    job, problem = _job(run)
    return RunSetup(stamp, job, read_forecast(run.forecast), problem)


def _job(run: RunDirectory) -> tuple[Job | None, str]:
    from trainer.config.load import load_job  # imported late: pydantic loads slowly

    if not _is_file(run.job):
        return None, ""  # a run that is just starting, or whose folder is gone
    try:
        return load_job(run.job), ""
    except ImpastoError as error:
        return None, error.sentence


def _is_file(path: Path) -> bool:
    with contextlib.suppress(OSError):  # no permission, or a disconnected share
        return long_path(path).is_file()
    return False


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return long_path(path).stat().st_size
    return 0


def _written(path: Path) -> int:
    with contextlib.suppress(OSError):
        return long_path(path).stat().st_mtime_ns
    return 0


class GpuMonitor:
    """Load and temperature of one run's GPU, by seconds since watching began.

    Use it only from the thread that created it.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.load = Track()
        """GPU load in percent."""
        self.temperature = Track()
        """Temperature in degrees Celsius."""
        self.name = ""
        """Name of the GPU; "" until it is known."""
        self.changed: Emitter[None] = Emitter()
        self._looking = ExclusiveTask(tasks)
        self._run: Run | None = None
        self._began = time.monotonic()

    def watch(self, run: Run | None) -> None:
        """Watch the GPU of another run, or no GPU."""
        if run is not self._run:
            self._run, self._began, self.name = run, time.monotonic(), ""
            self.load, self.temperature = Track(), Track()

    def look(self) -> None:
        """Query the driver if the run is training on a GPU."""
        run = self._run
        if run is not None and run.alive and run.progress.device.startswith("cuda"):
            self._looking.run(_gpus, lambda found: self._take(run, found))

    def take(self, gpu: Gpu) -> None:
        """Record the current state of a GPU."""
        self.name = gpu.name
        seconds = time.monotonic() - self._began
        self.load.add(seconds, gpu.load)
        self.temperature.add(seconds, gpu.temperature)
        self.changed.emit(None)

    def _take(self, run: Run, found: Sequence[Gpu]) -> None:
        gpu = gpu_of(run, found)
        if run is self._run and gpu is not None:
            self.take(gpu)


def gpu_of(run: Run, found: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU of a run: the one that its process uses, else the one named in its forecast, else the only one.

    Returns None if there are several GPUs and none of them matches.
    """
    pid = run.progress.pid
    by_process = (gpu for gpu in found if any(use.pid == pid for use in gpu.uses))
    by_name = (gpu for gpu in found if run.forecast and gpu.name == run.forecast.gpu)
    only = found[0] if len(found) == 1 else None
    return next(by_process, None) or next(by_name, None) or only


def _gpus() -> list[Gpu]:
    try:
        return list_gpus()
    except ImpastoError:
        return []  # the training setup reports a broken driver
