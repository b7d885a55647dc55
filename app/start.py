"""Opens the app, or says in words why Qt does not start here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(words: Sequence[str] = ()) -> int:
    """Open the window with the folders and files in `words`; return the exit code."""
    if sys.platform == "linux" and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"))):
        # Qt would end the process with an abort.
        return _told("there is no screen (neither DISPLAY nor WAYLAND_DISPLAY is set)", "Start it from a desktop")
    try:
        from app.qt.application import run
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "app":
            raise
        return _told(str(error), "Start it with run.py, which sets up what is missing or names it")
    return run(words)


def gui() -> int:
    """Start the app from an installed script."""
    return main(sys.argv[1:])


def _told(what: str, remedy: str) -> int:
    print(f"Impasto's window cannot open: {what}.\nWhat to do: {remedy}", file=sys.stderr)
    return 1
