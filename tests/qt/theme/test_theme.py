"""Colors, contrast and icons."""

import re
from pathlib import Path

import pytest
from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QColor, QIcon, QPalette
from PySide6.QtWidgets import QListWidget, QListWidgetItem, QPushButton, QRadioButton, QToolButton

from app.qt.runs.charts.painting import SERIES_COLORS, color_of, pale
from app.qt.theme import Theme, colors, icon, set_icon
from app.qt.theme.palettes import CONTRAST, DARK, LIGHT, SHAPES, TEXTS
from app.qt.theme.theme import FOLDER, sheet

ALL = {"light": LIGHT, "dark": DARK, "contrast": CONTRAST}


@pytest.fixture
def theme(qapp):
    """The application's look; after the test it has none of ours."""
    theme = Theme(qapp, "light")
    yield theme
    theme.choose("light")
    qapp.setStyleSheet("")
    theme.deleteLater()


def luminance(color: str) -> float:
    """WCAG 2.2, relative luminance."""
    values = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ratio(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula_gives_the_known_ratios():
    assert ratio("#000000", "#ffffff") == pytest.approx(21)
    assert ratio("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # WebAIM's well-known near miss


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("pairs", "least"),
    [(TEXTS, 4.5), (SHAPES, 3.0)],
    ids=["every text can be read on every background", "edges, focus rings and icons stand out"],
)
def test_contrast_is_high_enough(name, pairs, least):
    chosen = ALL[name]
    poor = {pair: ratio(getattr(chosen, pair[0]), getattr(chosen, pair[1])) for pair in pairs}
    assert {pair: value for pair, value in poor.items() if value < least} == {}


def test_in_high_contrast_the_noise_of_a_curve_stands_out_too(theme):
    theme.choose("contrast")
    series = [QColor(getattr(CONTRAST, color_of(place))) for place in range(SERIES_COLORS)]
    assert min(ratio(pale(color).name(), CONTRAST.base) for color in series) >= 3.0


def test_the_style_sheet_names_no_colour_of_its_own():
    marked = type(LIGHT)(*(f"#{index:06x}" for index in range(len(LIGHT.__slots__))))
    left = re.sub("|".join(f"#{index:06x}" for index in range(len(LIGHT.__slots__))), "", sheet(marked, Path("marks")))
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b|\brgba?\(", left) == []


@pytest.mark.parametrize("name", ALL)
def test_a_chosen_button_keeps_its_ring_and_has_a_dot(theme, qtbot, name):
    theme.choose(name)
    button = QRadioButton()
    qtbot.addWidget(button)
    button.resize(button.sizeHint())
    empty = button.grab().toImage()
    button.setChecked(True)
    full = button.grab().toImage()
    row = empty.height() // 2
    rings = [[image.pixelColor(x, row).name() for x in range(6)] for image in (empty, full)]
    assert rings[0] == rings[1]
    assert max(ratio(color, ALL[name].window) for color in rings[0]) > 2.5  # its round edge is a mixed color
    assert full.pixelColor(12, row) == QColor(ALL[name].accent)


@pytest.mark.parametrize("name", ALL)
def test_a_look_is_put_in_force(theme, qapp, qtbot, name):
    theme.choose("dark" if name == "light" else "light")
    with qtbot.waitSignal(theme.changed):
        theme.choose(name)
    assert colors() is ALL[name]
    assert qapp.palette().color(QPalette.ColorRole.Window) == QColor(ALL[name].window)


def test_the_system_is_followed_only_when_asked(theme, qapp, monkeypatch):
    hints = qapp.styleHints()
    monkeypatch.setattr(type(hints), "colorScheme", lambda self: Qt.ColorScheme.Dark)  # no system here can change
    theme.choose("system")
    assert colors() is DARK
    theme.choose("light")
    hints.colorSchemeChanged.emit(Qt.ColorScheme.Dark)
    assert colors() is LIGHT
    theme.choose("system")
    monkeypatch.setattr(type(hints), "colorScheme", lambda self: Qt.ColorScheme.Light)
    hints.colorSchemeChanged.emit(Qt.ColorScheme.Light)
    assert colors() is LIGHT


def darkest(made: QIcon, size: int, mode: QIcon.Mode = QIcon.Mode.Normal) -> QColor:
    """The color of the most opaque pixel."""
    image = made.pixmap(QSize(size, size), 1.0, mode).toImage()
    pixels = [image.pixelColor(x, y) for x in range(image.width()) for y in range(image.height())]
    return max(pixels, key=QColor.alpha)


def test_every_icon_is_drawn_in_the_text_color(theme):
    """Check all icons in one test: a theme per icon restyles every widget that earlier tests left, for a minute."""
    names = sorted(path.stem for path in FOLDER.glob("*.svg") if path.stem != "impasto")
    text = QColor(LIGHT.text).getRgb()[:3]
    pixels = {name: darkest(icon(name), 24) for name in names}
    assert {name for name, pixel in pixels.items() if pixel.alpha() <= 200} == set()
    shades = {name: [abs(a - b) for a, b in zip(pixels[name].getRgb()[:3], text, strict=True)] for name in names}
    assert {name: shade for name, shade in shades.items() if max(shade) >= 12} == {}


def test_icons_follow_the_colours(theme, qtbot):
    buttons = [QToolButton(), QPushButton()]
    for button in buttons:
        qtbot.addWidget(button)
        set_icon(button, "search")
    theme.choose("contrast")
    assert [darkest(button.icon(), 24).name() for button in buttons] == ["#ffffff"] * 2


def test_an_icon_has_as_many_pixels_as_the_screen_shows(theme, monkeypatch, qapp):
    monkeypatch.setattr(type(qapp.primaryScreen()), "devicePixelRatio", lambda self: 2.0)
    sharp = icon("search").pixmap(QSize(20, 20), 2.0)
    assert (sharp.width(), sharp.devicePixelRatio()) == (40, 2.0)


def test_a_name_without_a_drawing_is_a_mistake(theme):
    with pytest.raises(FileNotFoundError):
        icon("no-such-icon")


@pytest.mark.parametrize("look", ALL)
def test_what_is_ticked_and_chosen_shows_its_box_on_the_accent(theme, qtbot, look):
    theme.choose(look)
    shown = QListWidget()
    qtbot.addWidget(shown)
    item = QListWidgetItem("", shown)
    item.setCheckState(Qt.CheckState.Checked)
    shown.setCurrentItem(item)
    with qtbot.waitExposed(shown):
        shown.show()
    image, color = shown.viewport().grab(shown.visualItemRect(item)).toImage(), QColor(ALL[look].on_accent)
    columns = ([y for y in range(image.height()) if image.pixelColor(x, y) == color] for x in range(30))
    assert max(max(seen) - min(seen) for seen in columns if seen) >= 14, "the box, and not the tick alone"
