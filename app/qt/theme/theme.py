"""The theme of the app: light, dark or high contrast, chosen by the user or by the system."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from string import Template
from typing import Literal

from PySide6.QtCore import QByteArray, QObject, Qt, QTemporaryDir, Signal
from PySide6.QtGui import QAction, QColor, QGuiApplication, QIcon, QPainter, QPalette, QPixmap
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QAbstractButton, QApplication

from app.qt.theme.palettes import CONTRAST, DARK, LIGHT, Colors, colors, set_current

FOLDER = Path(__file__).resolve().parents[1] / "icons"
SIZES = (16, 20, 24)
_ROLES = {
    QPalette.ColorRole.Window: "window",
    QPalette.ColorRole.WindowText: "text",
    QPalette.ColorRole.Base: "base",
    QPalette.ColorRole.AlternateBase: "window",
    QPalette.ColorRole.Text: "text",
    QPalette.ColorRole.Button: "raised",
    QPalette.ColorRole.ButtonText: "text",
    QPalette.ColorRole.BrightText: "bad",
    QPalette.ColorRole.ToolTipBase: "raised",
    QPalette.ColorRole.ToolTipText: "text",
    QPalette.ColorRole.PlaceholderText: "muted",
    QPalette.ColorRole.Highlight: "accent",
    QPalette.ColorRole.HighlightedText: "on_accent",
    QPalette.ColorRole.Accent: "accent",
    QPalette.ColorRole.Link: "link",
    QPalette.ColorRole.LinkVisited: "link",
    # Fusion shades its bevels and outlines with these.
    QPalette.ColorRole.Light: "hover",
    QPalette.ColorRole.Midlight: "raised",
    QPalette.ColorRole.Mid: "line",
    QPalette.ColorRole.Dark: "edge",
    QPalette.ColorRole.Shadow: "line",
}
MARKS = (("check", "on_accent"), ("remove", "on_accent"), ("down", "text"), ("up", "text"), ("down", "disabled"))
"""Icons and their color roles; the style sheet refers to them as $marks/ICON-ROLE.svg."""
_TEXTS = (QPalette.ColorRole.WindowText, QPalette.ColorRole.Text, QPalette.ColorRole.ButtonText)
# Sizes are in logical px. Focus rings are 2 px wide; without focus, padding keeps their space so that nothing moves.
_SHEET = Template("""
QToolTip { color: $text; background: $raised; border: 1px solid $edge; padding: 4px 6px; }
QMenuBar { background: $rail; border-bottom: 1px solid $line; padding: 1px 4px; }
QMenuBar::item { padding: 4px 9px; border-radius: 4px; background: transparent; }
QMenuBar::item:selected { background: $pressed; color: $text; }
QMenu { background: $raised; border: 1px solid $edge; padding: 4px; }
QMenu::item { padding: 5px 28px 5px 10px; border-radius: 4px; }
QMenu::item:selected { background: $accent; color: $on_accent; }
QMenu::item:disabled { color: $disabled; background: transparent; }
QMenu::separator { height: 1px; background: $line; margin: 4px 6px; }
QMenu::icon { padding-left: 6px; }
QStatusBar { background: $rail; border-top: 1px solid $line; }
QStatusBar::item { border: none; }
QSplitter::handle { background: $line; }
QSplitter::handle:horizontal { width: 1px; }
QSplitter::handle:vertical { height: 1px; }
QSplitter::handle:hover { background: $focus; }
QFrame#rail { background: $rail; border: none; border-right: 1px solid $line; }
QFrame#rule { background: $line; border: none; }
QFrame#difference { background: $focus; border: none; border-radius: 1px; }
QFrame#notice { background: $raised; border: none; border-bottom: 1px solid $line; }
#farewell { border: 1px solid $edge; }
QFrame#coach { background: $raised; border: none; border-left: 4px solid $focus; border-bottom: 1px solid $line; }
QToolButton { background: transparent; border: 2px solid transparent; border-radius: 6px; padding: 3px; color: $text; }
QToolButton:hover { background: $hover; }
QToolButton:pressed, QToolButton:checked { background: $pressed; }
QToolButton:focus { border-color: $focus; }
QToolButton:disabled { color: $disabled; }
QToolButton::menu-indicator { image: none; }
QToolButton[popupMode="1"] { padding-right: 22px; }
QToolButton::menu-button { border: none; border-radius: 4px; width: 20px; }
QToolButton::menu-button:hover { background: $pressed; }
QToolButton::menu-arrow { image: url("$marks/down-text.svg"); width: 12px; height: 12px; }
QPushButton { background: $raised; border: 1px solid $edge; border-radius: 6px; padding: 6px 15px; color: $text; }
QPushButton:hover { background: $hover; }
QPushButton:pressed, QPushButton:checked { background: $pressed; }
QPushButton:default { background: $accent; border-color: $accent; color: $on_accent; }
QPushButton:disabled { color: $disabled; background: $window; border-color: $line; }
QPushButton:focus { border: 2px solid $focus; padding: 5px 14px; }
QPushButton:default:focus { border-color: $text; }
QLineEdit, QPlainTextEdit, QTextEdit, QComboBox, QAbstractSpinBox {
    background: $base; border: 1px solid $edge; border-radius: 6px; padding: 4px 7px; color: $text;
    selection-background-color: $accent; selection-color: $on_accent; placeholder-text-color: $muted;
}
QLineEdit:focus, QPlainTextEdit:focus, QTextEdit:focus, QComboBox:focus, QAbstractSpinBox:focus {
    border: 2px solid $focus; padding: 3px 6px;
}
QLineEdit:disabled, QPlainTextEdit:disabled, QTextEdit:disabled, QComboBox:disabled, QAbstractSpinBox:disabled {
    color: $disabled; border-color: $line; placeholder-text-color: $disabled;
}
QAbstractSpinBox QLineEdit, QComboBox QLineEdit {
    border: none; border-radius: 0; padding: 0 5px; background: transparent;
}
QComboBox { background: $raised; padding-right: 24px; }
QComboBox:focus { padding-right: 23px; }
QComboBox:hover { background: $hover; }
QComboBox::drop-down, QDateTimeEdit::drop-down { border: none; width: 24px; }
QComboBox::down-arrow, QDateTimeEdit::down-arrow { image: url("$marks/down-text.svg"); width: 12px; height: 12px; }
QComboBox::down-arrow:disabled { image: url("$marks/down-disabled.svg"); }
QComboBox QAbstractItemView { background: $raised; border: 1px solid $edge; padding: 3px; outline: none; }
QAbstractSpinBox { padding: 4px 22px 4px 5px; }
QAbstractSpinBox:focus { padding: 3px 21px 3px 4px; }
QAbstractSpinBox::up-button, QAbstractSpinBox::down-button {
    subcontrol-origin: border; width: 20px; border: none; background: transparent;
}
QAbstractSpinBox::up-button { subcontrol-position: top right; }
QAbstractSpinBox::down-button { subcontrol-position: bottom right; }
QAbstractSpinBox::up-arrow { image: url("$marks/up-text.svg"); width: 9px; height: 9px; }
QAbstractSpinBox::down-arrow { image: url("$marks/down-text.svg"); width: 9px; height: 9px; }
QCheckBox, QRadioButton { spacing: 8px; border: 2px solid transparent; border-radius: 4px; padding: 1px; }
QCheckBox:focus, QRadioButton:focus { border-color: $focus; }
QCheckBox:disabled, QRadioButton:disabled { color: $disabled; }
QCheckBox::indicator, QRadioButton::indicator, QListView::indicator, QTreeView::indicator {
    width: 16px; height: 16px; background: $base; border: 1px solid $edge; border-radius: 4px;
}
QRadioButton::indicator { border-radius: 9px; }
QCheckBox::indicator:checked, QListView::indicator:checked, QTreeView::indicator:checked {
    background: $accent; border-color: $accent; image: url("$marks/check-on_accent.svg");
}
QCheckBox::indicator:indeterminate {
    background: $accent; border-color: $accent; image: url("$marks/remove-on_accent.svg");
}
QListView::indicator:checked:selected, QTreeView::indicator:checked:selected { border-color: $on_accent; }
QRadioButton::indicator:checked {
    background: qradialgradient(cx: 0.5, cy: 0.5, radius: 0.5, fx: 0.5, fy: 0.5, stop: 0.5 $accent, stop: 0.6 $base);
}
QSlider:horizontal { min-height: 20px; }
QSlider::groove:horizontal { height: 4px; background: $edge; border-radius: 2px; }
QSlider::sub-page:horizontal { background: $focus; border-radius: 2px; }
QSlider::handle:horizontal {
    width: 14px; height: 14px; margin: -6px 0; border-radius: 8px; background: $raised; border: 1px solid $text;
}
QSlider::handle:horizontal:hover { background: $hover; }
QSlider::handle:horizontal:focus { border: 2px solid $focus; }
QProgressBar { background: $base; border: 1px solid $edge; border-radius: 6px; text-align: center; color: $text; }
QProgressBar::chunk { background: $focus; border-radius: 5px; }
QTabBar::tab { padding: 6px 12px; border: none; border-bottom: 2px solid transparent; color: $muted; }
QTabBar::tab:selected { border-bottom-color: $focus; color: $text; }
QTabBar::tab:hover { background: $hover; }
QTabBar::tab:focus { color: $focus; }
QTabBar { qproperty-drawBase: 0; }
QTabWidget::pane { border: none; border-top: 1px solid $line; }
QListView, QTreeView, QTableView, QScrollArea { border: 1px solid transparent; }
QListView:focus, QTreeView:focus, QTableView:focus { border-color: $focus; }
QListView, QTreeView, QTableView {
    background: $base; selection-background-color: $accent; selection-color: $on_accent;
}
QListView::item, QTreeView::item { padding: 2px 6px; height: 22px; }
QListView::item:selected, QTreeView::item:selected { background: $accent; color: $on_accent; }
QHeaderView::section { background: $window; color: $muted; border: none; border-bottom: 1px solid $line; padding: 4px; }
QTreeView QHeaderView::section { padding-left: 9px; }
QTableCornerButton::section { background: $window; border: none; border-bottom: 1px solid $line; }
QGroupBox { border: none; margin-top: 24px; padding-top: 4px; }
QGroupBox::title { subcontrol-origin: margin; left: 0; color: $text; font-weight: 600; }
QLabel[role="title"] { font-size: 17pt; font-weight: 600; }
QLabel[role="heading"] { font-weight: 600; }
QLabel[role="muted"] { color: $muted; }
QLabel[role="good"] { color: $good; }
QLabel[role="warning"] { color: $warning; }
QLabel[role="bad"] { color: $bad; }
QLabel[role="keys"] { background: $raised; border: 1px solid $edge; border-radius: 4px; padding: 1px 6px; }
QLabel[role="badge"] {
    background: $raised; border: 1px solid $edge; border-radius: 4px; padding: 2px 8px; font-weight: 600;
}
QScrollBar:vertical { background: transparent; width: 12px; margin: 0; }
QScrollBar:horizontal { background: transparent; height: 12px; margin: 0; }
QScrollBar::handle { background: $edge; border: 3px solid transparent; border-radius: 5px; }
QScrollBar::handle:vertical { min-height: 32px; margin: 2px 3px; border: none; border-radius: 3px; }
QScrollBar::handle:horizontal { min-width: 32px; margin: 3px 2px; border: none; border-radius: 3px; }
QScrollBar::handle:hover { background: $muted; }
QScrollBar::add-line, QScrollBar::sub-line { width: 0; height: 0; }
QScrollBar::add-page, QScrollBar::sub-page { background: transparent; }
""")
_THEMES: dict[str, Colors] = {"light": LIGHT, "dark": DARK, "contrast": CONTRAST}
_DARK_BELOW = 128  # lightness of 0..255
_NAME, _ROLE = "iconName", "iconRole"


def icon(name: str, role: str = "text") -> QIcon:
    """Return the icon app/qt/icons/NAME.svg in the current theme.

    `role` is its color role, a field of `Colors`. Raises FileNotFoundError if there is no such icon.
    """
    ratios = tuple(sorted({screen.devicePixelRatio() for screen in QGuiApplication.screens()}))
    now = colors()
    return _render_icon(name, getattr(now, role), now.disabled, now.on_accent, ratios)


def set_icon(target: QAbstractButton | QAction, name: str, role: str = "text") -> None:
    """Set the icon of a button or action; it is redrawn when the theme changes."""
    target.setProperty(_NAME, name)
    target.setProperty(_ROLE, role)
    target.setIcon(icon(name, role))


def save_drawing(name: str, role: str, target: Path) -> None:
    """Write an icon in a color of the current theme as an SVG file, for use in the style sheet."""
    target.write_text(_svg(name, getattr(colors(), role)), encoding="utf-8")


def redraw_icons() -> None:
    """Redraw all icons that were set with `set_icon`, in the current theme."""
    for widget in QApplication.allWidgets():
        targets: list[QAbstractButton | QAction] = list(widget.actions())
        if isinstance(widget, QAbstractButton):
            targets.append(widget)
        for target in targets:
            name = target.property(_NAME)
            if name:
                target.setIcon(icon(name, target.property(_ROLE)))


@lru_cache(maxsize=256)
def _render_icon(name: str, normal: str, disabled: str, selected: str, ratios: tuple[float, ...]) -> QIcon:
    result = QIcon()
    renderer = QSvgRenderer(QByteArray(_svg(name, normal).encode()))
    for size in SIZES:
        for ratio in ratios:
            drawn = _render_pixmap(renderer, size, ratio)
            result.addPixmap(drawn, QIcon.Mode.Normal)
            result.addPixmap(_tinted(drawn, disabled), QIcon.Mode.Disabled)
            result.addPixmap(_tinted(drawn, selected), QIcon.Mode.Selected)
    return result


def _render_pixmap(renderer: QSvgRenderer, size: int, ratio: float) -> QPixmap:
    pixmap = QPixmap(round(size * ratio), round(size * ratio))
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    renderer.render(painter)
    painter.end()
    pixmap.setDevicePixelRatio(ratio)
    return pixmap


def _tinted(drawn: QPixmap, color: str) -> QPixmap:
    """Return a one-color icon in another color; this is ten times as fast as rendering the SVG again."""
    pixmap = QPixmap(drawn)
    painter = QPainter(pixmap)
    painter.setCompositionMode(QPainter.CompositionMode.CompositionMode_SourceIn)
    painter.fillRect(pixmap.rect(), QColor(color))
    painter.end()
    return pixmap


def _svg(name: str, color: str) -> str:
    return (FOLDER / f"{name}.svg").read_text(encoding="utf-8").replace("currentColor", color)


def palette(colors: Colors) -> QPalette:
    """Return the Qt palette for a color scheme, with paler text for disabled widgets."""
    result = QPalette()
    for role, name in _ROLES.items():
        result.setColor(role, QColor(getattr(colors, name)))
    for role in _TEXTS:
        result.setColor(QPalette.ColorGroup.Disabled, role, QColor(colors.disabled))
    result.setColor(QPalette.ColorGroup.Disabled, QPalette.ColorRole.Highlight, QColor(colors.line))
    return result


def sheet(colors: Colors, marks: Path) -> str:
    """Return the style sheet for a color scheme; `marks` is the folder with the icon files of `MARKS`."""
    return _SHEET.substitute(asdict(colors), marks=marks.as_posix())


__all__ = ["Choice", "Theme", "colors"]

Choice = Literal["system", "light", "dark", "contrast"]


class Theme(QObject):
    """Theme of the application."""

    changed = Signal()
    """Emitted after the colors have changed; `colors()` returns the new ones."""

    def __init__(self, application: QApplication, choice: Choice = "system") -> None:
        super().__init__(application)
        self._application = application
        # Read before we set our own palette: until then, Qt has the system's.
        self._system_is_dark = application.palette().color(QPalette.ColorRole.Window).lightness() < _DARK_BELOW
        self.choice: Choice = choice
        self._icon_folder = QTemporaryDir()
        application.setStyle("Fusion")
        hints = application.styleHints()
        hints.colorSchemeChanged.connect(self._on_system_changed)
        accessibility = getattr(hints, "accessibility", None)  # since Qt 6.10
        if accessibility is not None:
            accessibility().contrastPreferenceChanged.connect(self._on_system_changed)
        self.choose(choice)

    def choose(self, choice: Choice) -> None:
        """Apply a theme at once; "system" follows the system."""
        self.choice = choice
        self._set_system_scheme()
        self._apply(_THEMES.get(choice) or self._system_theme())

    def _on_system_changed(self) -> None:
        if self.choice == "system":
            self._apply(self._system_theme())

    def _set_system_scheme(self) -> None:
        """Request light or dark title bars and file dialogs; some systems ignore this."""
        scheme = {"light": Qt.ColorScheme.Light, "dark": Qt.ColorScheme.Dark, "contrast": Qt.ColorScheme.Dark}
        self._application.styleHints().setColorScheme(scheme.get(self.choice, Qt.ColorScheme.Unknown))

    def _system_theme(self) -> Colors:
        hints = self._application.styleHints()
        accessibility = getattr(hints, "accessibility", None)
        if accessibility is not None and accessibility().contrastPreference() == Qt.ContrastPreference.HighContrast:
            return CONTRAST
        if hints.colorScheme() == Qt.ColorScheme.Unknown:
            return DARK if self._system_is_dark else LIGHT
        return DARK if hints.colorScheme() == Qt.ColorScheme.Dark else LIGHT

    def _write_marks(self, chosen: Colors) -> Path:
        """Write the icons in `MARKS` as files, because style sheets can use only files; return their folder."""
        folder = Path(self._icon_folder.path())
        for name, role in MARKS:
            save_drawing(name, role, folder / f"{name}-{role}.svg")
        return folder

    def _apply(self, chosen: Colors) -> None:
        set_current(chosen)
        self._application.setPalette(palette(chosen))
        self._application.setStyleSheet(sheet(chosen, self._write_marks(chosen)))
        redraw_icons()
        self.changed.emit()
