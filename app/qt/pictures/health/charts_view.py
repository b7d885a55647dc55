"""One chart at a time, chosen from a list."""

from __future__ import annotations

from collections.abc import Set

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QScrollArea, QStackedWidget, QVBoxLayout, QWidget

from app.core.health import charts
from app.core.health.health import Health
from app.qt.inputs import ComboBox
from app.qt.pictures.health.charts import Chart, Columns, Rows, SizeMap


class ChartsView(QWidget):
    """Buckets, sizes, caption lengths and tags; `chosen` with the pictures of the bar that is clicked."""

    chosen = Signal(object)

    def __init__(self, health: Health, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._health = health
        self.choice = ComboBox()
        self.buckets = Rows(self.tr("Shapes as training sees them"))
        self.sizes = SizeMap(self.tr("Widths and heights"))
        self.lengths = Columns(self.tr("Lengths of captions in tokens"))
        self.tags = Rows(self.tr("Most frequent tags"))
        self.note = QLabel()
        self.stack = QStackedWidget()
        self._build()

    def renew(self) -> None:
        """Show what is so now; only the chart that is seen costs anything."""
        if not self.isVisible():
            return
        health, chart = self._health, self.choice.currentIndex()
        if chart == 0:
            bars = charts.buckets(health)
            self.buckets.show_bars(bars)
            self.note.setText(self.tr("%n shape(s) at {side} pixels", "", len(bars)).format(side=health.aim.resolution))
        elif chart == 1:
            self.sizes.show_cells(charts.sizes(health), health.aim.resolution)
            self.note.setText(
                self.tr("Below the line: fewer pixels than {side} × {side}").format(side=health.aim.resolution)
            )
        elif chart == 2:
            self.lengths.show_bars(charts.caption_lengths(health), health.aim.tokens)
            self.note.setText(self.tr("Tokens; what lies beyond {read} is not read").format(read=health.aim.tokens))
        else:
            self.tags.show_bars(charts.frequent_tags(health))
            self.note.setText(self.tr("The most frequent tags"))

    def showEvent(self, event: object) -> None:  # noqa: N802
        """Catch up with what changed meanwhile."""
        super().showEvent(event)  # type: ignore[arg-type]
        self.renew()

    def _build(self) -> None:
        self.choice.addItems([self.tr("Shapes"), self.tr("Sizes"), self.tr("Captions"), self.tr("Tags")])
        self.choice.setAccessibleName(self.tr("Chart"))
        self.choice.currentIndexChanged.connect(self._choose)
        self.note.setProperty("role", "muted")
        self.note.setWordWrap(True)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.setContentsMargins(10, 4, 10, 2)
        row.addWidget(self.choice)
        row.addWidget(self.note, 1)
        charts_shown: tuple[Chart, ...] = (self.buckets, self.sizes, self.lengths, self.tags)
        for chart in charts_shown:
            chart.chosen.connect(self._chosen)
            self.stack.addWidget(_scrolled(chart) if isinstance(chart, Rows) else chart)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addLayout(row)
        column.addWidget(self.stack, 1)

    def _choose(self, chart: int) -> None:
        self.stack.setCurrentIndex(chart)
        self.renew()

    def _chosen(self, ids: Set[int]) -> None:
        self.chosen.emit(ids)


def _scrolled(chart: Chart) -> QScrollArea:
    area = QScrollArea()
    area.setWidget(chart)
    area.setWidgetResizable(True)
    area.setFrameShape(QFrame.Shape.NoFrame)
    area.setFocusProxy(chart)
    return area
