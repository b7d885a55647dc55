"""A machine on which no further process of Python comes up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, spawn
from pathlib import Path


@contextmanager
def no_process_starts() -> Iterator[None]:
    """Inside, what multiprocessing starts ends before it says a word, or cannot be started at all: there is nothing."""
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # multiprocessing's own process is there before
    python = spawn.get_executable()
    spawn.set_executable(str(Path(__file__).with_name("no such program")))
    try:
        yield
    finally:
        spawn.set_executable(python)
