"""The strip of saved steps, each with its preview and validation loss; the best one is marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PySide6.QtCore import (
    QAbstractListModel,
    QItemSelectionModel,
    QLocale,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPointF,
    QRect,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QFont, QFontMetrics, QImage, QPainter, QPaintEvent, QPixmap, QResizeEvent
from PySide6.QtWidgets import QListView, QSizePolicy, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.core.after.export import Candidate
from app.core.pixels import Pixels, read_pixels
from app.core.session import Session
from app.core.tasks import reraise
from app.qt.theme import colors
from app.qt.tile_painting import panel, ring
from app.qt.widgets import plain_tip, to_image, while_alive

_SIDE = 132
_INSET = 8
_IMAGE_PIXELS = 2 * _SIDE  # longer side of a cached image in px: sharp on a 2x screen


def read_image(
    owner: QObject, session: Session, file: Path, done: Callable[[QImage], None], side: int = 0
) -> None:  # fmt: skip
    """Read an image on a worker and pass it to `done` if `owner` still exists.

    If the file is unreadable, `done` gets a null image. `side` limits the longer side in pixels; 0 keeps the size.
    Workers return only bytes, never Qt objects: PySide creates its types and enumerations lazily, and two threads
    doing so at the same time crash the process.
    """

    def on_pixels(pixels: Pixels | None) -> None:
        done(to_image(pixels) if pixels else QImage())

    session.tasks.run(lambda: read_pixels(file, side), while_alive(owner, on_pixels), reraise, kept=False)


def paint_fitting(painter: QPainter, room: QRect, image: QImage, ratio: float) -> None:
    """Paint an image centered in `room`, as large as possible but enlarged at most four times."""
    size = QSize(image.size()).scaled(room.size(), Qt.AspectRatioMode.KeepAspectRatio)
    size = size.boundedTo(image.size() * 4)
    place = QRect(room.topLeft(), size)
    place.moveCenter(room.center())
    mode = Qt.TransformationMode.SmoothTransformation
    scaled = image.scaled(size * ratio, Qt.AspectRatioMode.IgnoreAspectRatio, mode)
    scaled.setDevicePixelRatio(ratio)
    painter.drawImage(place.topLeft(), scaled)


class ImageView(QWidget):
    """Widget that shows an image scaled to fit, or a sentence if there is none."""

    def __init__(self, session: Session, sentence: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._sentence = sentence
        self._image = QImage()
        self._scaled: tuple[tuple[int, int, float], QPixmap] | None = None
        self.file: Path | None = None
        """File of the image that is shown or being read."""
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setMinimumSize(160, 160)

    @property
    def shows(self) -> bool:
        """Whether an image is shown."""
        return not self._image.isNull()

    def show_file(self, file: Path | None) -> None:
        """Show an image, keeping the previous one until the file is read; None shows the sentence."""
        self.file = file
        if file is None:
            self._take(None, QImage())
        else:
            read_image(self, self._session, file, lambda image: self._take(file, image))

    def _take(self, file: Path | None, image: QImage) -> None:
        if file == self.file:
            self._image, self._scaled = image, None
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the image centered."""
        painter = QPainter(self)
        painter.fillRect(self.rect(), colors().base)
        if self._image.isNull():
            painter.setPen(colors().muted)
            room = self.rect().adjusted(16, 16, -16, -16)
            painter.drawText(room, Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap, self._sentence)
            return
        key = (self.width(), self.height(), self.devicePixelRatioF())
        if self._scaled is None or self._scaled[0] != key:
            self._scaled = key, self._fitting()
        painter.drawPixmap(0, 0, self._scaled[1])

    def _fitting(self) -> QPixmap:
        ratio = self.devicePixelRatioF()
        whole = QPixmap(self.size() * ratio)
        whole.setDevicePixelRatio(ratio)
        whole.fill(Qt.GlobalColor.transparent)
        painter = QPainter(whole)
        paint_fitting(painter, self.rect(), self._image, ratio)
        painter.end()
        return whole


_Index = QModelIndex | QPersistentModelIndex


class Candidates(QAbstractListModel):
    """List model of a run's saved steps; previews are read on demand."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._images: dict[Path, QImage | None] = {}
        self.all: list[Candidate] = []
        self.prompt = 0

    def show(self, found: Sequence[Candidate], prompt: int) -> None:
        """Replace the candidates and show their previews of the prompt at index `prompt`."""
        self.beginResetModel()
        self.all, self.prompt = list(found), prompt
        self.endResetModel()

    def rowCount(self, parent: _Index | None = None) -> int:  # noqa: N802
        """Return the number of candidates."""
        return 0 if parent is not None and parent.isValid() else len(self.all)

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        """Return a candidate's title, or its description for tooltips and screen readers."""
        candidate = self.all[index.row()]
        if role == Qt.ItemDataRole.DisplayRole:
            return self.title(candidate)
        if role in (Qt.ItemDataRole.AccessibleTextRole, Qt.ItemDataRole.ToolTipRole):
            words = [self.title(candidate), self.loss(candidate), self.mark(candidate), candidate.file.name]
            sentence = ", ".join(word for word in words if word)
            return plain_tip(sentence) if role == Qt.ItemDataRole.ToolTipRole else sentence
        return None

    def title(self, candidate: Candidate) -> str:
        """Return a candidate's title."""
        words = self.tr("Step {step} (EMA)") if candidate.ema else self.tr("Step {step}")
        return words.format(step=QLocale().toString(candidate.step))

    def loss(self, candidate: Candidate) -> str:
        """Return a candidate's loss at fixed noise in words, or "" if it was not measured."""
        if candidate.loss is None:
            return ""
        words = self.tr("val. loss {loss}") if candidate.held_out else self.tr("training images {loss}")
        return words.format(loss=QLocale().toString(candidate.loss, "f", 4))

    def mark(self, candidate: Candidate) -> str:
        """Return "Best", "Lowest loss" or "Last" in the user's language, or "" for other candidates."""
        if candidate.best:
            return self.tr("Best") if candidate.held_out else self.tr("Lowest loss")
        return self.tr("Last") if candidate.last else ""

    def image(self, candidate: Candidate) -> QImage | None:
        """Return a candidate's preview; None while it is being read or if it has none."""
        file = candidate.images.get(self.prompt)
        if file is None:
            return None
        if file not in self._images:
            self._images[file] = None  # so that repaints in the meantime do not read the file again
            read_image(self, self._session, file, lambda image: self._take(file, image), _IMAGE_PIXELS)
        return self._images[file]

    def _take(self, file: Path, image: QImage) -> None:
        self._images[file] = None if image.isNull() else image
        for row, candidate in enumerate(self.all):
            if candidate.images.get(self.prompt) == file:
                self.dataChanged.emit(self.index(row), self.index(row))


class _CandidateDelegate(QStyledItemDelegate):
    """Delegate that paints a candidate's preview, step and loss."""

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:  # noqa: N802
        """Return the size of a cell."""
        return QSize(_SIDE + 2 * _INSET, _SIDE + 2 * _INSET + 2 * QFontMetrics(option.font).lineSpacing() + 4)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        """Paint one candidate."""
        model = index.model()
        assert isinstance(model, Candidates)
        candidate, state = model.all[index.row()], option.state
        selected = bool(state & QStyle.StateFlag.State_Selected)
        cell = option.rect.adjusted(2, 2, -2, -2)
        cell.setHeight(
            min(cell.height(), self.sizeHint(option, index).height() - 4)
        )  # the view stretches cells to its own height
        painter.save()
        if selected:
            panel(painter, QRectF(cell), colors().accent)
        room = QRect(cell.left() + _INSET - 2, cell.top() + _INSET - 2, _SIDE, _SIDE)
        self._image(painter, room, model, candidate)
        self._mark(painter, room, option.font, model.mark(candidate), best=candidate.best)
        line = QFontMetrics(option.font).lineSpacing()
        words = QRect(room.left(), room.bottom() + 5, room.width(), line)
        bold = QFont(option.font)
        bold.setBold(True)
        painter.setFont(bold)
        painter.setPen(QColor(colors().on_accent if selected else colors().text))
        painter.drawText(words, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, model.title(candidate))
        painter.setFont(option.font)
        painter.setPen(QColor(colors().on_accent if selected else colors().muted))
        below = words.translated(0, line)
        painter.drawText(below, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, model.loss(candidate))
        if state & QStyle.StateFlag.State_HasFocus:
            ring(painter, cell, selected=selected)
        painter.restore()

    def _image(self, painter: QPainter, room: QRect, model: Candidates, candidate: Candidate) -> None:
        image = model.image(candidate)
        if image is None:
            panel(painter, QRectF(room), colors().raised, colors().line)
            painter.setPen(QColor(colors().muted))
            words = self.tr("no preview") if model.prompt not in candidate.images else ""
            painter.drawText(room, Qt.AlignmentFlag.AlignCenter, words)
            return
        paint_fitting(painter, room, image, painter.device().devicePixelRatioF())

    def _mark(self, painter: QPainter, room: QRect, font: QFont, words: str, *, best: bool) -> None:
        if not words:
            return
        metrics = QFontMetrics(font)
        pill = QRectF(room.left() + 6, room.top() + 6, metrics.horizontalAdvance(words) + 16, metrics.height() + 4)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QColor(colors().edge))
        painter.setBrush(QColor(colors().accent if best else colors().raised))
        painter.drawRoundedRect(pill.translated(QPointF(0.5, 0.5)), 5, 5)
        painter.setPen(QColor(colors().on_accent if best else colors().text))
        painter.drawText(pill, Qt.AlignmentFlag.AlignCenter, words)


class CandidateStrip(QListView):
    """Horizontal list of candidates; arrow keys select one."""

    chosen = Signal(object)
    """The selected Candidate, or None."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.candidates = Candidates(session)
        self.candidates.setParent(self)
        self._auto_step: int | None = None
        """Automatically selected step, which a new best step may replace; None if the user selected the step."""
        self.setModel(self.candidates)
        self.setItemDelegate(_CandidateDelegate(self))
        self.setFlow(QListView.Flow.LeftToRight)
        self.setWrapping(False)
        self.setUniformItemSizes(True)
        self.setSpacing(2)
        self.setHorizontalScrollMode(QListView.ScrollMode.ScrollPerPixel)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(self.tr("Saved steps"))
        self.setFixedHeight(_SIDE + 2 * _INSET + 2 * self.fontMetrics().lineSpacing() + 22)
        self.selectionModel().currentChanged.connect(lambda _new, _old: self._on_current_changed())
        self.clicked.connect(lambda _: self._on_current_changed())

    def current(self) -> Candidate | None:
        """Return the selected candidate; None if there is none."""
        row = self.currentIndex().row()
        return self.candidates.all[row] if 0 <= row < len(self.candidates.all) else None

    def show_candidates(self, found: Sequence[Candidate], prompt: int) -> None:
        """Show candidates; keep the step that the user selected, otherwise select the best or the last step."""
        before, auto_step = self.current(), self._auto_step
        self.candidates.show(found, prompt)
        steps = [candidate.step for candidate in found]
        if before and before.step in steps and before.step != auto_step:
            self.choose(steps.index(before.step))
        else:
            row = next((row for row, candidate in enumerate(found) if candidate.best), len(steps) - 1)
            self.choose(row)
            self._auto_step = steps[row] if steps else None

    def choose(self, row: int) -> None:
        """Select a candidate by its row."""
        self._auto_step = None
        self.selectionModel().setCurrentIndex(
            self.candidates.index(row), QItemSelectionModel.SelectionFlag.ClearAndSelect
        )
        if not self.candidates.all:
            self.chosen.emit(None)

    def _on_current_changed(self) -> None:
        self._auto_step = None
        self.chosen.emit(self.current())

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Keep the selected candidate visible."""
        super().resizeEvent(event)
        self.scrollTo(self.currentIndex())
