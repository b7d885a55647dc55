"""The queue in the window: its entries, edits, and the worker process that runs it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from app.core.events import Emitter
from app.core.runs.summary import RunSummary
from app.core.tasks import Post, Tasks, handle_only
from app.core.words import full_message
from trainer.errors import ImpastoError, RunError
from trainer.protocol.places import write_remedy
from trainer.protocol.processes import last_words, launch, stop_tracking
from trainer.protocol.queue import Entry, Queue, QueueSnapshot, new_entry, new_id, outcome


@dataclass(frozen=True)
class QueueState:
    """Snapshot of the queue, and whether a worker is running."""

    reading: QueueSnapshot = field(default_factory=QueueSnapshot)
    working: bool = False
    """Whether a worker is running or starting."""
    died: str | None = None
    """Last output of this session's worker if it died, possibly empty; otherwise None."""
    problem: str = ""
    """Reason why the queue cannot be read, or ""."""

    @cached_property
    def running(self) -> tuple[Entry, ...]:
        """Return the running entries; cached, since every row in the list of runs needs them."""
        return tuple(entry for entry in self.reading.entries if entry.state == "running")

    @property
    def stuck_count(self) -> int:
        """Return the number of entries that are interrupted or have no worker to run them; 0 if the queue is held."""
        if self.reading.held:
            return 0
        stuck = ("interrupted",) if self.working else ("interrupted", "waiting")
        return sum(entry.state in stuck for entry in self.reading.entries)

    def has_ready_entry(self, now: float) -> bool:
        """Return whether an entry could start at this Unix time and is only waiting for resources."""
        moving = self.working and not self.reading.held
        return moving and any(one.state == "waiting" and (one.after or 0.0) <= now for one in self.reading.entries)


class QueueManager:
    """Manager of the queue: reads and edits it on a background thread, one operation at a time.

    Use it only from the thread that created it.
    """

    def __init__(self, post: Post, queue: Queue | None = None) -> None:
        self.queue = queue or Queue()
        self.now = QueueState()
        """Latest state of the queue."""
        self.changed: Emitter[None] = Emitter()
        """Emitted when `now` changes."""
        self.failed: Emitter[ImpastoError] = Emitter()
        """Emitted when a requested action failed."""
        self._tasks = Tasks(post, in_order=True)
        self.write_edits: Callable[[], None] = lambda: None
        """Called on a worker before a job is queued, to write pending image edits that the run will read."""
        self._requested: list[Future[None]] = []
        self._looking = False
        self._worker: subprocess.Popen[bytes] | None = None
        self._died: str | None = None
        self._log_start = 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return all entries in order, including ended ones."""
        return self.now.reading.entries

    def entry(self, name: str) -> Entry | None:
        """Return the entry with an id, or None."""
        return self.now.reading.find(name)

    def is_starting(self, run: RunSummary) -> bool:
        """Return whether the engine of a run is starting, which takes a few seconds."""
        return run.state != "running" and any(
            entry.run == run.path and (entry.pid is None or run.attempts <= entry.attempts)
            for entry in self.now.running
        )

    def failure_of(self, run: RunSummary) -> str:
        """Return why a run's latest start failed, or "".

        The reason comes from the queue entry, since a run cannot record it on a full disk.
        """
        latest = max((one for one in self.entries if one.run == run.path), key=lambda one: one.added, default=None)
        failed = latest is not None and latest.state == "failed" and run.attempts <= latest.attempts + 1
        return latest.problem if latest and failed else ""

    def is_finishing(self, run: RunSummary) -> bool:
        """Return whether the queue has not recorded the result of an ended run yet."""
        return self.now.working and any(one.run == run.path for one in self.now.running)

    def start(self, job: Path, text: str | None = None) -> str:
        """Append a job to the queue, start a worker if needed, and return the entry's id.

        The job is `text` if given, else the content of the file `job`. The entry is written in the background; `failed`
        is emitted if this or reading the file fails.
        """
        name = new_id()

        def put() -> None:
            self.write_edits()
            self.queue.put(new_entry(job, name=name, text=text))

        self._ask(put, works=True)
        return name

    def resume(self, run: Path, steps: int | None = None) -> None:
        """Queue a run to resume, optionally up to `steps` in total."""
        self._ask(lambda: self.queue.add_run(run, steps), works=True)

    def requeue(self, name: str) -> None:
        """Put a paused, interrupted, stopped or failed entry back in line."""
        self._ask(lambda: self.queue.resume(name), works=True)

    def pause(self, name: str) -> None:
        """Pause a running entry or hold a waiting one."""
        self._ask(lambda: self.queue.pause(name), works=self._runs(name))

    def stop(self, name: str) -> None:
        """Stop a running entry or remove a waiting or paused one."""
        self._ask(lambda: self.queue.stop(name), works=self._runs(name))

    def withdraw(self, name: str) -> None:
        """Withdraw a pause or stop command that the run has not read yet."""
        self._ask(lambda: self.queue.withdraw(name))

    def move(self, name: str, before: str | None) -> None:
        """Move an entry before another, or to the end."""
        self._ask(lambda: self.queue.move(name, before))

    def remove(self, name: str) -> None:
        """Remove an entry; its run stays on disk."""
        self._ask(lambda: self.queue.remove(name))

    def clear(self) -> None:
        """Remove all ended entries."""
        self._ask(self.queue.clear)

    def duplicate(self, name: str) -> None:
        """Append an entry's job to the queue again, using the current content of its job file."""
        entry = self.entry(name)
        if entry is not None and entry.job is not None:
            self.start(entry.job)

    def start_after(self, name: str, after: float | None) -> None:
        """Set the earliest start of an entry (Unix time in seconds); None removes the limit."""
        self._ask(lambda: self.queue.start_after(name, after), works=self.now.working)

    def hold(self) -> None:
        """Start no new jobs until `resume_queue` is called; running jobs continue."""
        self._ask(self.queue.hold)

    def resume_queue(self) -> None:
        """Release the hold and restart interrupted jobs."""
        self._ask(self.queue.release, works=True)

    def set_hold_on_failure(self, hold: bool) -> None:
        """Choose whether the queue holds after a failed job or continues with the next entry."""
        self._ask(lambda: self.queue.set_hold_on_failure(hold))

    def look(self) -> None:
        """Read the queue again, unless a read is already in progress."""
        if not self._looking:
            self._looking = True
            self._tasks.run(self._look, self._seen, self._on_unreadable)

    def close(self) -> None:
        """Finish pending edits; the worker process keeps running."""
        wait(self._requested)
        self._tasks.close()
        if self._worker is not None:
            stop_tracking(self._worker)

    # --- internals

    def _runs(self, name: str) -> bool:
        entry = self.entry(name)
        return entry is not None and entry.state == "running"

    def _ask(self, edit: Callable[[], object], *, works: bool = False) -> None:
        """Edit the queue, start a worker if `works` is set, and read the queue again."""

        def work() -> None:
            edit()
            if works:
                self._ensure_worker()

        self._requested = [one for one in self._requested if not one.done()]
        self._requested.append(self._tasks.run(work, lambda _: None, handle_only(ImpastoError, self.failed.emit)))
        self._looking = True
        self._tasks.run(self._look, self._seen, self._on_unreadable)

    def _seen(self, now: QueueState) -> None:
        self._looking = False
        if now != self.now:
            self.now = now
            self.changed.emit(None)

    def _on_unreadable(self, fault: BaseException) -> None:
        """Report an unreadable queue once rather than at every read."""
        self._looking = False
        handle_only(ImpastoError, lambda error: self._seen(replace(self.now, problem=full_message(error))))(fault)

    # --- on the worker thread

    def _ensure_worker(self) -> None:
        """Start a worker unless one is running; raises RunError if that fails."""
        if self._starting() or self.queue.worker_alive() or self.queue.read().held:
            return
        log = self.queue.worker_log
        try:
            self._died, self._log_start = None, log.stat().st_size if log.exists() else 0
            self._worker = launch(["queue", "run"], log)
        except OSError as error:
            raise RunError(
                "queue.worker",
                f"Could not start the queue: {error.strerror or error}.",
                f"{write_remedy(error)} Or start the queue in a terminal with `python -m trainer queue`.",
            ) from error

    def _starting(self) -> bool:
        return self._worker is not None and self._worker.poll() is None

    def _look(self) -> QueueState:
        working = self._starting() or self.queue.worker_alive()
        if not working:
            if any(entry.state == "running" for entry in self.queue.read().entries):
                self.queue.record_dead_engines(lambda entry: outcome(self.queue, entry))
            self._record_worker_end()
        return QueueState(self.queue.read(), working, None if working else self._died)

    def _record_worker_end(self) -> None:
        """Record the last output of this session's worker after it ended."""
        if self._worker is not None and self._worker.returncode:
            self._died = last_words(self.queue.worker_log, self._log_start)
        self._worker = None
