"""Draws any prompt with the chosen LoRA at any strength, without leaving the window."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QCoreApplication, Qt, Signal
from PySide6.QtWidgets import (
    QAbstractSpinBox,
    QFormLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app.core.after.drawing import GridCell, RenderJob
from app.core.after.export import Candidate
from app.core.session import Session
from app.qt.runs.after.strip import ImageView
from app.qt.widgets import DoubleSpinBox, Slider, SpinBox

if TYPE_CHECKING:
    from trainer.config.job import Job

_MOST_STRENGTH = 2.0
_LARGEST_SEED = 2**31 - 1


class TryBox(QWidget):
    """A prompt and how it is drawn, on the left; its picture on the right."""

    failed = Signal(object)
    said = Signal(str)

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._job: Job | None = None
        self._candidate: Candidate | None = None
        self._folder = Path()
        self._settings: dict[str, Any] = {}
        self.drawing: RenderJob | None = None
        """What was asked last."""
        self.prompt, self.negative = QPlainTextEdit(), QLineEdit()
        self.strength, self.slider = DoubleSpinBox(), Slider(Qt.Orientation.Horizontal)
        self.seed, self.width_box, self.height_box = SpinBox(), SpinBox(), SpinBox()
        self.draw_button, self.cancel_button = QPushButton(self.tr("Draw")), QPushButton(self.tr("Cancel"))
        self.progress, self.stage = QProgressBar(), QLabel()
        self.picture = ImageView(session, self.tr("The picture appears here."))
        self._name()
        self._lay_out()
        self._listen()
        self._refresh()

    def show_job(self, job: Job | None, folder: Path) -> None:
        """Try out LoRAs of this job; its first preview prompt is the beginning. Pictures go into `folder`.

        What was written stays where only the job became another, as that of a run which goes on.
        """
        begin = job is not None and (self._job is None or folder != self._folder)
        if folder != self._folder:
            self.cancel()
            self.drawing = None
            self.picture.show_file(None)
        self._job, self._folder = job, folder
        if begin and job:
            self._begin(job)
        self._refresh()

    def show_candidate(self, candidate: Candidate | None) -> None:
        """Try out this one."""
        self._candidate = candidate
        self._refresh()

    def draw(self) -> None:
        """Draw the prompt; what is drawn now is given up."""
        if not self.can_draw() or self._job is None or self._candidate is None:
            return
        cell = GridCell(self._candidate.file, self.strength.value(), self.prompt_settings())
        self.drawing = drawing = self._session.renderer.draw(self._job, [cell], self._folder)
        drawing.changed.connect(lambda _: self._refresh())
        drawing.drawn.connect(lambda number: self.picture.show_file(drawing.files[number]))
        drawing.noticed.connect(self.said.emit)
        drawing.failed.connect(self.failed.emit)
        self._refresh()

    def cancel(self) -> None:
        """Give the drawing up."""
        if self.is_drawing():
            self._session.renderer.cancel()

    def can_draw(self) -> bool:
        """Tell whether there is something to draw, and with what."""
        return bool(self._job and self._candidate and self.prompt.toPlainText().strip())

    def is_drawing(self) -> bool:
        """Tell whether a picture is on its way."""
        return bool(self.drawing and not self.drawing.over)

    def picture_of(self, candidate: Candidate) -> Path | None:
        """Return the picture that was drawn last, where it was drawn with this one."""
        drawing = self.drawing
        return drawing.files.get(0) if drawing and drawing.cells[0].lora == candidate.file else None

    def prompt_settings(self) -> dict[str, Any]:
        """Return what is to be drawn as a job's prompt has it."""
        return {
            **self._settings,
            "prompt": self.prompt.toPlainText().strip(),
            "negative": self.negative.text().strip(),
            "seed": self.seed.value(),
            "width": self.width_box.value(),
            "height": self.height_box.value(),
        }

    # --- inside

    def _begin(self, job: Job) -> None:
        """Take over how the job draws its previews; steps, guidance and sampler stay those."""
        from trainer.config.job import PromptConfig

        first = next(iter(job.report.previews.prompts), PromptConfig(prompt=_trigger(job)))
        self._settings = first.model_dump()
        self.prompt.setPlainText(first.prompt)
        self.negative.setText(first.negative)
        self.seed.setValue(min(first.seed, _LARGEST_SEED))
        side = job.recipe.resolution or 512
        self.width_box.setValue(first.width or side)
        self.height_box.setValue(first.height or side)

    def _refresh(self) -> None:
        drawing, busy = self.drawing, self.is_drawing()
        self.draw_button.setEnabled(self.can_draw())
        self.cancel_button.setVisible(busy)
        show_progress(self.progress, self.stage, drawing if busy else None)

    def _name(self) -> None:
        self.prompt.setAccessibleName(self.tr("Prompt"))
        self.prompt.setTabChangesFocus(True)
        self.prompt.setFixedHeight(3 * self.fontMetrics().lineSpacing() + 14)
        self.negative.setPlaceholderText(self.tr("what to avoid"))
        self.strength.setRange(-_MOST_STRENGTH, _MOST_STRENGTH)
        self.strength.setSingleStep(0.1)
        self.strength.setValue(1.0)
        self.strength.setAccessibleName(self.tr("Strength"))
        self.slider.setRange(0, round(_MOST_STRENGTH * 20))
        self.slider.setValue(20)
        self.slider.setAccessibleName(self.tr("Strength"))
        self.seed.setRange(0, _LARGEST_SEED)
        for box, name in ((self.width_box, self.tr("Width")), (self.height_box, self.tr("Height"))):
            box.setRange(64, 4096)
            box.setSingleStep(64)
            box.setValue(512)
            box.setAccessibleName(name)
            box.editingFinished.connect(lambda box=box: box.setValue(box.value() // 8 * 8))
        lay_progress(self.progress, self.stage)
        numbers: list[QAbstractSpinBox] = [self.strength, self.seed, self.width_box, self.height_box]
        for number in numbers:
            number.lineEdit().setTextMargins(5, 0, 0, 0)  # Qt passes over the style sheet's padding here
            number.setFixedWidth(112)

    def _lay_out(self) -> None:
        strength, size, buttons = QHBoxLayout(), QHBoxLayout(), QHBoxLayout()
        strength.addWidget(self.slider, 1)
        strength.addWidget(self.strength)
        for widget in (self.width_box, QLabel("×"), self.height_box):
            size.addWidget(widget)
        size.addStretch(1)
        buttons.addWidget(self.draw_button)
        buttons.addWidget(self.cancel_button)
        buttons.addWidget(self.progress, 1)
        buttons.addWidget(self.stage)
        buttons.addStretch(0)
        for line in (strength, size, buttons):
            line.setSpacing(10)
        form = QFormLayout()
        form.setHorizontalSpacing(14)
        form.setVerticalSpacing(9)
        form.addRow(self.tr("Prompt"), self.prompt)
        form.addRow(self.tr("Negative"), self.negative)
        form.addRow(self.tr("Strength"), strength)
        form.addRow(self.tr("Seed"), self.seed)
        form.addRow(self.tr("Size"), size)
        left = QVBoxLayout()
        left.addLayout(form)
        left.addSpacing(4)
        left.addLayout(buttons)
        left.addStretch(1)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(18)
        row.addLayout(left, 5)
        row.addWidget(self.picture, 6)

    def _listen(self) -> None:
        self.slider.valueChanged.connect(lambda value: self.strength.setValue(value / 20))
        self.strength.valueChanged.connect(self._follow)
        self.prompt.textChanged.connect(self._refresh)
        self.draw_button.clicked.connect(self.draw)
        self.cancel_button.clicked.connect(self.cancel)

    def _follow(self, strength: float) -> None:
        self.slider.blockSignals(True)
        self.slider.setValue(round(strength * 20))
        self.slider.blockSignals(False)


def show_progress(bar: QProgressBar, words: QLabel, drawing: RenderJob | None) -> None:
    """Say how far a drawing is, with a bar and a word; None: hide both."""
    bar.setVisible(drawing is not None)
    words.setVisible(drawing is not None)
    if drawing is None:
        return
    bar.setRange(0, 0 if drawing.stage == "starting" else 1000)
    bar.setValue(round(drawing.share * 1000))
    stages = {
        "starting": QCoreApplication.translate("Drawing", "Starting the engine"),
        "loading": QCoreApplication.translate("Drawing", "Loading the base"),
        "drawing": QCoreApplication.translate("Drawing", "Drawing"),
    }
    words.setText(stages.get(drawing.stage, ""))


def lay_progress(bar: QProgressBar, words: QLabel) -> None:
    """Make a bar without text and the word beside it."""
    bar.setTextVisible(False)
    bar.setFixedHeight(12)
    bar.setAccessibleName(QCoreApplication.translate("Drawing", "Progress"))
    words.setProperty("role", "muted")


def _trigger(job: Job) -> str:
    return next((folder.trigger for folder in job.dataset.folders if folder.trigger), "")
