"""Writes small files of the app's own behind what the user does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from app.core.events import Emitter
from app.core.tasks import Post
from trainer.errors import ImpastoError
from trainer.protocol import files
from trainer.protocol.files import numbered
from trainer.protocol.places import is_disk_full, write_remedy
from trainer.protocol.reading import UnusableFileError, decoded, read_json, reason_of

T = TypeVar("T")

Decode = Callable[[Any, list[str]], T]
"""Makes a value of parsed content. It appends the name of each member that it has to leave out to the list."""


def load(
    path: Path, decode: Decode[T], default: T, lost: str, read: Callable[[Path], Any] | None = None
) -> tuple[T, str]:
    """Return what a stored file holds, and a sentence about what was wrong with it, empty for a sound or missing file.

    A file that cannot be used, as a whole or in part, is renamed to NAME.damaged.json so that the next write does not
    destroy it. `lost` ends the sentence for a file that is of no use at all. `read` parses the file, by default JSON.
    """
    left_out: list[str] = []
    try:
        content = read(path) if read else read_json(path, "settings")
        found = decoded(content, lambda value: decode(value, left_out), path)
    except FileNotFoundError:
        return default, ""
    except (OSError, UnusableFileError) as error:
        return default, f"Could not read {path.name}: {reason_of(error)}, so {lost}. {_set_aside(path)}"
    if not left_out:
        return found, ""
    names = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
    return found, f"{path.name} has entries that cannot be used ({names}); all others are kept. {_set_aside(path)}"


def _set_aside(path: Path) -> str:
    """Rename a file to a name that is free and return a sentence about it."""
    names = (path.with_suffix(f"{ending}{path.suffix}") for ending in numbered(".damaged"))
    aside = next(name for name in names if not name.exists())
    try:
        files.replace(path, aside)
    except OSError as error:
        return f"It could not be set aside: {reason_of(error)}."
    return f"The old file is now {aside}."


_log = logging.getLogger(__name__)


class DeferredWriter:
    """One file, written on a thread of its own while there is something to write: a disk that sleeps holds up nobody.

    Of texts that are handed over meanwhile only the latest is written. A disk that refuses is noted, as `what` "was not
    kept". `durable`: what was written outlives a loss of power, too.
    """

    def __init__(self, path: Path, what: str, *, durable: bool = False) -> None:
        self.path = path
        self._what, self._durable = what, durable
        self._waiting: str | None = None
        self._unkept: str | None = None
        self._writer: threading.Thread | None = None
        self._access = threading.Lock()
        self.notice = ""
        """What was wrong with the file when it was loaded, in a sentence."""

    def load(
        self,
        decode: Decode[T],
        default: T,
        lost: str,
        encode: Callable[[T], str],
        read: Callable[[Path], Any] | None = None,
    ) -> T:
        """Return what the file holds, as `stored.load` does; what is left of a file damaged in part is written back."""
        found, self.notice = load(self.path, decode, default, lost, read)
        if self.notice and found != default:
            self.write(encode(found))
        return found

    def write(self, text: str) -> None:
        """Let the file hold this text soon."""
        with self._access:
            self._waiting = text
            if self._writer is None or not self._writer.is_alive():
                self._writer = threading.Thread(target=self._write, name="app-keeper")
                self._writer.start()

    def settle(self) -> None:
        """Wait until the file holds what was handed over last, tried once more where it was refused; at the app's end.

        Nobody hears of a refusal by then.
        """
        writer = self._writer
        if writer is not None:
            writer.join()
        if self._unkept is not None:
            self._put(self._unkept)

    def _write(self) -> None:
        while (text := self._next()) is not None:
            refused_before = self._unkept is not None
            fault = self._put(text)
            if fault or refused_before:
                self._turned(fault)

    def _turned(self, fault: OSError | None) -> None:
        """Hear, on the writing thread, that the disk refuses, or that it does no longer."""

    def _put(self, text: str) -> OSError | None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(self.path, text, durable=self._durable)
        except OSError as fault:
            _log.info("%s not kept: %s", self._what, fault)
            self._unkept = text
            return fault
        self._unkept = None
        return None

    def _next(self) -> str | None:
        with self._access:
            text, self._waiting = self._waiting, None
            if text is None:
                self._writer = None
            return text


class DurableWriter(DeferredWriter):
    """Such a file that the user would miss: it outlives a loss of power, and he hears where it cannot be written.

    `what` is what it holds, in the plural; `code` that of the error. `post` leads to the thread that it belongs to.
    """

    def __init__(self, path: Path, what: str, code: str, post: Post) -> None:
        super().__init__(path, f"the {what} were", durable=True)
        self.post = post
        self.failed: Emitter[ImpastoError] = Emitter()
        """What was handed over holds, but could not be kept for the next start."""
        self.resolved: Emitter[ImpastoError] = Emitter()
        """What `failed` told is over, or is told anew."""
        self._code, self._content = code, what
        self._error: ImpastoError | None = None

    def _turned(self, fault: OSError | None) -> None:
        error = self._worded(fault) if fault else None
        self.post(lambda: self._tell(error))

    def _tell(self, error: ImpastoError | None) -> None:
        before, self._error = self._error, error
        if before:
            self.resolved.emit(before)
        if error:
            self.failed.emit(error)

    def _worded(self, fault: OSError) -> ImpastoError:
        reason = "the disk is full" if is_disk_full(fault) else fault.strerror or fault
        return ImpastoError(
            self._code,
            f"The {self._content} cannot be kept in {self.path}: {reason}.",
            f"They hold for now. {write_remedy(fault)} Then they are kept when Impasto ends.",
        )
