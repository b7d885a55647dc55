"""Chooses light, dark or high contrast, as the user or the system wants it, and follows when the system changes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from PySide6.QtCore import QObject, Qt, QTemporaryDir, Signal
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import QApplication

from app.qt.theme.current import colours, put_in_force
from app.qt.theme.icons import redraw_icons, save_drawing
from app.qt.theme.palettes import CONTRAST, DARK, LIGHT, Colours
from app.qt.theme.style import MARKS, palette, sheet

__all__ = ["Choice", "Theme", "colours"]

Choice = Literal["system", "light", "dark", "contrast"]
_NAMED: dict[str, Colours] = {"light": LIGHT, "dark": DARK, "contrast": CONTRAST}
_DARK_BELOW = 128  # lightness of 0..255


class Theme(QObject):
    """The one look of the application."""

    changed = Signal()
    """Other colours are in force: `colours()` tells which."""

    def __init__(self, application: QApplication, choice: Choice = "system") -> None:
        super().__init__(application)
        self._application = application
        # Before we give Qt a palette of ours, it has the system's.
        self._system_is_dark = application.palette().color(QPalette.ColorRole.Window).lightness() < _DARK_BELOW
        self.choice: Choice = choice
        self._drawings = QTemporaryDir()
        application.setStyle("Fusion")
        hints = application.styleHints()
        hints.colorSchemeChanged.connect(self._follow)
        accessibility = getattr(hints, "accessibility", None)  # since Qt 6.10
        if accessibility is not None:
            accessibility().contrastPreferenceChanged.connect(self._follow)
        self.choose(choice)

    def choose(self, choice: Choice) -> None:
        """Put a look in force, or the system's; at once."""
        self.choice = choice
        self._tell_system()
        self._put(_NAMED.get(choice) or self._of_system())

    def _follow(self) -> None:
        if self.choice == "system":
            self._put(self._of_system())

    def _tell_system(self) -> None:
        """Ask for title bars and file dialogs of the same lightness; systems without such a choice ignore it."""
        scheme = {"light": Qt.ColorScheme.Light, "dark": Qt.ColorScheme.Dark, "contrast": Qt.ColorScheme.Dark}
        self._application.styleHints().setColorScheme(scheme.get(self.choice, Qt.ColorScheme.Unknown))

    def _of_system(self) -> Colours:
        hints = self._application.styleHints()
        accessibility = getattr(hints, "accessibility", None)
        if accessibility is not None and accessibility().contrastPreference() == Qt.ContrastPreference.HighContrast:
            return CONTRAST
        if hints.colorScheme() == Qt.ColorScheme.Unknown:
            return DARK if self._system_is_dark else LIGHT
        return DARK if hints.colorScheme() == Qt.ColorScheme.Dark else LIGHT

    def _draw(self, chosen: Colours) -> Path:
        """Return the folder with the marks of boxes and arrows in these colours; style sheets take them from files."""
        folder = Path(self._drawings.path())
        for name, role in MARKS:
            save_drawing(name, role, folder / f"{name}-{role}.svg")
        return folder

    def _put(self, chosen: Colours) -> None:
        put_in_force(chosen)
        self._application.setPalette(palette(chosen))
        self._application.setStyleSheet(sheet(chosen, self._draw(chosen)))
        redraw_icons()
        self.changed.emit()
