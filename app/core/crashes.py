"""Keeps what is known of a crash until the next start, when somebody is there to read it."""

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


class CrashNet:
    """Writes the traceback of every exception that nobody caught, and of a crash in native code, into crash.log.

    One per user's running app. `told` is called with the text of an exception, on the thread where it happened.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or places.home()) / "crash.log"
        self.notified: Callable[[str], None] = lambda text: None
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._before = (sys.excepthook, threading.excepthook)

    def last(self) -> str | None:
        """Return what the app before this one wrote, header included; None where it ended well. Keeps it aside."""
        try:
            text = read_bytes(self.path, "text").decode("utf-8", errors="replace")
            if not text.partition(_END_OF_HEADER)[2].strip():
                return None
            self.path.replace(self.path.with_name("crash-last.log"))
        except (OSError, ValueError):  # missing or unreadable, which must not keep the app from starting
            return None
        return text

    def spread(self) -> None:
        """Catch from now on; where the file cannot be written, exceptions go only where they went before."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # With whatever names of files an exception tells of: some are no Unicode.
            self._file = self.path.open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
            self._file.write(_header())
            self._file.flush()
            faulthandler.enable(self._file)
        sys.excepthook = self._caught
        threading.excepthook = self._caught_in_thread

    def fold(self) -> None:
        """Stop catching; remove the file where nothing was caught."""
        sys.excepthook, threading.excepthook = self._before
        if self._file is None:
            return
        faulthandler.disable()
        caught = self._file.tell() > len(_header().encode())
        self._file.close()
        self._file = None
        if not caught:
            self.path.unlink(missing_ok=True)

    def _caught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        self._write(text)
        self._before[0](kind, error, trace)
        self.notified(text)

    def _caught_in_thread(self, caught: threading.ExceptHookArgs) -> None:
        if caught.exc_value is not None:
            text = "".join(traceback.format_exception(caught.exc_value))
            self._write(f"In thread {caught.thread.name if caught.thread else '?'}:\n{text}")
            self.notified(text)
        self._before[1](caught)

    def _write(self, text: str) -> None:
        # A full disk must not make of an exception an endless row of them.
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n{text}\n")
                self._file.flush()


def _header() -> str:
    """What a helper asks first; it tells nothing of the user."""
    return f"Impasto {__version__}, Python {platform.python_version()}, {platform.platform()}{_END_OF_HEADER}"
