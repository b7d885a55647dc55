"""Dialog for painting masks, one image at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QActionGroup
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QSlider, QVBoxLayout, QWidget
from shiboken6 import isValid

from app.core.edits.backups import Written
from app.core.edits.masks import (
    LEFT_OUT,
    TRAINED,
    Mask,
    MaskChanged,
    OpenedMask,
    read_mask,
    remove_mask,
    state_of,
    write_mask,
)
from app.core.library import LibraryImage
from app.core.session import Session
from app.core.words import full_message
from app.qt.images.dialogs import ImageStepDialog
from app.qt.images.health.mask_canvas import MaskCanvas, Tool
from app.qt.widgets import Slider
from trainer.errors import ImpastoError

_Callback = Callable[[], None]


class MaskPainter(ImageStepDialog):
    """Mask dialog; saves when the user changes the image or closes the dialog, and backs up the old file."""

    def __init__(
        self, session: Session, ids: Sequence[int], start: int | None = None, parent: QWidget | None = None
    ) -> None:
        super().__init__(session, ids, start, parent)
        self.canvas = MaskCanvas(session)
        self.state: str | None = None
        """Hash of the mask file when it was read; None if it did not exist."""
        self.changed = self.busy = False
        self._overwrite = False
        self.message = QLabel()
        self.sliders: dict[str, QSlider] = {}
        self.remove_button, self.over_button = QPushButton(), QPushButton()
        self.discard_button, self.done_button = QPushButton(), QPushButton()
        self.setWindowTitle(self.tr("Mask"))
        self.resize(1100, 800)
        self._build()
        self._open()

    # User actions

    def select_tool(self, tool: Tool) -> None:
        """Select a tool."""
        self.canvas.tool = tool
        self.actions_by_name[tool].setChecked(True)
        self.canvas.update()

    def fill(self, value: int) -> None:
        """Fill the whole mask with a value."""
        self._change_mask(lambda mask: mask.fill(value))

    def invert(self) -> None:
        """Invert the mask."""
        self._change_mask(Mask.invert)

    def undo(self) -> None:
        """Undo the last stroke."""
        self._change_mask(Mask.undo)

    def redo(self) -> None:
        """Redo the last undone stroke."""
        self._change_mask(Mask.redo)

    def step(self, by: int) -> None:
        """Save and go to another image."""
        place = self._index_after(by)
        if place != self._index:
            self._save(lambda: self._show_index(place))

    def remove(self) -> None:
        """Remove the mask file, or clear the mask if it has no file; training then uses the whole image."""
        image, state, over = self.image, self.state, self._overwrite
        if image is None or state is None:
            self.fill(TRAINED)
            return
        path, root = image.path, image.folder.root
        backups = self._session.backups
        self._run(
            lambda: remove_mask(path, root, state, backups, over=over),
            lambda written: self._on_removed(image, written),
        )

    def discard(self) -> None:
        """Close without saving this mask."""
        self.changed = False
        super().reject()

    def reject(self) -> None:
        """Save and close; Escape and the window's close button also call this, so that nothing is lost."""
        self._save(super().reject)

    def accept(self) -> None:
        """Save and close."""
        self._save(super().accept)

    def overwrite(self) -> None:
        """Save even though another program has changed the file."""
        self._overwrite = True
        self._save(self._update_state)

    # Reading and writing

    def _open(self) -> None:
        image = self.image
        self.canvas.show_mask(None)
        self.canvas.show_image(image.id if image else None)
        self.changed = self._overwrite = False
        self._show_message("")
        self._update_state()
        if image is None or not image.width or not image.height:
            self._show_message(self.tr("Could not read this image, so you cannot paint a mask for it."))
            return
        path, width, height = image.path, image.width, image.height
        self._run(lambda: read_mask(path, width, height), self._on_mask_read)

    def _on_mask_read(self, opened: object) -> None:
        assert isinstance(opened, OpenedMask)
        self.state = opened.state
        self.canvas.show_mask(Mask(opened.pixels))
        if opened.stretched:
            self._show_message(self.tr("The mask's size differs from the image's; it was stretched to fit."))
        self._update_state()

    def _save(self, after: _Callback) -> None:
        image, mask = self.image, self.canvas.painting
        if self.busy:
            return
        if not self.changed or image is None or mask is None:
            after()
            return
        mask.end()
        path, root, pixels, state = image.path, image.folder.root, mask.pixels.copy(), self.state
        over, backups = self._overwrite, self._session.backups
        self.changed = False  # before the worker ends, so that strokes painted meanwhile count as changes
        self._run(
            lambda: write_mask(path, root, pixels, state, backups, over=over),
            lambda written: self._on_saved(image, written, after),
            self._on_save_failed,
        )

    def _on_save_failed(self) -> None:
        self.changed = True
        self._update_state()

    def _on_saved(self, image: LibraryImage, written: object, after: _Callback) -> None:
        assert isinstance(written, Written)
        self.state, self._overwrite = state_of(written.after), False
        self._session.rewriter.record(f"Paint the mask of {image.name}", image.folder.root, [written])
        self._show_message("")
        self._session.library.set_facts({image.id: {"mask": True}}, "mask")
        self._save(after)  # again if the user has painted meanwhile

    def _on_removed(self, image: LibraryImage, written: object) -> None:
        assert isinstance(written, Written)
        self._session.rewriter.record(f"Remove the mask of {image.name}", image.folder.root, [written])
        self._session.library.set_facts({image.id: {"mask": False}}, "mask")
        self._open()

    def _show_index(self, place: int) -> None:
        self._index = place
        self._open()

    def _run(self, work: Callable[[], object], done: Callable[[object], None], failed: _Callback | None = None) -> None:
        """Read or write a mask file on a worker; do nothing if the previous read or write is still running."""
        if self.busy:
            return
        self.busy = True

        def ended(result: object) -> None:
            if isValid(self):
                self.busy = False
                done(result)

        def on_failed(fault: BaseException) -> None:
            if not isValid(self):
                return
            self.busy = False
            if failed is not None:
                failed()
            if not isinstance(fault, ImpastoError):
                raise fault
            self.over_button.setVisible(isinstance(fault, MaskChanged))
            self._show_message(full_message(fault))

        self._session.tasks.run(work, ended, on_failed)

    def _change_mask(self, change: Callable[[Mask], None]) -> None:
        if self.canvas.painting is not None:
            change(self.canvas.painting)
            self._on_painted()

    def _on_painted(self) -> None:
        self.changed = True
        self.canvas.update()
        self._update_state()

    # Messages and state

    def _show_message(self, sentence: str) -> None:
        self.message.setText(sentence)
        self.message.setVisible(bool(sentence))
        if not sentence:
            self.over_button.hide()

    def _update_state(self) -> None:
        mask = self.canvas.painting
        self._update_position()
        self.actions_by_name["undo"].setEnabled(mask is not None and mask.can_undo)
        self.actions_by_name["redo"].setEnabled(mask is not None and mask.can_redo)
        self.remove_button.setEnabled(self.state is not None or self.changed)
        self.discard_button.setEnabled(self.changed)

    # Building

    def _build(self) -> None:
        bar = QHBoxLayout()
        bar.setContentsMargins(10, 8, 10, 6)
        bar.setSpacing(2)
        tools = QActionGroup(self)
        for name, icon, text, key in (
            ("brush", "brush", self.tr("Brush: include in training"), "B"),
            ("eraser", "eraser", self.tr("Eraser: exclude from training"), "E"),
            ("fill", "fill", self.tr("Fill area"), "G"),
        ):
            action = self._action(name, icon, text, key, lambda tool=name: self.select_tool(tool))
            action.setCheckable(True)
            tools.addAction(action)
            bar.addWidget(self._button(action))
        self.actions_by_name["brush"].setChecked(True)
        bar.addSpacing(14)
        for name, icon, text, key, run in (
            ("all", "check", self.tr("Include all"), "Ctrl+A", lambda: self.fill(TRAINED)),
            ("none", "close", self.tr("Exclude all"), "Ctrl+Shift+A", lambda: self.fill(LEFT_OUT)),
            ("invert", "invert", self.tr("Invert"), "Ctrl+I", self.invert),
            ("undo", "undo", self.tr("Undo"), "Ctrl+Z", self.undo),
            ("redo", "redo", self.tr("Redo"), "Ctrl+Shift+Z", self.redo),
            ("previous", "left", self.tr("Previous image"), "PgUp", lambda: self.step(-1)),
            ("next", "right", self.tr("Next image"), "PgDown", lambda: self.step(1)),
        ):
            bar.addWidget(self._button(self._action(name, icon, text, key, run)))
            if name in ("invert", "redo"):
                bar.addSpacing(14)
        bar.addStretch(1)
        canvas = self.canvas
        bar.addWidget(self._slider("size", self.tr("Size"), 1, 300, canvas.radius, canvas.resize_brush))
        bar.addWidget(
            self._slider(
                "hardness", self.tr("Hardness"), 0, 100, round(100 * canvas.hardness), self._on_hardness_changed
            )
        )
        bar.addWidget(
            self._slider("opacity", self.tr("Overlay"), 10, 100, round(100 * canvas.opacity), self._on_opacity_changed)
        )
        canvas.sized.connect(self.sliders["size"].setValue)
        canvas.painted.connect(self._on_painted)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addLayout(bar)
        column.addWidget(canvas, 1)
        column.addLayout(self._build_foot())
        canvas.setFocus()

    def _build_foot(self) -> QVBoxLayout:
        self.name.setProperty("role", "muted")
        self.message.setProperty("role", "warning")
        self.message.setWordWrap(True)
        hint = QLabel(self.tr("Tinted areas are excluded from training."))
        hint.setProperty("role", "muted")
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.name)
        row.addSpacing(12)
        row.addWidget(hint, 1)
        for button, text, run in (
            (self.over_button, self.tr("Overwrite"), self.overwrite),
            (self.remove_button, self.tr("Remove mask"), self.remove),
            (self.discard_button, self.tr("Close without saving"), self.discard),
            (self.done_button, self.tr("Done"), self.accept),
        ):
            button.setText(text)
            button.clicked.connect(run)
            button.setAutoDefault(button is self.done_button)
            row.addWidget(button)
        self.done_button.setDefault(True)
        self.over_button.hide()
        foot = QVBoxLayout()
        foot.setContentsMargins(12, 8, 12, 10)
        foot.addWidget(self.message)
        foot.addLayout(row)
        return foot

    def _slider(self, name: str, text: str, low: int, high: int, value: int, changed: Callable[[int], None]) -> QWidget:
        slider, label = Slider(Qt.Orientation.Horizontal), QLabel(text)
        slider.setRange(low, high)
        slider.setValue(value)
        slider.setFixedWidth(96)
        slider.setAccessibleName(text)
        slider.valueChanged.connect(changed)
        label.setProperty("role", "muted")
        label.setBuddy(slider)
        self.sliders[name] = slider
        both = QWidget()
        row = QHBoxLayout(both)
        row.setContentsMargins(8, 0, 0, 0)
        row.addWidget(label)
        row.addWidget(slider)
        return both

    def _on_hardness_changed(self, percent: int) -> None:
        self.canvas.hardness = percent / 100

    def _on_opacity_changed(self, percent: int) -> None:
        self.canvas.opacity = percent / 100
        self.canvas.update()
