"""One run that is watched: what its folder says, read a little at a time on a worker, and told as it comes."""

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
from app.core.runs.summary import RESUMABLE, RunSummary, summarise
from app.core.tasks import Single, Tasks, in_turns
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
"""Codes of notices that tell of something amiss."""
# Bytes of events.jsonl that are taken in at once: some 1,500 events, which hold the window's thread for a few ms.
_PORTION = 256 * 1024
_TAIL = 8 * 1024
_LAST_LINES = 12
# Phases that come back while training goes on, or after it: their time is to be added to that of the steps.
_BESIDES = ("validate", "preview", "checkpoint", "save")


@dataclass(slots=True)
class RunRemark:
    """One thing, which may have happened several times in a row."""

    event: events.Event
    """The first of them."""
    kind: Kind
    times: int = 1
    last: events.Event | None = None
    """The last of them, where there are several."""


class Remarks:
    """The latest remarks of a run, the earliest first."""

    def __init__(self) -> None:
        self.all: deque[RunRemark] = deque(maxlen=_MOST)

    def tell(self, event: events.Event) -> None:
        """Take in the next event."""
        kind = _kind(event)
        if kind is None:
            return
        former = self._former(event)
        if former:
            former.times, former.last = former.times + 1, event
        else:
            self.all.append(RunRemark(event, kind))

    def _former(self, event: events.Event) -> RunRemark | None:
        """Return the remark that this one repeats: each attempt says the same of base and settings again."""
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
        case events.MemoryExhausted() | events.SteppedDown() | events.Slow() | events.Skipped():
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
class Setup:
    """What was decided before a run began; `stamp` tells whether its files were written anew since."""

    stamp: tuple[int, ...]
    job: Job | None
    forecast: Forecast | None
    problem: str


@dataclass(frozen=True)
class RunSnapshot:
    """What one look at a run's folder brought."""

    summary: RunSummary
    arrived: list[events.Event]
    offset: int
    more: bool
    """Whether there is more to be read at once."""
    replaced: bool
    """Whether events.jsonl is another file than before, to be told from its start."""
    setup: Setup
    last_words: str
    read: float = field(default_factory=time.monotonic)


class Run:
    """A run and all that is known of it. Everything here belongs to the thread that made it."""

    def __init__(self, path: Path, tasks: Tasks) -> None:
        self.directory = RunDirectory(path)
        self.summary = RunSummary(path, path.name, "unknown")
        self.job: Job | None = None
        self.forecast: Forecast | None = None
        self.events_arrived: Emitter[list[events.Event]] = Emitter()
        """New events, already taken in; long runs come in portions. An empty list: told anew from the start."""
        self.changed: Emitter[None] = Emitter()
        """`summary`, `problem`, `last_words`, `job` or `forecast` are others now."""
        self.polled: Emitter[None] = Emitter()
        """Its folder was read to the end once more, whether or not that brought anything."""
        self.loaded = False
        """Whether everything that stood in the folder at first was read."""
        self.problem = ""
        """What is wrong with the folder or only partly understood, in sentences."""
        self.last_words = ""
        """The end of what the engine printed, of a run that ended without a word or failed."""
        self.closed = False
        """Whether nobody watches it any more."""
        self._reading = Single(tasks)
        self._setup = Setup((), None, None, "")
        self._begin()

    # --- what is told of it

    @property
    def phases(self) -> dict[events.Phase, PhaseState]:
        """Its phases with their progress, in the order in which they came."""
        return self.story.phases

    @property
    def error(self) -> events.ErrorEvent | None:
        """Why the latest attempt ended, where it ended in an error."""
        return self.story.error

    @property
    def alive(self) -> bool:
        """Whether an engine holds it."""
        return self.summary.state == "running"

    @property
    def resumable(self) -> bool:
        """Whether it may go on from its last checkpoint."""
        return self.summary.state in RESUMABLE

    def now(self) -> float:
        """Return the Unix time by the run's clock, counted on from its last event: no jump of ours moves it."""
        return self._last_time + max(0.0, time.monotonic() - self._last_read) if self._last_time else time.time()

    def seconds_left(self) -> float | None:
        """Return how long it still needs; None while nothing can be said, or when it does not run."""
        if not self.alive:
            return None
        phase, each, whole = self.story.current, self.story.step_seconds, self.summary.steps
        if each is None or not whole:
            return None
        left = max(0, whole - self._done) * each + self._besides()
        if phase is None or phase == "train":
            return left
        this = self.story.seconds_left(phase, self.now())
        return None if this is None else this + left

    # --- reading

    def read(self) -> None:
        """Read what is new in the folder; nothing when that is on its way."""
        if not self.closed:
            path, offset, setup = self.directory.path, self._offset, self._setup
            self._reading.run(lambda: look(path, offset, setup), self._take, kept=False)

    def close(self) -> None:
        """Read no more."""
        self.closed = True

    def _begin(self) -> None:
        self.story = RunProgress()
        self.series = Series()
        self.remarks = Remarks()
        self.previews: list[events.Preview] = []
        self.saved: list[events.Saved] = []
        self.validations: list[events.Validation] = []
        self.notices: list[events.Notice] = []
        self.unknown = 0
        """Events that this version does not know."""
        self._offset = 0
        self._last_time = self._last_read = 0.0

    def _take(self, glimpse: RunSnapshot) -> None:
        if self.closed:
            return
        if glimpse.replaced:
            self._begin()
            self.events_arrived.emit([])
        self._offset = glimpse.offset
        for event in glimpse.arrived:
            self._tell(event)
        if glimpse.arrived:
            self._last_time, self._last_read = glimpse.arrived[-1].time, glimpse.read
            self.events_arrived.emit(glimpse.arrived)
        first = not self.loaded and not glimpse.more
        self.loaded = self.loaded or first
        self._say(glimpse, first)
        if glimpse.more:
            self.read()
        else:
            self.polled.emit(None)

    def _say(self, glimpse: RunSnapshot, first: bool) -> None:
        """Tell of what stands in other files than that of the events, where it changed or all is known at `first`."""
        before = (self.summary, self.problem, self.last_words, self._setup)
        self.summary, self.last_words, self._setup = glimpse.summary, glimpse.last_words, glimpse.setup
        self.job, self.forecast = glimpse.setup.job, glimpse.setup.forecast
        newer = "A newer Impasto wrote part of this run; what this one does not know is left out." * bool(self.unknown)
        self.problem = " ".join(filter(None, (self.summary.problem, glimpse.setup.problem, newer)))
        if first or before != (self.summary, self.problem, self.last_words, self._setup):
            self.changed.emit(None)

    def _tell(self, event: events.Event) -> None:
        self.story.update(event)
        self.series.tell(event)
        self.remarks.tell(event)
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
        """The steps that are done."""
        return self.story.step.step if self.story.step else self.summary.step

    def _besides(self) -> float:
        """Return the seconds that the forecast has for previews and the like, as far as they are still to come."""
        if self.forecast is None or not self.summary.steps:
            return 0.0
        left = max(0.0, 1.0 - self._done / self.summary.steps)
        return left * sum(phase.seconds for phase in self.forecast.phases if phase.phase in _BESIDES)


def look(path: Path, offset: int, before: Setup) -> RunSnapshot:
    """Read what is new in a run's folder since byte `offset` of its events; on a worker."""
    summary = summarise(path)  # first: an engine that ended after this has written its last events by the next look
    run = RunDirectory(path)
    replaced = _is_file(run.events) and _size(run.events) < offset
    try:
        lines, end = events.read_lines(run.events, 0 if replaced else offset, _PORTION)
    except OSError:
        lines, end, replaced = [], offset, False  # the summary says what is wrong with the folder
    arrived = [events.from_line(line) for line in in_turns(lines)]
    end = end if replaced else max(end, offset)  # of a folder that is gone, what was read stays
    more = bool(arrived) and _size(run.events) > end
    setup = _set_up(run, before)
    words = last_words(run.console) if summary.state in ("interrupted", "failed") and not more else ""
    return RunSnapshot(summary, arrived, end, more, replaced, setup, words)


def last_words(console: Path) -> str:
    """Return the last lines that an engine printed, of each line what a terminal would show at the end."""
    try:
        lines = read_end(console, torn=True, room=_TAIL).lines
    except OSError:
        return ""
    return "\n".join([line for line in lines if line][-_LAST_LINES:])


def _set_up(run: RunDirectory, before: Setup) -> Setup:
    """Return the run's job and forecast, read again only where their files were written anew."""
    stamp = (_written(run.job), _written(run.forecast))
    if stamp == before.stamp:
        return before
    job, problem = _job(run)
    return Setup(stamp, job, read_forecast(run.forecast), problem)


def _job(run: RunDirectory) -> tuple[Job | None, str]:
    from trainer.config.load import load_job  # pydantic takes a while to load: not before a run is looked at

    if not _is_file(run.job):
        return None, ""  # a run that is only beginning, or whose folder is gone
    try:
        return load_job(run.job), ""
    except ImpastoError as error:
        return None, error.sentence


def _is_file(path: Path) -> bool:
    with contextlib.suppress(OSError):  # a folder that may not be read any more, a share that went away
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
    """Load and temperature of one run's card since it is watched, by seconds. Belongs to the thread that made it."""

    def __init__(self, tasks: Tasks) -> None:
        self.load = Track()
        """Per cent."""
        self.temperature = Track()
        """Degrees Celsius."""
        self.name = ""
        """Of the card; nothing until it is known."""
        self.changed: Emitter[None] = Emitter()
        self._looking = Single(tasks)
        self._run: Run | None = None
        self._began = time.monotonic()

    def watch(self, run: Run | None) -> None:
        """Watch the card of another run, or none."""
        if run is not self._run:
            self._run, self._began, self.name = run, time.monotonic(), ""
            self.load, self.temperature = Track(), Track()

    def look(self) -> None:
        """Ask the driver, where the run is alive and trains on a card."""
        run = self._run
        if run is not None and run.alive and run.story.device.startswith("cuda"):
            self._looking.run(_gpus, lambda found: self._take(run, found))

    def take(self, gpu: Gpu) -> None:
        """Take in how a card is now."""
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
    """Return the card that a run trains on: where its process is seen, else that of its forecast, else the only one."""
    pid = run.story.pid
    by_process = (gpu for gpu in found if any(use.pid == pid for use in gpu.uses))
    by_name = (gpu for gpu in found if run.forecast and gpu.name == run.forecast.card)
    only = found[0] if len(found) == 1 else None
    return next(by_process, None) or next(by_name, None) or only


def _gpus() -> list[Gpu]:
    try:
        return list_gpus()
    except ImpastoError:
        return []  # a driver that broke since is told of where a training is set up
