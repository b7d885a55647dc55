"""Our own icons, drawn in the colours in force and sharp on every screen."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from PySide6.QtCore import QByteArray, Qt
from PySide6.QtGui import QAction, QColor, QGuiApplication, QIcon, QPainter, QPixmap
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QAbstractButton, QApplication

from app.qt.theme.current import colours

FOLDER = Path(__file__).resolve().parents[1] / "icons"
SIZES = (16, 20, 24)
_NAME, _ROLE = "iconName", "iconRole"


def icon(name: str, role: str = "text") -> QIcon:
    """Return the icon app/qt/icons/NAME.svg in the colours of now; raises FileNotFoundError for a name we lack.

    `role` is the colour that it has, one of `Colours`.
    """
    ratios = tuple(sorted({screen.devicePixelRatio() for screen in QGuiApplication.screens()}))
    now = colours()
    return _made(name, getattr(now, role), now.disabled, now.on_accent, ratios)


def set_icon(target: QAbstractButton | QAction, name: str, role: str = "text") -> None:
    """Give a button or an action an icon that follows the colours."""
    target.setProperty(_NAME, name)
    target.setProperty(_ROLE, role)
    target.setIcon(icon(name, role))


def save_drawing(name: str, role: str, target: Path) -> None:
    """Write an icon in a colour of now as a file, for what only a style sheet can draw."""
    target.write_text(_drawing(name, getattr(colours(), role)), encoding="utf-8")


def redraw_icons() -> None:
    """Draw every icon that `set_icon` gave again, in the colours of now."""
    for widget in QApplication.allWidgets():
        targets: list[QAbstractButton | QAction] = list(widget.actions())
        if isinstance(widget, QAbstractButton):
            targets.append(widget)
        for target in targets:
            name = target.property(_NAME)
            if name:
                target.setIcon(icon(name, target.property(_ROLE)))


@lru_cache(maxsize=256)
def _made(name: str, normal: str, disabled: str, selected: str, ratios: tuple[float, ...]) -> QIcon:
    made = QIcon()
    renderer = QSvgRenderer(QByteArray(_drawing(name, normal).encode()))
    for size in SIZES:
        for ratio in ratios:
            drawn = _drawn(renderer, size, ratio)
            made.addPixmap(drawn, QIcon.Mode.Normal)
            made.addPixmap(_coloured(drawn, disabled), QIcon.Mode.Disabled)
            made.addPixmap(_coloured(drawn, selected), QIcon.Mode.Selected)
    return made


def _drawn(renderer: QSvgRenderer, size: int, ratio: float) -> QPixmap:
    pixmap = QPixmap(round(size * ratio), round(size * ratio))
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    renderer.render(painter)
    painter.end()
    pixmap.setDevicePixelRatio(ratio)
    return pixmap


def _coloured(drawn: QPixmap, colour: str) -> QPixmap:
    """Return a drawing in another colour: ours have but one, and to draw it again would take ten times as long."""
    pixmap = QPixmap(drawn)
    painter = QPainter(pixmap)
    painter.setCompositionMode(QPainter.CompositionMode.CompositionMode_SourceIn)
    painter.fillRect(pixmap.rect(), QColor(colour))
    painter.end()
    return pixmap


def _drawing(name: str, colour: str) -> str:
    return (FOLDER / f"{name}.svg").read_text(encoding="utf-8").replace("currentColor", colour)
