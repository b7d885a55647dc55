"""What Qt tests stand on: no screen, and no thread or timer that outlives its test.

pytest-qt itself fails a test on a message of Qt's at WARNING or above (pyproject.toml) and on an exception in a slot.
Preferences and window state lie in the per-user folder, which is a new one for each test.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import shiboken6
from PySide6.QtCore import QCoreApplication, QEvent, QObject, QPoint, Qt, QThread, QTimer
from PySide6.QtGui import QAction, QCursor, QGuiApplication, QWindow
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QAbstractButton, QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.core.session import Session
from app.qt.actions.commands import CommandAction
from app.qt.main_thread import MainThreadQueue
from app.qt.window import Window

PATIENCE = 120_000
"""Milliseconds that a test waits where it says nothing else: a busy machine is no fault of the app's."""

_ASIDE = QPoint(1, 0)
"""From where the pointer comes that a test before left in the very place: of a move to there Qt tells nobody."""


class PatientQtBot(QtBot):
    """Waits longer than pytest-qt's five seconds."""

    def waitUntil(self, callback: Callable[[], object], *, timeout: int = PATIENCE) -> None:  # noqa: N802
        """Wait until something is so: None says no, too, where pytest-qt would take it for an assertion that held."""
        for pause in (1, 2, 4):  # pytest-qt looks every 10 ms, and most of what tests wait for takes less
            with contextlib.suppress(AssertionError):
                if callback():
                    return
            self.wait(pause)
        super().waitUntil(lambda: bool(callback()), timeout=timeout)

    def waitSignal(self, signal: Any, *, timeout: int = PATIENCE, **words: Any) -> Any:  # noqa: N802
        return super().waitSignal(signal, timeout=timeout, **words)

    def waitExposed(self, widget: Any, *, timeout: int = PATIENCE) -> Any:  # noqa: N802
        return super().waitExposed(widget, timeout=timeout)

    def waitActive(self, widget: Any, *, timeout: int = PATIENCE) -> Any:  # noqa: N802
        return super().waitActive(widget, timeout=timeout)

    def keyClick(self, *arguments: Any, **words: Any) -> None:  # noqa: N802
        """Press a key as a hand does: after what the window has still to do, such as asking what can be done now."""
        QCoreApplication.processEvents()
        QTest.keyClick(*arguments, **words)

    def mouseClick(self, widget: QWidget | QWindow, *arguments: Any, **words: Any) -> None:  # noqa: N802
        """Click as a hand does: on what can be used, which may be so a moment after what changed it."""
        self.waitUntil(lambda: not isinstance(widget, QWidget) or widget.isEnabled())
        QTest.mouseClick(widget, *arguments, **words)

    def hover(self, widget: QWidget, place: QPoint) -> None:
        """Move the pointer, no button held, over a place of a shown widget.

        The move is given to the widget's own window: Qt's `mouseMove` moves the screen's pointer instead, and
        whatever lies above there, such as a tip that is about to go, takes the move.
        """
        QTest.mouseRelease(QWidget(), Qt.MouseButton.LeftButton)  # a double click of a test before left it held
        window = widget.window()
        there = widget.mapTo(window, place)
        for spot in (there + _ASIDE, there):
            QTest.mouseMove(window.windowHandle(), spot)

    def mouseMove(self, widget: QWidget, pos: QPoint) -> None:  # noqa: N802
        """Move the screen's pointer over a widget, as a drag does."""
        if QCursor.pos() == widget.mapToGlobal(pos):
            QTest.mouseMove(widget, pos + _ASIDE)
        QTest.mouseMove(widget, pos)


@pytest.fixture
def qtbot(qapp: QObject, request: pytest.FixtureRequest) -> QtBot:
    return PatientQtBot(request)


def recorded(monkeypatch: pytest.MonkeyPatch, kind: type[QObject]) -> list[weakref.ref[QObject]]:
    """Weak references to every object of a class that is started with `start()` from Python."""
    started: list[weakref.ref[QObject]] = []
    original = kind.start

    def start(self: QObject, *arguments: object) -> None:
        started.append(weakref.ref(self))
        original(self, *arguments)

    monkeypatch.setattr(kind, "start", start)
    return started


def alive(started: list[weakref.ref[QObject]], runs: Callable[[QObject], bool]) -> list[QObject]:
    objects = [reference() for reference in started]
    return [thing for thing in objects if thing is not None and shiboken6.isValid(thing) and runs(thing)]


@pytest.fixture(autouse=True)
def collected_here() -> Iterator[None]:
    """Free the widgets of tests on this thread alone, as the app does (app/qt/main_thread.py says why)."""
    gc.collect(1)  # what the test before left
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def all_collected() -> Iterator[None]:
    """Leave no widget to tests whose threads might come to free it."""
    yield
    gc.collect()


@pytest.fixture(autouse=True, scope="session")
def empty_clipboard_at_the_end(qapp: QGuiApplication) -> Iterator[None]:
    """Empty the clipboard: without a screen Qt frees its content only after Python has ended, and crashes."""
    yield
    qapp.clipboard().clear()


@pytest.fixture(autouse=True)
def nothing_left_running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test that leaves a thread or a timer running after its widgets are closed.

    A worker that only looks at something is waited for here: the app ends without it when it takes long.
    """
    timers, threads = recorded(monkeypatch, QTimer), recorded(monkeypatch, QThread)
    before, shown = set(threading.enumerate()), set(QApplication.topLevelWidgets())
    yield
    for widget in set(QApplication.topLevelWidgets()) - shown:  # each change of theme restyles those that stay
        widget.deleteLater()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)  # widgets that pytest-qt has closed
    left = [f"{timer.parent()}: {timer}" for timer in alive(timers, QTimer.isActive)]
    left += [str(thread) for thread in alive(threads, QThread.isRunning)]
    end = time.monotonic() + PATIENCE / 1000
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, end - time.monotonic()))
        left += [str(thread)] if thread.is_alive() else []
    if left:
        pytest.fail("still running after the test:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def nothing_is_used_in_vain(qtbot: QtBot) -> Iterator[None]:
    """Wait until a command or a button that a test uses can be used: the window asks a moment after what changed it."""
    with pytest.MonkeyPatch.context() as patched:  # one of its own: tests undo theirs
        for kind, use in ((CommandAction, "trigger"), (QAbstractButton, "click")):
            patched.setattr(kind, use, _when_it_can(getattr(kind, use), qtbot))
        yield


def _when_it_can(use: Callable[[Any], None], qtbot: QtBot) -> Callable[[Any], None]:
    def patient(thing: QAction | QWidget) -> None:
        qtbot.waitUntil(thing.isEnabled)
        use(thing)

    return patient


@pytest.fixture
def session(qapp: QObject) -> Iterator[Session]:
    """A session that reports home through Qt's event loop, as in the app."""
    yield from _session()


@pytest.fixture
def another_session(qapp: QObject) -> Iterator[Session]:
    """That of another window, or of the next start."""
    yield from _session()


def _session() -> Iterator[Session]:
    poster = MainThreadQueue()
    session = Session(poster.post)
    yield session
    session.close()
    poster.close()


@pytest.fixture
def window(qtbot: QtBot, session: Session) -> Window:
    """The window of that session, shown, with no folder open."""
    window = Window(session)
    qtbot.addWidget(window)
    with qtbot.waitExposed(window):
        window.show()
    return window
