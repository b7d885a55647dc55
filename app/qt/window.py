"""The window: a rail of pages on the left, the page beside it, one line of status below."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import (
    QButtonGroup,
    QFrame,
    QHBoxLayout,
    QLabel,
    QMainWindow,
    QStackedWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.actions.table import Action
from app.qt.pictures.page import PicturesPage
from app.qt.theme import set_icon
from app.qt.words import QT_TRANSLATE_NOOP

ACTIONS = (
    Action("window.quit", QT_TRANSLATE_NOOP("Action", "Quit"), "file", "close", keys=("Ctrl+Q",)),
    Action(
        "window.pictures",
        QT_TRANSLATE_NOOP("Action", "Pictures"),
        "view",
        "show_pictures",
        keys=("Ctrl+1",),
        icon="pictures",
    ),
    Action("window.train", QT_TRANSLATE_NOOP("Action", "Train"), "view", "show_train", keys=("Ctrl+2",), icon="train"),
    Action("window.runs", QT_TRANSLATE_NOOP("Action", "Runs"), "view", "show_runs", keys=("Ctrl+3",), icon="runs"),
    Action(
        "window.presets",
        QT_TRANSLATE_NOOP("Action", "Presets"),
        "view",
        "show_presets",
        keys=("Ctrl+4",),
        icon="presets",
    ),
)


class Window(QMainWindow):
    """What the user sees of one session."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.commands = Commands(self)
        self.setWindowTitle("Impasto")
        self.resize(1280, 800)
        self.pictures = PicturesPage(session, self.commands)
        self.pages = QStackedWidget()
        self._rail = _Rail()
        self.commands.add(ACTIONS, self)
        self._build()
        self.commands.fill(self.menuBar())
        for event in (session.view.shown, session.view.selection):
            event.connect(lambda _: self.commands.refresh())

    def open(self, paths: Iterable[str | Path]) -> None:
        """Open folders as datasets, and the folders of single files."""

    def show_pictures(self) -> None:
        """Go to the pictures."""
        self._show(0)

    def show_train(self) -> None:
        """Go to where trainings are set up."""
        self._show(1)

    def show_runs(self) -> None:
        """Go to the runs."""
        self._show(2)

    def show_presets(self) -> None:
        """Go to the presets."""
        self._show(3)

    def _show(self, index: int) -> None:
        self.pages.setCurrentIndex(index)
        self._rail.mark(index)
        self.commands.refresh()

    def _build(self) -> None:
        self._add_page("window.pictures", self.pictures)
        words = self.tr("Here you will choose a base and a preset, see what fits your graphics card, and start.")
        self._add_page("window.train", _Coming(self.tr("Train"), words))
        words = self.tr("Here you will watch runs, compare what they learn, and go on with those that stopped.")
        self._add_page("window.runs", _Coming(self.tr("Runs"), words))
        words = self.tr("Here you will keep your presets and exchange them with others.")
        self._add_page("window.presets", _Coming(self.tr("Presets"), words))
        middle = QWidget()
        row = QHBoxLayout(middle)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        row.addWidget(self._rail)
        row.addWidget(self.pages, 1)
        self.setCentralWidget(middle)
        self.statusBar().setSizeGripEnabled(False)
        self._show(0)

    def _add_page(self, command: str, page: QWidget) -> None:
        self.pages.addWidget(page)
        self._rail.add(self.commands[command].text(), command.partition(".")[2], self.commands[command].trigger)


class _Rail(QFrame):
    """One button a page, from top to bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.setObjectName("rail")
        self.buttons = QButtonGroup(self)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(6, 8, 6, 8)
        self._column.setSpacing(4)
        self._column.addStretch()

    def add(self, title: str, icon: str, go: object) -> None:
        """Put one more page's button below the others."""
        button = QToolButton()
        button.setText(title)
        button.setCheckable(True)
        button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextUnderIcon)
        button.setIconSize(QSize(24, 24))
        button.setFixedWidth(72)
        button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        set_icon(button, icon)
        button.clicked.connect(go)
        self.buttons.addButton(button, len(self.buttons.buttons()))
        self._column.insertWidget(self._column.count() - 1, button)

    def mark(self, index: int) -> None:
        """Show which page is open."""
        self.buttons.button(index).setChecked(True)


class _Coming(QWidget):
    """A page of a later version: what it will be for."""

    def __init__(self, title: str, sentence: str) -> None:
        super().__init__()
        column = QVBoxLayout(self)
        column.setContentsMargins(40, 36, 40, 36)
        column.setSpacing(8)
        for text, role in ((title, "title"), (sentence, "muted"), (self.tr("Not in this version yet."), "muted")):
            label = QLabel(text)
            label.setProperty("role", role)
            label.setWordWrap(True)
            column.addWidget(label)
        column.addStretch()
