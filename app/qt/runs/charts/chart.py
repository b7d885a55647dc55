"""One chart: a title, a legend, and lines by step that can be moved and enlarged along the steps."""

from __future__ import annotations

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QSizePolicy, QStackedWidget, QVBoxLayout

from app.core.runs.curves import at
from app.qt.runs.charts.axis import Wording, count
from app.qt.runs.charts.legend import Entry, Legend
from app.qt.runs.charts.lines import Drawing
from app.qt.runs.charts.plot import ZOOM, Plot

_NUDGE = 0.01


class Chart(QFrame):
    """Draws a `Drawing`; `words` word the values of its axis."""

    moved = Signal(float, float)
    """The user wants to see these steps: first, last."""
    reset = Signal()
    """The user wants to see all steps."""

    def __init__(self, title: str, words: Wording, along: Wording = count, *, whole: bool = True) -> None:
        super().__init__()
        self.title = title
        self._words, self._along = words, along
        self.drawing = Drawing()
        self.cursor_step: float | None = None
        """Where the cursor is; None where there is none."""
        self.plot = Plot(words, along, self._press, whole=whole)
        self.plot.setAccessibleName(title)
        self.plot.moved.connect(self.moved)
        self.plot.reset.connect(self.reset)
        self.plot.hovered.connect(lambda step: self.point_at(step if self.drawing.lines else None))
        self.legend = Legend()
        self.readout = QLabel()
        self.readout.setProperty("role", "muted")
        self.readout.setTextFormat(Qt.TextFormat.PlainText)  # runs are named in it
        self._lay_out()

    def draw(self, drawing: Drawing) -> None:
        """Draw other lines, or more of them."""
        self.drawing = drawing
        self._title.setText(drawing.title or self.title)
        self.plot.setAccessibleName(self._title.text())
        self.plot.setAccessibleDescription(drawing.words)
        self.plot.show_drawing(drawing)
        self.legend.show_entries(self._entries())

    def show_steps(self, first: float, last: float) -> None:
        """Show the steps from one to another; nobody is told of it."""
        self.plot.show_steps(first, last)

    def point_at(self, step: float | None) -> None:
        """Put the cursor at a step and say what is there; None takes it away."""
        self.cursor_step = step
        self.plot.point_at(step)
        self.readout.setText(self.said_at(step) if step is not None else "")
        self._beside.setCurrentWidget(self.readout if self.readout.text() else self.legend)

    def said_at(self, step: float) -> str:
        """Return what each line says at a step."""
        found = [(line, at(line.steps, line.values, step)) for line in self.drawing.lines]
        told = [(line, point) for line, point in found if point]
        if not told:
            return ""
        named = len({line.label for line, _ in told}) > 1 or len({line.run for line, _ in told}) > 1
        words = [f"{line.run or line.label} {self._words(v)}" if named else self._words(v) for line, (_, v) in told]
        return f"{self._along(told[0][1][0])}:  " + ",  ".join(words)

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Follow the colours."""
        super().changeEvent(event)
        if event.type() == QEvent.Type.PaletteChange and hasattr(self, "legend"):
            self.legend.update()

    # --- inside

    def _press(self, key: int) -> bool:
        """Do what a key asks for; tell whether it asked for anything."""
        first, last = self.plot.steps
        middle = self.cursor_step if self.cursor_step is not None else (first + last) / 2
        width = last - first
        match key:
            case Qt.Key.Key_Left | Qt.Key.Key_Right:
                by = width * _NUDGE * (1 if key == Qt.Key.Key_Right else -1)
                self.point_at(min(max(middle + by, first), last))
                self.plot.setAccessibleDescription(f"{self.readout.text()}. {self.drawing.words}")
            case Qt.Key.Key_Plus | Qt.Key.Key_Equal:
                self.plot.zoom(middle, ZOOM)
            case Qt.Key.Key_Minus:
                self.plot.zoom(middle, 1 / ZOOM)
            case Qt.Key.Key_PageUp | Qt.Key.Key_PageDown:
                by = width * 0.5 * (1 if key == Qt.Key.Key_PageDown else -1)
                self.moved.emit(first + by, last + by)
            case Qt.Key.Key_Home:
                self.reset.emit()
            case _:
                return False
        return True

    def _entries(self) -> list[Entry]:
        lines: dict[str, Entry] = {}
        for line in self.drawing.lines:
            lines.setdefault(line.label, (line.label, line.colour, line.look))
        levels = [(level.label, level.colour, "dashed") for level in self.drawing.levels]
        return [*lines.values(), *levels, *((label, colour, "plain") for label, colour in self.drawing.extra)]

    def _lay_out(self) -> None:
        self._title = QLabel(self.title)
        self._title.setProperty("role", "heading")
        top = QHBoxLayout()
        top.setSpacing(14)
        top.addWidget(self._title)
        self._beside = QStackedWidget()  # what the cursor says stands where the legend stood: there is room for one
        self._beside.addWidget(self.legend)
        self._beside.addWidget(self.readout)
        self._beside.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        top.addWidget(self._beside, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        column.addLayout(top)
        column.addWidget(self.plot, 1)
