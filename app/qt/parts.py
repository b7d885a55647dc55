"""Small parts that rooms share, fit for what strangers wrote or drew."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, QSize, Qt
from PySide6.QtGui import QImage, QPixmap
from PySide6.QtWidgets import QLabel, QToolButton, QVBoxLayout, QWidget
from shiboken6 import isValid

from app.core.pixels import Pixels


def plain_label(role: str = "") -> QLabel:
    """Return a label for any text: never read as HTML, wrapped, and to be copied from."""
    label = QLabel()
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setWordWrap(True)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    if role:
        label.setProperty("role", role)
    return label


def say(label: QLabel, text: str, role: str | None = None) -> None:
    """Show a text, in the colour of a role if one is given; without a text the label takes no room."""
    if role is not None and label.property("role") != role:
        label.setProperty("role", role)
        label.style().polish(label)  # a look by property is looked up again only when asked
    label.setText(text)
    label.setVisible(bool(text))


def sign(side: int) -> QToolButton:
    """Return a place for an icon that is only looked at, `side` of Qt's pixels wide and high; `set_icon` fills it."""
    place = QToolButton()
    place.setIconSize(QSize(side, side))
    place.setFocusPolicy(Qt.FocusPolicy.NoFocus)
    place.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
    return place


def centre(owner: QWidget, *parts: QWidget | int) -> None:
    """Fill a widget with a column a little above its middle: labels across it, all else as wide as it needs.

    A number is room between two parts, in Qt's pixels, besides what lies between any two.
    """
    column = QVBoxLayout(owner)
    column.setContentsMargins(24, 24, 24, 24)
    column.setSpacing(10)
    column.addStretch(2)
    for part in parts:
        if isinstance(part, int):
            column.addSpacing(part)
        elif isinstance(part, QLabel):
            part.setWordWrap(True)
            part.setTextFormat(Qt.TextFormat.PlainText)
            part.setAlignment(Qt.AlignmentFlag.AlignCenter)
            column.addWidget(part)
        else:
            column.addWidget(part, 0, Qt.AlignmentFlag.AlignHCenter)
    column.addStretch(3)


def come_forward(window: QWidget) -> None:
    """Show a window over those of other programs, as large as it was; one that was closed just now too."""
    window.show()
    window.setWindowState(window.windowState() & ~Qt.WindowState.WindowMinimized)
    window.raise_()
    window.activateWindow()


def while_there(owner: QObject, have: Callable[..., None]) -> Callable[..., None]:
    """Let a worker's answer go that comes when who wanted it is gone."""
    return lambda *answer: have(*answer) if isValid(owner) else None


def until_destroyed(owner: QObject, *ends: Callable[[], None]) -> None:
    """End what `connect` of our own events returned when who listens goes: the session outlives every widget."""
    owner.destroyed.connect(lambda _=None: [end() for end in ends])


def image_of(pixels: Pixels) -> QImage:
    """Return a picture as Qt has it, with memory of its own."""
    form = QImage.Format.Format_RGB888
    return QImage(pixels.rgb, pixels.width, pixels.height, 3 * pixels.width, form).copy()


def pixmap_of(pixels: Pixels, side: int, ratio: float) -> QPixmap:
    """Return a picture to fit a square of `side` of Qt's pixels, sharp on a screen of that ratio."""
    image = image_of(pixels)
    edge = round(side * ratio)
    scaled = image.scaled(edge, edge, Qt.AspectRatioMode.KeepAspectRatio, Qt.TransformationMode.SmoothTransformation)
    pixmap = QPixmap.fromImage(scaled)
    pixmap.setDevicePixelRatio(ratio)
    return pixmap


def keep_room(widget: QWidget) -> None:
    """Let nothing move when it is hidden."""
    policy = widget.sizePolicy()
    policy.setRetainSizeWhenHidden(True)
    widget.setSizePolicy(policy)
