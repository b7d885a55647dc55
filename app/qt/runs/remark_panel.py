"""Sentences about a run, the most telling first, each with its sign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QGridLayout, QLabel, QScrollArea, QSizePolicy, QWidget

from app.core.runs.run import Kind
from app.qt.theme import icon

_SIGNS: dict[Kind, tuple[str, str]] = {
    "info": ("info", "muted"),
    "warning": ("warning", "warning"),
    "error": ("error", "bad"),
}
_MOST = 40
_SIGN = 16
_HIGHEST = 168
_BORDER = 1


class Told(NamedTuple):
    """One of them."""

    kind: Kind
    sentence: str
    when: str = ""


class RemarkPanel(QScrollArea):
    """As high as its sentences need, up to a third of a small window; not there where there are none."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.told: list[Told] = []
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(self.tr("Remarks"))
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Maximum)
        self.hide()

    def show_told(self, told: Sequence[Told]) -> None:
        """Show these, the first on top."""
        if list(told) == self.told:
            return
        self.told = list(told)
        page = QWidget()
        grid = QGridLayout(page)
        grid.setContentsMargins(12, 8, 12, 8)
        grid.setHorizontalSpacing(8)
        grid.setVerticalSpacing(4)
        grid.setColumnStretch(1, 1)
        for row, one in enumerate(self.told[:_MOST]):
            grid.addWidget(_Sign(one.kind), row, 0, Qt.AlignmentFlag.AlignTop)
            grid.addWidget(_words(one.sentence, "text"), row, 1, Qt.AlignmentFlag.AlignTop)
            grid.addWidget(_words(one.when, "muted"), row, 2, Qt.AlignmentFlag.AlignTop)
        grid.setRowStretch(grid.rowCount(), 1)
        self.setWidget(page)
        self.setVisible(bool(told))
        self.updateGeometry()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Ask for another height: sentences break elsewhere."""
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self.updateGeometry()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the room that all sentences need, or as much as they may have."""
        page = self.widget()
        layout = page.layout() if page else None
        if layout is None:
            return QSize(0, 0)
        width = max(200, self.viewport().width())
        return QSize(width, min(_HIGHEST, layout.totalHeightForWidth(width) + 2 * _BORDER))

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return room for a line: a scroll area asks for more by itself."""
        return QSize(100, min(self.sizeHint().height(), 2 * self.fontMetrics().height()))


class _Sign(QWidget):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._name, self._role = _SIGNS[kind]
        self.setFixedSize(_SIGN, max(_SIGN, self.fontMetrics().height()))

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the sign in the colours of now."""
        painter = QPainter(self)
        icon(self._name, self._role).paint(painter, self.rect())
        painter.end()


def _words(text: str, role: str) -> QLabel:
    label = QLabel(text)
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setProperty("role", role)
    label.setWordWrap(role == "text")
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label
