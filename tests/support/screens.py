"""Save every page and dialog of the app as an image, for people to look at.

    python -m tests.support.screens FOLDER

Each screen is a function that brings a window, with the demo's images open, to the state to be photographed, and
returns the widget to photograph. A package adds its own:

    @screen("loupe")
    def loupe(window: Window) -> QWidget:
        window.commands["views.loupe"].trigger()
        return window

Modules beside this one called `screens_NAME.py` are found automatically. The interface scale is set per process
(QT_SCALE_FACTOR); it saves NAME-LOOK-PERCENT.png for each look. Arguments after FOLDER select looks and screens.
nameless.json lists the widgets of each screen that take the keyboard focus and have no name for screen readers.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PySide6.QtCore import QDeadlineTimer, QEvent, QEventLoop, Qt, QTimer
from PySide6.QtGui import QAccessible, QAccessibleInterface
from PySide6.QtWidgets import QAbstractSpinBox, QApplication, QComboBox, QLabel, QWidget

from app.core.session import Session
from app.qt.actions.palette import CommandPalette, ShortcutList
from app.qt.images.captions.bulk_dialog import BulkDialog, ReplaceForm
from app.qt.images.captions.recovery_dialogs import RestoreDialog
from app.qt.images.health.cropper import Cropper
from app.qt.images.health.mask_painter import MaskPainter
from app.qt.main_thread import MainThreadQueue
from app.qt.notices import CrashDialog
from app.qt.preferences import PreferencesDialog
from app.qt.theme import Theme
from app.qt.widgets import install_language
from app.qt.window import Window
from tests.support import ROOT

Screen = Callable[[Window], QWidget]
LOOKS = ("light", "dark", "contrast")
SIZE = (1280, 800)
DEMO = ROOT / "assets" / "demo" / "pictures"

SCREENS: dict[str, Screen] = {}


def screen(name: str) -> Callable[[Screen], Screen]:
    """Register a screen under a name."""

    def enter(show: Screen) -> Screen:
        assert name not in SCREENS, name
        SCREENS[name] = show
        return show

    return enter


@screen("pictures")
def pictures(window: Window) -> QWidget:
    window.show_images()
    window.commands["views.grid"].trigger()
    chosen = window.session.view.ids[1]
    window.session.view.select([chosen], chosen)
    return window


@screen("runs")
def runs(window: Window) -> QWidget:
    window.show_runs()
    return window


@screen("notices")
def notices(window: Window) -> QWidget:
    window.show_images()
    window.notices.show_notice(
        "Could not read preferences.toml: it is not valid TOML. All preferences were reset to their defaults.",
        "warning",
    )
    window.report_crash("Traceback")
    return window


@screen("preferences")
def preferences(window: Window) -> QWidget:
    return PreferencesDialog(window.session.settings, window.commands, window)


@screen("keys")
def keys(window: Window) -> QWidget:
    dialog = PreferencesDialog(window.session.settings, window.commands, window)
    dialog.tabs.setCurrentWidget(dialog.shortcuts)
    return dialog


@screen("palette")
def palette(window: Window) -> QWidget:
    dialog = CommandPalette(window.commands, window)
    dialog.field.setText("pic")
    return dialog


@screen("sheet")
def sheet(window: Window) -> QWidget:
    return ShortcutList(window.commands, window)


@screen("crash")
def crash(window: Window) -> QWidget:
    return CrashDialog("Impasto 0.1.0, Python 3.12\n\nTraceback (most recent call last):\n  ...", window)


@screen("menu")
def menu(window: Window) -> QWidget:
    made = window.menuBar().actions()[2].menu()
    made.popup(window.mapToGlobal(window.rect().center()))
    return made


@screen("captions")
def captions(window: Window) -> QWidget:
    window.show_images()
    window.session.view.select(window.session.view.ids[:8], window.session.view.ids[0])
    window.images.editor.chips.choose(1)
    return window


@screen("captions-bulk")
def captions_bulk(window: Window) -> QWidget:
    dialog = BulkDialog(window.session, "caption", window)
    dialog.operations.setCurrentRow(3)
    assert isinstance(dialog.form, ReplaceForm)
    dialog.form.sought.setText(r"(\w+)$")
    dialog.form.replacement.setText(r"very \1")
    dialog.form.pattern.setChecked(True)
    wait(QApplication.instance(), lambda: dialog.apply_button.isEnabled())
    return dialog


@screen("health")
def health(window: Window) -> QWidget:
    window.show_images()
    healthy(window)
    window.images.health_panel.list.setCurrentIndex(window.images.health_panel.list.findings.index(0))
    return window


@screen("charts")
def charts(window: Window) -> QWidget:
    window.show_images()
    healthy(window)
    window.images.health_panel.figures.click()
    return window


@screen("crops")
def crops(window: Window) -> QWidget:
    window.images.health_panel.problems.click()
    healthy(window)
    place = Cropper(window.session, window.session.view.ids, parent=window)
    place.show()
    wait(QApplication.instance(), lambda: place.canvas.whole is not None)
    place.canvas.shrink(0.8)
    return place


@screen("masks")
def masks(window: Window) -> QWidget:
    place = MaskPainter(window.session, window.session.view.ids, parent=window)
    place.show()
    wait(QApplication.instance(), lambda: place.canvas.whole is not None and place.canvas.painting is not None)
    place.invert()
    place.canvas.press(place.canvas.rect().center().toPointF())
    place.canvas.lift()
    place.changed = False  # nothing to save when it closes
    return place


def healthy(window: Window) -> None:
    """Wait until everything about the images is known."""
    found = window.session.health
    wait(QApplication.instance(), lambda: bool(found.current_findings) and found.current_progress()[:2] == (0, 0))


@screen("captions-restore")
def captions_restore(window: Window) -> QWidget:
    dialog = RestoreDialog(window.session, window)
    comparing = dialog.intro.text()
    wait(QApplication.instance(), lambda: dialog.intro.text() != comparing)
    return dialog


def wait(application: QApplication, until: Callable[[], bool], milliseconds: int = 120_000) -> None:
    """Process Qt's events until a condition holds, without using the CPU while waiting; raise TimeoutError."""
    deadline = QDeadlineTimer(milliseconds)
    beat = QTimer(interval=10)  # also notices changes that no Qt event reports
    beat.start()
    while not until():
        if deadline.hasExpired():
            raise TimeoutError("the window did not get where it should be")
        application.processEvents(QEventLoop.ProcessEventsFlag.WaitForMoreEvents)


def open_demo(application: QApplication, window: Window, folder: Path) -> None:
    """Open a copy of the demo's images, and wait until each is loaded and has a thumbnail."""
    session = window.session
    shown: set[int] = set()
    session.thumbnails.ready.connect(lambda thumbnail: shown.add(thumbnail.image))
    shutil.copytree(DEMO, folder)
    window.open([folder])
    wait(application, lambda: len(session.library.images) > 5 and len(shown) >= min(12, len(session.view.ids)) > 0)


@contextmanager
def showing(application: QApplication, show: Screen, window: Window) -> Iterator[QWidget]:
    """Yield one screen, shown and laid out; close it afterwards if it is a window of its own."""
    shown = show(window)
    if shown is not window:
        shown.show()
    application.sendPostedEvents(None, QEvent.Type.LayoutRequest)
    application.processEvents()
    yield shown
    if shown is not window:
        shown.close()
    for bar in tuple(window.notices._bars):
        window.notices._remove(bar)


def main(folder: Path, chosen: Sequence[str] = ()) -> None:
    """Save all screens in all looks, or those looks and screens whose names start with the given words."""
    looks = tuple(look for look in LOOKS if look in chosen) or LOOKS
    names = tuple(word for word in chosen if word not in LOOKS)
    folder.mkdir(parents=True, exist_ok=True)
    percent = round(float(os.environ.get("QT_SCALE_FACTOR", "1")) * 100)
    application = QApplication([])
    install_language(application, "en")
    theme = Theme(application)
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as place, a_window(Path(place)) as window:
        open_demo(application, window, Path(place) / "demo")
        view = window.session.view
        for look in looks:
            theme.choose(look)
            for name, show in SCREENS.items():
                if names and not name.startswith(names):
                    continue
                view.select(view.ids[:1], view.ids[0])
                with showing(application, show, window) as shown:
                    found[name] = nameless(shown)
                    # Fastest PNG compression: strong compression takes longer than drawing.
                    shown.grab().save(str(folder / f"{name}-{look}-{percent}.png"), quality=90)
    (folder / "nameless.json").write_text(json.dumps(found), encoding="utf-8")


def name_of(widget: QWidget) -> str:
    """Return the name of a widget for screen readers."""
    interface: QAccessibleInterface = QAccessible.queryAccessibleInterface(widget)
    return interface.text(QAccessible.Text.Name) if interface else ""


def nameless(top: QWidget) -> list[str]:
    """Return the widgets that take the keyboard focus and have no name; a box's current value is not a name."""
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


@contextmanager
def a_window(place: Path) -> Iterator[Window]:
    """Yield the window, with its data in a temporary folder unless one is set."""
    os.environ.setdefault("IMPASTO_HOME", str(place / "home"))
    poster = MainThreadQueue()
    session = Session(poster.post)
    window = Window(session)
    window.resize(*SIZE)
    window.show()
    try:
        yield window
    finally:
        session.close()
        poster.close()


def load_rooms() -> None:
    """Import the modules beside this one, which register their screens."""
    for path in sorted(Path(__file__).parent.glob("screens_*.py")):
        importlib.import_module(f"tests.support.{path.stem}")


if __name__ == "__main__":
    from tests.support import screens  # the module that they imported, not __main__

    screens.main(Path(sys.argv[1]), sys.argv[2:])
else:
    load_rooms()
