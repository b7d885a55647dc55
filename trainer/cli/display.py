"""Shows a run's events: bars and figures on a terminal, plain lines elsewhere, or the events as JSON lines."""

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
from trainer.protocol.progress import Story
from trainer.protocol.run_directory import RunDirectory
from trainer.protocol.text import printable, printable_lines

OnEvent = Callable[[events.Event], None]

# Plain lines go to files and to other programs: one every ten seconds tells enough.
_PLAIN_SECONDS = 10.0
_BAR_WIDTH = 30
# These come again and again while training; a bar is shown only as long as one is under way.
_PASSING: tuple[events.Phase, ...] = ("preview", "validate", "save")
_REFUSALS = (OSError, ValueError)  # of a disk, and of a text: no line of a log is worth a run


@contextmanager
def open_display(stream: TextIO, *, as_json: bool, past: Iterable[events.Event] = ()) -> Iterator[OnEvent]:
    """Give the function that shows events on `stream` while the block lasts; `past` ones only set the scene."""
    if as_json:
        for event in past:
            write_lines(stream, [json_line(events.to_line(event))])
        yield lambda event: write_lines(stream, [json_line(events.to_line(stamped(event)))])
        return
    story = Story()
    for event in past:
        story.tell(event)
    console = Console(file=cast(TextIO, _Terminal(stream)), highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        plain = PlainDisplay(stream, story)
        yield lambda event: plain.show(stamped(event))
        return
    display = LiveDisplay(console, story)
    with Live(console=console, get_renderable=display.picture, refresh_per_second=4):
        yield lambda event: display.show(stamped(event))


class _Terminal:
    """A terminal that may be closed under us with its window: from then on what is drawn goes nowhere.

    Bars are drawn by a thread, and once more at the end, where an error would make a fault of a run that is well.
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
    """Keeps bars and figures at the bottom of a terminal, and writes what is worth keeping above them."""

    def __init__(self, console: Console, story: Story) -> None:
        self._console = console
        self._story = story
        self._lock = threading.Lock()  # rich draws from a thread of its own

    def picture(self) -> Group:
        """Return what the terminal shows now."""
        with self._lock:
            return picture(self._story, time.time())

    def show(self, event: events.Event) -> None:
        """Take in one event."""
        with self._lock:
            self._story.tell(event)
        if told := words.sentence(event):
            self._console.print(Text("\n".join(printable_lines(told))))


class PlainDisplay:
    """Writes lines: a phase's first beginning and end, its progress now and then, and whatever else an event says."""

    def __init__(self, stream: TextIO, story: Story) -> None:
        self._stream = stream
        self._story = story
        self._last = 0.0
        self._begun: set[events.Phase] = set()
        self._ended: set[events.Phase] = set()

    def show(self, event: events.Event) -> None:
        """Take in one event."""
        self._story.tell(event)
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


def picture(story: Story, now: float) -> Group:
    """Return what a terminal shows of a story: a row with bar, count and time for each phase, and the figures."""
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
    """Return the event with a time: those from before there is a run have passed no writer that gives them one."""
    return event if event.time else dataclasses.replace(event, time=time.time())


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
