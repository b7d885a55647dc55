"""Comparison of two samples: overlaid with a movable divider, or side by side."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QPointF, QRect, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QPen, QRegion, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QLabel, QSizePolicy, QVBoxLayout, QWidget

from app.core.library import LibraryImage
from app.core.session import Session
from app.qt.images.zoom import Zoom, ZoomArea
from app.qt.theme import colors
from app.qt.widgets import Slider

_GRIP = 22
_GAP = 4
_ENLARGED = 4.0
_FINE = 1000
_ARROWS = {
    Qt.Key.Key_Left: (0, -1),
    Qt.Key.Key_Right: (0, 1),
    Qt.Key.Key_Up: (-1, 0),
    Qt.Key.Key_Down: (1, 0),
}


class Stage(QWidget):
    """Two images that pan and zoom together, the first to the left of the divider, the second to its right.

    Both fill the same area. A mask hides the part of the second image to the left of the divider, so that the
    first image is visible there and receives mouse events.
    """

    moved = Signal(float)
    """New position of the divider, as a fraction of the width."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.zoom = Zoom(self)
        self.first, self.second = (ZoomArea(session, self.zoom, self) for _ in range(2))
        self.line = _DividerLine(self)
        self.part = 0.5
        """Position of the divider, as a fraction of the width."""
        self.side_by_side = False
        """Whether the images are shown side by side, without a divider."""
        self.alone = False
        """Whether only the second image is shown."""
        for area in (self.first, self.second):
            area.fits_up_to = _ENLARGED
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setMinimumSize(120, 120)

    def set_part(self, part: float) -> None:
        """Move the divider to a fraction of the width."""
        part = max(0.0, min(1.0, part))
        if part != self.part:
            self.part = part
            self.arrange()
            self.moved.emit(part)

    def arrange(self) -> None:
        """Update the geometry, mask and visibility of the images and the divider."""
        whole = self.rect()
        half = (whole.width() - _GAP) // 2
        side_by_side = self.side_by_side and not self.alone
        self.first.setVisible(not self.alone)
        self.first.setGeometry(QRect(0, 0, half, whole.height()) if side_by_side else whole)
        self.second.setGeometry(QRect(half + _GAP, 0, half, whole.height()) if side_by_side else whole)
        self.line.setVisible(not side_by_side and not self.alone)
        if self.line.isVisibleTo(self):
            x = round(self.part * whole.width())
            # Qt treats an empty mask as no mask, so use one pixel outside the widget.
            shown = QRect(x, 0, whole.width() - x, whole.height()) if x < whole.width() else QRect(-1, -1, 1, 1)
            self.second.setMask(QRegion(shown))
            self.line.setGeometry(x - _GRIP // 2, 0, _GRIP, whole.height())
            self.line.raise_()
        else:
            self.second.clearMask()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Update the layout for the new size."""
        super().resizeEvent(event)
        self.arrange()


class _DividerLine(QWidget):
    """Divider that the user drags across the images."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._stage = stage
        self.setCursor(Qt.CursorShape.SplitHCursor)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint a line that is visible on light and dark images, with a grip in the middle."""
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        across, middle = self.width() / 2, self.height() / 2
        for width, color in ((3.0, colors().base), (1.0, colors().text)):
            painter.setPen(QPen(QColor(color), width))
            painter.drawLine(QPointF(across, 0), QPointF(across, self.height()))
        painter.setPen(QPen(QColor(colors().text), 1.0))
        painter.setBrush(QColor(colors().raised))
        painter.drawEllipse(QRectF(across - 8, middle - 8, 16, 16))
        for left in (-2.5, 2.5):
            painter.drawLine(QPointF(across + left, middle - 3), QPointF(across + left, middle + 3))
        painter.end()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Move the divider to the mouse while the left button is pressed."""
        if event.buttons() & Qt.MouseButton.LeftButton:
            place = self.mapTo(self._stage, event.position())
            self._stage.set_part(place.x() / max(1, self._stage.width()))


class SampleCompare(QWidget):
    """Comparison of two samples, with their titles and a slider that moves the divider."""

    moved = Signal(int, int)
    """Number of rows and columns by which the user wants to move the selection."""
    left = Signal()

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.stage = Stage(session)
        self.slider = Slider(Qt.Orientation.Horizontal)
        self.slider.setRange(0, _FINE)
        self.slider.setValue(_FINE // 2)
        self.slider.setAccessibleName(self.tr("Visible part of the first sample"))
        self.first, self.second = QLabel(), QLabel()
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(self.tr("Comparison of samples"))
        self._lay_out()
        self.slider.valueChanged.connect(lambda value: self.stage.set_part(value / _FINE))
        self.stage.moved.connect(lambda part: self.slider.setValue(round(part * _FINE)))
        for area in (self.stage.first, self.stage.second):
            area.pressed.connect(self.setFocus)

    @property
    def side_by_side(self) -> bool:
        """Whether the samples are side by side."""
        return self.stage.side_by_side

    def set_side_by_side(self, on: bool) -> None:
        """Arrange the samples side by side, or overlay them."""
        self.stage.side_by_side = on
        self._arrange()

    def show_samples(
        self,
        images: Mapping[int, LibraryImage],
        first: tuple[LibraryImage | None, str],
        second: tuple[LibraryImage | None, str],
    ) -> None:
        """Show two of `images` with their titles; show the second alone if the first is None or the same image."""
        self.stage.alone = first[0] is None or first[0] is second[0]
        for area, label, (image, words) in (
            (self.stage.first, self.first, first),
            (self.stage.second, self.second, second),
        ):
            area.images = images
            area.show_image(image.id if image else None)
            label.setText(words)
        self.setAccessibleDescription(second[1] if self.stage.alone else f"{first[1]} | {second[1]}")
        self._arrange()

    def _arrange(self) -> None:
        self.first.setVisible(not self.stage.alone)
        self.slider.setVisible(not self.stage.alone and not self.stage.side_by_side)
        across = Qt.AlignmentFlag.AlignHCenter if self.stage.alone else Qt.AlignmentFlag.AlignRight
        self.second.setAlignment(across | Qt.AlignmentFlag.AlignVCenter)
        self.stage.arrange()

    def _lay_out(self) -> None:
        row = QHBoxLayout()
        row.setContentsMargins(10, 4, 10, 4)
        row.setSpacing(12)
        for label in (self.first, self.second):
            label.setTextFormat(Qt.TextFormat.PlainText)
            label.setMinimumWidth(1)
        row.addWidget(self.first, 2)
        row.addWidget(self.slider, 3)
        row.addWidget(self.second, 2)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.stage, 1)
        column.addLayout(row)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Handle keys: arrows select other samples; +, - and Z zoom; Escape and Enter close the comparison."""
        key = event.key()
        if key in _ARROWS:
            self.moved.emit(*_ARROWS[Qt.Key(key)])
        elif key in (Qt.Key.Key_Plus, Qt.Key.Key_Equal):
            self.stage.second.zoom_by(1.25)
        elif key == Qt.Key.Key_Minus:
            self.stage.second.zoom_by(1 / 1.25)
        elif key == Qt.Key.Key_Z:
            self.stage.second.toggle_full()
        elif key in (Qt.Key.Key_Escape, Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.left.emit()
        else:
            super().keyPressEvent(event)
