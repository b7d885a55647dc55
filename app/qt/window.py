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
from app.qt.pictures.page import PicturesPage


class Window(QMainWindow):
    """What the user sees of one session."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.setWindowTitle("Impasto")
        self.resize(1280, 800)
        self.pictures = PicturesPage(session)
        self.pages = QStackedWidget()
        self._rail = QVBoxLayout()
        self._buttons = QButtonGroup(self)
        self._build()

    def open(self, paths: Iterable[str | Path]) -> None:
        """Open folders as datasets, and the folders of single files."""

    def show_page(self, index: int) -> None:
        """Go to a page by its place on the rail."""
        self.pages.setCurrentIndex(index)
        self._buttons.button(index).setChecked(True)

    def _build(self) -> None:
        self._add_page(self.tr("Pictures"), self.pictures)
        self._add_page(self.tr("Train"), self._coming(self.tr("Here you will set up a training and start it.")))
        self._add_page(self.tr("Runs"), self._coming(self.tr("Here you will watch runs and compare what they learn.")))
        self._add_page(self.tr("Presets"), self._coming(self.tr("Here you will keep and exchange presets.")))
        self._rail.addStretch()
        middle = QWidget()
        row = QHBoxLayout(middle)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        row.addLayout(self._rail)
        row.addWidget(self.pages, 1)
        self.setCentralWidget(middle)
        self.statusBar()
        self.show_page(0)

    def _add_page(self, title: str, page: QWidget) -> None:
        button = QToolButton()
        button.setText(title)
        button.setCheckable(True)
        button.setAutoRaise(True)
        index = self.pages.addWidget(page)
        button.clicked.connect(lambda: self.show_page(index))
        self._buttons.addButton(button, index)
        self._rail.addWidget(button)

    def _coming(self, sentence: str) -> QWidget:
        label = QLabel(sentence)
        label.setAlignment(Qt.AlignmentFlag.AlignCenter)
        return label
