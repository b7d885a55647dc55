"""What is asked of running engines, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.events import Event
from app.core.tasks import Single, Tasks, only
from trainer.errors import ImpastoError, RunError
from trainer.protocol import commands
from trainer.protocol.commands import Answer, CommandName, EndingName
from trainer.protocol.places import write_remedy
from trainer.protocol.run_directory import RunDirectory, State

_ENDS: Mapping[CommandName, State] = {"pause": "paused", "stop": "stopped"}
"""How a run stands that did such an order."""


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
        self.changed: Event[None] = Event()
        """Others wait now."""
        self.answered: Event[tuple[Order, Answer]] = Event()
        self.failed: Event[ImpastoError] = Event()
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
                commands.withdraw(run, name)

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

        self._tasks.run(lambda: commands.send(run, name), sent, only(OSError, failed))

    def look(self) -> None:
        """See what was answered; nothing where nothing waits."""
        orders = [order for order in self._waiting if order.sent is not None]
        if orders:
            self._looking.run(lambda: [(order, _answer(order)) for order in orders], self._take)

    def _take(self, found: list[tuple[Order, Answer | None]]) -> None:
        for order, answer in found:
            if answer is not None:
                self._waiting.remove(order)
                self.changed.emit(None)
                self.answered.emit((order, answer))


def _answer(order: Order) -> Answer | None:
    """Return what became of an order; on a worker."""
    assert order.sent is not None
    alive = order.run.is_alive()  # asked first: an engine answers, and then ends
    answer = commands.answer(order.sent)
    return answer if answer or alive else _unread(order)


def _unread(order: Order) -> Answer:
    """Return what becomes of an order that nobody read: another one, from elsewhere, may have done the same."""
    status = order.run.read_status()
    came_about = status is not None and status.state == _ENDS.get(order.name)
    return Answer("done" if came_about else "void", "")


def _unwritten(run: RunDirectory, error: OSError) -> RunError:
    return RunError(
        "run.command",
        f'Could not send the command to the run "{run.name}": {run.commands} cannot be written to '
        f"({error.strerror or error}).",
        f"{write_remedy(error)} The run itself continues.",
    )
