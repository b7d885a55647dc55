"""The XY grid: steps and strengths as columns, prompts as rows, one seed for all cells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QLocale, QModelIndex, QPersistentModelIndex, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QCloseEvent, QImage, QPainter
from PySide6.QtWidgets import (
    QDialog,
    QFormLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QListWidget,
    QListWidgetItem,
    QPlainTextEdit,
    QProgressBar,
    QPushButton,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableWidget,
    QTableWidgetItem,
    QVBoxLayout,
    QWidget,
)

from app.core.after.drawing import RenderJob, grid
from app.core.after.export import Candidate
from app.core.session import Session
from app.qt.runs.after.strip import paint_fitting, read_image
from app.qt.runs.after.try_box import show_progress, style_progress
from app.qt.theme import colors
from app.qt.tile_painting import panel, ring
from app.qt.widgets import plain_tip

if TYPE_CHECKING:
    from trainer.config.job import Job

_SIDE = 168
_MAX_CELLS = 400
_NUMBER = re.compile(r"[^\s;]+")
_DECIMAL_COMMA = re.compile(r"(?<=\d),(?=\d)")


class _Cell(QStyledItemDelegate):
    """Delegate that paints an image centered in its cell."""

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        """Paint one cell; a selected one has the accent color as its background."""
        selected = bool(option.state & QStyle.StateFlag.State_Selected)
        cell = option.rect.adjusted(2, 2, -2, -2)
        painter.save()
        if selected:
            panel(painter, QRectF(cell), colors().accent)
        image = index.data(Qt.ItemDataRole.UserRole)
        room = cell.adjusted(4, 4, -4, -4)
        if isinstance(image, QImage) and not image.isNull():
            paint_fitting(painter, room, image, painter.device().devicePixelRatioF())
        else:
            panel(painter, QRectF(room), colors().raised, colors().line)
        if option.state & QStyle.StateFlag.State_HasFocus:
            ring(painter, cell, selected=selected)
        painter.restore()


class GridDialog(QDialog):
    """Dialog to choose steps, strengths and prompts and to show the images as they are generated."""

    picked = Signal(int, float)
    """Step and strength that the user picked."""
    failed = Signal(object)

    def __init__(
        self,
        session: Session,
        job: Job,
        found: Sequence[Candidate],
        settings: dict[str, Any],
        folder: Path,
        parent: QWidget | None = None,
    ) -> None:
        """Create the dialog for these saved LoRAs and initial prompt `settings`; grids are saved in `folder`."""
        super().__init__(parent)
        self._session, self._job, self._settings, self._folder = session, job, settings, folder
        self._found = list(found)
        self.drawing: RenderJob | None = None
        self._columns: list[tuple[int, float]] = []
        self._rows: list[str] = []
        self.steps, self.strengths, self.prompts = QListWidget(), QLineEdit("0.6, 0.8, 1"), QPlainTextEdit()
        self.count, self.progress, self.stage, self.table = QLabel(), QProgressBar(), QLabel(), QTableWidget()
        self.render_button, self.cancel_button = QPushButton(self.tr("Generate")), QPushButton(self.tr("Cancel"))
        self.pick_button, self.close_button = QPushButton(self.tr("Use this step")), QPushButton(self.tr("Close"))
        self.setWindowTitle(self.tr("Grid of steps, strengths and prompts"))
        self.resize(960, 700)
        self._fill()
        self._lay_out()
        self._listen()
        self._refresh()

    # --- the user's choices

    def chosen(self) -> list[Candidate]:
        """Return the saved LoRAs whose steps are checked."""
        return [candidate for row, candidate in enumerate(self._found) if self._is_checked(row)]

    def chosen_strengths(self) -> list[float] | None:
        """Return the entered strengths, or None if one is not a number from -100 to 100.

        A comma between two digits is a decimal comma if the user's locale has one.
        """
        text = self.strengths.text()
        if QLocale().decimalPoint() == ",":
            text = _DECIMAL_COMMA.sub(".", text)
        try:
            found = [float(text) for text in _NUMBER.findall(text.replace(",", " "))]
        except ValueError:
            return None
        return list(dict.fromkeys(found)) if all(-100 <= strength <= 100 for strength in found) else None

    def chosen_prompts(self) -> list[str]:
        """Return the entered prompts, one per line, without duplicates."""
        return list(dict.fromkeys(line.strip() for line in self.prompts.toPlainText().splitlines() if line.strip()))

    def problem(self) -> str:
        """Return the reason why the grid cannot be generated, or "" if it can."""
        strengths = self.chosen_strengths()
        if not self.chosen():
            return self.tr("Select at least one step.")
        if not strengths:
            return self.tr("Enter strengths as numbers, for example 0.6, 0.8, 1.")
        if not self.chosen_prompts():
            return self.tr("Enter at least one prompt.")
        if self._cells() > _MAX_CELLS:
            return self.tr("{count} images are too many. The maximum is {most}.").format(
                count=QLocale().toString(self._cells()), most=_MAX_CELLS
            )
        return ""

    # --- generating

    def start_rendering(self) -> None:
        """Generate the grid; the cells appear one by one."""
        strengths = self.chosen_strengths()
        if self.problem() or strengths is None:
            return
        chosen, prompts = self.chosen(), self.chosen_prompts()
        settings = [{**self._settings, "prompt": prompt} for prompt in prompts]
        cells = grid([candidate.file for candidate in chosen], strengths, settings)
        self._lay_table(chosen, strengths, prompts)
        folder = self._folder / f"grid {datetime.now().astimezone():%Y-%m-%d %H.%M.%S}"
        self.drawing = drawing = self._session.renderer.render(self._job, cells, folder)
        rows = len(prompts)
        drawing.image_ready.connect(lambda number: self._show(drawing, number, number % rows, number // rows))
        drawing.changed.connect(lambda _: self._refresh())
        drawing.failed.connect(self.failed.emit)
        self._refresh()

    def cancel(self) -> None:
        """Stop generating, but keep the finished cells."""
        if self._busy():
            self._session.renderer.cancel()

    def pick(self) -> None:
        """Emit `picked` with the current cell's step and strength, and close the dialog."""
        column = self.table.currentColumn()
        if column >= 0:
            self.picked.emit(*self._columns[column])
            self.accept()

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802
        """Stop generating when the dialog closes."""
        self.cancel()
        super().closeEvent(event)

    def done(self, result: int) -> None:
        """Stop generating when the dialog closes."""
        self.cancel()
        super().done(result)

    # --- inside

    def _cells(self) -> int:
        return len(self.chosen()) * len(self.chosen_strengths() or ()) * len(self.chosen_prompts())

    def _busy(self) -> bool:
        return bool(self.drawing and not self.drawing.is_over)

    def _fill(self) -> None:
        number = QLocale().toString
        for candidate in self._found:
            words = self.tr("Step {step}").format(step=number(candidate.step))
            loss = "" if candidate.loss is None else f"   {number(candidate.loss, 'f', 4)}"
            best = self.tr("best") if candidate.held_out else self.tr("lowest on training images")
            item = QListWidgetItem(words + loss + ("   " + best if candidate.best else ""), self.steps)
            item.setSizeHint(QSize(0, self.fontMetrics().height() + 12))
            item.setFlags(item.flags() | Qt.ItemFlag.ItemIsUserCheckable)
            notable = candidate.best or candidate.last
            item.setCheckState(Qt.CheckState.Checked if notable else Qt.CheckState.Unchecked)
        ticked = [row for row in range(self.steps.count()) if self._is_checked(row)]
        if ticked:
            self.steps.setCurrentRow(ticked[0])  # scrolls to it in a long list
        self.prompts.setPlainText(str(self._settings["prompt"]))

    def _is_checked(self, row: int) -> bool:
        return self.steps.item(row).checkState() == Qt.CheckState.Checked

    def _lay_table(self, chosen: Sequence[Candidate], strengths: Sequence[float], prompts: Sequence[str]) -> None:
        columns = self._columns = [(candidate.step, strength) for candidate in chosen for strength in strengths]
        self._rows = list(prompts)
        table = self.table
        table.clear()
        table.setRowCount(len(prompts))
        table.setColumnCount(len(columns))
        for column, (step, strength) in enumerate(columns):
            words = self.tr("Step {step}").format(step=QLocale().toString(step))
            title = f"{words}\n× {QLocale().toString(strength, 'g', 4)}"
            table.setHorizontalHeaderItem(column, QTableWidgetItem(title))
            table.setColumnWidth(column, _SIDE + 10)
        for row, prompt in enumerate(prompts):
            table.setVerticalHeaderItem(row, head := QTableWidgetItem(_shortened(prompt)))
            head.setToolTip(plain_tip(prompt))
            table.setRowHeight(row, _SIDE + 10)

    def _show(self, drawing: RenderJob, number: int, row: int, column: int) -> None:
        if drawing is self.drawing:
            file = drawing.files[number]
            read_image(self, self._session, file, lambda image: self._take(drawing, image, row, column), 2 * _SIDE)

    def _take(self, drawing: RenderJob, image: QImage, row: int, column: int) -> None:
        if drawing is not self.drawing:
            return
        item = QTableWidgetItem()
        item.setData(Qt.ItemDataRole.UserRole, image)
        step, strength = self._columns[column]
        words = self.tr("Step {step}, strength {strength}: {prompt}").format(
            step=step, strength=strength, prompt=self._rows[row]
        )
        item.setData(Qt.ItemDataRole.AccessibleTextRole, words)
        self.table.setItem(row, column, item)
        if self.table.currentColumn() < 0:
            self.table.setCurrentCell(row, column)

    def _refresh(self) -> None:
        problem, busy, cells = self.problem(), self._busy(), self._cells()
        counted = self.tr("{count} images, all with seed {seed}.")
        words = problem or counted.format(count=QLocale().toString(cells), seed=self._settings["seed"])
        self.count.setText(words)
        self.render_button.setEnabled(not problem)
        self.cancel_button.setVisible(busy)
        self.pick_button.setEnabled(self.table.currentColumn() >= 0)
        show_progress(self.progress, self.stage, self.drawing if busy else None)

    def _listen(self) -> None:
        self.steps.itemChanged.connect(lambda _: self._refresh())
        self.strengths.textChanged.connect(lambda _: self._refresh())
        self.prompts.textChanged.connect(self._refresh)
        self.table.currentCellChanged.connect(lambda *_: self._refresh())
        self.table.cellDoubleClicked.connect(lambda *_: self.pick())
        self.render_button.clicked.connect(self.start_rendering)
        self.cancel_button.clicked.connect(self.cancel)
        self.pick_button.clicked.connect(self.pick)
        self.close_button.clicked.connect(self.reject)

    def _lay_out(self) -> None:
        self.table.setItemDelegate(_Cell(self.table))
        self.table.setCornerButtonEnabled(False)
        self.table.setAccessibleName(self.tr("Grid"))
        self.table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self.table.setSelectionMode(QTableWidget.SelectionMode.SingleSelection)
        self.table.setTabKeyNavigation(False)
        self.table.setShowGrid(False)
        self.table.verticalHeader().setFixedWidth(150)
        self.table.verticalHeader().setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
        self.steps.setAccessibleName(self.tr("Steps"))
        self.steps.setFixedHeight(126)
        self.prompts.setAccessibleName(self.tr("Prompts"))
        self.prompts.setTabChangesFocus(True)
        self.prompts.setPlaceholderText(self.tr("one prompt per line"))
        self.prompts.setFixedHeight(84)
        style_progress(self.progress, self.stage)
        self.count.setProperty("role", "muted")
        for button in (self.render_button, self.cancel_button, self.pick_button, self.close_button):
            button.setAutoDefault(False)
        left, right = QFormLayout(), QFormLayout()
        left.addRow(self.tr("Steps"), self.steps)
        right.addRow(self.tr("Strengths"), self.strengths)
        right.addRow(self.tr("Prompts"), self.prompts)
        top, middle, bottom = QHBoxLayout(), QHBoxLayout(), QHBoxLayout()
        top.setSpacing(18)
        top.addLayout(left, 4)
        top.addLayout(right, 6)
        middle.addWidget(self.render_button)
        middle.addWidget(self.cancel_button)
        middle.addWidget(self.progress, 1)
        middle.addWidget(self.stage)
        middle.addStretch(0)
        middle.addWidget(self.count)
        middle.setSpacing(10)
        bottom.addStretch(1)
        bottom.addWidget(self.pick_button)
        bottom.addWidget(self.close_button)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 14, 14, 12)
        column.setSpacing(12)
        column.addLayout(top)
        column.addLayout(middle)
        column.addWidget(self.table, 1)
        column.addLayout(bottom)


def _shortened(prompt: str) -> str:
    """Return a prompt wrapped into short lines for a row header, truncated after a few lines."""
    words, lines = prompt.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 20:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join([*lines[:5], "…"] if len(lines) > 6 else lines)
