"""List of this user's runs, and commands sent to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from app.core.events import Emitter
from app.core.runs.run import Run
from app.core.runs.summary import RunSummary, Summaries
from app.core.tasks import ExclusiveTask, Post, Tasks, handle_only
from trainer.errors import ImpastoError, RunError
from trainer.protocol import commands, places
from trainer.protocol.commands import CommandName, CommandResult, EndingName
from trainer.protocol.places import write_remedy
from trainer.protocol.run_directory import RunDirectory, State, forget_run, forgotten_runs, known_runs

_ENDS: Mapping[CommandName, State] = {"pause": "paused", "stop": "stopped"}
"""State of a run after it has executed a command."""


class Runs:
    """List of the runs that this user started, in or outside the app, and of runs in the folders of the user's jobs.

    A dedicated worker reads them, which keeps other long work from delaying the detection of dead runs.
    """

    def __init__(self, post: Post) -> None:
        self.all: list[RunSummary] = []
        """Summaries of all runs, latest start first."""
        self.changed: Emitter[None] = Emitter()
        """Emitted when `all` changes."""
        self.failed: Emitter[ImpastoError] = Emitter()
        """Emitted when a requested action failed."""
        self.looked = False
        """Whether `all` has been read at least once."""
        self._tasks = Tasks(post, threads=1)
        self._looking = ExclusiveTask(self._tasks)
        self._summaries = Summaries()
        self._shown: set[Path] = set()
        self._forgotten: set[Path] = set()
        """Runs removed since the current read began, or not yet removed on disk; a read must not add them back."""
        self._open: dict[Path, Run] = {}
        self._requested: dict[Path, Future[None]] = {}
        """Removals being written to disk, by run."""

    def refresh(self) -> None:
        """Read the states of all runs, unless a read is already in progress."""
        if not self._looking.busy:
            self._forgotten.intersection_update(path for path, one in self._requested.items() if not one.done())
            shown = frozenset(self._shown)
            self._looking.run(lambda: self._read(shown), self._take, kept=False)

    def open(self, path: Path) -> Run:
        """Return the watcher of a run, which all callers share until it is closed; add the run to the list."""
        path = path.absolute()
        run = self._open.get(path)
        if run is None or run.closed:
            run = self._open[path] = Run(path, self._tasks)
            self._shown.add(path)
        return run

    def update_summary(self, summary: RunSummary) -> None:
        """Replace the summary of a run in the list with one that was read separately."""
        others = [summary if each.path == summary.path else each for each in self.all]
        if others != self.all:
            self.all = others
            self.changed.emit(None)

    def forget(self, path: Path) -> None:
        """Remove a run from the list until it is started again; its folder is not changed.

        If the removal cannot be saved, the run is put back in the list and `failed` is emitted.
        """
        self._forgotten.add(path)
        self._shown.discard(path)
        self.all = [summary for summary in self.all if summary.path != path]
        self.changed.emit(None)

        def work() -> None:
            forget_run(path)
            self._summaries.forget(path)

        self._requested = {each: one for each, one in self._requested.items() if not one.done()}
        self._requested[path] = self._tasks.run(work, lambda _: None, lambda fault: self._keep(path, fault))

    def close(self) -> None:
        """Stop watching after all pending removals are written."""
        wait(self._requested.values())
        for run in self._open.values():
            run.close()
        self._tasks.close()

    def _read(self, shown: Iterable[Path]) -> list[RunSummary]:
        """Return all summaries. Runs on the worker; a run whose folder is gone stays in the list with a problem."""
        paths = dict.fromkeys((*known_runs(), *_runs_of_jobs(), *shown))
        found = [self._summaries.of(path) for path in paths]
        return sorted(found, key=lambda summary: summary.started, reverse=True)

    def _keep(self, path: Path, fault: BaseException) -> None:
        """Put a run back in the list and report why its removal failed."""
        self._forgotten.discard(path)
        self._shown.add(path)
        self.refresh()
        handle_only(RunError, self.failed.emit)(fault)

    def _take(self, found: list[RunSummary]) -> None:
        found = [summary for summary in found if summary.path not in self._forgotten]
        self._shown.update(summary.path for summary in found)
        if found != self.all or not self.looked:
            self.looked = True
            self.all = found
            self.changed.emit(None)


def _runs_of_jobs() -> Iterable[Path]:
    """Yield the runs in the folders of this user's jobs; they are found even if the list of runs was lost."""
    forgotten = forgotten_runs()
    for marker in sorted((places.home() / "jobs").glob("*/runs/*/run.json")):
        if marker.parent not in forgotten:
            yield marker.parent


@dataclass(frozen=True)
class RunCommand:
    """A command to a run; `sent` is its file, None while it is being written."""

    run: RunDirectory
    name: CommandName
    sent: Path | None = None


class RunCommands:
    """Sends commands to runs and keeps track of unanswered ones. All disk access happens on a worker."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._waiting: list[RunCommand] = []
        self._looking = ExclusiveTask(tasks)
        self.changed: Emitter[None] = Emitter()
        """Emitted when the waiting commands change."""
        self.answered: Emitter[tuple[RunCommand, CommandResult]] = Emitter()
        self.failed: Emitter[ImpastoError] = Emitter()
        """Emitted when a command could not be written."""

    def waiting(self, run: RunDirectory) -> list[CommandName]:
        """Return the unanswered commands of a run, in order."""
        return [order.name for order in self._waiting if order.run.path == run.path]

    def ending(self, run: RunDirectory) -> EndingName | None:
        """Return the unanswered pause or stop command of a run, or None."""
        for name in self.waiting(run):
            if name == "pause" or name == "stop":
                return name
        return None

    def withdraw(self, run: RunDirectory) -> None:
        """Withdraw a run's unread pause and stop commands, including those sent by other windows."""

        def work() -> None:
            for name in ("stop", "pause"):
                commands.withdraw(run.commands, name)

        self._tasks.run(
            work, lambda _: self.look(), handle_only(OSError, lambda fault: self.failed.emit(_unwritten(run, fault)))
        )

    def send(self, run: RunDirectory, name: CommandName) -> None:
        """Send a command to a run's engine."""
        order = RunCommand(run, name)
        self._waiting.append(order)
        self.changed.emit(None)

        def sent(path: Path) -> None:
            self._waiting[self._waiting.index(order)] = RunCommand(run, name, path)

        def failed(fault: OSError) -> None:
            self._waiting.remove(order)
            self.changed.emit(None)
            self.failed.emit(_unwritten(run, fault))

        self._tasks.run(lambda: commands.send(run.commands, name), sent, handle_only(OSError, failed))

    def look(self) -> None:
        """Check for answers if any command is waiting."""
        orders = [order for order in self._waiting if order.sent is not None]
        if orders:
            self._looking.run(lambda: [(order, _answer(order)) for order in orders], self._take)

    def _take(self, found: list[tuple[RunCommand, CommandResult | None]]) -> None:
        for order, answer in found:
            if answer is not None:
                self._waiting.remove(order)
                self.changed.emit(None)
                self.answered.emit((order, answer))


def _answer(order: RunCommand) -> CommandResult | None:
    """Return the result of a command; None while it is pending. Call it on a worker."""
    assert order.sent is not None
    alive = order.run.is_alive()  # check this first: an engine answers before it ends
    answer = commands.answer(order.sent)
    return answer if answer or alive else _unread(order)


def _unread(order: RunCommand) -> CommandResult:
    """Return the result of an unread command: "done" if the run ended as requested, else "void"."""
    status = order.run.read_status()
    took_effect = status is not None and status.state == _ENDS.get(order.name)
    return CommandResult("done" if took_effect else "void", "")


def _unwritten(run: RunDirectory, error: OSError) -> RunError:
    return RunError(
        "run.command",
        f'Could not send the command to the run "{run.name}": {run.commands} cannot be written to '
        f"({error.strerror or error}).",
        f"{write_remedy(error)} The run itself continues.",
    )
