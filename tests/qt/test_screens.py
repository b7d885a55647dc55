"""Every page and dialog in every look and size, as pictures for people to look at; and a walk over all that takes keys.

IMPASTO_SCREENS=FOLDER keeps the pictures; else they lie in pytest's temporary folder. tests/support/screens.py says how
a room adds its screens.
"""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from PySide6.QtCore import Qt
from PySide6.QtGui import QAccessible, QAccessibleInterface
from PySide6.QtWidgets import QAbstractSpinBox, QApplication, QComboBox, QDialog, QLabel, QWidget

import app.qt
from app.qt.window import Window
from tests.support.screens import LOOKS, SCREENS, SIZE, open_demo, showing

ROOT = Path(__file__).resolve().parents[2]


# Every look at one size and every size in one look; all of both where pictures are made for people to look at.
ALL = "IMPASTO_SCREENS" in os.environ


@pytest.mark.parametrize(
    ("percent", "looks"), [(100, LOOKS), (150, LOOKS if ALL else ("dark",)), (200, LOOKS if ALL else ("contrast",))]
)
def test_every_screen_in_every_look_and_size(percent, looks, tmp_path):
    folder = Path(os.environ.get("IMPASTO_SCREENS") or tmp_path / "screens")
    environment = {**os.environ, "QT_SCALE_FACTOR": str(percent / 100)}
    command = [sys.executable, "-m", "tests.support.screens", str(folder), *looks]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    for name in SCREENS:
        pictures = [Image.open(folder / f"{name}-{look}-{percent}.png") for look in looks]
        counts = [colours(picture) for picture in pictures]
        assert all(len(count) > 8 for count in counts), f"{name} shows next to nothing"
        grounds = {max(count)[1] for count in counts}
        assert len(grounds) == len(looks), f"{name} looks the same in other colours"
        if name == "pictures":
            assert pictures[0].size == tuple(side * percent // 100 for side in SIZE)


def colours(look):
    """How often each colour is among every fourth pixel of every fourth line: all of them would take minutes."""
    width, height = look.size
    few = look.convert("RGB").resize((width // 4, height // 4), Image.Resampling.NEAREST)
    return few.getcolors(few.width * few.height)


def dialogs(base: type[QDialog] = QDialog) -> Iterator[type[QDialog]]:
    """The app's dialogs, but for those that are only what others share."""
    for each in base.__subclasses__():
        if each.__module__.startswith("app.") and not each.__subclasses__():
            yield each
        yield from dialogs(each)


def test_every_dialog_has_its_screen():
    for module in pkgutil.walk_packages(app.qt.__path__, "app.qt."):
        importlib.import_module(module.name)
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "support").glob("screens*.py"))
    found = sorted(each.__name__ for each in dialogs())
    assert len(found) > 10
    missing = [name for name in found if not re.search(rf"\b{name}\b", sources)]
    assert missing == []


def name_of(widget: QWidget) -> str:
    """What a screen reader calls a widget."""
    interface: QAccessibleInterface = QAccessible.queryAccessibleInterface(widget)
    return interface.text(QAccessible.Text.Name) if interface else ""


def nameless(top: QWidget) -> list[str]:
    """The widgets that take the keyboard and have no name; a box's current value is no name of it."""
    buddies = {label.buddy() for label in top.findChildren(QLabel) if label.buddy()}
    found = []
    for widget in (top, *top.findChildren(QWidget)):
        inner = isinstance(widget.parent(), QAbstractSpinBox | QComboBox) or widget.focusProxy() is not None
        if not widget.isVisibleTo(top) or inner or not widget.focusPolicy() & Qt.FocusPolicy.TabFocus:
            continue
        valued = isinstance(widget, QComboBox | QAbstractSpinBox)
        named = bool(widget.accessibleName()) or widget in buddies if valued else bool(name_of(widget).strip())
        if not named:
            found.append(f"{type(widget).__name__} {widget.objectName()!r} in {type(widget.parent()).__name__}")
    return found


def test_whatever_takes_the_keyboard_has_a_name(session, qtbot, tmp_path):
    window = Window(session)
    qtbot.addWidget(window)
    window.resize(*SIZE)
    window.show()
    application = QApplication.instance()
    open_demo(application, window, tmp_path / "demo")
    found = {}
    for name, show in SCREENS.items():
        session.view.select(session.view.ids[:1], session.view.ids[0])
        with showing(application, show, window) as shown:
            found[name] = nameless(shown)
    assert {name: widgets for name, widgets in found.items() if widgets} == {}


def test_the_walk_would_find_a_nameless_button(qtbot):
    top = QWidget()
    qtbot.addWidget(top)
    box = QComboBox(top)
    box.addItem("a value")
    top.show()
    assert nameless(top) == ["QComboBox '' in QWidget"]
    box.setAccessibleName("Colours")
    assert nameless(top) == []
