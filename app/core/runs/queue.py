"""The queue as the window knows it: what stands in it, what is asked of it, and that a worker is at it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from app.core.events import Emitter
from app.core.runs.summary import RunSummary
from app.core.tasks import Post, Tasks, only
from app.core.words import full_message
from trainer.errors import ImpastoError, RunError
from trainer.protocol.places import write_remedy
from trainer.protocol.processes import last_words, launch, stop_tracking
from trainer.protocol.queue import Entry, Queue, QueueSnapshot, new_entry, new_id, outcome


@dataclass(frozen=True)
class Look:
    """The queue at one moment, and whether somebody works on it."""

    reading: QueueSnapshot = field(default_factory=QueueSnapshot)
    working: bool = False
    """A worker is at it, or is just starting."""
    died: str | None = None
    """The last words, which may be empty, of the worker that this session started and that died; None: none did."""
    problem: str = ""
    """Why the queue cannot be read, in words."""

    @cached_property
    def running(self) -> tuple[Entry, ...]:
        """The entries whose turn it is: a few, of which each row of a long list of runs asks."""
        return tuple(entry for entry in self.reading.entries if entry.state == "running")

    @property
    def left(self) -> int:
        """How many entries nobody goes on with by himself: the computer was restarted, or the worker ended."""
        if self.reading.held:
            return 0
        stuck = ("interrupted",) if self.working else ("interrupted", "waiting")
        return sum(entry.state in stuck for entry in self.reading.entries)

    def presses(self, now: float) -> bool:
        """Tell whether at this Unix time an entry waits for nothing but room to begin."""
        moving = self.working and not self.reading.held
        return moving and any(one.state == "waiting" and (one.after or 0.0) <= now for one in self.reading.entries)


class QueueKeeper:
    """Belongs to the thread that makes it; the disk is read and written on a thread of its own, in order."""

    def __init__(self, post: Post, queue: Queue | None = None) -> None:
        self.queue = queue or Queue()
        self.now = Look()
        """The queue as it was looked at last."""
        self.changed: Emitter[None] = Emitter()
        """`now` is another."""
        self.failed: Emitter[ImpastoError] = Emitter()
        """Something that was asked could not be done."""
        self._tasks = Tasks(post, in_order=True)
        self.write_edits: Callable[[], None] = lambda: None
        """Waits on a worker until edits of images are on disk, where a run reads them; whoever saves them sets it."""
        self._requested: list[Future[None]] = []
        self._looking = False
        self._worker: subprocess.Popen[bytes] | None = None
        self._died: str | None = None
        self._said = 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What stands in the queue, in order, ended entries too."""
        return self.now.reading.entries

    def entry(self, name: str) -> Entry | None:
        """Return an entry by its id."""
        return self.now.reading.find(name)

    def begins(self, run: RunSummary) -> bool:
        """Tell whether the turn of a run has come and its engine is on its way, which takes some seconds."""
        return run.state != "running" and any(
            entry.run == run.path and (entry.pid is None or run.attempts <= entry.attempts)
            for entry in self.now.running
        )

    def failure_of(self, run: RunSummary) -> str:
        """Return why the latest start of a run failed, as its entry has it: a full disk takes no word in the run."""
        latest = max((one for one in self.entries if one.run == run.path), key=lambda one: one.added, default=None)
        failed = latest is not None and latest.state == "failed" and run.attempts <= latest.attempts + 1
        return latest.problem if latest and failed else ""

    def concludes(self, run: RunSummary) -> bool:
        """Tell whether it is still to be entered what became of a run that has ended."""
        return self.now.working and any(one.run == run.path for one in self.now.running)

    def start(self, job: Path, text: str | None = None) -> str:
        """Put a job at the end, as `text` has it or as its file is, and see that a worker runs; return the entry's id.

        The entry is on disk soon; `failed` tells if not, or if the file cannot be read.
        """
        name = new_id()

        def put() -> None:
            self.write_edits()
            self.queue.put(new_entry(job, name=name, text=text))

        self._ask(put, works=True)
        return name

    def resume(self, run: Path, steps: int | None = None) -> None:
        """Go on with a run when its turn comes, to `steps` in all where they are given."""
        self._ask(lambda: self.queue.add_run(run, steps), works=True)

    def requeue(self, name: str) -> None:
        """Let a paused, interrupted, stopped or failed entry wait for its turn again."""
        self._ask(lambda: self.queue.resume(name), works=True)

    def pause(self, name: str) -> None:
        """Pause what runs, hold back what waits."""
        self._ask(lambda: self.queue.pause(name), works=self._runs(name))

    def stop(self, name: str) -> None:
        """Stop what runs; what waits or is paused leaves the queue."""
        self._ask(lambda: self.queue.stop(name), works=self._runs(name))

    def withdraw(self, name: str) -> None:
        """Take back a pause or stop that what runs has not read yet."""
        self._ask(lambda: self.queue.withdraw(name))

    def move(self, name: str, before: str | None) -> None:
        """Put an entry before another, or at the end."""
        self._ask(lambda: self.queue.move(name, before))

    def remove(self, name: str) -> None:
        """Take an entry out; its run stays on disk."""
        self._ask(lambda: self.queue.remove(name))

    def clear(self) -> None:
        """Take out all that has ended."""
        self._ask(self.queue.clear)

    def duplicate(self, name: str) -> None:
        """Put the job of an entry in once more, at the end: frozen anew, as its file is now."""
        entry = self.entry(name)
        if entry is not None and entry.job is not None:
            self.start(entry.job)

    def start_after(self, name: str, after: float | None) -> None:
        """Let an entry wait for a moment (Unix time in seconds), or for its turn only."""
        self._ask(lambda: self.queue.start_after(name, after), works=self.now.working)

    def hold(self) -> None:
        """Begin nothing more until `release`; what runs is not touched."""
        self._ask(self.queue.hold)

    def resume_queue(self) -> None:
        """Begin again, also with what was interrupted."""
        self._ask(self.queue.release, works=True)

    def set_hold_on_failure(self, hold: bool) -> None:
        """Hold the queue after each failure, or go on with the next entry."""
        self._ask(lambda: self.queue.set_hold_on_failure(hold))

    def look(self) -> None:
        """Look at the queue again; called while an earlier look is under way, it does nothing."""
        if not self._looking:
            self._looking = True
            self._tasks.run(self._look, self._seen, self._not_seen)

    def close(self) -> None:
        """Finish what was asked; the worker goes on."""
        wait(self._requested)
        self._tasks.close()
        if self._worker is not None:
            stop_tracking(self._worker)

    # --- inside

    def _runs(self, name: str) -> bool:
        entry = self.entry(name)
        return entry is not None and entry.state == "running"

    def _ask(self, edit: Callable[[], object], *, works: bool = False) -> None:
        """Edit the queue, then see that somebody works on it where that is wanted, then look at it."""

        def work() -> None:
            edit()
            if works:
                self._see_to_worker()

        self._requested = [one for one in self._requested if not one.done()]
        self._requested.append(self._tasks.run(work, lambda _: None, only(ImpastoError, self.failed.emit)))
        self._looking = True
        self._tasks.run(self._look, self._seen, self._not_seen)

    def _seen(self, now: Look) -> None:
        self._looking = False
        if now != self.now:
            self.now = now
            self.changed.emit(None)

    def _not_seen(self, fault: BaseException) -> None:
        """Show a queue that cannot be read as a problem, once, and not at each look."""
        self._looking = False
        only(ImpastoError, lambda error: self._seen(replace(self.now, problem=full_message(error))))(fault)

    # --- on the thread of its own

    def _see_to_worker(self) -> None:
        """Start a worker unless one is there; raises RunError when it cannot be started."""
        if self._starting() or self.queue.worker_alive() or self.queue.read().held:
            return
        log = self.queue.worker_log
        try:
            self._died, self._said = None, log.stat().st_size if log.exists() else 0
            self._worker = launch(["queue", "run"], log)
        except OSError as error:
            raise RunError(
                "queue.worker",
                f"What works on the queue could not be started: {error.strerror or error}.",
                f"{write_remedy(error)} Or start it in a terminal with `python -m trainer queue`.",
            ) from error

    def _starting(self) -> bool:
        return self._worker is not None and self._worker.poll() is None

    def _look(self) -> Look:
        working = self._starting() or self.queue.worker_alive()
        if not working:
            if any(entry.state == "running" for entry in self.queue.read().entries):
                self.queue.record_dead_engines(lambda entry: outcome(self.queue, entry))
            self._take_leave()
        return Look(self.queue.read(), working, None if working else self._died)

    def _take_leave(self) -> None:
        """Note why the worker that this session started is gone."""
        if self._worker is not None and self._worker.returncode:
            self._died = last_words(self.queue.worker_log, self._said)
        self._worker = None
