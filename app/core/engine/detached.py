"""Starts engine processes that go on when the app ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def command(words: Sequence[str]) -> list[str]:
    """Return the command line of `python -m trainer WORDS` with the Python that runs the app."""
    return [sys.executable, "-X", "utf8", "-m", "trainer", *words]


def start(words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> int:
    """Start `python -m trainer WORDS` on its own and return its process id; what it prints goes on at the end of `log`.

    It has no console and no parent that could take it along: closing the window, or ending the session on Windows'
    task list, leaves it running. Raises OSError when it cannot be started or the log cannot be written.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(  # the child outlives this object on purpose
            command(words),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=log.parent,
            env={**os.environ, **(environment or {})},
            creationflags=_own_group(),
            start_new_session=sys.platform != "win32",
        )
    process.returncode = 0  # it is nobody's to wait for: without this Python warns when the object goes
    return process.pid


def no_console() -> int:
    """Return what keeps Windows from opening a console for a child; nothing elsewhere."""
    if sys.platform == "win32":
        return subprocess.CREATE_NO_WINDOW
    return 0


def _own_group() -> int:
    if sys.platform == "win32":
        return subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP
    return 0
