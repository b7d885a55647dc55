"""Every page and dialog as images for people to look at, and the names of all widgets that take the keyboard.

IMPASTO_SCREENS=FOLDER keeps the images, in every look and size; else they are in pytest's temporary folder.
tests/support/screens.py says how a page adds its screens.
"""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from PIL import Image
from PySide6.QtWidgets import QComboBox, QDialog, QWidget

import app.qt
from tests.support import ROOT
from tests.support.screens import LOOKS, SCREENS, SIZE, nameless

# Where people want to look at the images: then all are made, in every look and size, as with --all.
KEPT = os.environ.get("IMPASTO_SCREENS")
OTHER_SIZES = [pytest.param(percent, marks=() if KEPT else pytest.mark.slow) for percent in (150, 200)]
# Screens with the most text and the most widgets, where a larger size changes most.
DENSE = ("pictures", "health", "preferences", "runs-charts", "train-settings", "presets-edit")
# What Qt says of a window without a screen.
OFFSCREEN = "This plugin does not support"


def draw(folder: Path, percent: int, *words: str) -> None:
    """Save screens as images, in a process of its own; fail on anything that Qt, a slot or a log reports there."""
    environment = {**os.environ, "QT_SCALE_FACTOR": str(percent / 100)}
    for name in ("IMPASTO_HOME", "IMPASTO_CACHE"):
        environment.pop(name, None)  # it has folders of its own
    command = [sys.executable, "-m", "tests.support.screens", str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith(OFFSCREEN)] == []


def check(folder: Path, percent: int, looks: Sequence[str], names: Iterable[str]) -> None:
    """Check that each screen shows something, and something else in each look."""
    for name in names:
        images = [Image.open(folder / f"{name}-{look}-{percent}.png") for look in looks]
        counts = [colors(image) for image in images]
        assert all(len(count) > 8 for count in counts), f"{name} shows next to nothing"
        backgrounds = {max(count)[1] for count in counts}
        assert len(backgrounds) == len(looks), f"{name} looks the same in other colors"
        if name == "pictures":
            assert images[0].size == tuple(side * percent // 100 for side in SIZE)


@pytest.fixture(scope="module")
def looks(request: pytest.FixtureRequest) -> Sequence[str]:
    """Light and dark, and high contrast where every image is made."""
    return LOOKS if KEPT or request.config.getoption("all") else LOOKS[:2]


@pytest.fixture(scope="module")
def drawn(looks: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw every screen at its usual size, once for all tests of this file."""
    folder = Path(KEPT or tmp_path_factory.mktemp("screens"))
    draw(folder, 100, *looks)
    return folder


def test_every_screen_in_light_and_dark(drawn, looks):
    check(drawn, 100, looks, SCREENS)


def test_dense_screens_in_high_contrast_at_twice_the_size(tmp_path):
    draw(tmp_path, 200, "contrast", *DENSE)
    check(tmp_path, 200, ["contrast"], DENSE)


@pytest.mark.parametrize("percent", OTHER_SIZES)
def test_every_screen_in_every_look_and_larger(percent, tmp_path):
    folder = Path(KEPT or tmp_path)
    draw(folder, percent)
    check(folder, percent, LOOKS, SCREENS)


def colors(image):
    """Count the colors of every fourth pixel of every fourth line: all of them would take minutes."""
    width, height = image.size
    few = image.convert("RGB").resize((width // 4, height // 4), Image.Resampling.NEAREST)
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


def test_whatever_takes_the_keyboard_has_a_name(drawn):
    found = json.loads((drawn / "nameless.json").read_text(encoding="utf-8"))
    assert found.keys() == SCREENS.keys()
    assert {name: widgets for name, widgets in found.items() if widgets} == {}


def test_the_walk_would_find_a_nameless_button(qtbot):
    top = QWidget()
    qtbot.addWidget(top)
    box = QComboBox(top)
    box.addItem("a value")
    top.show()
    assert nameless(top) == ["QComboBox '' in QWidget"]
    box.setAccessibleName("Theme")
    assert nameless(top) == []
