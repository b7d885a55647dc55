"""Where a job's runs and their LoRAs go."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFileDialog, QGridLayout, QLabel, QPushButton, QWidget

from app.core.jobs.draft import Draft
from app.core.runs.log import without_home
from app.qt.train.line import Line
from trainer.config.job import OutputConfig
from trainer.config.paths import absolute

_KEY = "output.runs"


class OutputRow(QWidget):
    """The folder as the job has it, and a button that asks for another; an empty field means the one beside the job."""

    left = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._draft: Draft | None = None
        self.field, self.button, self.words = Line(), QPushButton(self.tr("Choose…")), QLabel()
        self.field.setAccessibleName(self.tr("Output"))
        self.field.setToolTip(
            f"{_KEY}\n" + self.tr("The folder for this job's runs: a whole path, or one from the job's folder on.")
        )
        self.button.setAutoDefault(False)
        self.button.setAccessibleName(self.tr("Choose the folder for the runs"))
        self.words.setProperty("role", "muted")
        self.words.setWordWrap(True)
        self.words.setText(self.tr("Each run gets a folder of its own in there, with its LoRA."))
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(8)
        grid.setVerticalSpacing(4)
        grid.addWidget(self.field, 0, 0)
        grid.addWidget(self.button, 0, 1)
        grid.addWidget(self.words, 1, 0, 1, 2)
        self.field.textEdited.connect(lambda text: self._put(text.strip(), typing=True))
        self.field.editingFinished.connect(self.left)
        self.button.clicked.connect(lambda: self._choose())

    def show_draft(self, draft: Draft) -> None:
        """Show this job's folder."""
        self._draft = draft
        stated = draft.get(_KEY)
        text = stated if isinstance(stated, str) else ""
        if self.field.text().strip() != text:
            self.field.show_text(text)
        beside = absolute(OutputConfig().runs, draft.path.parent)
        self.field.setPlaceholderText(without_home(beside, Path.home()))

    def _put(self, text: str, *, typing: bool = False) -> None:
        if self._draft is not None:
            self._draft.set(_KEY, text or None, typing=typing)

    def _choose(self) -> None:
        if self._draft is None:
            return
        now = absolute(self.field.text().strip() or OutputConfig().runs, self._draft.path.parent)
        title = self.tr("The folder for this job's runs")
        chosen = QFileDialog.getExistingDirectory(self, title, now)
        if chosen:
            self._put(str(Path(chosen)))
