"""Widget that generates images with the selected LoRA, for any prompt and strength."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QCoreApplication, Qt, Signal
from PySide6.QtWidgets import (
    QAbstractSpinBox,
    QCheckBox,
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

_MAX_STRENGTH = 2.0
_MAX_SEED = 2**31 - 1


class TryBox(QWidget):
    """Widget with the prompt and settings on the left and the generated image on the right."""

    failed = Signal(object)
    message_shown = Signal(str)

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._job: Job | None = None
        self._candidate: Candidate | None = None
        self._folder = Path()
        self._settings: dict[str, Any] = {}
        self._is_weighted = False
        self.drawing: RenderJob | None = None
        """Most recent request for an image, or None."""
        self.prompt, self.negative = QPlainTextEdit(), QLineEdit()
        self.weights = QCheckBox(self.tr("Read (word:1.3) as a weight"))
        self.strength, self.slider = DoubleSpinBox(), Slider(Qt.Orientation.Horizontal)
        self.seed, self.width_box, self.height_box = SpinBox(), SpinBox(), SpinBox()
        self.render_button, self.cancel_button = QPushButton(self.tr("Generate")), QPushButton(self.tr("Cancel"))
        self.progress, self.stage, self.lora = QProgressBar(), QLabel(), QLabel()
        self.image = ImageView(session, self.tr("The image appears here."))
        self._configure()
        self._lay_out()
        self._listen()
        self._refresh()

    def show_job(self, job: Job | None, folder: Path) -> None:
        """Prepare to try this job's LoRAs; generated images are saved in `folder`.

        Fills in the job's first preview prompt, unless a job with this folder is already shown: while a run is
        active, its job is read repeatedly, and the user's entries must be kept.
        """
        is_new = job is not None and (self._job is None or folder != self._folder)
        if folder != self._folder:
            self.cancel()
            self.drawing = None
            self.image.show_file(None)
        self._job, self._folder = job, folder
        if is_new and job:
            self._load_job(job)
        self._refresh()

    def show_candidate(self, candidate: Candidate | None, title: str = "") -> None:
        """Set the saved LoRA to try and its title, such as "Step 500"; for None, nothing can be generated."""
        self._candidate = candidate
        self.lora.setText(title)
        self._refresh()

    def start_rendering(self) -> None:
        """Generate an image for the prompt; a request that is still running is canceled."""
        if not self.can_render() or self._job is None or self._candidate is None:
            return
        cell = GridCell(self._candidate.file, self.strength.value(), self.prompt_settings())
        self.drawing = drawing = self._session.renderer.render(self._job, [cell], self._folder)
        drawing.changed.connect(lambda _: self._refresh())
        drawing.image_ready.connect(lambda number: self.image.show_file(drawing.files[number]))
        drawing.noticed.connect(self.message_shown.emit)
        drawing.failed.connect(self.failed.emit)
        self._refresh()

    def cancel(self) -> None:
        """Cancel the request for an image, if it is still running."""
        if self.is_drawing():
            self._session.renderer.cancel()

    def can_render(self) -> bool:
        """Return whether an image can be generated, which requires a prompt, a LoRA and a job."""
        return bool(self._job and self._candidate and self.prompt.toPlainText().strip())

    def is_drawing(self) -> bool:
        """Return whether an image is being generated."""
        return bool(self.drawing and not self.drawing.is_over)

    def image_of(self, candidate: Candidate) -> Path | None:
        """Return the latest generated image if it was made with this candidate, otherwise None."""
        drawing = self.drawing
        return drawing.files.get(0) if drawing and drawing.cells[0].lora == candidate.file else None

    def prompt_settings(self) -> dict[str, Any]:
        """Return the current entries in the form of a job's preview prompt."""
        return {
            **self._settings,
            "prompt": self.prompt.toPlainText().strip(),
            "negative": self.negative.text().strip(),
            "seed": self.seed.value(),
            "width": self.width_box.value(),
            "height": self.height_box.value(),
            # Unless the user chose, the renderer decides, which then reports weights that it does not read.
            "weights": None if self.weights.isChecked() == self._is_weighted else self.weights.isChecked(),
        }

    # --- inside

    def _load_job(self, job: Job) -> None:
        """Load the job's first preview prompt with its seed, size and sampling settings."""
        from trainer.config.job import PromptConfig

        first = next(iter(job.report.previews.prompts), PromptConfig(prompt=_trigger(job)))
        self._settings = first.model_dump()
        self.prompt.setPlainText(first.prompt)
        self.negative.setText(first.negative)
        self.seed.setValue(min(first.seed, _MAX_SEED))
        self._is_weighted = bool(job.recipe.weighted_captions)
        self.weights.setChecked(self._is_weighted if first.weights is None else first.weights)
        side = job.recipe.resolution or 512
        self.width_box.setValue(first.width or side)
        self.height_box.setValue(first.height or side)

    def _refresh(self) -> None:
        drawing, busy = self.drawing, self.is_drawing()
        self.render_button.setEnabled(self.can_render())
        self.cancel_button.setVisible(busy)
        show_progress(self.progress, self.stage, drawing if busy else None)

    def _configure(self) -> None:
        self.prompt.setAccessibleName(self.tr("Prompt"))
        self.prompt.setTabChangesFocus(True)
        self.prompt.setFixedHeight(3 * self.fontMetrics().lineSpacing() + 14)
        self.negative.setPlaceholderText(self.tr("what to avoid"))
        self.weights.setToolTip(self.tr(r"Also (word) and [word]. Write brackets that are part of a tag as \(word\)."))
        self.strength.setRange(-_MAX_STRENGTH, _MAX_STRENGTH)
        self.strength.setSingleStep(0.1)
        self.strength.setValue(1.0)
        self.strength.setAccessibleName(self.tr("Strength"))
        self.slider.setRange(0, round(_MAX_STRENGTH * 20))
        self.slider.setValue(20)
        self.slider.setAccessibleName(self.tr("Strength"))
        self.seed.setRange(0, _MAX_SEED)
        for box, name in ((self.width_box, self.tr("Width")), (self.height_box, self.tr("Height"))):
            box.setRange(64, 4096)
            box.setSingleStep(64)
            box.setValue(512)
            box.setAccessibleName(name)
            box.editingFinished.connect(lambda box=box: box.setValue(box.value() // 8 * 8))
        style_progress(self.progress, self.stage)
        numbers: list[QAbstractSpinBox] = [self.strength, self.seed, self.width_box, self.height_box]
        for number in numbers:
            number.lineEdit().setTextMargins(5, 0, 0, 0)  # Qt ignores the style sheet's padding here
            number.setFixedWidth(112)

    def _lay_out(self) -> None:
        strength, size, buttons = QHBoxLayout(), QHBoxLayout(), QHBoxLayout()
        strength.addWidget(self.slider, 1)
        strength.addWidget(self.strength)
        for widget in (self.width_box, QLabel("×"), self.height_box):
            size.addWidget(widget)
        size.addStretch(1)
        buttons.addWidget(self.render_button)
        buttons.addWidget(self.cancel_button)
        buttons.addWidget(self.progress, 1)
        buttons.addWidget(self.stage)
        buttons.addStretch(0)
        for line in (strength, size, buttons):
            line.setSpacing(10)
        form = QFormLayout()
        form.setHorizontalSpacing(14)
        form.setVerticalSpacing(9)
        form.addRow(self.tr("LoRA"), self.lora)
        form.addRow(self.tr("Prompt"), self.prompt)
        form.addRow(self.tr("Negative prompt"), self.negative)
        form.addRow("", self.weights)
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
        row.addWidget(self.image, 6)

    def _listen(self) -> None:
        self.slider.valueChanged.connect(lambda value: self.strength.setValue(value / 20))
        self.strength.valueChanged.connect(self._on_strength_changed)
        self.prompt.textChanged.connect(self._refresh)
        self.render_button.clicked.connect(self.start_rendering)
        self.cancel_button.clicked.connect(self.cancel)

    def _on_strength_changed(self, strength: float) -> None:
        self.slider.blockSignals(True)
        self.slider.setValue(round(strength * 20))
        self.slider.blockSignals(False)


def show_progress(bar: QProgressBar, words: QLabel, drawing: RenderJob | None) -> None:
    """Show a request's progress as a bar and a short text; None hides both."""
    bar.setVisible(drawing is not None)
    words.setVisible(drawing is not None)
    if drawing is None:
        return
    bar.setRange(0, 0 if drawing.stage == "starting" else 1000)
    bar.setValue(round(drawing.share * 1000))
    stages = {
        "starting": QCoreApplication.translate("Drawing", "Starting…"),
        "loading": QCoreApplication.translate("Drawing", "Loading the base…"),
        "drawing": QCoreApplication.translate("Drawing", "Generating…"),
    }
    words.setText(stages.get(drawing.stage, ""))


def style_progress(bar: QProgressBar, words: QLabel) -> None:
    """Style a progress bar that has no text, and the label beside it."""
    bar.setTextVisible(False)
    bar.setFixedHeight(12)
    bar.setAccessibleName(QCoreApplication.translate("Drawing", "Progress"))
    words.setProperty("role", "muted")


def _trigger(job: Job) -> str:
    return next((folder.trigger for folder in job.dataset.folders if folder.trigger), "")
