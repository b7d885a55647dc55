"""The grid of samples, with keyboard navigation; only visible cells are loaded and painted."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QLocale, QPoint, QRect, QSize, Qt, QTimer, Signal
from PySide6.QtGui import (
    QAccessible,
    QAccessibleEvent,
    QColor,
    QContextMenuEvent,
    QHelpEvent,
    QHideEvent,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
    QShowEvent,
    QWheelEvent,
)
from PySide6.QtWidgets import QAbstractScrollArea, QFrame, QToolTip, QWidget

from app.core.disk.thumbnails import Edge, Thumbnail, edge_for
from app.core.library import LibraryImage
from app.core.runs.series import CellIndex, Samples
from app.core.session import Session
from app.qt.theme import colors, icon
from app.qt.tile_painting import CellPainter, panel, ring
from app.qt.tiles import Images, SampleLayout
from app.qt.widgets import plain_tip, until_destroyed

SIDES = (96, 480)
"""Smallest and largest length of a cell's longer side, in logical pixels."""
_INSET = 4
_ICON_SIZE = 16
_MOVES = {
    Qt.Key.Key_Left: (0, -1),
    Qt.Key.Key_Right: (0, 1),
    Qt.Key.Key_Up: (-1, 0),
    Qt.Key.Key_Down: (1, 0),
}
_LEFT = int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
_CENTERED = int(Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap)


class SampleGrid(QAbstractScrollArea):
    """Grid of `Samples`: step 0 stays visible; new samples are scrolled into view unless the user has scrolled away."""

    opened = Signal()
    """Emitted when the user opens the current sample."""
    moved = Signal()
    """Emitted when another sample, or none, becomes the current one."""
    menu_requested = Signal(QPoint)
    """Global position at which the user requested a context menu."""
    resized = Signal(int)
    """New length of a cell's longer side, in logical pixels."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._images = Images(session.thumbnails)
        self._cells = CellPainter(self.font())
        self._shape = 1.0, 1.0
        self.samples: Samples | None = None
        self.current: CellIndex | None = None
        self.pinned: CellIndex | None = None
        self.empty = ""
        """Text shown while there are no samples."""
        self.side = 192
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(self.tr("Samples"))
        self.viewport().setAutoFillBackground(False)
        self._thumbnail_timer = QTimer(self)
        self._thumbnail_timer.setSingleShot(True)
        self._thumbnail_timer.timeout.connect(self._request_thumbnails)
        self.verticalScrollBar().valueChanged.connect(lambda _: self._update_view())
        self.horizontalScrollBar().valueChanged.connect(lambda _: self._update_view())
        until_destroyed(self, session.thumbnails.ready.connect(self._on_thumbnail_ready))

    def show_samples(self, samples: Samples | None) -> None:
        """Show other samples and scroll to the newest."""
        self.samples, self.pinned = samples, None
        self.go(None)
        self._lay_out()
        self.verticalScrollBar().setValue(0)
        self.horizontalScrollBar().setValue(self.horizontalScrollBar().maximum())

    def set_shape(self, width: int, height: int) -> None:
        """Set the cells' aspect ratio to that of images of this size."""
        longest = max(width, height)
        self._shape = width / longest, height / longest
        self.follow()

    def follow(self) -> None:
        """Update the layout for new samples; scroll to them if the view was at the end."""
        bar = self.horizontalScrollBar()
        at_end = bar.value() == bar.maximum()
        self._lay_out()
        if at_end:
            bar.setValue(bar.maximum())

    def set_side(self, side: int) -> None:
        """Resize the cells and keep the current sample visible."""
        side = max(SIDES[0], min(SIDES[1], side))
        if side != self.side:
            self.side = side
            self.follow()
            self._scroll_to_current()
            self.resized.emit(side)

    def go(self, spot: CellIndex | None) -> None:
        """Make this sample the current one; for None, no sample is current."""
        if spot != self.current:
            self.current = spot
            self._scroll_to_current()
            self._announce()
            self.moved.emit()
            self.viewport().update()

    def step(self, rows: int, columns: int) -> None:
        """Move the selection by rows and columns within the grid; if nothing is selected, select the newest sample."""
        samples = self.samples
        if not samples or not samples.steps:
            return
        last_row, last_column = len(samples.prompts) - 1, len(samples.steps) - 1
        if self.current is None:
            self.go(CellIndex(samples.steps[-1], 0))
            return
        row = min(max(self.current.prompt + rows, 0), last_row)
        column = min(max(samples.steps.index(self.current.step) + columns, 0), last_column)
        self.go(CellIndex(samples.steps[column], row))

    def image(self, spot: CellIndex | None) -> LibraryImage | None:
        """Return the image of a cell, or None."""
        return self.samples.at(spot) if self.samples and spot else None

    def step_title(self, step: int) -> str:
        """Return a column's title."""
        if not step:
            return self.tr("Baseline")
        is_average = self.samples is not None and step in self.samples.averaged
        words = self.tr("Step {step} (EMA)") if is_average else self.tr("Step {step}")
        return words.format(step=QLocale().toString(step))

    def prompt_title(self, prompt: int) -> str:
        """Return a row's title: its prompt, or a number if the prompt is unknown."""
        known = self.samples.prompts[prompt].strip() if self.samples else ""
        return known.replace("\n", " ") or self.tr("Prompt {number}").format(number=prompt + 1)

    # Geometry

    @property
    def layout_now(self) -> SampleLayout:
        """Current layout of cells and titles."""
        samples, line = self.samples, self._cells.line
        width, height = (round(part * self.side) for part in self._shape)
        steps = samples.steps if samples else ()
        return SampleLayout(
            len(samples.prompts) if steps and samples else 0, len(steps), width, height, line + 6, line + 2
        )

    @property
    def scrolled(self) -> tuple[int, int]:
        """Horizontal and vertical scroll offset."""
        return self.horizontalScrollBar().value(), self.verticalScrollBar().value()

    def rectangle(self, spot: CellIndex) -> QRect:
        """Return a cell's rectangle in viewport coordinates."""
        assert self.samples is not None
        return QRect(*self.layout_now.cell(spot.prompt, self.samples.steps.index(spot.step), *self.scrolled))

    def seen(self) -> list[CellIndex]:
        """Return the visible cells, sorted from the newest step to the baseline."""
        layout, (across, down) = self.layout_now, self.scrolled
        samples, room = self.samples, self.viewport().size()
        if not samples or not layout.columns:
            return []
        columns = [*reversed(layout.columns_seen(across, room.width())), 0]
        rows = layout.rows_seen(down, room.height())
        return [CellIndex(samples.steps[column], row) for column in columns for row in rows]

    def _at(self, place: QPoint) -> CellIndex | None:
        found = self.layout_now.at(place.x(), place.y(), *self.scrolled)
        return CellIndex(self.samples.steps[found[1]], found[0]) if found and self.samples else None

    def _lay_out(self) -> None:
        layout, room = self.layout_now, self.viewport().size()
        across, down = self.horizontalScrollBar(), self.verticalScrollBar()
        across.setRange(0, max(0, layout.all_across - room.width()))
        across.setPageStep(max(1, room.width() - layout.fixed_right))
        across.setSingleStep(layout.pitch)
        down.setRange(0, max(0, layout.all_down - room.height()))
        down.setPageStep(max(1, room.height() - layout.head))
        down.setSingleStep(max(24, layout.row_height // 3))
        self._update_view()

    def _scroll_to_current(self) -> None:
        if self.image_place is None:
            return
        place, layout, room = self.image_place, self.layout_now, self.viewport().size()
        across, down = self.horizontalScrollBar(), self.verticalScrollBar()
        if self.samples and self.current and self.current.step != self.samples.steps[0]:
            if place.left() < layout.fixed_right:
                across.setValue(across.value() + place.left() - layout.fixed_right)
            elif place.right() > room.width() - layout.gap:
                across.setValue(across.value() + place.right() - room.width() + layout.gap)
        if place.top() - layout.line < layout.head:
            down.setValue(down.value() + place.top() - layout.line - layout.head)
        elif place.bottom() > room.height() - layout.gap:
            down.setValue(down.value() + place.bottom() - room.height() + layout.gap)

    @property
    def image_place(self) -> QRect | None:
        """Rectangle of the current cell in viewport coordinates, or None if no cell is current."""
        return self.rectangle(self.current) if self.samples and self.current else None

    # Thumbnails

    def _update_view(self) -> None:
        self.viewport().update()
        if self.isVisible():
            self._thumbnail_timer.start()

    def _request_thumbnails(self) -> None:
        """Request the thumbnails of the visible cells only."""
        if self.isVisible():
            images = (self.image(spot) for spot in self.seen())
            self._session.thumbnails.show((one for one in images if one), self._edge())

    def _edge(self) -> Edge:
        return edge_for((self.side - 2 * _INSET) * self.devicePixelRatioF())

    def _on_thumbnail_ready(self, thumbnail: Thumbnail) -> None:
        if self.samples and thumbnail.image in self.samples.images:
            self.viewport().update()

    # Painting

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the visible cells, then the fixed first column, then the titles on top."""
        painter = QPainter(self.viewport())
        painter.fillRect(event.rect(), QColor(colors().base))
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        samples, layout = self.samples, self.layout_now
        if not samples or not layout.columns:
            painter.setPen(QColor(colors().muted))
            painter.drawText(self.viewport().rect().adjusted(24, 24, -24, -24), _CENTERED, self.empty)
            painter.end()
            return
        self._images.begin()
        room, spots = self.viewport().rect(), self.seen()
        first = samples.steps[0]
        painter.setClipRect(room.adjusted(layout.fixed_right - _INSET, layout.head, 0, 0))
        self._paint_cells(painter, [spot for spot in spots if spot.step != first])
        painter.setClipRect(room.adjusted(0, layout.head, 0, 0))
        self._paint_cells(painter, [spot for spot in spots if spot.step == first])
        self._paint_prompts(painter, layout)
        painter.setClipping(False)
        self._paint_titles(painter, layout)
        painter.end()
        if self._images.incomplete:
            QTimer.singleShot(0, self.viewport(), self.viewport().update)

    def _paint_cells(self, painter: QPainter, spots: list[CellIndex]) -> None:
        for spot in spots:
            room, record = self.rectangle(spot), self.image(spot)
            if record is None:
                panel(painter, room.toRectF(), colors().window, colors().line)
            else:
                inner = room.adjusted(_INSET, _INSET, -_INSET, -_INSET)
                image = self._images.pixmap(record, self._edge(), self._side(record, inner), self.devicePixelRatioF())
                self._cells.image(painter, inner, record, image)
            if spot == self.pinned:
                self._paint_pin(painter, room)
            if spot == self.current:
                ring(painter, room) if self.hasFocus() else self._paint_frame(painter, room)

    def _side(self, image: LibraryImage, room: QRect) -> int:
        """Return the length of an image's longer side when the image is scaled to fit the cell."""
        known = self._session.thumbnails.get(image, self._edge())
        if known is None or not known.width:
            return min(room.width(), room.height())
        scale = min(room.width() / known.width, room.height() / known.height)
        return round(max(known.width, known.height) * scale)

    def _paint_frame(self, painter: QPainter, room: QRect) -> None:
        """Mark the current cell while another widget has the focus."""
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.setPen(QPen(QColor(colors().edge), 2.0))
        painter.drawRoundedRect(room.toRectF().adjusted(1, 1, -1, -1), 5, 5)

    def _paint_pin(self, painter: QPainter, room: QRect) -> None:
        place = QRect(room.left() + 8, room.top() + 8, _ICON_SIZE + 8, _ICON_SIZE + 8)
        panel(painter, place.toRectF(), colors().raised, colors().edge)
        icon("pin").paint(painter, place.adjusted(4, 4, -4, -4))

    def _paint_prompts(self, painter: QPainter, layout: SampleLayout) -> None:
        """Paint each row's title at the left edge, regardless of the horizontal scroll position."""
        width = self.viewport().width() - 2 * layout.gap - 2
        painter.setPen(QColor(colors().text))
        painter.setFont(self.font())
        for row in layout.rows_seen(self.scrolled[1], self.viewport().height()):
            room = QRect(layout.gap + 2, layout.top(row, self.scrolled[1]), width, layout.line)
            words = self.fontMetrics().elidedText(self.prompt_title(row)[:1000], Qt.TextElideMode.ElideRight, width)
            painter.drawText(room, _LEFT, words)
            if self.scrolled[0]:  # cells are scrolled under the fixed column
                edge = QRect(layout.fixed_right - layout.gap // 2, room.bottom(), 1, layout.height)
                painter.fillRect(edge, QColor(colors().edge))

    def _paint_titles(self, painter: QPainter, layout: SampleLayout) -> None:
        samples, strip = self.samples, QRect(0, 0, self.viewport().width(), layout.head)
        assert samples is not None
        painter.fillRect(strip, QColor(colors().window))
        painter.fillRect(strip.adjusted(0, strip.height() - 1, 0, 0), QColor(colors().line))
        painter.setClipRect(strip.adjusted(layout.fixed_right - _INSET, 0, 0, 0))
        for column in layout.columns_seen(self.scrolled[0], strip.width()):
            self._paint_title(painter, layout, column)
        painter.setClipping(False)
        self._paint_title(painter, layout, 0)

    def _paint_title(self, painter: QPainter, layout: SampleLayout, column: int) -> None:
        assert self.samples is not None
        step = self.samples.steps[column]
        room = QRect(layout.left(column, self.scrolled[0]) + 2, 0, layout.width - 4, layout.head - 1)
        if step == self.samples.best:
            sign = QRect(room.left(), room.center().y() - _ICON_SIZE // 2 + 1, _ICON_SIZE, _ICON_SIZE)
            icon("star-filled", "good").paint(painter, sign)
            room.setLeft(sign.right() + 5)
        if step in self.samples.saved:
            sign = QRect(room.right() - _ICON_SIZE, room.center().y() - _ICON_SIZE // 2 + 1, _ICON_SIZE, _ICON_SIZE)
            icon("save", "muted").paint(painter, sign)
            room.setRight(sign.left() - 4)
        painter.setFont(self.font())
        painter.setPen(QColor(colors().text if step == self.samples.best else colors().muted))
        words = self.step_title(step)
        painter.drawText(room, _LEFT, self.fontMetrics().elidedText(words, Qt.TextElideMode.ElideRight, room.width()))

    # Mouse and keys

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Make the pressed cell the current one."""
        if (spot := self._at(event.position().toPoint())) is not None:
            self.go(spot)

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Open the double-clicked sample."""
        if self._at(event.position().toPoint()) is not None:
            self.opened.emit()

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Resize the cells if Ctrl is held; otherwise scroll vertically, or horizontally if all rows fit."""
        if event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            self.set_side(self.side + (16 if event.angleDelta().y() > 0 else -16))
            event.accept()
        elif not self.verticalScrollBar().maximum() and event.angleDelta().y():
            bar = self.horizontalScrollBar()
            bar.setValue(bar.value() - event.angleDelta().y())
            event.accept()
        else:
            super().wheelEvent(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Handle keys: arrows, Page Up, Page Down, Home and End select a sample; Enter opens the selected one."""
        key, steps = event.key(), len(self.samples.steps) if self.samples else 0
        ends = {Qt.Key.Key_Home: (0, -steps), Qt.Key.Key_End: (0, steps)}
        if key in _MOVES or key in ends:
            self.step(*(_MOVES | ends)[Qt.Key(key)])
        elif key in (Qt.Key.Key_PageUp, Qt.Key.Key_PageDown):
            page = max(1, self.viewport().height() // self.layout_now.row_height)
            self.step(page if key == Qt.Key.Key_PageDown else -page, 0)
        elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.current is not None:
            self.opened.emit()
        else:
            super().keyPressEvent(event)

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:  # noqa: N802
        """Request the context menu."""
        if self.current is not None:
            self.menu_requested.emit(event.globalPos())

    def viewportEvent(self, event: QEvent) -> bool:  # noqa: N802
        """Show a tooltip for the cell under the pointer."""
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            spot = self._at(event.pos())
            QToolTip.showText(event.globalPos(), plain_tip(self.describe(spot, "\n")) if spot else "", self)
            return True
        return super().viewportEvent(event)

    def _lowest(self) -> str:
        is_held_out = self.samples is not None and self.samples.has_held_out
        return self.tr("lowest validation loss") if is_held_out else self.tr("lowest loss on training images")

    def describe(self, spot: CellIndex, between: str = ", ") -> str:
        """Return a sample's step, marks, state and prompt as text, separated by `between`."""
        image = self.image(spot)
        thumbnail = self._session.thumbnails.get(image, self._edge()) if image else None
        samples = self.samples
        words = [
            self.step_title(spot.step),
            self._lowest() if samples and spot.step == samples.best else "",
            self.tr("LoRA saved") if samples and spot.step in samples.saved else "",
            self.tr("pinned") if spot == self.pinned else "",
            "" if image else self.tr("not generated yet"),
            thumbnail.problem or "" if thumbnail else "",
            self.prompt_title(spot.prompt),
        ]
        return between.join(word for word in words if word)

    def _announce(self) -> None:
        self.setAccessibleDescription(self.describe(self.current) if self.current else "")
        QAccessible.updateAccessibility(QAccessibleEvent(self, QAccessible.Event.DescriptionChanged))

    # The rest

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Update the layout for the new size."""
        super().resizeEvent(event)
        self.follow()

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Request the thumbnails again, because another view's request may have replaced this one's."""
        super().showEvent(event)
        self._update_view()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Cancel the pending thumbnail request."""
        super().hideEvent(event)
        self._thumbnail_timer.stop()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Apply a new font."""
        super().changeEvent(event)
        if hasattr(self, "_cells"):  # Qt sends such events during construction
            self._cells = CellPainter(self.font())

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return a size that fits a few columns."""
        return QSize(4 * self.side, 2 * self.side)
