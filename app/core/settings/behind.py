"""Writes a small file of the app's own behind what the user does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from trainer.protocol import atomic

_log = logging.getLogger(__name__)


class Behind:
    """One file, written on a thread of its own while there is something to write: a disk that sleeps holds up nobody.

    Of texts that are handed over meanwhile only the latest is written. A disk that refuses is noted, as `what` "was not
    kept", and told to `refused`, on that thread. `durable`: what was written outlives a loss of power, too.
    """

    def __init__(
        self, path: Path, what: str, refused: Callable[[OSError], None] | None = None, *, durable: bool = False
    ) -> None:
        self.path = path
        self._what, self._refused, self._durable = what, refused, durable
        self._waiting: str | None = None
        self._writer: threading.Thread | None = None
        self._access = threading.Lock()

    def write(self, text: str) -> None:
        """Let the file hold this text soon."""
        with self._access:
            self._waiting = text
            if self._writer is None or not self._writer.is_alive():
                self._writer = threading.Thread(target=self._write, name="app-keeper")
                self._writer.start()

    def settle(self) -> None:
        """Wait until the file holds what was handed over last; at the app's end."""
        writer = self._writer
        if writer is not None:
            writer.join()

    def _write(self) -> None:
        while (text := self._next()) is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                atomic.write_text(self.path, text, durable=self._durable)
            except OSError as error:
                _log.info("%s not kept: %s", self._what, error)
                if self._refused:
                    self._refused(error)

    def _next(self) -> str | None:
        with self._access:
            text, self._waiting = self._waiting, None
            if text is None:
                self._writer = None
            return text
