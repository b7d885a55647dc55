"""The window in which one sees what training shows of each picture, and chooses another part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from PySide6.QtCore import QLocale
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.core.edits.history import Stretch
from app.core.health.judging import Shown, crop_to, largest, shown_of
from app.core.library import Altered, Crop
from app.core.session import Session
from app.qt.inputs import ComboBox
from app.qt.pictures.health.crop_canvas import CropCanvas
from app.qt.pictures.one_by_one import OneByOne


class Cropper(OneByOne):
    """Every crop is an edit like others, and the picture's file is never touched. In here only crops are undone."""

    def __init__(
        self, session: Session, ids: Sequence[int], start: int | None = None, parent: QWidget | None = None
    ) -> None:
        super().__init__(session, ids, start, parent)
        self._recipe = session.health.aim.recipe()
        self._steps = Stretch(session.history)
        self.canvas = CropCanvas(session)
        self.facts, self.shape = QLabel(), ComboBox()
        self.reset_button, self.done_button = QPushButton(), QPushButton()
        self.setWindowTitle(self.tr("Crop"))
        self.resize(1100, 800)
        self._build()
        self._show_picture()
        self._tell_steps()
        ends = (session.library.altered.connect(self._altered), session.history.changed.connect(self._tell_steps))
        self.destroyed.connect(lambda: [end() for end in ends])

    def step(self, by: int) -> None:
        """Go to another picture."""
        self._place = self._place_after(by)
        self._show_picture()

    def reset(self) -> None:
        """Train on all of the picture again, from its middle."""
        self._crop(None)

    def toggle_thirds(self) -> None:
        """Show the lines of thirds, or not."""
        self.canvas.thirds = not self.canvas.thirds
        self.canvas.update()

    def undo(self) -> None:
        """Take the last crop back."""
        self._steps.undo()

    def redo(self) -> None:
        """Make it again."""
        self._steps.redo()

    def _crop(self, frame: Crop | None) -> None:
        picture = self.picture
        edit = crop_to(picture, frame) if picture else None
        if edit:
            self._steps.do(edit)
        else:
            self._tell()

    def _choose_shape(self, row: int) -> None:
        picture, shape = self.picture, self.shape.itemData(row)
        if picture and picture.width and picture.height and shape:
            self._crop(largest(picture.width, picture.height, tuple(shape)))

    # What is shown

    def _altered(self, altered: Altered) -> None:
        picture = self.picture
        if picture and picture.id in altered.altered and altered.what & {"crop", "size", "file"}:
            self._tell()

    def _tell_steps(self, _: None = None) -> None:
        self.actions_by_name["undo"].setEnabled(self._steps.can_undo)
        self.actions_by_name["redo"].setEnabled(self._steps.can_redo)

    def _show_picture(self) -> None:
        picture = self.picture
        self.canvas.show_picture(picture.id if picture else None)
        self._tell()

    def _shown(self, crop: Crop | None) -> Shown | None:
        picture = self.picture
        if picture is None or not picture.width or not picture.height:
            return None
        return shown_of(picture.width, picture.height, crop, self._recipe)

    def _follow(self) -> None:
        """Say what the frame leaves out while it is held."""
        shown = self._shown(self.canvas.frame)
        if shown:
            self.facts.setText(self._facts(shown))

    def _tell(self) -> None:
        picture = self.picture
        shown = self._shown(picture.crop if picture else None)
        self.canvas.show_frame(shown.frame if shown else None)
        self._tell_place()
        self.facts.setText(self._facts(shown) if shown else self.tr("Too small for any shape, or not to be read."))
        self.canvas.setAccessibleDescription(self.facts.text())
        self.reset_button.setEnabled(picture is not None and picture.crop is not None)
        self._fill_shapes(shown)

    def _facts(self, shown: Shown) -> str:
        number = QLocale()
        parts = [f"{shown.bucket[0]} × {shown.bucket[1]}"]
        parts.append(self.tr("{share} % outside").format(share=number.toString(100 * shown.lost, "f", 0)))
        if shown.enlarged > 1.02:
            parts.append(self.tr("enlarged {factor} times").format(factor=number.toString(shown.enlarged, "f", 2)))
        return "   ·   ".join(parts)

    def _fill_shapes(self, shown: Shown | None) -> None:
        """Offer the shapes that the dataset has already: pictures of one shape are batched together."""
        shapes = {cast("tuple[int, int]", shape) for shape in self._session.health.files.all("bucket")}
        shapes |= {shown.bucket} if shown else set()
        ordered = sorted(shapes, key=lambda shape: (-shape[0] / shape[1], shape))
        self.shape.blockSignals(True)
        self.shape.clear()
        for width, height in ordered:
            self.shape.addItem(f"{width} × {height}", (width, height))
        self.shape.setCurrentIndex(ordered.index(shown.bucket) if shown else -1)
        self.shape.blockSignals(False)

    # Building

    def _build(self) -> None:
        self.shape.setAccessibleName(self.tr("Shape"))
        self.shape.activated.connect(self._choose_shape)
        self.canvas.pulled.connect(self._follow)
        self.canvas.framed.connect(lambda: self._crop(self.canvas.frame))
        label = QLabel(self.tr("Shape"))
        label.setProperty("role", "muted")
        bar = QHBoxLayout()
        bar.setSpacing(8)
        bar.setContentsMargins(10, 8, 10, 6)
        bar.addWidget(label)
        bar.addWidget(self.shape)
        bar.addSpacing(12)
        bar.addWidget(self.facts, 1)
        for name, icon, text, key, run in (
            ("thirds", "grid", self.tr("Thirds"), "T", self.toggle_thirds),
            ("undo", "undo", self.tr("Undo"), "Ctrl+Z", self.undo),
            ("redo", "redo", self.tr("Redo"), "Ctrl+Shift+Z", self.redo),
            ("previous", "left", self.tr("Previous picture"), "PgUp", lambda: self.step(-1)),
            ("next", "right", self.tr("Next picture"), "PgDown", lambda: self.step(1)),
        ):
            bar.addWidget(self._button(self._action(name, icon, text, key, run)))
        self.name.setProperty("role", "muted")
        self.reset_button.setText(self.tr("Back to the middle"))
        self.reset_button.clicked.connect(self.reset)
        self.done_button.setText(self.tr("Done"))
        self.done_button.clicked.connect(self.accept)
        self.done_button.setDefault(True)
        foot = QHBoxLayout()
        foot.setContentsMargins(12, 8, 12, 10)
        foot.setSpacing(8)
        foot.addWidget(self.name, 1)
        foot.addWidget(self.reset_button)
        foot.addWidget(self.done_button)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addLayout(bar)
        column.addWidget(self.canvas, 1)
        column.addLayout(foot)
        self.canvas.setFocus()
