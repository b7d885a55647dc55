"""Notices that a run has ended, whatever the user looks at."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from app.core.events import Emitter
from app.core.runs.queue import QueueKeeper
from app.core.runs.runs import Runs
from app.core.runs.summary import LIVE, RunSummary, State, summarise
from app.core.settings.deferred_writer import load
from app.core.tasks import Single, Tasks
from app.core.words import full_message
from trainer.protocol import events, files, places
from trainer.protocol.files import long_path
from trainer.protocol.run_directory import RunDirectory

_log = logging.getLogger(__name__)
_TOLD: frozenset[State] = frozenset({"done", "failed", "interrupted"})
"""Ends that nobody asked for: who pauses or stops a run knows that it ends."""
_TAIL = 64 * 1024


@dataclass(frozen=True)
class Unfinished:
    """Runs that lived, and entries of the queue that ran or waited, by their ids."""

    runs: frozenset[Path] = frozenset()
    entries: frozenset[str] = frozenset()


class SeenRuns:
    """Keeps it in a file of the user's; a file that cannot be read holds nothing, for nothing but a notice is lost."""

    def __init__(self, tasks: Tasks) -> None:
        self._path = places.home() / "unfinished.json"
        self._writing = Single(tasks)
        found, notice = load(self._path, _unfinished, Unfinished(), "what ended meanwhile is not reported")
        if notice:
            _log.info("%s", notice)
        self._wanted = self._kept = found

    @property
    def kept(self) -> Unfinished:
        """What the file holds."""
        return self._kept

    def keep(self, unfinished: Unfinished) -> None:
        """Put this into the file soon."""
        self._wanted = unfinished
        if unfinished != self._kept and not self._writing.busy:
            self._kept = unfinished
            self._writing.run(lambda: self._write(unfinished), lambda _: self.keep(self._wanted))

    def close(self) -> None:
        """Put into the file what is not there yet; called when no worker writes any more."""
        if self._writing.busy or self._wanted != self._kept:
            self._write(self._wanted)

    def _write(self, unfinished: Unfinished) -> None:
        kept = {"runs": sorted(map(str, unfinished.runs)), "entries": sorted(unfinished.entries)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(self._path, kept, durable=False)
        except OSError as error:
            _log.info("the state of what runs was not saved: %s", error)


def _unfinished(found: Any, left_out: list[str]) -> Unfinished:
    runs, entries = (_texts(found[key], left_out) for key in ("runs", "entries"))
    return Unfinished(frozenset(map(Path, runs)), frozenset(entries))


def _texts(found: Any, left_out: list[str]) -> list[str]:
    left_out += [repr(text)[:80] for text in found if not isinstance(text, str)]
    return [text for text in found if isinstance(text, str)]


Continuing = Literal["training", "queue"]
"""A run that is alive, or a queue in which something only waits to begin."""


@dataclass(frozen=True)
class Ended:
    """A run that was alive when it was looked at before."""

    summary: RunSummary
    why: str = ""
    """What went wrong and what to do, where that was said."""
    job: Path | None = None
    """The job file, of one that failed before it had a run."""
    earlier: bool = False
    """Whether it ended while the app was closed."""


class RunWatcher:
    """Belongs to the thread that makes it. While nothing runs and nothing waits for its turn, it needs no look."""

    def __init__(self, runs: Runs, queue: QueueKeeper, tasks: Tasks) -> None:
        self._runs, self._queue, self._looking = runs, queue, Single(tasks)
        self._memory = SeenRuns(tasks)
        left = self._memory.kept
        self._alive = set(left.runs)
        self._living: dict[Path, RunSummary] = {}
        """How those stand that were seen alive."""
        self._earlier = set(left.runs)
        """Runs that lived when the app ended last, and were not seen alive since."""
        self._notified: dict[Path, float] = {}
        """When the starts began whose end was told."""
        self._pending = set(left.entries)
        """The entries of the queue that ran or waited."""
        self._queue_seen = False
        self.awaited: set[str] = set()
        """Entries whose beginning somebody waits for, who tells himself why they could not begin."""
        self.changed: Emitter[None] = Emitter()
        """`watching` may be another now."""
        self.ended: Emitter[Ended] = Emitter()
        self.resumed: Emitter[Path] = Emitter()
        """A run whose end was told is alive: it was resumed. Told as often as that is seen."""
        runs.changed.connect(lambda _: self._learn())
        queue.changed.connect(lambda _: self._learn_queue())

    @property
    def watching(self) -> bool:
        """Whether something runs, or is about to: then `look` is to be called every few seconds."""
        return bool(self._alive) or self._queue_moves

    @property
    def alive(self) -> dict[Path, RunSummary]:
        """The runs that were seen alive when they were looked at last."""
        return {path: summary for path, summary in self._living.items() if path in self._alive}

    @property
    def goes_on(self) -> Continuing | None:
        """What does not end with the app, as far as this session has seen it: what lived in the last may have ended."""
        moves, entries = self._queue_moves, self._queue.entries
        if self._alive - self._earlier or (moves and any(entry.state == "running" for entry in entries)):
            return "training"
        return "queue" if moves else None

    def look(self) -> None:
        """See whether what was alive still is, and whether the queue has begun something."""
        if self._queue_moves:
            self._queue.look()
        begun = {entry.run for entry in self._queue.entries if entry.state == "running" and entry.run is not None}
        paths = self._alive | begun
        if paths:
            self._looking.run(lambda: [_seen(path) for path in paths], self._take)

    def close(self) -> None:
        """Keep what goes on for the next start; called when no worker writes any more."""
        self._memory.close()

    @property
    def _queue_moves(self) -> bool:
        now = self._queue.now
        return now.working and any(entry.state in ("running", "waiting") for entry in now.reading.entries)

    def _learn(self) -> None:
        """Take over which runs live; what lived before and does no more is looked at more closely."""
        if not self._runs.looked:
            return
        living = [summary for summary in self._runs.all if summary.state in LIVE]
        listed = {summary.path for summary in living}
        ended = self._alive - listed
        self._alive |= listed
        self._earlier -= listed
        self._living |= {summary.path: summary for summary in living}
        for summary in living:
            self._tell_life(summary)
        self._changed()
        if ended:
            self.look()

    def _learn_queue(self) -> None:
        """Notice what the queue has worked off: a run may begin and end between two looks, or never begin."""
        if self._queue.now.problem:
            return
        entries = self._queue.entries
        over = [one for one in entries if one.id in self._pending and one.state in ("done", "failed", "interrupted")]
        self._pending = {entry.id for entry in entries if entry.state in ("waiting", "running")}
        runs = {entry.run for entry in over if entry.run is not None}
        earlier, self._queue_seen = not self._queue_seen, True
        self._earlier |= runs if earlier else set()
        for entry in over:
            if entry.run is None and entry.job is not None and entry.id not in self.awaited:
                failed = RunSummary(entry.job, entry.name, "failed")
                self.ended.emit(Ended(failed, entry.problem, entry.job, earlier))
        self._alive |= runs
        self._changed()
        if runs:
            self.look()

    def _take(self, found: Iterable[Ended]) -> None:
        for one in found:
            path = one.summary.path
            if one.summary.state in LIVE:
                self._alive.add(path)
                self._earlier.discard(path)
                self._living[path] = one.summary
                self._tell_life(one.summary)
            elif path in self._alive:
                if one.summary.state == "interrupted":
                    if self._queue.concludes(one.summary):
                        continue  # its entry will say why
                    one = replace(one, why=self._queue.failure_of(one.summary))
                self._alive.remove(path)
                if (one.summary.state in _TOLD or one.why) and self._notified.get(path) != one.summary.started:
                    self._notified[path] = one.summary.started
                    self.ended.emit(replace(one, earlier=path in self._earlier))
        self._changed()

    def _tell_life(self, living: RunSummary) -> None:
        """Tell of one that began anew since its end was told; a list may be older than that, and show it alive yet."""
        if living.started > self._notified.get(living.path, living.started):
            self.resumed.emit(living.path)

    def _changed(self) -> None:
        self._memory.keep(Unfinished(frozenset(self._alive), frozenset(self._pending)))
        self.changed.emit(None)


def _seen(path: Path) -> Ended:
    """Return how a run stands; on a worker."""
    summary = summarise(path)
    return Ended(summary, _why(RunDirectory(path)) if summary.state in ("failed", "paused") else "")


def _why(run: RunDirectory) -> str:
    """Return what went wrong in the latest attempt of a run; "" where it ended as somebody wanted."""
    try:
        start = max(0, long_path(run.events).stat().st_size - _TAIL)
        told, _ = events.read_events(run.events, start)
    except OSError:
        return ""
    latest = next((one.attempt for one in reversed(told) if not isinstance(one, events.UnknownEvent)), 0)
    errors = [one for one in told if isinstance(one, events.ErrorEvent) and one.attempt == latest]
    return full_message(errors[-1]) if errors else ""
