"""All runs of this user, as the list of runs shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from app.core.events import Emitter
from app.core.runs.run import Run
from app.core.runs.summary import RunSummary, Summaries
from app.core.tasks import Post, Single, Tasks, only
from trainer.errors import ImpastoError, RunError
from trainer.protocol import commands, places
from trainer.protocol.commands import CommandName, CommandResult, EndingName
from trainer.protocol.places import write_remedy
from trainer.protocol.run_directory import RunDirectory, State, forget_run, forgotten_runs, known_runs

_ENDS: Mapping[CommandName, State] = {"pause": "paused", "stop": "stopped"}
"""How a run stands that did such an order."""


class Runs:
    """The runs that were started by this user, in the app or not, and those in the folders of his jobs.

    A worker of its own reads them: however long other work takes, a run that died is seen within the next look.
    """

    def __init__(self, post: Post) -> None:
        self.all: list[RunSummary] = []
        """The latest started first."""
        self.changed: Emitter[None] = Emitter()
        """`all` is another list now."""
        self.failed: Emitter[ImpastoError] = Emitter()
        """Something that was asked could not be done."""
        self.looked = False
        """Whether `all` was read once."""
        self._tasks = Tasks(post, threads=1)
        self._looking = Single(self._tasks)
        self._summaries = Summaries()
        self._shown: set[Path] = set()
        self._forgotten: set[Path] = set()
        """Since the look that runs began, or not yet on disk: what it brings of them is not wanted any more."""
        self._open: dict[Path, Run] = {}
        self._requested: dict[Path, Future[None]] = {}
        """To be forgotten on disk."""

    def look(self) -> None:
        """Read again how all runs stand; nothing when that is on its way."""
        if not self._looking.busy:
            self._forgotten.intersection_update(path for path, one in self._requested.items() if not one.done())
            shown = frozenset(self._shown)
            self._looking.run(lambda: self._read(shown), self._take, kept=False)

    def open(self, path: Path) -> Run:
        """Return a run to watch; the same to all who ask for it until it is closed. It joins the list."""
        path = path.absolute()
        run = self._open.get(path)
        if run is None or run.closed:
            run = self._open[path] = Run(path, self._tasks)
            self._shown.add(path)
        return run

    def stands(self, summary: RunSummary) -> None:
        """Take over how a run stands that was just read by itself."""
        others = [summary if each.path == summary.path else each for each in self.all]
        if others != self.all:
            self.all = others
            self.changed.emit(None)

    def forget(self, path: Path) -> None:
        """Take a run out of the list until it is started again; its folder stays as it is.

        It comes back, and `failed` says why, when that could not be written.
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
        """Watch no more; what was asked is done first."""
        wait(self._requested.values())
        for run in self._open.values():
            run.close()
        self._tasks.close()

    def _read(self, shown: Iterable[Path]) -> list[RunSummary]:
        """On the worker; what was shown before stays in the list when its folder is gone, and says so."""
        paths = dict.fromkeys((*known_runs(), *_beside_jobs(), *shown))
        found = [self._summaries.of(path) for path in paths]
        return sorted(found, key=lambda summary: summary.started, reverse=True)

    def _keep(self, path: Path, fault: BaseException) -> None:
        """A run could not be taken out of the list."""
        self._forgotten.discard(path)
        self._shown.add(path)
        self.look()
        only(RunError, self.failed.emit)(fault)

    def _take(self, found: list[RunSummary]) -> None:
        found = [summary for summary in found if summary.path not in self._forgotten]
        self._shown.update(summary.path for summary in found)
        if found != self.all or not self.looked:
            self.looked = True
            self.all = found
            self.changed.emit(None)


def _beside_jobs() -> Iterable[Path]:
    """Yield the runs in the folders of this user's jobs, which a list that was lost does not name."""
    forgotten = forgotten_runs()
    for marker in sorted((places.home() / "jobs").glob("*/runs/*/run.json")):
        if marker.parent not in forgotten:
            yield marker.parent


@dataclass(frozen=True)
class Order:
    """Something asked of a run; `sent` is None while it is being written."""

    run: RunDirectory
    name: CommandName
    sent: Path | None = None


class Orders:
    """Those that wait for their answer. `give` and `look` touch the disk on a worker only."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._waiting: list[Order] = []
        self._looking = Single(tasks)
        self.changed: Emitter[None] = Emitter()
        """Others wait now."""
        self.answered: Emitter[tuple[Order, CommandResult]] = Emitter()
        self.failed: Emitter[ImpastoError] = Emitter()
        """An order could not be written."""

    def waiting(self, run: RunDirectory) -> list[CommandName]:
        """Return what was asked of a run and not answered yet, in order."""
        return [order.name for order in self._waiting if order.run.path == run.path]

    def ending(self, run: RunDirectory) -> EndingName | None:
        """Return the command to end a run that was given here and has no answer yet."""
        for name in self.waiting(run):
            if name == "pause" or name == "stop":
                return name
        return None

    def withdraw(self, run: RunDirectory) -> None:
        """Withdraw the pending commands that end a run, those of other windows too; the run may be faster."""

        def work() -> None:
            for name in ("stop", "pause"):
                commands.withdraw(run.commands, name)

        self._tasks.run(
            work, lambda _: self.look(), only(OSError, lambda fault: self.failed.emit(_unwritten(run, fault)))
        )

    def give(self, run: RunDirectory, name: CommandName) -> None:
        """Ask something of a run's engine."""
        order = Order(run, name)
        self._waiting.append(order)
        self.changed.emit(None)

        def sent(path: Path) -> None:
            self._waiting[self._waiting.index(order)] = Order(run, name, path)

        def failed(fault: OSError) -> None:
            self._waiting.remove(order)
            self.changed.emit(None)
            self.failed.emit(_unwritten(run, fault))

        self._tasks.run(lambda: commands.send(run.commands, name), sent, only(OSError, failed))

    def look(self) -> None:
        """See what was answered; nothing where nothing waits."""
        orders = [order for order in self._waiting if order.sent is not None]
        if orders:
            self._looking.run(lambda: [(order, _answer(order)) for order in orders], self._take)

    def _take(self, found: list[tuple[Order, CommandResult | None]]) -> None:
        for order, answer in found:
            if answer is not None:
                self._waiting.remove(order)
                self.changed.emit(None)
                self.answered.emit((order, answer))


def _answer(order: Order) -> CommandResult | None:
    """Return what became of an order; on a worker."""
    assert order.sent is not None
    alive = order.run.is_alive()  # asked first: an engine answers, and then ends
    answer = commands.answer(order.sent)
    return answer if answer or alive else _unread(order)


def _unread(order: Order) -> CommandResult:
    """Return what becomes of an order that nobody read: another one, from elsewhere, may have done the same."""
    status = order.run.read_status()
    came_about = status is not None and status.state == _ENDS.get(order.name)
    return CommandResult("done" if came_about else "void", "")


def _unwritten(run: RunDirectory, error: OSError) -> RunError:
    return RunError(
        "run.command",
        f'Could not send the command to the run "{run.name}": {run.commands} cannot be written to '
        f"({error.strerror or error}).",
        f"{write_remedy(error)} The run itself continues.",
    )
