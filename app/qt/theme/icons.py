"""Our own icons, drawn in the colours in force and sharp on every screen."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from PySide6.QtCore import QByteArray, Qt
from PySide6.QtGui import QAction, QGuiApplication, QIcon, QPainter, QPixmap
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QAbstractButton, QApplication

from app.qt.theme.current import colours

FOLDER = Path(__file__).resolve().parents[1] / "icons"
SIZES = (16, 20, 24, 32)
_NAME = "iconName"


def icon(name: str) -> QIcon:
    """Return the icon app/qt/icons/NAME.svg in the colours of now; raises FileNotFoundError for a name we lack."""
    ratios = tuple(sorted({screen.devicePixelRatio() for screen in QGuiApplication.screens()}))
    return _made(name, colours().text, colours().disabled, ratios)


def set_icon(target: QAbstractButton | QAction, name: str) -> None:
    """Give a button or an action an icon that follows the colours."""
    target.setProperty(_NAME, name)
    target.setIcon(icon(name))


def redraw_icons() -> None:
    """Draw every icon that `set_icon` gave again, in the colours of now."""
    for widget in QApplication.allWidgets():
        targets: list[QAbstractButton | QAction] = list(widget.actions())
        if isinstance(widget, QAbstractButton):
            targets.append(widget)
        for target in targets:
            name = target.property(_NAME)
            if name:
                target.setIcon(icon(name))


@lru_cache(maxsize=256)
def _made(name: str, normal: str, disabled: str, ratios: tuple[float, ...]) -> QIcon:
    drawing = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    made = QIcon()
    for mode, colour in ((QIcon.Mode.Normal, normal), (QIcon.Mode.Disabled, disabled)):
        renderer = QSvgRenderer(QByteArray(drawing.replace("currentColor", colour).encode()))
        for size in SIZES:
            for ratio in ratios:
                made.addPixmap(_drawn(renderer, size, ratio), mode)
    return made


def _drawn(renderer: QSvgRenderer, size: int, ratio: float) -> QPixmap:
    pixmap = QPixmap(round(size * ratio), round(size * ratio))
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    renderer.render(painter)
    painter.end()
    pixmap.setDevicePixelRatio(ratio)
    return pixmap
