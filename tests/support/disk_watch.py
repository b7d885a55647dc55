"""Detect disk accesses on the thread that must not wait for a disk."""

from __future__ import annotations

import io
import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_OS = ("stat", "lstat", "scandir", "listdir", "open", "mkdir", "rename", "replace", "unlink", "rmdir", "utime")


@contextmanager
def looks_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield a list of this thread's accesses to a folder while the block runs, with their callers."""
    mine, found = threading.current_thread(), list[str]()

    def watched(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(path: Any, *words: Any, **more: Any) -> Any:
            if threading.current_thread() is mine and str(folder) in str(path):
                found.append(f"{name} {path}\n" + "".join(traceback.format_stack(limit=8)[:-1]))
            return real(path, *words, **more)

        patch.setattr(module, name, call)

    with monkeypatch.context() as patch:
        for name in _OS:
            watched(os, name)
        watched(io, "open")
        yield found
