"""The image grid, which paints the thumbnails that are already loaded and never waits for others."""

from __future__ import annotations

from collections.abc import Iterable

from PySide6.QtCore import QEvent, QPoint, QRect, QSize, Qt, QTimer, Signal
from PySide6.QtGui import (
    QAccessible,
    QAccessibleAnnouncementEvent,
    QAccessibleEvent,
    QColor,
    QContextMenuEvent,
    QHelpEvent,
    QHideEvent,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QShowEvent,
    QWheelEvent,
)
from PySide6.QtWidgets import QAbstractScrollArea, QApplication, QFrame, QToolTip, QWidget

from app.core.disk.roots import unique_name
from app.core.disk.thumbnails import Thumbnail, edge_for
from app.core.library import LibraryChange, LibraryImage
from app.core.session import Session
from app.qt.theme import colors
from app.qt.tile_painting import CellPainter, band
from app.qt.tiles import GridLayout, Images
from app.qt.widgets import plain_tip

SIDES = (72, 480)
"""Smallest and largest side of an image in the grid, in logical px."""
_STEPS = {Qt.Key.Key_Left: -1, Qt.Key.Key_Right: 1}
_ROWS = {Qt.Key.Key_Up: -1, Qt.Key.Key_Down: 1}
_INSET = 12
_ANNOUNCED = frozenset({"rating", "excluded", "mask", "problem"})
_DESCRIBED = _ANNOUNCED | {"caption"}
"""Image fields in the accessible description. Caption changes are not announced: typing is read aloud anyway."""
_CENTERED = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap


class Grid(QAbstractScrollArea):
    """Grid of the images in `session.view`; the layout is computed on demand, the selection is stored by id."""

    opened = Signal()
    """Emitted when the user wants to open the current image in the loupe."""
    menu_requested = Signal(QPoint)
    """The user requested a context menu at this screen position."""
    resized = Signal(int)
    """The side of the images has changed to this many logical px."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session, self._view, self._library = session, session.view, session.library
        self._images = Images(session.thumbnails)
        self.side = 168
        self.lines = True
        """Whether the first line of the caption is shown below each image."""
        self._cells = CellPainter(self.font())
        self._anchor: int | None = None
        self._top: int | None = None
        self._pressed: QPoint | None = None
        self._band: QRect | None = None
        self._selected_before: frozenset[int] = frozenset()
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(self.tr("Images"))
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.viewport().setAutoFillBackground(False)
        self._request_timer = QTimer(self)
        self._request_timer.setSingleShot(True)
        self._request_timer.timeout.connect(self._request_thumbnails)
        self.verticalScrollBar().valueChanged.connect(self._on_scrolled)
        self._ends = [
            self._view.shown.connect(lambda _: self._on_view_shown()),
            self._view.selection.connect(lambda _: self._on_selection_changed()),
            self._library.altered.connect(self._on_library_altered),
            session.thumbnails.ready.connect(self._on_thumbnail_ready),
        ]
        self.destroyed.connect(lambda: self._disconnect())
        self._on_view_shown()

    # Layout

    @property
    def layout_now(self) -> GridLayout:
        """Return the current layout, with positions relative to the top of the content."""
        line = self._cells.line if self.lines else 0
        return GridLayout(len(self._view.ids), self.viewport().width(), self.side, line)

    @property
    def visible(self) -> range:
        """Return the indexes of the images that are fully or partly visible."""
        top = self.verticalScrollBar().value()
        return self.layout_now.between(top, top + self.viewport().height())

    def rectangle(self, index: int) -> QRect:
        """Return an image's rectangle in viewport coordinates."""
        left, top, width, height = self.layout_now.cell(index)
        return QRect(left, top - self.verticalScrollBar().value(), width, height)

    def set_side(self, side: int) -> None:
        """Change the size of the images.

        The current image stays in view or, if it is not visible now, the first visible one.
        """
        side = max(SIDES[0], min(SIDES[1], side))
        if side != self.side:
            visible_id = self._image_to_keep()
            self.side = side
            self._lay_out(visible_id)
            self.resized.emit(side)

    def show_lines(self, on: bool) -> None:
        """Show or hide the captions below the images."""
        visible_id = self._image_to_keep()
        self.lines = on
        self._lay_out(visible_id)

    def _image_to_keep(self) -> int | None:
        """Return the id of the image to keep in view: the current one if it is visible, else the first visible one."""
        seen = [self._view.ids[index] for index in self.visible]
        return self._view.current if self._view.current in seen else next(iter(seen), None)

    def _lay_out(self, visible_id: int | None) -> None:
        bar, layout = self.verticalScrollBar(), self.layout_now
        bar.setRange(0, max(0, layout.height - self.viewport().height()))
        bar.setPageStep(self.viewport().height())
        bar.setSingleStep(max(24, layout.row_height // 3))
        if visible_id is not None and (index := self._index(visible_id)) is not None:
            self._reveal(index)
        self._schedule_update()

    def _index(self, number: int | None) -> int | None:
        try:
            return self._view.ids.index(number)  # type: ignore[arg-type]
        except ValueError:
            return None

    def _reveal(self, index: int) -> None:
        bar, place = self.verticalScrollBar(), self.rectangle(index)
        gap = self.layout_now.gap
        if place.top() < gap:
            bar.setValue(bar.value() + place.top() - gap)
        elif place.bottom() > self.viewport().height() - gap:
            bar.setValue(bar.value() + min(place.top() - gap, place.bottom() - self.viewport().height() + gap))

    # Changes

    def _on_view_shown(self) -> None:
        self._lay_out(self._top if self._index(self._view.current) is None else self._view.current)

    def _on_selection_changed(self) -> None:
        index = self._index(self._view.current)
        if index is not None and not self._band:
            self._reveal(index)
        self._announce(index)
        self.viewport().update()

    def _on_library_altered(self, altered: LibraryChange) -> None:
        seen = {self._view.ids[index] for index in self.visible}
        if not seen.isdisjoint(altered.altered):
            if not altered.what.isdisjoint(("file", "problem")):
                self._schedule_update()
            self.viewport().update()
        if self._view.current in altered.altered and not altered.what.isdisjoint(_DESCRIBED):
            self._announce(self._index(self._view.current), aloud=not altered.what.isdisjoint(_ANNOUNCED))

    def _on_thumbnail_ready(self, thumbnail: Thumbnail) -> None:
        for index in self.visible:
            if self._view.ids[index] == thumbnail.image:
                self.viewport().update(self.rectangle(index))
                return

    def _on_scrolled(self) -> None:
        seen = self.visible
        self._top = self._view.ids[seen.start] if seen else None
        self._schedule_update()

    def _schedule_update(self) -> None:
        self.viewport().update()
        if self.isVisible():
            self._request_timer.start()

    def _request_thumbnails(self) -> None:
        """Request the visible thumbnails from the top, then those one screen below and one screen above."""
        if not self.isVisible():
            return
        seen, ids = self.visible, self._view.ids
        below = range(seen.stop, min(len(ids), seen.stop + len(seen)))
        above = range(max(0, seen.start - len(seen)), seen.start)
        order = [ids[index] for part in (seen, below, reversed(above)) for index in part]
        images = self._library.images
        known = (images[number] for number in order if number in images)
        self._session.thumbnails.show(known, self._edge())

    def _edge(self) -> int:
        return edge_for((self.side - _INSET) * self.devicePixelRatioF())

    def in_sight(self) -> list[int]:
        """Return the ids of the visible images; none while the grid is hidden."""
        return [self._view.ids[index] for index in self.visible] if self.isVisible() else []

    # Painting

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Paint the visible images, using the thumbnails that are loaded."""
        painter = QPainter(self.viewport())
        painter.fillRect(event.rect(), QColor(colors().base))
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if not self._view.ids:
            self._paint_empty(painter)
        self._images.begin()
        ratio, edge = self.devicePixelRatioF(), self._edge()
        for index in self.visible:
            record = self._library.images.get(self._view.ids[index])
            place = self.rectangle(index)
            if record and place.intersects(event.rect()):
                image = self._images.pixmap(record, edge, self.side - _INSET, ratio)
                self._paint_cell(painter, place, record, image)
        if self._band:
            band(painter, self._band.translated(0, -self.verticalScrollBar().value()), self.palette())
        painter.end()
        if self._images.incomplete:
            QTimer.singleShot(0, self.viewport(), self.viewport().update)

    def _paint_cell(self, painter: QPainter, place: QRect, record: LibraryImage, image: object) -> None:
        text = (record.caption or "").strip() if self.lines else None
        self._cells.paint(
            painter,
            place,
            record,
            image,  # type: ignore[arg-type]
            text,
            selected=record.id in self._view.selected,
            current=record.id == self._view.current,
            focused=self.hasFocus(),
        )

    def _paint_empty(self, painter: QPainter) -> None:
        painter.setPen(QColor(colors().muted))
        nothing = self.tr("No image matches the filter.")
        words = nothing if self._library.images else self.tr("Drop a folder of images here.")
        painter.drawText(self.viewport().rect().adjusted(24, 24, -24, -24), int(_CENTERED), words)

    # Mouse

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Select the clicked image, or start a rubber band if the click is not on an image."""
        place = event.position().toPoint()
        index = self._at(place)
        number = self._view.ids[index] if index is not None else None
        if event.button() == Qt.MouseButton.RightButton:
            if number is not None and number not in self._view.selected:
                self._select(number, Qt.KeyboardModifier.NoModifier)
            return
        if event.button() != Qt.MouseButton.LeftButton:
            return
        keys = event.modifiers()
        if number is not None:
            self._select(number, keys)
            return
        adds = bool(keys & (Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier))
        self._selected_before = self._view.selected if adds else frozenset()
        self._pressed = QPoint(place.x(), place.y() + self.verticalScrollBar().value())
        self._view.select(self._selected_before, self._view.current)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Resize the rubber band and select the images in it."""
        if self._pressed is None:
            return
        place = event.position().toPoint()
        here = QPoint(place.x(), place.y() + self.verticalScrollBar().value())
        if self._band is None and (here - self._pressed).manhattanLength() < QApplication.startDragDistance():
            return
        self._band = QRect(self._pressed, here).normalized()
        inside = self.layout_now.within(self._band.left(), self._band.top(), self._band.right(), self._band.bottom())
        self._view.select(self._selected_before.union(self._view.ids[index] for index in inside), self._view.current)
        self.viewport().update()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """End the rubber band."""
        self._pressed = self._band = None
        self.viewport().update()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Request to open the image in the loupe."""
        if self._at(event.position().toPoint()) is not None:
            self.opened.emit()

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Scroll; with Ctrl, change the size of the images."""
        if event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            self.set_side(self.side + (16 if event.angleDelta().y() > 0 else -16))
            event.accept()
        else:
            super().wheelEvent(event)

    def viewportEvent(self, event: QEvent) -> bool:  # noqa: N802
        """Show a tooltip about the image under the pointer."""
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            index = self._at(event.pos())
            words = self._tip(self._view.ids[index]) if index is not None else ""
            QToolTip.showText(event.globalPos(), plain_tip(words), self)
            return True
        return super().viewportEvent(event)

    def _tip(self, number: int) -> str:
        image = self._library.images[number]
        size = f"{image.width} × {image.height}" if image.width else ""
        thumbnail = self._session.thumbnails.get(image, self._edge())
        problem = image.problem or (thumbnail.problem if thumbnail else None)
        root = image.folder.root
        inside = f"{unique_name(root, self._session.datasets.folders)}/{image.path.relative_to(root).as_posix()}"
        return "\n".join(part for part in (inside, size, problem, (image.caption or "").strip()[:500]) if part)

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:  # noqa: N802
        """Request the context menu."""
        self.menu_requested.emit(event.globalPos())

    def _at(self, place: QPoint) -> int | None:
        return self.layout_now.at(place.x(), place.y() + self.verticalScrollBar().value())

    # Keyboard and selection

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Move to another image (Shift: extend the selection; Ctrl: keep it), or toggle or open the current one."""
        target = self._target(event.key())
        if target is not None:
            self._move_to(target, event.modifiers())
        elif event.key() == Qt.Key.Key_Space and self._view.current is not None:
            self._select(self._view.current, Qt.KeyboardModifier.ControlModifier)
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self._view.current is not None:
            self.opened.emit()
        else:
            super().keyPressEvent(event)

    def _target(self, key: int) -> int | None:
        """Return the index that a navigation key moves to; None for other keys or if there are no images."""
        count, layout = len(self._view.ids), self.layout_now
        page = max(1, self.viewport().height() // layout.row_height)
        rows = {**_ROWS, Qt.Key.Key_PageUp: -page, Qt.Key.Key_PageDown: page}
        ends = {Qt.Key.Key_Home: 0, Qt.Key.Key_End: count - 1}
        if not count or (key not in _STEPS and key not in rows and key not in ends):
            return None
        here = self._index(self._view.current)
        if key in ends:
            return ends[Qt.Key(key)]
        if here is None:
            return self.visible.start if self.visible else 0
        by_row = rows.get(Qt.Key(key), 0) * layout.columns
        target = here + (_STEPS.get(Qt.Key(key)) or by_row)
        if 0 <= target < count:
            return target
        # Down from the last row but one goes to the last image if there is none directly below.
        last_row = (count - 1) // layout.columns
        if by_row > 0:
            return count - 1 if here // layout.columns < last_row else here
        return here % layout.columns if by_row < 0 else here

    def step(self, by: int) -> None:
        """Select only the next or previous image and make it the current one."""
        here = self._index(self._view.current)
        target = (here + by) if here is not None else 0
        if 0 <= target < len(self._view.ids):
            self._move_to(target, Qt.KeyboardModifier.NoModifier)

    def _move_to(self, index: int, keys: Qt.KeyboardModifier) -> None:
        number = self._view.ids[index]
        if keys & Qt.KeyboardModifier.ControlModifier and not keys & Qt.KeyboardModifier.ShiftModifier:
            self._view.select(self._view.selected, number)
        else:
            self._select(number, keys & Qt.KeyboardModifier.ShiftModifier)

    def _select(self, number: int, keys: Qt.KeyboardModifier) -> None:
        """Select one image; with Shift, the range from the anchor to it; with Ctrl, toggle it."""
        adds = bool(keys & Qt.KeyboardModifier.ControlModifier)
        if keys & Qt.KeyboardModifier.ShiftModifier:
            chosen = frozenset(self._span(number))
            self._view.select(self._view.selected | chosen if adds else chosen, number)
            return
        self._anchor = number
        self._view.select(self._view.selected ^ {number} if adds else {number}, number)

    def _span(self, number: int) -> Iterable[int]:
        ends = [self._index(number), self._index(self._anchor)]
        first, last = (index if index is not None else ends[0] or 0 for index in ends)
        return self._view.ids[min(first, last) : max(first, last) + 1]

    def select_all(self) -> None:
        """Select all shown images."""
        self._view.select(self._view.ids, self._view.current)

    # Other events

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Update the layout; keep the current image in view or, if it is not visible, the first visible one."""
        super().resizeEvent(event)
        self._lay_out(self._view.current if self._view.current in self.in_sight() else self._top)

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Request thumbnails again, since other views may have requested different ones."""
        super().showEvent(event)
        self._schedule_update()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        """Request no thumbnails while hidden."""
        super().hideEvent(event)
        self._request_timer.stop()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Update the text measurements, since the font may have changed."""
        super().changeEvent(event)
        self._cells = CellPainter(self.font())

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return space for a few columns."""
        return QSize(4 * (self.side + 8) + 8, 3 * (self.side + 8))

    def describe(self, number: int) -> str:
        """Return the accessible description of an image."""
        image = self._library.images[number]
        words = [image.name, image.caption or self.tr("no caption")]
        words += [self.tr("excluded")] if image.excluded else []
        words += [self.tr("%n star(s)", "", image.rating)] if image.rating else []
        words += [self.tr("with mask")] if image.mask else []
        words += [image.problem] if image.problem else []
        return ", ".join(words)

    def _announce(self, index: int | None, *, aloud: bool = True) -> None:
        """Update the accessible description.

        With `aloud`, also announce it, because few screen readers notice that a description has changed.
        """
        number = self._view.current
        if number is None or index is None or number not in self._library.images:
            return
        place = self.tr("{place} of {count}").format(place=index + 1, count=len(self._view.ids))
        self.setAccessibleDescription(f"{self.describe(number)}, {place}")
        QAccessible.updateAccessibility(QAccessibleEvent(self, QAccessible.Event.DescriptionChanged))
        if aloud and self.hasFocus():
            QAccessible.updateAccessibility(QAccessibleAnnouncementEvent(self, self.accessibleDescription()))

    def _disconnect(self) -> None:
        for end in self._ends:
            end()
