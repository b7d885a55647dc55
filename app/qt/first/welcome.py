"""The welcome: what this PC has, which models are there already, and the way into the tour."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QIcon
from PySide6.QtWidgets import QDialog, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.core.session import Session
from app.qt.first.machine import MachinePanel
from app.qt.first.tools import ToolsPanel
from app.qt.theme.icons import FOLDER


class Welcome(QDialog):
    """Stands beside the work, never before it."""

    tour = Signal()
    pictures = Signal()
    """The user wants to open a folder."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(self.tr("Welcome to Impasto"))
        self.resize(660, 560)
        self.machine, self.tools = MachinePanel(session.tasks), ToolsPanel(session.models)
        self.first = QPushButton(self.tr("Take the tour"))
        self.finished.connect(lambda: self.machine.close_down())
        self.destroyed.connect(lambda _=None, machine=self.machine: machine.close_down())
        self._build()
        self.first.setFocus()

    def _build(self) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 22, 24, 18)
        column.setSpacing(10)
        column.addLayout(self._head())
        column.addSpacing(8)
        column.addWidget(_label(self.tr("Your PC"), "heading"))
        column.addWidget(self.machine)
        column.addSpacing(10)
        column.addWidget(_label(self.tr("Your models"), "heading"))
        column.addWidget(_label(self.tr("They are used where they lie: nothing is copied or moved."), "muted"))
        column.addWidget(self.tools, 1)
        column.addSpacing(6)
        column.addLayout(self._buttons())

    def _head(self) -> QHBoxLayout:
        sign = QLabel()
        sign.setPixmap(QIcon(str(FOLDER / "impasto.svg")).pixmap(44, 44))
        words = QVBoxLayout()
        words.setSpacing(2)
        words.addWidget(_label(self.tr("Welcome to Impasto"), "title"))
        words.addWidget(_label(self.tr("Your pictures become a LoRA for SD 1.5 or SDXL, on your own PC."), "muted"))
        row = QHBoxLayout()
        row.setSpacing(14)
        row.addWidget(sign, 0, Qt.AlignmentFlag.AlignTop)
        row.addLayout(words, 1)
        return row

    def _buttons(self) -> QHBoxLayout:
        self.first.setToolTip(self.tr("A few minutes: a small LoRA is really trained, on any PC"))
        self.first.setDefault(True)
        pictures = QPushButton(self.tr("Open pictures…"))
        close = QPushButton(self.tr("Close"))
        for button in (pictures, close):
            button.setAutoDefault(False)
        for button, way in ((self.first, self.tour), (pictures, self.pictures)):
            button.clicked.connect(lambda _=False, way=way: (self.close(), way.emit()))
        close.clicked.connect(lambda: self.close())
        row = QHBoxLayout()
        row.addWidget(close)
        row.addStretch()
        row.addWidget(pictures)
        row.addWidget(self.first)
        return row


def _label(text: str, role: str) -> QLabel:
    label = QLabel(text)
    label.setProperty("role", role)
    label.setWordWrap(True)
    return label
