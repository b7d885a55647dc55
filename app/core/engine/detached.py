"""Starts engine processes that go on when the app ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.protocol.detached import command, launch, let_go

__all__ = ["command", "no_console", "start"]


def start(words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> int:
    """Start `python -m trainer WORDS` on its own and return its process id; see `trainer.protocol.detached.launch`."""
    process = launch(words, log, environment)
    let_go(process)
    return process.pid


def no_console() -> int:
    """Return what keeps Windows from opening a console for a child; nothing elsewhere."""
    if sys.platform == "win32":
        return subprocess.CREATE_NO_WINDOW
    return 0
