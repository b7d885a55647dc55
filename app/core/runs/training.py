"""Track the current training for the status bar, sidebar, title and tray icon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from app.core.events import Emitter
from app.core.runs.queue import QueueManager
from app.core.runs.run import Run
from app.core.runs.runs import RunCommands, Runs
from app.core.runs.summary import RunSummary
from app.core.runs.watcher import RunWatcher
from trainer.protocol.commands import Ending
from trainer.protocol.queue import Entry
from trainer.protocol.run_directory import RunDirectory


@dataclass(frozen=True)
class Training:
    """A run that is training, or a job whose engine is starting."""

    summary: RunSummary
    """Summary of the run; for a job without a run yet, only its name and file."""
    left: float | None = None
    """Estimated remaining seconds; None if unknown."""
    entry: str | None = None
    """Id of its queue entry while its engine is starting."""
    others: int = 0
    """Number of other runs training at the same time."""

    @property
    def is_starting(self) -> bool:
        """Return whether its engine is still starting."""
        return self.entry is not None

    @property
    def ending(self) -> Ending | None:
        """Return its unfinished pause or stop command, or None."""
        return self.summary.ending

    @property
    def share(self) -> float | None:
        """Return the fraction of completed steps, 0 to 1; None if unknown."""
        return min(1.0, self.summary.step / self.summary.steps) if self.summary.steps else None


class NowTraining:
    """Tracker of the current training. Use it only from the thread of `runs`; call `look` about once per second."""

    def __init__(self, runs: Runs, queue: QueueManager, watcher: RunWatcher, orders: RunCommands) -> None:
        self._runs, self._queue, self._watcher, self._orders = runs, queue, watcher, orders
        self._run: Run | None = None
        self._latest: RunSummary | None = None
        """Summary of the run that was shown last."""
        self._stop_listening: Callable[[], None] | None = None
        self.now: Training | None = None
        """Current training; the first one if there are several, None if there is none."""
        self.changed: Emitter[None] = Emitter()
        """Emitted when `now` changes."""
        watcher.changed.connect(lambda _: self._follow())
        queue.changed.connect(lambda _: self._follow())
        orders.changed.connect(lambda _: self._follow())

    def look(self) -> None:
        """Check for answers to commands and read the progress of the shown run."""
        self._orders.look()
        self._follow()
        if self._run:
            self._run.read()

    def pause(self) -> None:
        """Pause the shown training."""
        if self.now and self.now.entry:
            self._queue.pause(self.now.entry)
        elif self.now:
            self._orders.send(RunDirectory(self.now.summary.path), "pause")

    def keep_training(self) -> None:
        """Withdraw the pause or stop command of the shown training."""
        if self.now and self.now.entry:
            self._queue.withdraw(self.now.entry)
        elif self.now:
            entry = self._entry_of(self.now.summary.path)
            if entry and entry.wish:
                self._queue.withdraw(entry.id)
            self._orders.withdraw(RunDirectory(self.now.summary.path))

    def _follow(self) -> None:
        """Update `now` from the runs and the queue."""
        living = sorted(self._watcher.alive)
        shown = self._run.directory.path if self._run else None
        self._watch(shown if shown in living else next(iter(living), None))
        found = self._from_run(len(living) - 1) if self._run else self._from_entry()
        if found != self.now:
            self.now = found
            self.changed.emit(None)

    def _watch(self, path: Path | None) -> None:
        if path and self._run and not self._run.closed and self._run.directory.path == path:
            return
        if self._stop_listening:
            self._stop_listening()
        self._run = self._runs.open(path) if path else None
        self._stop_listening = self._run.polled.connect(lambda _: self._follow()) if self._run else None

    def _from_run(self, others: int) -> Training | None:
        run = self._run
        assert run is not None
        summary = run.summary if run.loaded else self._watcher.alive[run.directory.path]
        if summary.state != "running":
            return None
        self._latest = summary
        step = run.progress.step.step if run.progress.step else 0
        summary = replace(summary, step=max(summary.step, step), ending=self._ending(summary))
        left = run.seconds_left()
        return Training(summary, None if left is None else float(round(left)), others=others)

    def _ending(self, summary: RunSummary) -> Ending | None:
        """Return a run's pause or stop command, whether it is in the run's folder or not written there yet."""
        if summary.ending:
            return summary.ending
        requested = self._orders.ending(RunDirectory(summary.path))
        entry = self._entry_of(summary.path)
        name = requested or (entry.wish if entry else None)
        return Ending(name, accepted=False) if name else None

    def _from_entry(self) -> Training | None:
        """Return the first job whose engine is starting, or None."""
        entry = next(filter(self._is_starting, self._queue.now.running), None) if self._queue.now.working else None
        if entry is None:
            return None
        ending = Ending(entry.wish, accepted=False) if entry.wish else None
        path = entry.run or entry.job or Path(entry.name)
        return Training(RunSummary(path, entry.name, "new", ending=ending), entry=entry.id)

    def _is_starting(self, entry: Entry) -> bool:
        """Return whether an entry's engine is starting; entries stay "running" briefly after their run ends."""
        latest = self._latest
        return latest is None or entry.run != latest.path or latest.attempts <= entry.attempts

    def _entry_of(self, run: Path) -> Entry | None:
        return next((one for one in self._queue.now.running if one.run == run), None)
