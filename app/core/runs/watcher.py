"""Detect when runs end, no matter which page is open."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from app.core.events import Emitter
from app.core.runs.queue import QueueManager
from app.core.runs.runs import Runs
from app.core.runs.summary import LIVE, RunSummary, State, summarize
from app.core.settings.deferred_writer import load
from app.core.tasks import ExclusiveTask, Tasks
from app.core.words import full_message
from trainer.protocol import events, files, places
from trainer.protocol.files import long_path
from trainer.protocol.run_directory import RunDirectory

_log = logging.getLogger(__name__)
_REPORTED: frozenset[State] = frozenset({"done", "failed", "interrupted"})
"""End states to report; a user who pauses or stops a run already knows."""
_TAIL = 64 * 1024


@dataclass(frozen=True)
class Unfinished:
    """Live runs, and ids of queue entries that are running or waiting."""

    runs: frozenset[Path] = frozenset()
    entries: frozenset[str] = frozenset()


class SeenRuns:
    """File that stores `Unfinished`; an unreadable file counts as empty, since only notifications are lost."""

    def __init__(self, tasks: Tasks) -> None:
        self._path = places.home() / "unfinished.json"
        self._writing = ExclusiveTask(tasks)
        found, notice = load(
            self._path, _unfinished, Unfinished(), "Runs that ended while Impasto was closed are not reported."
        )
        if notice:
            _log.info("%s", notice)
        self._wanted = self._kept = found

    @property
    def content(self) -> Unfinished:
        """Return the content that was last read from the file or last sent to a worker to be written."""
        return self._kept

    def save(self, unfinished: Unfinished) -> None:
        """Write this content to the file in the background."""
        self._wanted = unfinished
        if unfinished != self._kept and not self._writing.busy:
            self._kept = unfinished
            self._writing.run(lambda: self._write(unfinished), lambda _: self.save(self._wanted))

    def close(self) -> None:
        """Write content that is not on disk yet. Call it when no worker is writing."""
        if self._writing.busy or self._wanted != self._kept:
            self._write(self._wanted)

    def _write(self, unfinished: Unfinished) -> None:
        content = {"runs": sorted(map(str, unfinished.runs)), "entries": sorted(unfinished.entries)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(self._path, content, durable=False)
        except OSError as error:
            _log.info("could not save the list of unfinished runs: %s", error)


def _unfinished(found: Any, left_out: list[str]) -> Unfinished:
    runs, entries = (_texts(found[key], left_out) for key in ("runs", "entries"))
    return Unfinished(frozenset(map(Path, runs)), frozenset(entries))


def _texts(found: Any, left_out: list[str]) -> list[str]:
    left_out += [repr(text)[:80] for text in found if not isinstance(text, str)]
    return [text for text in found if isinstance(text, str)]


Continuing = Literal["training", "queue"]
"""What continues after the app closes: a live run, or only a queue with waiting entries."""


@dataclass(frozen=True)
class Ended:
    """A run that was alive and has ended, or a job that failed to start."""

    summary: RunSummary
    why: str = ""
    """What went wrong and what to do, if known."""
    job: Path | None = None
    """Job file if the job failed before it had a run; otherwise None."""
    earlier: bool = False
    """Whether it ended while the app was closed."""


class RunWatcher:
    """Reports when runs end. Use it only from the thread of `runs`; `look` is only needed while `watching`."""

    def __init__(self, runs: Runs, queue: QueueManager, tasks: Tasks) -> None:
        self._runs, self._queue, self._looking = runs, queue, ExclusiveTask(tasks)
        self._memory = SeenRuns(tasks)
        left = self._memory.content
        self._alive = set(left.runs)
        self._living: dict[Path, RunSummary] = {}
        """Summaries of the runs that were seen alive, by path."""
        self._earlier = set(left.runs)
        """Runs of earlier sessions not seen alive in this one, which therefore ended while the app was closed."""
        self._notified: dict[Path, float] = {}
        """Start times of the attempts whose end was reported, by path."""
        self._pending = set(left.entries)
        """Ids of the queue entries that were running or waiting when the queue was last read."""
        self._queue_seen = False
        self.awaited: set[str] = set()
        """Ids of entries whose failure to start is reported by the caller that waits for them."""
        self.changed: Emitter[None] = Emitter()
        """Emitted when `watching` may have changed."""
        self.ended: Emitter[Ended] = Emitter()
        self.resumed: Emitter[Path] = Emitter()
        """Emitted with a run that was resumed after its end was reported."""
        runs.changed.connect(lambda _: self._on_runs_changed())
        queue.changed.connect(lambda _: self._on_queue_changed())

    @property
    def watching(self) -> bool:
        """Return whether anything is running or about to start; if so, call `look` every few seconds."""
        return bool(self._alive) or self._is_queue_active

    @property
    def alive(self) -> dict[Path, RunSummary]:
        """Return the runs that were alive at the last check."""
        return {path: summary for path, summary in self._living.items() if path in self._alive}

    @property
    def continuing(self) -> Continuing | None:
        """Return what continues after the app closes, or None."""
        is_queue_active, entries = self._is_queue_active, self._queue.entries
        # Runs of an earlier session count only once they have been seen alive: they may have ended since.
        if self._alive - self._earlier or (is_queue_active and any(entry.state == "running" for entry in entries)):
            return "training"
        return "queue" if is_queue_active else None

    def look(self) -> None:
        """Check whether live runs are still alive and whether the queue started something."""
        if self._is_queue_active:
            self._queue.look()
        begun = {entry.run for entry in self._queue.entries if entry.state == "running" and entry.run is not None}
        paths = self._alive | begun
        if paths:
            self._looking.run(lambda: [_seen(path) for path in paths], self._take)

    def close(self) -> None:
        """Save the unfinished runs and entries for the next start. Call it when no worker is writing."""
        self._memory.close()

    @property
    def _is_queue_active(self) -> bool:
        now = self._queue.now
        return now.working and any(entry.state in ("running", "waiting") for entry in now.reading.entries)

    def _on_runs_changed(self) -> None:
        """Update the live runs, and inspect those that are no longer alive."""
        if not self._runs.looked:  # an unread list is empty: all runs of the last session would seem to have ended
            return
        living = [summary for summary in self._runs.all if summary.state in LIVE]
        listed = {summary.path for summary in living}
        ended = self._alive - listed
        self._alive |= listed
        self._earlier -= listed
        self._living |= {summary.path: summary for summary in living}
        for summary in living:
            self._report_resumed(summary)
        self._changed()
        if ended:
            self.look()

    def _on_queue_changed(self) -> None:
        """Report ended queue entries, since a run may start and end between two checks, or never start."""
        if self._queue.now.problem:
            return
        entries = self._queue.entries
        over = [one for one in entries if one.id in self._pending and one.state in ("done", "failed", "interrupted")]
        self._pending = {entry.id for entry in entries if entry.state in ("waiting", "running")}
        runs = {entry.run for entry in over if entry.run is not None}
        earlier, self._queue_seen = not self._queue_seen, True
        # Entries that are already over at the first reading ended while the app was closed.
        self._earlier |= runs if earlier else set()
        for entry in over:
            if entry.run is None and entry.job is not None and entry.id not in self.awaited:
                failed = RunSummary(entry.job, entry.name, "failed")
                self.ended.emit(Ended(failed, entry.problem, entry.job, earlier))
        self._alive |= runs  # counts them as alive, so that `look` reports their end with the reason
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
                self._report_resumed(one.summary)
            elif path in self._alive:
                if one.summary.state == "interrupted":
                    if self._queue.is_finishing(one.summary):
                        continue  # its entry will report the reason
                    one = replace(one, why=self._queue.failure_of(one.summary))
                self._alive.remove(path)
                # A resumed run may end again; the start time of its attempt ensures that each end is reported once.
                if (one.summary.state in _REPORTED or one.why) and self._notified.get(path) != one.summary.started:
                    self._notified[path] = one.summary.started
                    self.ended.emit(replace(one, earlier=path in self._earlier))
        self._changed()

    def _report_resumed(self, living: RunSummary) -> None:
        """Emit `resumed` if this attempt started after the one whose end was reported.

        Start times are compared because an outdated list can still show the ended attempt as alive.
        """
        if living.started > self._notified.get(living.path, living.started):
            self.resumed.emit(living.path)

    def _changed(self) -> None:
        self._memory.save(Unfinished(frozenset(self._alive), frozenset(self._pending)))
        self.changed.emit(None)


def _seen(path: Path) -> Ended:
    """Return the summary of an ended run, with the error that made it fail or pause. Call it on a worker."""
    summary = summarize(path)
    return Ended(summary, _why(RunDirectory(path)) if summary.state in ("failed", "paused") else "")


def _why(run: RunDirectory) -> str:
    """Return what went wrong in the latest attempt of a run; "" if it ended as intended."""
    try:
        start = max(0, long_path(run.events).stat().st_size - _TAIL)
        attempt_events, _ = events.read_events(run.events, start)
    except OSError:
        return ""
    latest = next((one.attempt for one in reversed(attempt_events) if not isinstance(one, events.UnknownEvent)), 0)
    errors = [one for one in attempt_events if isinstance(one, events.ErrorEvent) and one.attempt == latest]
    return full_message(errors[-1]) if errors else ""
