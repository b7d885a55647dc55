"""The loupe, which shows the current image fitted or zoomed, and the comparison of several images."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent, QShowEvent
from PySide6.QtWidgets import QGridLayout, QLabel, QVBoxLayout, QWidget

from app.core.library import LibraryChange, LibraryImage
from app.core.session import Session
from app.qt.images.zoom import Zoom, ZoomArea
from app.qt.widgets import until_destroyed

_PAN = {
    Qt.Key.Key_Left: (-0.2, 0.0),
    Qt.Key.Key_Right: (0.2, 0.0),
    Qt.Key.Key_Up: (0.0, -0.2),
    Qt.Key.Key_Down: (0.0, 0.2),
}
_STEPS = {
    Qt.Key.Key_Left: -1,
    Qt.Key.Key_Up: -1,
    Qt.Key.Key_PageUp: -1,
    Qt.Key.Key_Right: 1,
    Qt.Key.Key_Down: 1,
    Qt.Key.Key_PageDown: 1,
    Qt.Key.Key_Space: 1,
}
MOST = 4


class Loupe(QWidget):
    """View of the current image.

    Arrow keys show another image. If the image is zoomed or Shift is held, they move its visible part instead.
    """

    stepped = Signal(int)
    left = Signal()

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.area = ZoomArea(session, Zoom(self))
        self.facts = QLabel()
        self.facts.setProperty("role", "muted")
        self.facts.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.facts.setContentsMargins(8, 4, 8, 4)
        self.facts.setMinimumWidth(1)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(self.tr("Loupe"))
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.area, 1)
        column.addWidget(self.facts)
        self.area.zoom.changed.connect(self._describe)
        self.area.loaded.connect(self._describe)
        self.area.pressed.connect(self.setFocus)
        until_destroyed(
            self,
            session.view.selection.connect(lambda _: self._on_selection_changed()),
            session.library.altered.connect(self._on_library_altered),
        )

    def _on_selection_changed(self) -> None:
        if self.isVisible():
            self.area.show_image(self._session.view.current)
            self._describe()

    def _on_library_altered(self, altered: LibraryChange) -> None:
        if self._session.view.current in altered.altered:
            self._describe()

    def _describe(self) -> None:
        view = self._session.view
        image = self._session.library.images.get(view.current or 0)
        text = self._facts(image) if image else ""
        self.facts.setText(text)
        self.setAccessibleDescription(text)

    def _facts(self, image: LibraryImage) -> str:
        parts = [image.name]
        if image.width and image.height:
            parts.append(f"{image.width} × {image.height}")
        parts.append(self.tr("{scale}%").format(scale=round(100 * self.area.scale)))
        if image.rating:
            parts.append("★" * min(5, image.rating))
        if image.excluded:
            parts.append(self.tr("excluded"))
        return "   ·   ".join(parts)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Change, move or zoom the image, or leave the loupe."""
        key = Qt.Key(event.key())
        closer = self.area.zoom.scale is not None
        if key in _PAN and (closer or event.modifiers() & Qt.KeyboardModifier.ShiftModifier):
            self.area.move_by(*_PAN[key])
        elif key in _STEPS:
            self.stepped.emit(_STEPS[key])
        elif key in (Qt.Key.Key_Plus, Qt.Key.Key_Equal):
            self.area.zoom_by(1.25)
        elif key == Qt.Key.Key_Minus:
            self.area.zoom_by(1 / 1.25)
        elif key in (Qt.Key.Key_Escape, Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.left.emit()
        else:
            super().keyPressEvent(event)

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        """Show the current image."""
        super().showEvent(event)
        self._on_selection_changed()


class Compare(QWidget):
    """Side-by-side view of images with a shared zoom; a ring marks the current image."""

    left = Signal()

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.zoom = Zoom(self)
        self.ids: tuple[int, ...] = ()
        self.areas = [ZoomArea(session, self.zoom) for _ in range(MOST)]
        self._labels = [QLabel() for _ in range(MOST)]
        self._panes = [self._pane(area, label) for area, label in zip(self.areas, self._labels, strict=True)]
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setSpacing(4)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(self.tr("Comparison"))
        for place, area in enumerate(self.areas):
            area.pressed.connect(lambda place=place: self._make_current(place))
        until_destroyed(
            self,
            session.view.selection.connect(lambda _: self._update_panes()),
            session.library.altered.connect(self._on_library_altered),
        )

    def compare(self, ids: Sequence[int]) -> None:
        """Show these images, up to four."""
        self.ids = tuple(ids[:MOST])
        self.zoom.fit()
        for place, pane in enumerate(self._panes):
            self._grid.removeWidget(pane)
            pane.setVisible(place < len(self.ids))
            if place < len(self.ids):
                row, column = divmod(place, 2 if len(self.ids) == MOST else MOST)
                self._grid.addWidget(pane, row, column)
            self.areas[place].show_image(self.ids[place] if place < len(self.ids) else None)
        self._update_panes()

    def step(self, by: int) -> None:
        """Make the next or previous image the current one."""
        if self.ids:
            current = self._session.view.current
            here = self.ids.index(current) if current in self.ids else 0
            self._make_current((here + by) % len(self.ids))

    def toggle_full(self) -> None:
        """Toggle all images between 100% and fitted."""
        self.areas[0].toggle_full()

    def _pane(self, area: ZoomArea, label: QLabel) -> QWidget:
        pane = QWidget()
        column = QVBoxLayout(pane)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        label.setProperty("role", "muted")
        label.setAlignment(Qt.AlignmentFlag.AlignCenter)
        label.setContentsMargins(6, 3, 6, 3)
        label.setMinimumWidth(1)
        column.addWidget(area, 1)
        column.addWidget(label)
        return pane

    def _make_current(self, place: int) -> None:
        self.setFocus()
        view = self._session.view
        view.select(view.selected, self.ids[place])

    def _update_panes(self) -> None:
        for number, area, label in zip(self.ids, self.areas, self._labels, strict=False):
            area.marked = number == self._session.view.current
            label.setText(self._facts(number))
            area.update()
        self.setAccessibleDescription(self._facts(self._session.view.current or 0))

    def _on_library_altered(self, altered: LibraryChange) -> None:
        if not altered.removed.isdisjoint(self.ids):
            self.compare([number for number in self.ids if number not in altered.removed])
            if len(self.ids) < 2 and self.isVisible():
                self.left.emit()
        elif not altered.altered.isdisjoint(self.ids):
            self._update_panes()

    def _facts(self, number: int) -> str:
        image = self._session.library.images.get(number)
        if image is None:
            return ""
        parts = [image.name, f"{image.width} × {image.height}" if image.width else ""]
        parts += ["★" * min(5, image.rating or 0), self.tr("excluded") if image.excluded else ""]
        return "   ·   ".join(part for part in parts if part)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Change the current image, zoom all images, or leave the comparison."""
        key = event.key()
        if key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
            self.step(1 if key == Qt.Key.Key_Right else -1)
        elif key in (Qt.Key.Key_Plus, Qt.Key.Key_Equal):
            self.areas[0].zoom_by(1.25)
        elif key == Qt.Key.Key_Minus:
            self.areas[0].zoom_by(1 / 1.25)
        elif key == Qt.Key.Key_Escape:
            self.left.emit()
        else:
            super().keyPressEvent(event)
