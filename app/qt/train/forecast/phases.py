"""The phases of a run in their order: the number that the timeline shows, the time, the memory."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QGridLayout, QLabel, QSizePolicy, QWidget

from app.core.planning.answer import Plan
from app.qt.theme import colours
from app.qt.train.forecast import words
from app.qt.train.forecast.clearing import clear


class ShareBar(QWidget):
    """A thin bar that is filled by a share."""

    def __init__(self, share: float, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._share = share
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def sizeHint(self) -> QSize:  # noqa: N802
        """As high as a small letter."""
        return QSize(60, 10)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint ground and share."""
        now, painter = colours(), QPainter(self)
        painter.fillRect(self.rect(), QColor(now.base))
        painter.fillRect(QRectF(0, 0, max(self.width() * self._share, 2), self.height()), QColor(now.series3))


class PhaseTable(QWidget):
    """A row a phase."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(10)
        self._grid.setVerticalSpacing(3)
        self._grid.setColumnStretch(2, 1)

    def show_plan(self, plan: Plan) -> None:
        """Show a plan's phases."""
        clear(self._grid)
        whole, on_cpu = plan.forecast.seconds or 1.0, plan.forecast.on_cpu
        for row, phase in enumerate(plan.forecast.phases):
            decides = not on_cpu and phase is plan.decisive
            number, name = QLabel(str(row + 1)), QLabel(words.phase_name(phase.phase))
            number.setProperty("role", "muted")
            name.setProperty("role", "heading" if decides else "")
            time = QLabel(words.duration(phase.seconds) if phase.seconds >= 0.5 else self.tr("moments"))
            memory = QLabel(words.gigabytes(phase.host if on_cpu else plan.taken(phase.reserved)))
            if decides:
                memory.setProperty("role", "heading")
                memory.setToolTip(self.tr("This phase decides whether it fits."))
            for column, part in enumerate((number, name, ShareBar(phase.seconds / whole), time, memory)):
                side = Qt.AlignmentFlag.AlignRight if column in (0, 3, 4) else Qt.AlignmentFlag(0)
                self._grid.addWidget(part, row, column, side | Qt.AlignmentFlag.AlignVCenter)
