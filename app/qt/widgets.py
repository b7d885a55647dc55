"""Widgets and helpers that the pages share; safe for untrusted text and images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from html import escape
from pathlib import Path

from PySide6.QtCore import (
    QCoreApplication,
    QDateTime,
    QLibraryInfo,
    QLocale,
    QObject,
    QPoint,
    QProcess,
    QRect,
    QSize,
    Qt,
    QTranslator,
    QUrl,
)
from PySide6.QtGui import QDesktopServices, QImage, QPainter, QPaintEvent, QPixmap, QWheelEvent
from PySide6.QtWidgets import (
    QComboBox,
    QDateTimeEdit,
    QDialog,
    QDialogButtonBox,
    QDoubleSpinBox,
    QLabel,
    QLayout,
    QLayoutItem,
    QSizePolicy,
    QSlider,
    QSpinBox,
    QStyleOption,
    QToolButton,
    QVBoxLayout,
    QWidget,
)
from shiboken6 import isValid

from app.core.pixels import Pixels
from app.core.words import QT_TRANSLATE_NOOP
from trainer.protocol.text import parts, size

_APP = "impasto"


class ComboBox(QComboBox):
    """Combo box that ignores the mouse wheel unless it has the focus."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)  # Qt's default also focuses on wheel events

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Select the next or previous value, but only if the combo box has the focus."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class SpinBox(QSpinBox):
    """Spin box that ignores the mouse wheel unless it has the focus."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Step the number, but only if the spin box has the focus."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class DoubleSpinBox(QDoubleSpinBox):
    """Spin box for decimals that ignores the mouse wheel unless it has the focus."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Step the number, but only if the spin box has the focus."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class Slider(QSlider):
    """Slider that ignores the mouse wheel unless it has the focus."""

    def __init__(self, orientation: Qt.Orientation, parent: QWidget | None = None) -> None:
        super().__init__(orientation, parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Move the handle, but only if the slider has the focus."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class DateTimeEdit(QDateTimeEdit):
    """Date and time field that ignores the mouse wheel unless it has the focus."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Step the section under the cursor, but only if the field has the focus."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


def plain_label(role: str = "") -> QLabel:
    """Return a label for any text: never parsed as HTML, word-wrapped and selectable."""
    label = QLabel()
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setWordWrap(True)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    if role:
        label.setProperty("role", role)
    return label


def set_message(label: QLabel, text: str, role: str | None = None) -> None:
    """Set a label's text, and its role if given; hide the label if the text is empty."""
    if role is not None and label.property("role") != role:
        label.setProperty("role", role)
        label.style().polish(label)  # Qt does not restyle on property changes
    label.setText(text)
    label.setVisible(bool(text))


def icon_label(side: int) -> QToolButton:
    """Return a non-interactive widget for an icon `side` logical px wide; `set_icon` sets the icon."""
    place = QToolButton()
    place.setIconSize(QSize(side, side))
    place.setFocusPolicy(Qt.FocusPolicy.NoFocus)
    place.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
    return place


def center(owner: QWidget, *parts: QWidget | int) -> None:
    """Lay out widgets in a column slightly above the middle; labels get the full width, other widgets their own.

    A number adds extra space between two parts, in logical px.
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


def raise_window(window: QWidget) -> None:
    """Bring a window to the front at its previous size, even if it was minimized or just closed."""
    window.show()
    window.setWindowState(window.windowState() & ~Qt.WindowState.WindowMinimized)
    window.raise_()
    window.activateWindow()


def while_alive(owner: QObject, callback: Callable[..., None]) -> Callable[..., None]:
    """Wrap a worker's callback so that it does nothing once `owner` is destroyed."""
    return lambda *answer: callback(*answer) if isValid(owner) else None


def until_destroyed(owner: QObject, *ends: Callable[[], None]) -> None:
    """Call the disconnect functions `ends` when `owner` is destroyed, because the session's events outlive widgets."""
    owner.destroyed.connect(lambda _=None: [end() for end in ends])


def to_image(pixels: Pixels) -> QImage:
    """Convert pixels to a QImage that owns its memory."""
    form = QImage.Format.Format_RGB888
    return QImage(pixels.rgb, pixels.width, pixels.height, 3 * pixels.width, form).copy()


def to_pixmap(pixels: Pixels, side: int, ratio: float) -> QPixmap:
    """Convert pixels to a pixmap that fits a square of `side` logical px at the device pixel ratio `ratio`."""
    image = to_image(pixels)
    edge = round(side * ratio)
    scaled = image.scaled(edge, edge, Qt.AspectRatioMode.KeepAspectRatio, Qt.TransformationMode.SmoothTransformation)
    pixmap = QPixmap.fromImage(scaled)
    pixmap.setDevicePixelRatio(ratio)
    return pixmap


def retain_size(widget: QWidget) -> None:
    """Keep a widget's space in the layout while it is hidden."""
    policy = widget.sizePolicy()
    policy.setRetainSizeWhenHidden(True)
    widget.setSizePolicy(policy)


def close_row(dialog: QDialog) -> QDialogButtonBox:
    """Return a button box whose Close button is not the default, so pressing Enter does not close the dialog."""
    row = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
    row.button(QDialogButtonBox.StandardButton.Close).setAutoDefault(False)
    row.rejected.connect(dialog.reject)
    return row


def format_duration(seconds: float) -> str:
    """Format a duration at a useful precision: "40 s", "12 min", "2 h 05 min", "3 d 4 h"."""
    days, hours, minutes, rest = parts(seconds)
    if days:
        return _tr("{days} d {hours} h").format(days=days, hours=hours)
    if hours:
        return _tr("{hours} h {minutes} min").format(hours=hours, minutes=f"{minutes:02d}")
    if minutes:
        return _tr("{minutes} min").format(minutes=minutes)
    return _tr("{seconds} s").format(seconds=rest)


def format_memory(count: float) -> str:
    """Format a memory size in the same units as the command line, powers of 1024: "593 MiB", "7.1 GiB"."""
    number, unit = size(count).split()
    return f"{QLocale().toString(float(number), 'f', len(number.partition('.')[2]))} {unit}"


def format_past(unix: float, now: float) -> str:
    """Format a past time: only the time if it is today, "yesterday" with the time, or else the date."""
    then, today = QDateTime.fromSecsSinceEpoch(int(unix)), QDateTime.fromSecsSinceEpoch(int(now)).date()
    at = QLocale().toString(then.time(), QLocale.FormatType.ShortFormat)
    days = then.date().daysTo(today)
    if days == 0:
        return at
    if days == 1:
        return _tr("yesterday {time}").format(time=at)
    return QLocale().toString(then.date(), QLocale.FormatType.ShortFormat)


def format_future(unix: float, now: float) -> str:
    """Format a future time: only the time if it is today, "tomorrow" with the time, or else date and time."""
    then, today = QDateTime.fromSecsSinceEpoch(int(unix)), QDateTime.fromSecsSinceEpoch(int(now)).date()
    at = QLocale().toString(then.time(), QLocale.FormatType.ShortFormat)
    days = today.daysTo(then.date())
    if days == 0:
        return at
    if days == 1:
        return _tr("tomorrow {time}").format(time=at)
    return QLocale().toString(then, QLocale.FormatType.ShortFormat)


def _tr(text: str) -> str:
    return QCoreApplication.translate("Durations", text)


class ElidedLabel(QLabel):
    """Plain-text label that is elided if there is not enough space."""

    def __init__(self, text: str = "", parent: QWidget | None = None) -> None:
        super().__init__(text, parent)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Preferred)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return a size with space for a few letters."""
        return QSize(min(60, super().sizeHint().width()), super().minimumSizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the elided text."""
        painter, option = QPainter(self), QStyleOption()
        option.initFrom(self)
        room = self.contentsRect()
        words = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, room.width())
        flags, enabled = int(Qt.AlignmentFlag.AlignVCenter), self.isEnabled()
        self.style().drawItemText(painter, room, flags, option.palette, enabled, words, self.foregroundRole())
        painter.end()


def flow(sizes: Sequence[QSize], width: int, gap: int, breaks: Collection[int] = ()) -> tuple[list[QRect], int]:
    """Arrange boxes of these sizes in rows; return their rectangles and the total height.

    The boxes at the indexes in `breaks` start a new row. Boxes wider than `width` are cut to it and get their own row.
    All values are in px.
    """
    places: list[QRect] = []
    x = y = row = 0
    for number, hint in enumerate(sizes):
        wide = min(hint.width(), width)
        if x and (x + wide > width or number in breaks):
            x, y = 0, y + row + (2 * gap if number in breaks else gap)
            row = 0
        places.append(QRect(QPoint(x, y), QSize(wide, hint.height())))
        x += wide + gap
        row = max(row, hint.height())
    return places, y + row


class FlowLayout(QLayout):
    """Layout that places widgets in rows and wraps them like words, so its height depends on its width."""

    def __init__(self, gap: int) -> None:
        super().__init__()
        self._items: list[QLayoutItem] = []
        self.setSpacing(gap)

    def addItem(self, item: QLayoutItem) -> None:  # noqa: N802
        """Append an item."""
        self._items.append(item)

    def count(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def itemAt(self, index: int) -> QLayoutItem | None:  # noqa: N802 - Qt asks beyond the end
        """Return the item at an index; None if the index is out of range."""
        return self._items[index] if 0 <= index < len(self._items) else None

    def takeAt(self, index: int) -> QLayoutItem | None:  # noqa: N802
        """Remove and return the item at an index; None if the index is out of range."""
        return self._items.pop(index) if 0 <= index < len(self._items) else None

    def expandingDirections(self) -> Qt.Orientation:  # noqa: N802
        """Return no directions: the layout takes no more space than it needs."""
        return Qt.Orientation(0)

    def hasHeightForWidth(self) -> bool:  # noqa: N802
        """Return True, because the height depends on the width."""
        return True

    def heightForWidth(self, width: int) -> int:  # noqa: N802
        """Return the height of all rows at this width."""
        around = self.contentsMargins()
        inner = width - around.left() - around.right()
        return self._places(inner)[1] + around.top() + around.bottom()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size of all visible items in a single row."""
        sizes = [item.sizeHint() for item in self._shown()]
        width = sum(size.width() for size in sizes) + self.spacing() * max(0, len(sizes) - 1)
        return self._with_margins(QSize(width, max((size.height() for size in sizes), default=0)))

    def minimumSize(self) -> QSize:  # noqa: N802
        """Return the largest minimum width and height of any visible item."""
        sizes = [item.minimumSize() for item in self._shown()]
        width, height = (max((getattr(size, side)() for size in sizes), default=0) for side in ("width", "height"))
        return self._with_margins(QSize(width, height))

    def setGeometry(self, place: QRect) -> None:  # noqa: N802
        """Place all items."""
        super().setGeometry(place)
        inside = place.marginsRemoved(self.contentsMargins())
        corner = QPoint(inside.left(), inside.top())
        for item, where in zip(self._shown(), self._places(inside.width())[0], strict=True):
            item.setGeometry(where.translated(corner))

    def _shown(self) -> list[QLayoutItem]:
        return [item for item in self._items if not item.isEmpty()]

    def _places(self, width: int) -> tuple[list[QRect], int]:
        """Return the items' rectangles and the total height; all items get the largest height, which aligns them."""
        sizes = [item.sizeHint() for item in self._shown()]
        height = max((size.height() for size in sizes), default=0)
        return flow([QSize(size.width(), height) for size in sizes], width, self.spacing())

    def _with_margins(self, size: QSize) -> QSize:
        around = self.contentsMargins()
        return size + QSize(around.left() + around.right(), around.top() + around.bottom())


FOLDER = Path(__file__).resolve().parents[1] / "i18n"


def languages() -> list[str]:
    """Return the codes of the available languages."""
    return sorted(path.stem.partition("_")[2] for path in FOLDER.glob(f"{_APP}_*.qm"))


def install_language(application: QCoreApplication, language: str) -> None:
    """Install the translations for a language ("system": the system's language), with English as the fallback.

    English has a translation file too, for its plural forms.
    """
    locale = QLocale.system() if language == "system" else QLocale(language)
    QLocale.setDefault(locale)
    qt = QLibraryInfo.path(QLibraryInfo.LibraryPath.TranslationsPath)
    _install(application, QLocale("en"), _APP, str(FOLDER))
    _install(application, locale, "qtbase", qt)
    if locale.language() != QLocale.Language.English:
        _install(application, locale, _APP, str(FOLDER))


def _install(application: QCoreApplication, locale: QLocale, name: str, folder: str) -> None:
    translator = QTranslator(application)
    if translator.load(locale, name, "_", folder):
        application.installTranslator(translator)


def open_folder(folder: Path) -> bool:
    """Open a folder in the file manager; return whether the system accepted the request."""
    return QDesktopServices.openUrl(QUrl.fromLocalFile(str(folder)))


def reveal(file: Path) -> bool:
    """Show a file in the file manager, selected if possible; return whether the system accepted the request."""
    if sys.platform == "win32":
        return QProcess.startDetached("explorer.exe", ["/select,", str(file)])[0]
    if sys.platform == "darwin":
        return QProcess.startDetached("open", ["-R", str(file)])[0]
    return open_folder(file.parent)


def size_slider(sides: tuple[int, int], side: int, name: str) -> QSlider:
    """Return a slider for a size in logical px, between the two `sides`; `name` is its tooltip."""
    slider = Slider(Qt.Orientation.Horizontal)
    slider.setRange(*sides)
    slider.setSingleStep(8)
    slider.setPageStep(48)
    slider.setValue(side)
    slider.setFixedWidth(140)
    slider.setAccessibleName(name)
    slider.setToolTip(name)
    return slider


def plain_tip(text: str) -> str:
    """Return a tooltip that shows the text literally; otherwise Qt parses captions that look like HTML."""
    return f"<p style='white-space: pre-wrap'>{escape(text)}</p>" if text else ""


__all__ = ["QT_TRANSLATE_NOOP"]
