"""Keeps in a run's console.log what a terminal is told of it: who looks at the run later has no other log."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TextIO

from trainer.cli.display import PlainDisplay, stamped
from trainer.protocol import events
from trainer.protocol.files import long_path
from trainer.protocol.progress import Story
from trainer.protocol.run_directory import RunDirectory

_REFUSALS = (OSError, ValueError)  # of a disk, and of a text: no line of a log is worth a run


class RunLog:
    """Takes a run's events from the first on, and writes them once its folder is there, in the words of plain output.

    What engines print that nobody looks at (those of the queue) is led there as it is, and needs none of this. Where
    the disk refuses, the run goes on without a log.
    """

    def __init__(self) -> None:
        self._early: list[events.Event] | None = []
        self._stream: TextIO | None = None
        self._display: PlainDisplay | None = None

    def open(self, run: Path) -> None:
        """Write into this run's log from now on, what was told before first."""
        with contextlib.suppress(*_REFUSALS):
            console = long_path(RunDirectory(run).console)
            # A notice may name a file whose name is no Unicode: it is written as a terminal shows it.
            self._stream = console.open("a", encoding="utf-8", errors="replace", newline="\n")
            self._display = PlainDisplay(self._stream, Story())
        early, self._early = self._early or [], None
        for event in early:
            self.show(event)

    def show(self, event: events.Event) -> None:
        """Take in one event."""
        if self._early is not None:
            self._early.append(stamped(event))
        elif self._display:
            try:
                self._display.show(stamped(event))
            except _REFUSALS:
                self._display = None  # a full disk: half a line more or less helps nobody

    def close(self) -> None:
        """Write no more."""
        if self._stream is not None:
            with contextlib.suppress(*_REFUSALS):  # what a full disk did not take
                self._stream.close()
