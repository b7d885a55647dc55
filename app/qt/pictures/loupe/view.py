"""The loupe: the current picture, fitted or closer, with what is known of it below."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent, QShowEvent
from PySide6.QtWidgets import QLabel, QVBoxLayout, QWidget

from app.core.library import Altered, Picture
from app.core.session import Session
from app.qt.parts import until_destroyed
from app.qt.pictures.zoom import Zoom, ZoomArea

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


class Loupe(QWidget):
    """Arrow keys go from picture to picture while all of it is seen, with Shift or when closer they move it."""

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
            session.view.selection.connect(lambda _: self._follow()),
            session.library.altered.connect(self._altered),
        )

    def _follow(self) -> None:
        if self.isVisible():
            self.area.show_picture(self._session.view.current)
            self._describe()

    def _altered(self, altered: Altered) -> None:
        if self._session.view.current in altered.altered:
            self._describe()

    def _describe(self) -> None:
        view = self._session.view
        picture = self._session.library.pictures.get(view.current or 0)
        text = self._facts(picture) if picture else ""
        self.facts.setText(text)
        self.setAccessibleDescription(text)

    def _facts(self, picture: Picture) -> str:
        parts = [picture.name]
        if picture.width and picture.height:
            parts.append(f"{picture.width} × {picture.height}")
        parts.append(self.tr("{scale} %").format(scale=round(100 * self.area.scale)))
        if picture.rating:
            parts.append("★" * min(5, picture.rating))
        if picture.excluded:
            parts.append(self.tr("excluded"))
        return "   ·   ".join(parts)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Step, move, zoom, or leave."""
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
        """Show the picture that is current by now."""
        super().showEvent(event)
        self._follow()
