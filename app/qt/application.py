"""Starts Qt, one session and one window, and ends them in order."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from PySide6.QtGui import QGuiApplication, QIcon
from PySide6.QtWidgets import QApplication, QMessageBox

from app.core.crashes import CrashNet
from app.core.session import Session
from app.core.settings.preferences import Settings
from app.core.tasks import share_lock
from app.qt.instance import Instance
from app.qt.language import speak
from app.qt.pauses import Collector
from app.qt.posting import Poster
from app.qt.theme import Theme
from app.qt.theme.icons import FOLDER
from app.qt.window import Window
from trainer.errors import EXIT_FAULT, ImpastoError
from trainer.protocol import places


def run(words: Sequence[str]) -> int:
    """Open the window with these folders and files, and return the exit code when it is closed.

    Where the user has a window already, that one opens them.
    """
    settings = Settings()
    application = make_application(settings)
    instance = Instance(places.home())
    if not instance.claim():
        return _pass_on(instance, words)
    net = CrashNet()
    crash = net.last()
    net.spread()
    try:
        return _sit(application, settings, instance, net, crash, words)
    finally:
        net.fold()
        instance.close()


def make_application(settings: Settings) -> QApplication:
    """Return Qt's application, in the user's size, language and colours."""
    appearance = settings.preferences.appearance
    if appearance.scaling != 100:
        os.environ.setdefault("QT_SCALE_FACTOR", str(appearance.scaling / 100))  # Qt asks only when it starts
    application = QApplication([sys.argv[0]])
    share_lock()
    Collector(application)
    application.setApplicationName("Impasto")
    application.setDesktopFileName("impasto")
    application.setWindowIcon(QIcon(str(FOLDER / "impasto.svg")))
    speak(application, appearance.language)
    theme = Theme(application, appearance.look)
    settings.changed.connect(lambda chosen: theme.choose(chosen.appearance.look))
    return application


def _sit(
    application: QApplication,
    settings: Settings,
    instance: Instance,
    net: CrashNet,
    crash: str | None,
    words: Sequence[str],
) -> int:
    """One sitting: from the session's making to its end, when all is on disk."""
    poster = Poster()
    session = Session(poster.post, settings)
    try:
        window = Window(session)
        net.told = lambda text: poster.post(lambda: window.tell_fault(text))
        instance.opened.connect(window.come_forward)
        window.painted.connect(lambda: window.open(words, session.reopen))
        window.painted.connect(lambda: _greet(window))
        window.show()
        if crash:
            window.tell_crash(crash)
        return application.exec()
    finally:
        net.told = lambda text: None
        session.close()
        poster.close()


def _greet(window: Window) -> None:
    """Welcome who is here for the first time; where there is no screen, nobody is."""
    from app.core.settings.recent import is_first_start, remember

    if is_first_start() and QGuiApplication.platformName() != "offscreen":
        remember()
        window.show_welcome()


def _pass_on(instance: Instance, words: Sequence[str]) -> int:
    try:
        instance.send(words)
    except ImpastoError as error:
        QMessageBox.warning(None, "Impasto", f"{error.sentence}\n{error.remedy}")
        return EXIT_FAULT
    return 0
