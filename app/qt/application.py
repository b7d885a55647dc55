"""Starts Qt, one session and one window, and ends them in order."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from PySide6.QtWidgets import QApplication

from app.core.session import Session
from app.qt.posting import Poster
from app.qt.theme import Theme
from app.qt.window import Window


def run(words: Sequence[str]) -> int:
    """Open the window with these folders and files, and return the exit code when it is closed."""
    application = QApplication([sys.argv[0]])
    application.setApplicationName("Impasto")
    application.setDesktopFileName("impasto")
    Theme(application)
    poster = Poster()
    session = Session(poster.post)
    window = Window(session)
    window.show()
    window.open(words)
    try:
        return application.exec()
    finally:
        session.close()
