"""Opens the app, or says in words why Qt does not start here."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(words: Sequence[str] = ()) -> int:
    """Open the window with the folders and files in `words`; return the exit code."""
    try:
        from app.qt.application import run
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "app":
            raise
        print(f"Impasto's window cannot open: {error}", file=sys.stderr)
        print("What to do: start it with run.py, which sets up what is missing or names it", file=sys.stderr)
        return 1
    return run(words)


def gui() -> int:
    """Start the app from an installed script."""
    return main(sys.argv[1:])
