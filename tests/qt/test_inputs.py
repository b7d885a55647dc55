"""The mouse wheel scrolls the page and changes a setting only where that has the keyboard focus."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QDateTime, QPoint, QPointF, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import (
    QAbstractSlider,
    QAbstractSpinBox,
    QComboBox,
    QScrollArea,
    QScrollBar,
    QVBoxLayout,
    QWidget,
)
from pytestqt.qtbot import QtBot

from app.core.session import Session
from app.qt.train.page import TrainPage
from app.qt.widgets import ComboBox, DateTimeEdit, DoubleSpinBox, Slider, SpinBox
from app.qt.window import Window
from tests.support import ROOT
from tests.support.artist import shown_page
from tests.support.jobs import photographs

NOTCH = QPoint(0, -120)

# Whoever adds a kind of input that reacts to the wheel gives it a class in app/qt/widgets.py.
QTS_OWN = {
    *("QComboBox", "QFontComboBox", "QAbstractSpinBox", "QSpinBox", "QDoubleSpinBox"),
    *("QDateTimeEdit", "QDateEdit", "QTimeEdit", "QAbstractSlider", "QSlider", "QDial"),
}

Input = QComboBox | QAbstractSpinBox | QAbstractSlider


def turn_wheel(target: QWidget) -> None:
    """Turn the wheel by a notch over the middle of a widget, through its window as the system does."""
    window = target.window()
    QTest.wheelEvent(window.windowHandle(), QPointF(target.mapTo(window, target.rect().center())), NOTCH)


def value_of(thing: QWidget) -> object:
    if isinstance(thing, QComboBox):
        return thing.currentText()
    return thing.text() if isinstance(thing, QAbstractSpinBox) else thing.value()  # type: ignore[attr-defined]


def combo_box() -> ComboBox:
    box = ComboBox()
    box.addItems(["one", "two", "three"])
    return box


def editable() -> ComboBox:
    box = combo_box()
    box.setEditable(True)
    return box


def slider() -> Slider:
    made = Slider(Qt.Orientation.Horizontal)
    made.setValue(50)
    return made


@pytest.mark.parametrize("make", [combo_box, editable, SpinBox, DoubleSpinBox, DateTimeEdit, slider])
def test_the_wheel_over_each_kind_scrolls_unless_it_has_the_focus(make: Callable[[], Input], qtbot: QtBot) -> None:
    thing, area, inside = make(), QScrollArea(), QWidget()
    if isinstance(thing, SpinBox | DoubleSpinBox):
        thing.setValue(5)
    elif isinstance(thing, DateTimeEdit):
        thing.setDateTime(QDateTime(2026, 5, 5, 12, 0, 0))
    qtbot.addWidget(area)
    column = QVBoxLayout(inside)
    column.addWidget(thing)
    column.addSpacing(2000)
    area.setWidgetResizable(True)
    area.setWidget(inside)
    with qtbot.waitExposed(area):
        area.show()
    area.activateWindow()
    area.setFocus()
    before = value_of(thing)
    turn_wheel(thing)
    assert value_of(thing) == before and not thing.hasFocus()
    assert area.verticalScrollBar().value() > 0
    area.verticalScrollBar().setValue(0)
    thing.setFocus()
    qtbot.waitUntil(thing.hasFocus)
    turn_wheel(thing)
    assert value_of(thing) != before
    assert area.verticalScrollBar().value() == 0


def inputs_in(place: QWidget) -> list[QWidget]:
    found = [one for kind in (QComboBox, QAbstractSpinBox, QAbstractSlider) for one in place.findChildren(kind)]
    return [one for one in found if not isinstance(one, QScrollBar)]


@pytest.fixture
def page(window: Window, session: Session, qtbot: QtBot, tmp_path: Path) -> TrainPage:
    window.resize(1280, 900)
    session.datasets.open(photographs(tmp_path / "katzen ü", 3))
    qtbot.waitUntil(lambda: len(session.library.images) == 3)
    window.commands["window.train"].trigger()
    page = shown_page(window, TrainPage)
    qtbot.waitUntil(lambda: page.draft is not None and bool(page.sheet.essentials.cards.cards))
    return page


def test_scrolling_over_every_setting_of_a_job_changes_none(page: TrainPage, qtbot: QtBot) -> None:
    page.sheet.all.setChecked(True)
    page.sheet.form.finish()
    assert page.draft is not None
    before, sheet = page.draft.values, page.sheet
    shown = [one for one in inputs_in(sheet) if one.isVisible() and one.isEnabled()]
    assert len(shown) > 20
    for thing in shown:
        sheet.ensureWidgetVisible(thing, 0, 200)
        bar = sheet.verticalScrollBar()
        scrolled, value = bar.value(), value_of(thing)
        turn_wheel(thing)
        assert value_of(thing) == value, thing.accessibleName()
        assert bar.value() > scrolled or scrolled == bar.maximum(), thing.accessibleName()
    assert page.draft.values == before


def test_the_wheel_over_inputs_of_the_images_page_changes_none(
    page: TrainPage, window: Window, session: Session, qtbot: QtBot
) -> None:
    window.commands["window.images"].trigger()
    qtbot.waitUntil(window.images.isVisible)
    number = next(iter(session.library.images))
    session.view.select([number], number)
    before = session.settings.preferences
    shown = [one for one in inputs_in(window) if one.isVisible() and one.isEnabled()]
    assert shown
    for thing in shown:
        value = value_of(thing)
        turn_wheel(thing)
        assert value_of(thing) == value, thing.objectName()
    assert session.settings.preferences == before


def named(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def uses_of_qts_own(tree: ast.AST) -> list[tuple[int, str]]:
    """Return line and class wherever code builds one of Qt's own inputs, or derives from one."""
    built = [(node.lineno, named(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    built += [(node.lineno, named(base)) for node in classes for base in node.bases]
    return [(line, name) for line, name in built if name in QTS_OWN]


def test_no_code_builds_an_input_without_the_rule() -> None:
    for wrong in ("QSlider(way)", "QtWidgets.QSpinBox()", "class Mine(QComboBox): pass"):
        assert uses_of_qts_own(ast.parse(wrong))
    assert not uses_of_qts_own(ast.parse("box: QComboBox = ComboBox()"))
    files = [path for path in sorted((ROOT / "app").rglob("*.py")) if path != ROOT / "app" / "qt" / "widgets.py"]
    for path in files:
        assert not uses_of_qts_own(ast.parse(path.read_text(encoding="utf-8"))), path
