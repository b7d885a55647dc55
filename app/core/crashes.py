"""Crash log, kept until the app shows it at its next start."""

from __future__ import annotations

import contextlib
import faulthandler
import platform
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TextIO

from trainer import __version__
from trainer.protocol import places
from trainer.protocol.reading import read_bytes

_END_OF_HEADER = "\n\n"


class CrashLog:
    """Log of the tracebacks of uncaught exceptions and native crashes, in crash.log.

    Create one per app. `notified` is called with the traceback of each exception, on the thread that raised it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or places.home()) / "crash.log"
        self.notified: Callable[[str], None] = lambda text: None
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._previous_hooks = (sys.excepthook, threading.excepthook)

    def last(self) -> str | None:
        """Rename the previous session's crash log and return its text; return None if nothing crashed."""
        try:
            text = read_bytes(self.path, "text").decode("utf-8", errors="replace")
            if not text.partition(_END_OF_HEADER)[2].strip():
                return None
            self.path.replace(self.path.with_name("crash-last.log"))
        except (OSError, ValueError):  # a missing or unreadable log must not keep the app from starting
            return None
        return text

    def install(self) -> None:
        """Install the exception hooks; if the log is not writable, they only call the previous hooks and `notified`."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Exceptions may name files whose names are not valid Unicode.
            self._file = self.path.open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
            self._file.write(_header())
            self._file.flush()
            faulthandler.enable(self._file)
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception

    def uninstall(self) -> None:
        """Remove the exception hooks, and delete the log if nothing was logged."""
        sys.excepthook, threading.excepthook = self._previous_hooks
        if self._file is None:
            return
        faulthandler.disable()
        caught = self._file.tell() > len(_header().encode())
        self._file.close()
        self._file = None
        if not caught:
            self.path.unlink(missing_ok=True)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        self._write(text)
        self._previous_hooks[0](kind, error, trace)
        self.notified(text)

    def _on_thread_exception(self, caught: threading.ExceptHookArgs) -> None:
        if caught.exc_value is not None:
            text = "".join(traceback.format_exception(caught.exc_value))
            self._write(f"In thread {caught.thread.name if caught.thread else '?'}:\n{text}")
            self.notified(text)
        self._previous_hooks[1](caught)

    def _write(self, text: str) -> None:
        # On a full disk, an exception raised here would be caught and written again without end.
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n{text}\n")
                self._file.flush()


def _header() -> str:
    """Return the version information that support needs, with nothing about the user."""
    return f"Impasto {__version__}, Python {platform.python_version()}, {platform.platform()}{_END_OF_HEADER}"
