"""The base class for pages, and the loader that builds pages in small steps once the window is shown.

A worker imports most modules, namely those without Qt. Modules that define Qt classes are imported on the main thread,
one per turn of the event loop, to keep the window responsive. A page that the user opens early shows its title
immediately and is built before the others.
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
from app.core.tasks import reraise
from app.qt.actions.commands import Commands
from app.qt.widgets import center, while_alive
from trainer.errors import ImpastoError

BACKGROUND_MODULES = (
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
"""Modules without Qt that a worker imports, in this order: first those that import numpy and Pillow, or the
first thumbnails would wait half a second for that; then image health; then what the pages need, including the job's
pydantic models."""


class UndoStep(Protocol):
    """An edit that was undone or redone."""

    @property
    def name(self) -> str:
        """Name of the edit, as shown to the user."""


class UndoHistory(Protocol):
    """Undo history that Ctrl+Z uses while a page is shown."""

    @property
    def undo_name(self) -> str | None:
        """Name of the edit to undo; None if there is none."""

    @property
    def redo_name(self) -> str | None:
        """Name of the edit to redo; None if there is none."""

    def undo(self) -> UndoStep | None:
        """Undo the last edit and return it."""

    def redo(self) -> UndoStep | None:
        """Redo the last undone edit and return it."""


class NoUndo:
    """Empty undo history, for a page on which Ctrl+Z does nothing."""

    undo_name = redo_name = None

    def undo(self) -> None:
        """Do nothing."""

    def redo(self) -> None:
        """Do nothing."""


class Page(QWidget):
    """Base class for pages: emits messages for the window and adds its actions to the commands.

    The window builds a page when the user first opens it, or when the app is idle after startup.
    """

    message_shown = Signal(str)
    """Message for the status bar, shown for a few seconds."""
    notified = Signal(str, str, object)
    """Notice to show: sentence, kind ("info", "warning", "error"), and (button title, action) or None."""
    failed = Signal(object)
    """ImpastoError to show as a notice."""
    resolved = Signal(object)
    """Error or sentence of an earlier notice that no longer applies; the window removes the notice."""
    undoable = Signal()
    """Emitted when the names in `undoing` have changed."""

    undoing: UndoHistory | None = None
    """The page's own undo history; None to use the session's edit history."""

    def __init__(self, session: Session, commands: Commands, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.commands = commands

    def build(self) -> Iterator[None]:
        """Build the page, yielding after each part; called once, before the page is shown."""
        yield from ()

    def open(self, path: Path) -> None:
        """Show an item that belongs to this page, such as a run; the default does nothing."""

    def begin(self, name: str) -> None:
        """Handle a request from another page; the default does nothing.

        The Train page creates a job from the recipe with this name; the Runs page shows the queue entry with this id.
        """


@dataclass(frozen=True, slots=True)
class PageSpec:
    """Module and class of a page, and the modules that contain its larger parts."""

    module: str
    page: str
    parts: tuple[str, ...] = ()

    def load(self) -> Iterator[None]:
        """Import the modules one at a time, yielding after each."""
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


def load_background_modules() -> None:
    """Import the modules without Qt; runs on a worker."""
    from trainer.dataset.pixels import load_formats

    for module in BACKGROUND_MODULES:
        importlib.import_module(module)
    load_formats()


def load_vocabulary() -> None:
    """Load CLIP's vocabulary; runs on a worker.

    The tokenizer library holds the GIL for 40 ms, which goes unnoticed before a dataset is open. No page needs the
    vocabulary; if it is missing, the token counter reports that when it is used.
    """
    with suppress(ImpastoError):
        tokens.load()


PageCallback = Callable[[Page], None]
"""Function to call with a page as soon as it is built."""


class PagePlaceholder(QWidget):
    """Placeholder for a page that is not built yet: shows its title, and a retry button if building failed."""

    retry_requested = Signal()

    undoing: UndoHistory = NoUndo()
    """Empty, because edits made on other pages are not visible here."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title, self.words = QLabel(title), QLabel()
        self.button = QPushButton(self.tr("Try again"))
        self.button.clicked.connect(lambda: self.retry_requested.emit())
        self._build()
        self.show_loading()

    def show_loading(self) -> None:
        """Show that the page is being opened."""
        self.words.setText(self.tr("Opening…"))
        self.button.hide()

    def show_error(self) -> None:
        """Show that the page could not be opened, and what to do."""
        sentence = self.tr("This page could not be opened. Everything else still works, and nothing is lost.")
        remedy = self.tr("Try again. If that does not help, restart Impasto.")
        self.words.setText(f"{sentence}\n{remedy}")
        self.button.show()

    def _build(self) -> None:
        self.title.setProperty("role", "title")
        self.words.setProperty("role", "muted")
        center(self, self.title, self.words, self.button)


class PageLoader(QObject):
    """Builds pages, requested ones first, and puts them into a stack."""

    made = Signal(int, QWidget)
    """The page with this number is built; it replaces its placeholder once all slots have run."""

    def __init__(
        self, session: Session, commands: Commands, stack: QStackedWidget, later: Mapping[int, PageSpec]
    ) -> None:
        super().__init__(stack)
        self._session, self._commands, self._stack, self._specs = session, commands, stack, later
        self._making: dict[int, Iterator[None]] = {}
        """Remaining build steps of unfinished pages, by page number."""
        self._half_built: dict[int, Page] = {}
        self._order: list[int] = []
        """Numbers of the pages to build, next one first."""
        self._requested: set[int] = set()
        """Numbers of the pages requested so far, including those that could not be built."""
        self._uses: dict[int, list[PageCallback]] = {number: [] for number in later}
        self._loaded: bool | None = None
        """Whether the import of the modules without Qt has ended; None before it is started."""
        self._vocabulary_requested = False
        """Whether the vocabulary is loaded or loading."""
        self._timer = QTimer(self, interval=0)
        self._timer.timeout.connect(self._on_timeout)

    def place(self, number: int, title: str) -> PagePlaceholder:
        """Return a new placeholder for a page."""
        place = PagePlaceholder(title)
        place.retry_requested.connect(lambda: self.ask(number))
        return place

    def make_all(self) -> None:
        """Build all remaining pages in the background."""
        known = self._requested.union(self._order)
        self._order += [number for number in self._specs if number not in known and self._page(number) is None]
        self._begin()

    def ask(self, number: int, use: PageCallback | None = None) -> None:
        """Build a page before all others, then call `use` with it; call it at once if the page is already built."""
        page = self._page(number)
        if page is None:
            self._place(number).show_loading()
            self._requested.add(number)
            self._uses[number] += [use] if use else []
            self._order = [number, *(other for other in self._order if other != number)]
            self._begin()
        elif use:
            use(page)

    def _page(self, number: int) -> Page | None:
        page = self._stack.widget(number)
        return page if isinstance(page, Page) else None

    def _begin(self) -> None:
        """Import the modules without Qt on a worker, to keep the window responsive; then start building pages."""
        if self._loaded is None:
            self._loaded = False
            done, failed = while_alive(self, lambda _: self._on_loaded()), while_alive(self, self._on_load_failed)
            self._session.tasks.run(load_background_modules, done, failed)
        elif self._loaded and self._order:
            self._timer.start()

    def _on_loaded(self) -> None:
        self._loaded = True
        self._begin()

    def _on_load_failed(self, fault: BaseException) -> None:
        """Build the pages anyway, since only those that need the failed module will fail; report the exception."""
        self._on_loaded()
        raise fault

    def _on_timeout(self) -> None:
        """Run the next build step; if it fails, discard only that page and raise the exception, so it is reported."""
        number = self._order[0]
        if number not in self._making:
            self._making[number] = self._parts(number)
        try:
            whole = next(self._making[number], self) is self  # `self` as the sentinel: the steps have ended
        except Exception:
            self._give_up(number)
            raise
        if whole:
            self._finish(number)

    def _parts(self, number: int) -> Iterator[None]:
        spec = self._specs[number]
        yield from spec.load()
        page: Page = getattr(importlib.import_module(spec.module), spec.page)(self._session, self._commands)
        self._half_built[number] = page
        page.setParent(self._stack)  # now rather than when the page is complete: reparenting a full page takes 15 ms
        page.hide()  # otherwise it would appear when a hidden window is shown
        yield from page.build()
        yield
        self.made.emit(number, page)

    def _finish(self, number: int) -> None:
        self._dequeue(number)
        self._replace(number, self._half_built.pop(number))
        self._load_vocabulary()
        uses, self._uses[number] = self._uses[number], []
        with ExitStack() as stack:  # runs every callback even if one raises, in reverse order
            for use in reversed(uses):
                stack.callback(self.ask, number, use)

    def _replace(self, number: int, page: Page) -> None:
        place, stack = self._place(number), self._stack
        shown = place is stack.currentWidget()
        # The page is inserted before the placeholder is removed, or the stack would briefly show a neighbor.
        stack.insertWidget(number, page)
        if shown:
            stack.setCurrentWidget(page)
        stack.removeWidget(place)
        place.deleteLater()

    def _give_up(self, number: int) -> None:
        """Discard a half-built page, so that it can be built again from scratch."""
        self._dequeue(number)
        half = self._half_built.pop(number, None)
        if half:
            half.deleteLater()
        self._place(number).show_error()
        self._load_vocabulary()

    def _dequeue(self, number: int) -> None:
        del self._making[number]
        self._order.remove(number)
        if not self._order:
            self._timer.stop()

    def _load_vocabulary(self) -> None:
        """Load the vocabulary on a worker, once, when no page is left to build; earlier, it would delay the pages."""
        if not self._order and not self._vocabulary_requested:
            self._vocabulary_requested = True
            self._session.tasks.run(load_vocabulary, lambda _: None, reraise)

    def _place(self, number: int) -> PagePlaceholder:
        place = self._stack.widget(number)
        assert isinstance(place, PagePlaceholder)
        return place
