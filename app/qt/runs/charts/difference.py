"""How the jobs of the runs laid over each other differ."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QLocale, Qt
from PySide6.QtWidgets import QHeaderView, QLabel, QTableWidget, QTableWidgetItem, QVBoxLayout, QWidget

from app.core.runs.run import Run
from app.qt.tips import plain_tip

_MOST_ROWS = 12


class DifferenceTable(QWidget):
    """A row for each key that is not the same in all jobs, a column for each run."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._shown: tuple[object, ...] = ()
        self.title = QLabel(self.tr("How their jobs differ"))
        self.title.setProperty("role", "heading")
        self.sentence = QLabel()
        self.sentence.setProperty("role", "muted")
        self.sentence.setWordWrap(True)
        self.table = QTableWidget()
        self.table.setAccessibleName(self.title.text())
        self.table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self.table.setSelectionBehavior(QTableWidget.SelectionBehavior.SelectRows)
        self.table.setTabKeyNavigation(False)
        self.table.setShowGrid(False)
        self.table.verticalHeader().hide()
        self.table.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        self.table.horizontalHeader().setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
        column = QVBoxLayout(self)
        column.setContentsMargins(16, 0, 16, 16)
        for part in (self.title, self.sentence, self.table):
            column.addWidget(part)
        self.hide()

    def show_runs(self, runs: Sequence[Run]) -> None:
        """Compare the jobs of these runs; one alone has nothing to be compared with."""
        self.setVisible(len(runs) > 1)
        shown = tuple((run.summary.name, run.job) for run in runs)
        if len(runs) < 2 or shown == self._shown:
            return
        self._shown = shown
        from app.core.after.run_jobs import differences
        from app.core.jobs.settings import full_title  # the job's schema, which takes a while to load

        jobs = [run.job for run in runs if run.job is not None]
        found = differences(jobs) if len(jobs) == len(runs) else []
        self.sentence.setText(self._words(len(jobs) == len(runs), len(found)))
        self.sentence.setVisible(not found)
        self.table.setVisible(bool(found))
        self.table.setColumnCount(1 + len(runs))
        self.table.setHorizontalHeaderLabels([self.tr("Setting"), *(run.summary.name for run in runs)])
        self.table.setRowCount(len(found))
        for row, difference in enumerate(found):
            for place, text in enumerate((full_title(difference.key), *map(self._value, difference.values))):
                item = QTableWidgetItem(text)
                item.setToolTip(plain_tip(text if place else difference.key))
                self.table.setItem(row, place, item)
        rows = min(len(found), _MOST_ROWS)
        self.table.setFixedHeight(
            self.table.horizontalHeader().sizeHint().height()
            + rows * self.table.verticalHeader().defaultSectionSize()
            + 4
        )

    def _words(self, known: bool, differences: int) -> str:
        if not known:
            return self.tr("The job of one of these runs cannot be read.")
        return "" if differences else self.tr("Their jobs are the same in every setting.")

    def _value(self, value: object) -> str:
        if value is None:
            return self.tr("not set")
        if isinstance(value, bool):
            return self.tr("yes") if value else self.tr("no")
        if isinstance(value, int | float):
            return QLocale().toString(float(value), "g", 8)
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
