"""Small parts that rooms share, fit for what strangers wrote or drew."""

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
from trainer.protocol.text import parts

_OURS = "impasto"


class ComboBox(QComboBox):
    """Choose one of several values."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)  # Qt's default takes the focus when the wheel turns

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Choose the next value if focused."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class SpinBox(QSpinBox):
    """Choose a whole number."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Step the number if focused."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class DoubleSpinBox(QDoubleSpinBox):
    """Choose a decimal number."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Step the number if focused."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class Slider(QSlider):
    """Choose a number on a scale."""

    def __init__(self, orientation: Qt.Orientation, parent: QWidget | None = None) -> None:
        super().__init__(orientation, parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Move the handle if focused."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


class DateTimeEdit(QDateTimeEdit):
    """Choose a date and a time."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Step the section under the cursor if focused."""
        super().wheelEvent(event) if self.hasFocus() else event.ignore()


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


def close_row(dialog: QDialog) -> QDialogButtonBox:
    """Return a row whose one button closes a dialog in which Enter belongs to something else."""
    row = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
    row.button(QDialogButtonBox.StandardButton.Close).setAutoDefault(False)
    row.rejected.connect(dialog.reject)
    return row


def duration(seconds: float) -> str:
    """Word a length of time no finer than it tells something: "40 s", "12 min", "2 h 05 min", "3 d 4 h"."""
    days, hours, minutes, rest = parts(seconds)
    if days:
        return _tr("{days} d {hours} h").format(days=days, hours=hours)
    if hours:
        return _tr("{hours} h {minutes} min").format(hours=hours, minutes=f"{minutes:02d}")
    if minutes:
        return _tr("{minutes} min").format(minutes=minutes)
    return _tr("{seconds} s").format(seconds=rest)


def moment(unix: float, now: float) -> str:
    """Word a moment of the past: its time where it is of today, else its day too."""
    then, today = QDateTime.fromSecsSinceEpoch(int(unix)), QDateTime.fromSecsSinceEpoch(int(now)).date()
    at = QLocale().toString(then.time(), QLocale.FormatType.ShortFormat)
    days = then.date().daysTo(today)
    if days == 0:
        return at
    if days == 1:
        return _tr("yesterday {time}").format(time=at)
    return QLocale().toString(then.date(), QLocale.FormatType.ShortFormat)


def upcoming(unix: float, now: float) -> str:
    """Word a moment to come: its time where it is of today, else its day too."""
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


class Elided(QLabel):
    """Asks for the room that all of its text needs, and does with less; plain text only."""

    def __init__(self, text: str = "", parent: QWidget | None = None) -> None:
        super().__init__(text, parent)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Preferred)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return room for a few letters."""
        return QSize(min(60, super().sizeHint().width()), super().minimumSizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint what there is room for."""
        painter, option = QPainter(self), QStyleOption()
        option.initFrom(self)
        room = self.contentsRect()
        words = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, room.width())
        flags, enabled = int(Qt.AlignmentFlag.AlignVCenter), self.isEnabled()
        self.style().drawItemText(painter, room, flags, option.palette, enabled, words, self.foregroundRole())
        painter.end()


def flow(sizes: Sequence[QSize], width: int, gap: int, breaks: Collection[int] = ()) -> tuple[list[QRect], int]:
    """Return a place for each size and the height that all take; at the numbers in `breaks` a new row begins.

    What is wider than the width gets a row, and all of it. All in pixels.
    """
    places: list[QRect] = []
    x = y = row = 0
    for number, size in enumerate(sizes):
        wide = min(size.width(), width)
        if x and (x + wide > width or number in breaks):
            x, y = 0, y + row + (2 * gap if number in breaks else gap)
            row = 0
        places.append(QRect(QPoint(x, y), QSize(wide, size.height())))
        x += wide + gap
        row = max(row, size.height())
    return places, y + row


class FlowLayout(QLayout):
    """As wide as its widest widget at least, and as high as its rows are at the width that it gets."""

    def __init__(self, gap: int) -> None:
        super().__init__()
        self._items: list[QLayoutItem] = []
        self.setSpacing(gap)

    def addItem(self, item: QLayoutItem) -> None:  # noqa: N802
        """Put another thing at the end."""
        self._items.append(item)

    def count(self) -> int:
        """Return how many things there are."""
        return len(self._items)

    def itemAt(self, index: int) -> QLayoutItem | None:  # noqa: N802 - Qt asks beyond the end
        """Return one of them; None where there is none."""
        return self._items[index] if 0 <= index < len(self._items) else None

    def takeAt(self, index: int) -> QLayoutItem | None:  # noqa: N802
        """Take one out."""
        return self._items.pop(index) if 0 <= index < len(self._items) else None

    def expandingDirections(self) -> Qt.Orientation:  # noqa: N802
        """Take no more room than needed."""
        return Qt.Orientation(0)

    def hasHeightForWidth(self) -> bool:  # noqa: N802
        """Be the higher the narrower it is."""
        return True

    def heightForWidth(self, width: int) -> int:  # noqa: N802
        """Return how high all rows are."""
        around = self.contentsMargins()
        inner = width - around.left() - around.right()
        return self._places(inner)[1] + around.top() + around.bottom()

    def sizeHint(self) -> QSize:  # noqa: N802
        """One row, if there is room."""
        sizes = [item.sizeHint() for item in self._shown()]
        width = sum(size.width() for size in sizes) + self.spacing() * max(0, len(sizes) - 1)
        return self._with_margins(QSize(width, max((size.height() for size in sizes), default=0)))

    def minimumSize(self) -> QSize:  # noqa: N802
        """The widest thing alone."""
        sizes = [item.minimumSize() for item in self._shown()]
        width, height = (max((getattr(size, side)() for size in sizes), default=0) for side in ("width", "height"))
        return self._with_margins(QSize(width, height))

    def setGeometry(self, place: QRect) -> None:  # noqa: N802
        """Lay all out."""
        super().setGeometry(place)
        inside = place.marginsRemoved(self.contentsMargins())
        corner = QPoint(inside.left(), inside.top())
        for item, where in zip(self._shown(), self._places(inside.width())[0], strict=True):
            item.setGeometry(where.translated(corner))

    def _shown(self) -> list[QLayoutItem]:
        return [item for item in self._items if not item.isEmpty()]

    def _places(self, width: int) -> tuple[list[QRect], int]:
        """Return where all stand, each as high as the highest: so they stand on one line."""
        sizes = [item.sizeHint() for item in self._shown()]
        height = max((size.height() for size in sizes), default=0)
        return flow([QSize(size.width(), height) for size in sizes], width, self.spacing())

    def _with_margins(self, size: QSize) -> QSize:
        around = self.contentsMargins()
        return size + QSize(around.left() + around.right(), around.top() + around.bottom())


FOLDER = Path(__file__).resolve().parents[1] / "i18n"


def languages() -> list[str]:
    """Return the codes of the languages that the app speaks."""
    return sorted(path.stem.partition("_")[2] for path in FOLDER.glob(f"{_OURS}_*.qm"))


def speak(application: QCoreApplication, language: str) -> None:
    """Load the words of a language ("system": the system's); English where there are none.

    English has a translation as well: its plural forms.
    """
    locale = QLocale.system() if language == "system" else QLocale(language)
    QLocale.setDefault(locale)
    qt = QLibraryInfo.path(QLibraryInfo.LibraryPath.TranslationsPath)
    _install(application, QLocale("en"), _OURS, str(FOLDER))
    _install(application, locale, "qtbase", qt)
    if locale.language() != QLocale.Language.English:
        _install(application, locale, _OURS, str(FOLDER))


def _install(application: QCoreApplication, locale: QLocale, name: str, folder: str) -> None:
    translator = QTranslator(application)
    if translator.load(locale, name, "_", folder):
        application.installTranslator(translator)


def open_folder(folder: Path) -> bool:
    """Open a folder; tell whether the system could be asked to."""
    return QDesktopServices.openUrl(QUrl.fromLocalFile(str(folder)))


def reveal(file: Path) -> bool:
    """Open the folder of a file with the file selected, where the system can; else the folder alone."""
    if sys.platform == "win32":
        return QProcess.startDetached("explorer.exe", ["/select,", str(file)])[0]
    if sys.platform == "darwin":
        return QProcess.startDetached("open", ["-R", str(file)])[0]
    return open_folder(file.parent)


def size_slider(sides: tuple[int, int], side: int, name: str) -> QSlider:
    """Return a slider from the smaller to the larger of `sides`, in Qt's pixels; `name` says what has that size."""
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
    """Return a tip that shows a text as it stands: Qt takes what looks like HTML for HTML, a caption's tags too."""
    return f"<p style='white-space: pre-wrap'>{escape(text)}</p>" if text else ""


__all__ = ["QT_TRANSLATE_NOOP"]
