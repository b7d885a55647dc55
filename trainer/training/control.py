"""What may interrupt a run: commands from its directory, Ctrl-C and the system's request to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from trainer.protocol import commands, events
from trainer.protocol.rundir import RunDirectory
from trainer.training.reporter import Reporter

Order = Literal["pause", "stop"]


class Interrupted(Exception):
    """Raised between two units of work of a phase that has nothing to save."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.order = order


def answer(reporter: Reporter, command: commands.Command, outcome: commands.CommandOutcome, detail: str) -> None:
    """Says what became of a command: to who sent it, and among the events."""
    commands.finish(command, outcome, detail)
    reporter.write(events.CommandEvent(name=command.name, outcome=outcome, detail=detail))


class Control:
    """Looks for orders when asked; the first Ctrl-C is a pause, a second one ends at once."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._signalled = False
        self._accepted: list[commands.Command] = []

    def order(self) -> Order | None:
        """The order to end that stands, if any."""
        if self._signalled:
            return "pause"
        for command in commands.pending(self.run):
            if command.name in ("stop", "pause"):
                self._accepted.append(command)
                return "stop" if command.name == "stop" else "pause"
        return None

    def wishes(self) -> list[commands.Command]:
        """Pending commands that do not end the run: save and sample."""
        return [command for command in commands.pending(self.run) if command.name in ("save", "sample")]

    def raise_if_ordered(self) -> None:
        """Raises Interrupted when an order stands: for phases before training, which have nothing to save."""
        if (order := self.order()) is not None:
            raise Interrupted(order)

    def answer(self, reporter: Reporter, outcome: commands.CommandOutcome, detail: str) -> None:
        """Says what became of the order that ended the run."""
        for command in {command.path: command for command in self._accepted}.values():
            answer(reporter, command, outcome, detail)
        self._accepted.clear()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turns Ctrl-C, a request to end and a closed terminal into a pause while inside; main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP")
        former = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
        for number in former:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
