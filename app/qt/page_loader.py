"""What a page is, and how pages are made after the window has opened, a part in each turn of its thread.

The pages that are made after the window has opened, and what to load before each, so that no piece of it is long.

Most of their modules are none of Qt's; a worker loads those. The rest makes classes of Qt's: that is for the window's
thread, a part in each turn. Who goes to a page earlier sees its title at once, and it is made before the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from PySide6.QtCore import QObject, QTimer, Signal
from PySide6.QtWidgets import QLabel, QPushButton, QStackedWidget, QWidget

from app.core.query import tokens
from app.core.session import Session
from app.core.tasks import raise_again
from app.qt.actions.commands import Commands
from app.qt.widgets import centre, while_there
from trainer.errors import ImpastoError

BESIDE = (
    "app.core.disk.scanner",
    "app.core.disk.images",
    "app.core.disk.reading",
    "app.core.health.judging",
    "app.core.health.findings",
    "trainer.dataset.decoders",
    "app.core.jobs.essentials",
    "app.core.planning.answer",
    "app.core.after.export",
    "app.core.runs.run",
    "app.core.runs.series",
    "app.core.after.run_jobs",
    "app.core.runs.runs",
    "app.core.presets.presets",
)
"""What is none of Qt's: numpy and Pillow, for which the first thumbnails would wait half a second, what judges
pictures, then what the pages need; it brings the rest with it, pydantic's models of a job above all."""


class UndoneStep(Protocol):
    """Something that was taken back or done again."""

    @property
    def name(self) -> str:
        """What it was, in words."""


class Undoing(Protocol):
    """What Ctrl+Z takes back while a page is shown."""

    @property
    def undo_name(self) -> str | None:
        """What would be taken back, in words; None where there is nothing."""

    @property
    def redo_name(self) -> str | None:
        """What would be done again."""

    def undo(self) -> UndoneStep | None:
        """Take it back; return what was taken back."""

    def redo(self) -> UndoneStep | None:
        """Do it again; return what was done."""


class NoUndo:
    """That of a page on which nothing can be taken back, not even what was done on another."""

    undo_name = redo_name = None

    def undo(self) -> None:
        """Do nothing."""

    def redo(self) -> None:
        """Do nothing."""


class Page(QWidget):
    """A page tells the window what to say; it adds its actions to the commands when it is made.

    The window makes a page when it is shown for the first time, or when nothing else is to be done after the start.
    """

    said = Signal(str)
    """For the status line, some seconds."""
    told = Signal(str, str, object)
    """For a notice: sentence, kind ("info", "warning", "error"), and (title, function) of its button or None."""
    failed = Signal(object)
    """An ImpastoError, for a notice."""
    mended = Signal(object)
    """An ImpastoError that was told by `failed`, or a sentence told by `told`, that is over."""
    undoable = Signal()
    """What `undoing` names is another now."""

    undoing: Undoing | None = None
    """The page's own undo; None: that of the captions."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.commands = commands

    def build(self) -> Iterator[None]:
        """Make its parts, one in each turn of the window's thread; it is shown when there is no more. Called once."""
        yield from ()

    def open(self, path: Path) -> None:
        """Show this thing of the page's kind; pages that have none pass over it."""

    def begin(self, name: str) -> None:
        """Begin something new with what another page names; pages where nothing begins pass over it."""


@dataclass(frozen=True, slots=True)
class PageSpec:
    """A page's module and class, and the modules of its larger parts."""

    module: str
    page: str
    parts: tuple[str, ...] = ()

    def load(self) -> Iterator[None]:
        """Load one thing at a time."""
        for module in (*self.parts, self.module):
            importlib.import_module(module)
            yield


TRAIN = PageSpec("app.qt.train.page", "TrainPage", ("app.qt.train.forecast.panel", "app.qt.train.essentials"))
RUNS = PageSpec(
    "app.qt.runs.page",
    "RunsPage",
    (
        "app.qt.runs.after.export",
        "app.qt.runs.after.grid_dialog",
        "app.qt.runs.after.panel",
        "app.qt.runs.queue_panel",
        "app.qt.runs.log",
        "app.qt.runs.samples.matrix",
        "app.qt.runs.charts.board",
        "app.qt.runs.header",
    ),
)
PRESETS = PageSpec("app.qt.presets.page", "PresetsPage", ("app.qt.presets.cards", "app.qt.presets.dialogs"))


def load_beside() -> None:
    """Load what is none of Qt's; on a worker."""
    from trainer.dataset.pixels import load_formats

    for module in BESIDE:
        importlib.import_module(module)
    load_formats()


def load_vocabulary() -> None:
    """Load CLIP's; on a worker. Its library holds Python's lock for 40 ms, which nobody feels before a dataset is open.

    No page needs it: where it is missing, the counting of tokens says so when somebody asks for that.
    """
    with suppress(ImpastoError):
        tokens.load()


Use = Callable[[Page], None]
"""What is to be done with a page as soon as it is there."""


class PagePlaceholder(QWidget):
    """Stands where a page will be: its title, and what to do where it could not be made."""

    again = Signal()

    undoing: Undoing = NoUndo()
    """What was edited on other pages is out of sight here."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title, self.words = QLabel(title), QLabel()
        self.button = QPushButton(self.tr("Try again"))
        self.button.clicked.connect(lambda: self.again.emit())
        self._build()
        self.wait()

    def wait(self) -> None:
        """Say that the page is on its way."""
        self.words.setText(self.tr("Opening…"))
        self.button.hide()

    def give_up(self) -> None:
        """Say that the page could not be made, and what to do."""
        sentence = self.tr("This page could not be opened. Everything else goes on, and nothing is lost.")
        remedy = self.tr("Try again. If that does not help, close Impasto and start it again.")
        self.words.setText(f"{sentence}\n{remedy}")
        self.button.show()

    def _build(self) -> None:
        self.title.setProperty("role", "title")
        self.words.setProperty("role", "muted")
        centre(self, self.title, self.words, self.button)


class PageLoader(QObject):
    """Makes pages and puts each in its place among those of a stack, the ones that are asked for before all others."""

    made = Signal(int, QWidget)
    """The page with this number is whole; it comes into its place when all who hear of it are done."""

    def __init__(
        self, session: Session, commands: Commands, stack: QStackedWidget, later: Mapping[int, PageSpec]
    ) -> None:
        super().__init__(stack)
        self._session, self._commands, self._stack, self._rooms = session, commands, stack, later
        self._making: dict[int, Iterator[None]] = {}
        """Of pages that are not in their places, what is still to be done."""
        self._half: dict[int, Page] = {}
        self._order: list[int] = []
        """Those that are to be made, the next one first."""
        self._asked: set[int] = set()
        """Those that were asked for, some of which could not be made."""
        self._uses: dict[int, list[Use]] = {number: [] for number in later}
        self._loaded: bool | None = None
        """Whether what is none of Qt's is there; None before that was asked for."""
        self._spoken = False
        """Whether the vocabulary was asked for."""
        self._turns = QTimer(self, interval=0)
        self._turns.timeout.connect(self._turn)

    def place(self, number: int, title: str) -> PagePlaceholder:
        """Return what stands in the stack until a page is made."""
        place = PagePlaceholder(title)
        place.again.connect(lambda: self.ask(number))
        return place

    def make_all(self) -> None:
        """Make what nobody has asked for yet, while the user looks at something else."""
        known = self._asked.union(self._order)
        self._order += [number for number in self._rooms if number not in known and self._page(number) is None]
        self._begin()

    def ask(self, number: int, use: Use | None = None) -> None:
        """Make a page before all others, and `use` it when it is there: at once where it is."""
        page = self._page(number)
        if page is None:
            self._place(number).wait()
            self._asked.add(number)
            self._uses[number] += [use] if use else []
            self._order = [number, *(other for other in self._order if other != number)]
            self._begin()
        elif use:
            use(page)

    def _page(self, number: int) -> Page | None:
        page = self._stack.widget(number)
        return page if isinstance(page, Page) else None

    def _begin(self) -> None:
        """Load on a worker what is none of Qt's, then take turns: on this thread it would be one long turn."""
        if self._loaded is None:
            self._loaded = False
            have, lack = while_there(self, lambda _: self._go_on()), while_there(self, self._go_on_without)
            self._session.tasks.run(load_beside, have, lack)
        elif self._loaded and self._order:
            self._turns.start()

    def _go_on(self) -> None:
        self._loaded = True
        self._begin()

    def _go_on_without(self, fault: BaseException) -> None:
        """Let pages that need what cannot be loaded fail by themselves, and the others be made."""
        self._go_on()
        raise fault

    def _turn(self) -> None:
        """Make the next part of the page whose turn it is. A fault ends that page alone, and is raised to be told."""
        number = self._order[0]
        if number not in self._making:
            self._making[number] = self._parts(number)
        try:
            whole = next(self._making[number], self) is self
        except Exception:
            self._give_up(number)
            raise
        if whole:
            self._hand_over(number)

    def _parts(self, number: int) -> Iterator[None]:
        room = self._rooms[number]
        yield from room.load()
        page: Page = getattr(importlib.import_module(room.module), room.page)(self._session, self._commands)
        self._half[number] = page
        page.setParent(self._stack)  # ends with it, and does not change hands when it is whole: that takes 15 ms
        page.hide()  # or it would come in sight with a window that is hidden now
        yield from page.build()
        yield
        self.made.emit(number, page)

    def _hand_over(self, number: int) -> None:
        self._leave(number)
        self._replace(number, self._half.pop(number))
        self._load_vocabulary()
        uses, self._uses[number] = self._uses[number], []
        with ExitStack() as stack:  # which goes on after a fault, and begins with what was put in last
            for use in reversed(uses):
                stack.callback(self.ask, number, use)

    def _replace(self, number: int, page: Page) -> None:
        place, stack = self._place(number), self._stack
        shown = place is stack.currentWidget()
        stack.insertWidget(number, page)
        if shown:
            stack.setCurrentWidget(page)
        stack.removeWidget(place)
        place.deleteLater()

    def _give_up(self, number: int) -> None:
        """Let go what there is of a page, so that it can be made from its beginning once more."""
        self._leave(number)
        half = self._half.pop(number, None)
        if half:
            half.deleteLater()
        self._place(number).give_up()
        self._load_vocabulary()

    def _leave(self, number: int) -> None:
        del self._making[number]
        self._order.remove(number)
        if not self._order:
            self._turns.stop()

    def _load_vocabulary(self) -> None:
        """Load on a worker what no page needs, once and when none is to be made: it would hold them up."""
        if not self._order and not self._spoken:
            self._spoken = True
            self._session.tasks.run(load_vocabulary, lambda _: None, raise_again)

    def _place(self, number: int) -> PagePlaceholder:
        place = self._stack.widget(number)
        assert isinstance(place, PagePlaceholder)
        return place
