"""The window: a rail of pages on the left, the page beside it, one line of status below."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QButtonGroup,
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
from app.qt.words import QT_TRANSLATE_NOOP

ACTIONS = (
    Action("window.quit", QT_TRANSLATE_NOOP("Action", "Quit"), "file", "close", keys=("Ctrl+Q",)),
    Action("window.pictures", QT_TRANSLATE_NOOP("Action", "Pictures"), "view", "show_pictures", keys=("Ctrl+1",)),
    Action("window.train", QT_TRANSLATE_NOOP("Action", "Train"), "view", "show_train", keys=("Ctrl+2",)),
    Action("window.runs", QT_TRANSLATE_NOOP("Action", "Runs"), "view", "show_runs", keys=("Ctrl+3",)),
    Action("window.presets", QT_TRANSLATE_NOOP("Action", "Presets"), "view", "show_presets", keys=("Ctrl+4",)),
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
        self._rail = QVBoxLayout()
        self._buttons = QButtonGroup(self)
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
        self._buttons.button(index).setChecked(True)
        self.commands.refresh()

    def _build(self) -> None:
        self._add_page("window.pictures", self.pictures)
        self._add_page("window.train", _coming(self.tr("Here you will set up a training and start it.")))
        self._add_page("window.runs", _coming(self.tr("Here you will watch runs and compare what they learn.")))
        self._add_page("window.presets", _coming(self.tr("Here you will keep and exchange presets.")))
        self._rail.addStretch()
        middle = QWidget()
        row = QHBoxLayout(middle)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        row.addLayout(self._rail)
        row.addWidget(self.pages, 1)
        self.setCentralWidget(middle)
        self.statusBar()
        self._show(0)

    def _add_page(self, command: str, page: QWidget) -> None:
        button = QToolButton()
        button.setText(self.commands[command].text())
        button.setCheckable(True)
        button.setAutoRaise(True)
        button.clicked.connect(self.commands[command].trigger)
        self._buttons.addButton(button, self.pages.addWidget(page))
        self._rail.addWidget(button)


def _coming(sentence: str) -> QWidget:
    label = QLabel(sentence)
    label.setAlignment(Qt.AlignmentFlag.AlignCenter)
    return label
