"""A machine on which no further Python process starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, spawn
from pathlib import Path


@contextmanager
def no_process_starts() -> Iterator[None]:
    """Make every process that multiprocessing starts fail: the program to start does not exist."""
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # multiprocessing's own process has to be running already
    python = spawn.get_executable()
    spawn.set_executable(str(Path(__file__).with_name("no such program")))
    try:
        yield
    finally:
        spawn.set_executable(python)
