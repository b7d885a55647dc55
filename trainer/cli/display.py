"""Display a run's events: progress bars on a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.cli import words
from trainer.cli.common import discard, json_line, write_lines
from trainer.protocol import events
from trainer.protocol.files import long_path
from trainer.protocol.progress import RunProgress
from trainer.protocol.run_directory import RunDirectory
from trainer.protocol.text import printable, printable_lines

OnEvent = Callable[[events.Event], None]

# Plain output goes to files and other programs: a progress line every ten seconds is enough.
_PLAIN_SECONDS = 10.0
_BAR_WIDTH = 30
# These phases recur during training; their bars are shown only while they run.
_PASSING: tuple[events.Phase, ...] = ("preview", "validate", "save")
# Disk and text encoding errors: a run must not fail because a line of its log could not be written.
_WRITE_ERRORS = (OSError, ValueError)


@contextmanager
def open_display(stream: TextIO, *, as_json: bool, past: Iterable[events.Event] = ()) -> Iterator[OnEvent]:
    """Yield a function that shows events on `stream`; `past` events only set the initial state of the bars."""
    if as_json:
        for event in past:
            write_lines(stream, [json_line(events.to_line(event))])
        yield lambda event: write_lines(stream, [json_line(events.to_line(stamped(event)))])
        return
    story = RunProgress()
    for event in past:
        story.update(event)
    console = Console(file=cast(TextIO, _Terminal(stream)), highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        plain = PlainDisplay(stream, story)
        yield lambda event: plain.show(stamped(event))
        return
    display = LiveDisplay(console, story)
    with Live(console=console, get_renderable=display.image, refresh_per_second=4):
        yield lambda event: display.show(stamped(event))


class _Terminal:
    """Terminal stream whose window may be closed while the run continues; output after that is discarded.

    The bars are drawn one last time at the end of a run. Without this class, an OSError from drawing them would make a
    healthy run fail.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            discard(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            discard(self._stream)


class LiveDisplay:
    """Terminal display with live bars and figures at the bottom and permanent messages above them."""

    def __init__(self, console: Console, story: RunProgress) -> None:
        self._console = console
        self._story = story
        self._lock = threading.Lock()  # rich draws from its own thread

    def image(self) -> Group:
        """Return the bars and figures to draw now."""
        with self._lock:
            return image(self._story, time.time())

    def show(self, event: events.Event) -> None:
        """Update the bars from an event and print its sentence, if it has one."""
        with self._lock:
            self._story.update(event)
        if sentence := words.sentence(event):
            self._console.print(Text("\n".join(printable_lines(sentence))))


class PlainDisplay:
    """Display in plain lines: messages, the first start and end of each phase, and progress every ten seconds."""

    def __init__(self, stream: TextIO, story: RunProgress) -> None:
        self._stream = stream
        self._story = story
        self._last = 0.0
        self._begun: set[events.Phase] = set()
        self._ended: set[events.Phase] = set()

    def show(self, event: events.Event) -> None:
        """Write a line for an event, unless it is progress that is not due yet."""
        self._story.update(event)
        line = words.sentence(event) or self._progress(event)
        if line:
            write_lines(self._stream, printable_lines(line))

    def _progress(self, event: events.Event) -> str | None:
        match event:
            case events.PhaseStarted() if event.phase not in (*_PASSING, *self._begun):
                self._begun.add(event.phase)
                self._last = event.time
                return f"{words.PHASES[event.phase]}{words.whole(event.phase, event.total)}"
            case events.PhaseProgress() if self._due(event):
                return self._bar_in_words(event.phase, event.time)
            case events.StepEvent() if self._due(event) or event.step == self._story.phases["train"].total:
                return f"{self._bar_in_words('train', event.time)} · {words.figures(self._story)}"
            case events.PhaseFinished() if event.phase not in (*_PASSING, "train", *self._ended):
                self._ended.add(event.phase)
                return f"{words.PHASES[event.phase]}: done in {words.duration(event.seconds)}"
            case _:
                return None

    def _due(self, event: events.Event) -> bool:
        due = event.time - self._last >= _PLAIN_SECONDS
        if due:
            self._last = event.time
        return due

    def _bar_in_words(self, phase: events.Phase, now: float) -> str:
        state = self._story.phases[phase]
        left = self._story.seconds_left(phase, now)
        rest = f", {words.duration(left)} left" if left is not None else ""
        return f"{words.PHASES[phase]} {words.progress(phase, state.done, state.total)}{rest}"


def image(story: RunProgress, now: float) -> Group:
    """Return the live part of the display: a row with bar, count and time for each phase, then the figures."""
    rows = Table.grid(padding=(0, 1))
    for phase, state in story.phases.items():
        running = story.current == phase
        if phase in _PASSING and not running:
            continue
        left = story.seconds_left(phase, now) if running else None
        timing = f"{words.duration(left)} left" if left is not None else words.duration(state.elapsed(now))
        bar = ProgressBar(state.total, state.done, width=_BAR_WIDTH, pulse=state.total is None and running)
        rows.add_row(words.PHASES[phase], bar, words.progress(phase, state.done, state.total), timing)
    return Group(rows, Text(printable(words.figures(story))))


def stamped(event: events.Event) -> events.Event:
    """Return the event, with the current time if it has none, as is the case before the run folder exists."""
    return event if event.time else dataclasses.replace(event, time=time.time())


class RunLog:
    """A run's log in the format of the plain display; events are buffered until the run's folder exists.

    Runs that the queue starts do not need it, because all their output is redirected to the log. If the disk fails, the
    run continues without a log.
    """

    def __init__(self) -> None:
        self._early: list[events.Event] | None = []
        self._stream: TextIO | None = None
        self._display: PlainDisplay | None = None

    def open(self, run: Path) -> None:
        """Open the log in the folder `run` and write the buffered events to it."""
        with contextlib.suppress(*_WRITE_ERRORS):
            console = long_path(RunDirectory(run).console)
            # A notice may contain a file name that is not valid Unicode; write it as a terminal would show it.
            self._stream = console.open("a", encoding="utf-8", errors="replace", newline="\n")
            self._display = PlainDisplay(self._stream, RunProgress())
        early, self._early = self._early or [], None
        for event in early:
            self.show(event)

    def show(self, event: events.Event) -> None:
        """Write an event to the log, or buffer it until the log is open."""
        if self._early is not None:
            self._early.append(stamped(event))
        elif self._display:
            try:
                self._display.show(stamped(event))
            except _WRITE_ERRORS:
                self._display = None  # the disk is full: stop logging instead of writing partial lines

    def close(self) -> None:
        """Close the log."""
        if self._stream is not None:
            with contextlib.suppress(*_WRITE_ERRORS):  # closing flushes, which fails on a full disk
                self._stream.close()
