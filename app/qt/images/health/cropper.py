"""Dialog for choosing which part of each image to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from PySide6.QtCore import QLocale, QPointF, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QKeyEvent, QMouseEvent, QPainter, QPainterPath, QPaintEvent, QPen, QWheelEvent
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.core.edits.history import UndoScope
from app.core.health.judging import CropPreview, crop_preview, crop_to, largest_frame, moved, scaled
from app.core.library import Crop, LibraryChange
from app.core.session import Session
from app.qt.images.dialogs import ImageStepDialog
from app.qt.images.zoom import Zoom, ZoomArea
from app.qt.theme import colors
from app.qt.widgets import ComboBox

_STEPS = {
    Qt.Key.Key_Left: (-1, 0),
    Qt.Key.Key_Right: (1, 0),
    Qt.Key.Key_Up: (0, -1),
    Qt.Key.Key_Down: (0, 1),
}
_STEP = 0.02
_GRIP = 14
"""Maximum distance at which the mouse can grab a corner, in logical px."""


class CropCanvas(ZoomArea):
    """Image with a crop frame.

    Dragging the frame or pressing the arrow keys (with Shift: by 1 px) moves it. Dragging a corner, turning the wheel
    or pressing + or - resizes it.
    """

    pulled = Signal()
    """Emitted when the frame changes while the user drags it."""
    framed = Signal()
    """Emitted when the user has changed the frame: at the end of a drag, or with a key or the wheel."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, Zoom(), parent)
        self.zoom.setParent(self)
        self.fits_up_to = 8.0
        self.margin = 24
        self.frame: Crop | None = None
        self.thirds = True
        self._corner: tuple[int, int] | None = None
        self._grab_point: QPointF | None = None
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setMouseTracking(True)
        self.setAccessibleName(self.tr("Crop"))
        self.setAccessibleDescription(self.tr("Arrow keys move the frame, plus and minus resize it"))

    def show_frame(self, frame: Crop | None) -> None:
        """Show the crop frame."""
        self.frame = frame
        self.update()

    def shift(self, across: float, down: float) -> None:
        """Move the frame by fractions of the image's width and height."""
        if self.frame:
            self.show_frame(moved(self.frame, across, down))

    def shrink(self, factor: float, anchor: tuple[float, float] = (0.5, 0.5)) -> None:
        """Scale the frame by a factor; the anchor, in fractions of the frame, stays in place."""
        size = self.full_size
        if self.frame and size:
            self.show_frame(scaled(self.frame, factor, (size.width(), size.height()), anchor))

    def rectangle(self) -> QRectF:
        """Return the frame's rectangle in widget coordinates."""
        whole, (left, top, right, bottom) = self.place(), self.frame or (0.0, 0.0, 1.0, 1.0)
        return QRectF(
            whole.x() + left * whole.width(),
            whole.y() + top * whole.height(),
            (right - left) * whole.width(),
            (bottom - top) * whole.height(),
        )

    # Events

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the image, shade the part outside the frame, and paint the frame and its thirds."""
        super().paintEvent(event)
        if self.frame is None:
            return
        painter, frame = QPainter(self), self.rectangle()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        outside = QPainterPath()
        outside.addRect(self.place())
        inside = QPainterPath()
        inside.addRect(frame)
        # Black and white are painted over the image, so they do not depend on the theme.
        painter.fillPath(outside.subtracted(inside), QColor(0, 0, 0, 165))
        if self.thirds:
            painter.setPen(QPen(QColor(255, 255, 255, 110), 1.0))
            for part in (1 / 3, 2 / 3):
                x, y = frame.x() + part * frame.width(), frame.y() + part * frame.height()
                painter.drawLine(QPointF(x, frame.top()), QPointF(x, frame.bottom()))
                painter.drawLine(QPointF(frame.left(), y), QPointF(frame.right(), y))
        for color, width in ((QColor(0, 0, 0, 190), 4.0), (QColor(255, 255, 255), 2.0)):
            painter.setPen(QPen(color, width))
            painter.drawRect(frame)
        painter.setPen(QPen(QColor(0, 0, 0, 190), 1.0))
        painter.setBrush(QColor(255, 255, 255))
        for spot in (frame.topLeft(), frame.topRight(), frame.bottomLeft(), frame.bottomRight()):
            painter.drawRect(QRectF(spot.x() - 4, spot.y() - 4, 8, 8))
        if self.hasFocus():
            painter.setPen(QPen(QColor(colors().focus), 2.0))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRect(QRectF(self.rect()).adjusted(1, 1, -1, -1))
        painter.end()

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Grab a corner or the frame."""
        self.setFocus()
        if event.button() == Qt.MouseButton.LeftButton and self.frame:
            self._corner, self._grab_point = self._corner_at(event.position()), event.position()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Move or resize the frame."""
        if self._grab_point is None:
            self._show_cursor(event.position())
            return
        whole, went = self.place(), event.position() - self._grab_point
        if self._corner is None:
            self.shift(went.x() / whole.width(), went.y() / whole.height())
        else:
            self._pull(event.position(), self._corner)
        self._grab_point = event.position()
        self.pulled.emit()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """End the drag."""
        if self._grab_point is not None:
            self._grab_point = self._corner = None
            self.framed.emit()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Treat a double click as a second press."""
        self.mousePressEvent(event)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Resize the frame."""
        self.shrink(1 / 1.06 if event.angleDelta().y() > 0 else 1.06)
        self.framed.emit()
        event.accept()

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Move or resize the frame."""
        key, size = Qt.Key(event.key()), self.full_size
        if key in _STEPS and size:
            fine = event.modifiers() & Qt.KeyboardModifier.ShiftModifier
            across, down = _STEPS[key]
            wide, high = (1 / size.width(), 1 / size.height()) if fine else (_STEP, _STEP)
            self.shift(across * wide, down * high)
        elif key in (Qt.Key.Key_Plus, Qt.Key.Key_Equal):
            self.shrink(1.04)
        elif key == Qt.Key.Key_Minus:
            self.shrink(1 / 1.04)
        else:
            super().keyPressEvent(event)
            return
        self.framed.emit()

    def _corner_at(self, spot: QPointF) -> tuple[int, int] | None:
        """Return the corner near a point as (0 left or 1 right, 0 top or 1 bottom); None if there is none."""
        frame = self.rectangle()
        for across, x in ((0, frame.left()), (1, frame.right())):
            for down, y in ((0, frame.top()), (1, frame.bottom())):
                if abs(spot.x() - x) <= _GRIP and abs(spot.y() - y) <= _GRIP:
                    return across, down
        return None

    def _pull(self, spot: QPointF, corner: tuple[int, int]) -> None:
        """Resize the frame: the corner follows the pointer, and the opposite corner stays in place."""
        frame = self.rectangle()
        opposite = QPointF(frame.left() if corner[0] else frame.right(), frame.top() if corner[1] else frame.bottom())
        across = (spot.x() - opposite.x()) * (1 if corner[0] else -1) / frame.width()
        down = (spot.y() - opposite.y()) * (1 if corner[1] else -1) / frame.height()
        anchor = 1 - corner[0], 1 - corner[1]
        self.shrink(min(max(across, down, 0.01), *self._room(anchor)), anchor)

    def _room(self, anchor: tuple[int, int]) -> tuple[float, float]:
        """Return the factors by which the frame can grow in width and height while the corner `anchor` stays fixed."""
        left, top, right, bottom = self.frame or (0.0, 0.0, 1.0, 1.0)
        across = (right if anchor[0] else 1.0 - left) / (right - left)
        return across, (bottom if anchor[1] else 1.0 - top) / (bottom - top)

    def _show_cursor(self, spot: QPointF) -> None:
        corner = self._corner_at(spot)
        if corner is not None:
            same = corner[0] == corner[1]
            self.setCursor(Qt.CursorShape.SizeFDiagCursor if same else Qt.CursorShape.SizeBDiagCursor)
        elif self.rectangle().contains(spot):
            self.setCursor(Qt.CursorShape.SizeAllCursor)
        else:
            self.unsetCursor()


class Cropper(ImageStepDialog):
    """Crop dialog.

    A crop is an edit in the history and never changes the image file; Undo affects only crops made in this dialog.
    """

    def __init__(
        self, session: Session, ids: Sequence[int], start: int | None = None, parent: QWidget | None = None
    ) -> None:
        super().__init__(session, ids, start, parent)
        self._recipe = session.health.target.recipe()
        self._steps = UndoScope(session.history)
        self.canvas = CropCanvas(session)
        self.facts, self.shape = QLabel(), ComboBox()
        self.reset_button, self.done_button = QPushButton(), QPushButton()
        self.setWindowTitle(self.tr("Crop"))
        self.resize(1100, 800)
        self._build()
        self._show_image()
        self._update_undo_actions()
        ends = (
            session.library.altered.connect(self._on_library_altered),
            session.history.changed.connect(self._update_undo_actions),
        )
        self.destroyed.connect(lambda: [end() for end in ends])

    def step(self, by: int) -> None:
        """Go to another image."""
        self._index = self._index_after(by)
        self._show_image()

    def reset(self) -> None:
        """Remove the crop; training then uses the centered default."""
        self._crop(None)

    def toggle_thirds(self) -> None:
        """Show or hide the rule-of-thirds lines."""
        self.canvas.thirds = not self.canvas.thirds
        self.canvas.update()

    def undo(self) -> None:
        """Undo the last crop."""
        self._steps.undo()

    def redo(self) -> None:
        """Redo the last undone crop."""
        self._steps.redo()

    def _crop(self, frame: Crop | None) -> None:
        image = self.image
        edit = crop_to(image, frame) if image else None
        if edit:
            self._steps.do(edit)
        else:
            self._update()

    def _on_shape_activated(self, row: int) -> None:
        image, shape = self.image, self.shape.itemData(row)
        if image and image.width and image.height and shape:
            self._crop(largest_frame(image.width, image.height, tuple(shape)))

    # Display

    def _on_library_altered(self, altered: LibraryChange) -> None:
        image = self.image
        if image and image.id in altered.altered and altered.what & {"crop", "size", "file"}:
            self._update()

    def _update_undo_actions(self, _: None = None) -> None:
        self.actions_by_name["undo"].setEnabled(self._steps.can_undo)
        self.actions_by_name["redo"].setEnabled(self._steps.can_redo)

    def _show_image(self) -> None:
        image = self.image
        self.canvas.show_image(image.id if image else None)
        self._update()

    def _shown(self, crop: Crop | None) -> CropPreview | None:
        image = self.image
        if image is None or not image.width or not image.height:
            return None
        return crop_preview(image.width, image.height, crop, self._recipe)

    def _on_pulled(self) -> None:
        """While the frame is dragged, show its bucket and the percentage of the image that is cropped off."""
        shown = self._shown(self.canvas.frame)
        if shown:
            self.facts.setText(self._facts(shown))

    def _update(self) -> None:
        image = self.image
        shown = self._shown(image.crop if image else None)
        self.canvas.show_frame(shown.frame if shown else None)
        self._update_position()
        self.facts.setText(
            self._facts(shown) if shown else self.tr("Image is too small for any bucket, or cannot be read.")
        )
        self.canvas.setAccessibleDescription(self.facts.text())
        self.reset_button.setEnabled(image is not None and image.crop is not None)
        self._fill_shapes(shown)

    def _facts(self, shown: CropPreview) -> str:
        number = QLocale()
        parts = [f"{shown.bucket[0]} × {shown.bucket[1]}"]
        parts.append(self.tr("{share}% cropped off").format(share=number.toString(100 * shown.lost, "f", 0)))
        if shown.enlarged > 1.02:
            parts.append(self.tr("enlarged {factor}×").format(factor=number.toString(shown.enlarged, "f", 2)))
        return "   ·   ".join(parts)

    def _fill_shapes(self, shown: CropPreview | None) -> None:
        """List the buckets that the dataset already uses, since images in the same bucket can be batched together."""
        shapes = {cast("tuple[int, int]", shape) for shape in self._session.health.image_index.all("bucket")}
        shapes |= {shown.bucket} if shown else set()
        ordered = sorted(shapes, key=lambda shape: (-shape[0] / shape[1], shape))
        self.shape.blockSignals(True)  # filling the list is not a user's choice
        self.shape.clear()
        for width, height in ordered:
            self.shape.addItem(f"{width} × {height}", (width, height))
        self.shape.setCurrentIndex(ordered.index(shown.bucket) if shown else -1)
        self.shape.blockSignals(False)

    # Building

    def _build(self) -> None:
        self.shape.setAccessibleName(self.tr("Bucket"))
        self.shape.activated.connect(self._on_shape_activated)
        self.canvas.pulled.connect(self._on_pulled)
        self.canvas.framed.connect(lambda: self._crop(self.canvas.frame))
        label = QLabel(self.tr("Bucket"))
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
            ("previous", "left", self.tr("Previous image"), "PgUp", lambda: self.step(-1)),
            ("next", "right", self.tr("Next image"), "PgDown", lambda: self.step(1)),
        ):
            bar.addWidget(self._button(self._action(name, icon, text, key, run)))
        self.name.setProperty("role", "muted")
        self.reset_button.setText(self.tr("Reset to center"))
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
