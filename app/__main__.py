"""Open the window, or explain why Qt cannot start: `python -m app [FOLDER|FILE ...]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(words: Sequence[str] = ()) -> int:
    """Open the window with the folders and files in `words`; return the exit code."""
    if sys.platform == "linux" and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"))):
        # Without a display, Qt would abort the process.
        return _report(
            "there is no screen (neither DISPLAY nor WAYLAND_DISPLAY is set)", "Start Impasto from a desktop session"
        )
    try:
        from app.qt.application import run
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "app":
            raise
        return _report(str(error), "Start Impasto with run.py, which installs what is missing or names it")
    return run(words)


def gui() -> int:
    """Start the app from an installed script."""
    return main(sys.argv[1:])


def _report(problem: str, remedy: str) -> int:
    print(f"Could not open the window: {problem}.\nWhat to do: {remedy}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
