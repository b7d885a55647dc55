"""Read and write the app's own small files without making the user wait."""

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
"""Function that builds a value from parsed content and appends the names of invalid entries to the list."""


def load(
    path: Path, decode: Decode[T], default: T, lost: str, read: Callable[[Path], Any] | None = None
) -> tuple[T, str]:
    """Return the content of a stored file and a message about any problem with it.

    The message is empty for a valid or missing file. A file that is damaged, even in part, is renamed to
    NAME.damaged.json, which keeps the next write from destroying it. `lost` is a sentence that tells the user what is
    lost if the file is unreadable. `read` parses the file, by default as JSON.
    """
    left_out: list[str] = []
    try:
        content = read(path) if read else read_json(path, "settings")
        found = decoded(content, lambda value: decode(value, left_out), path)
    except FileNotFoundError:
        return default, ""
    except (OSError, UnusableFileError) as error:
        return default, f"Could not read {path.name}: {reason_of(error)}. {lost} {_rename_damaged(path)}"
    if not left_out:
        return found, ""
    names = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
    return found, f"{path.name} has entries that cannot be used ({names}); all others are used. {_rename_damaged(path)}"


def _rename_damaged(path: Path) -> str:
    """Rename a damaged file to an unused name and return a message about it."""
    names = (path.with_suffix(f"{ending}{path.suffix}") for ending in numbered(".damaged"))
    renamed = next(name for name in names if not name.exists())
    try:
        files.replace(path, renamed)
    except OSError as error:
        return f"Could not rename the file: {reason_of(error)}."
    return f"The old file is now {renamed}."


_log = logging.getLogger(__name__)


class DeferredWriter:
    """Writer of one file that never blocks on a slow disk; its thread only runs while there is something to write.

    If several texts are passed during a write, only the latest is written. Failures are logged; `what` names the
    content in the log ("the recent folders"). With `durable`, written text survives a power loss.
    """

    def __init__(self, path: Path, what: str, *, durable: bool = False) -> None:
        self.path = path
        self._what, self._durable = what, durable
        self._pending: str | None = None
        self._unsaved: str | None = None
        self._writer: threading.Thread | None = None
        self._access = threading.Lock()
        self.notice = ""
        """Message about any problem with the file when it was loaded, or ""."""

    def load(
        self,
        decode: Decode[T],
        default: T,
        lost: str,
        encode: Callable[[T], str],
        read: Callable[[Path], Any] | None = None,
    ) -> T:
        """Return the file's content as the function `load` does; write back the usable part of a damaged file."""
        found, self.notice = load(self.path, decode, default, lost, read)
        if self.notice and found != default:
            self.write(encode(found))
        return found

    def write(self, text: str) -> None:
        """Write this text in the background."""
        with self._access:
            self._pending = text
            if self._writer is None or not self._writer.is_alive():
                self._writer = threading.Thread(target=self._write, name="app-writer")
                self._writer.start()

    def settle(self) -> None:
        """Wait until the last text is written, and retry if that failed. Call it when the app closes.

        If the retry fails too, the failure is only logged.
        """
        writer = self._writer
        if writer is not None:
            writer.join()
        if self._unsaved is not None:
            self._put(self._unsaved)

    def _write(self) -> None:
        while (text := self._next()) is not None:
            failed_before = self._unsaved is not None
            fault = self._put(text)
            if fault or failed_before:
                self._on_written(fault)

    def _on_written(self, fault: OSError | None) -> None:
        """Handle a failed write or, if `fault` is None, the first success after one. Runs on the writing thread."""

    def _put(self, text: str) -> OSError | None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(self.path, text, durable=self._durable)
        except OSError as fault:
            _log.info("could not save %s: %s", self._what, fault)
            self._unsaved = text
            return fault
        self._unsaved = None
        return None

    def _next(self) -> str | None:
        with self._access:
            text, self._pending = self._pending, None
            if text is None:
                self._writer = None
            return text


class DurableWriter(DeferredWriter):
    """Writer of a file with valuable content: it survives a power loss, and failures are reported.

    `what` names the content in the plural, `code` is the error code, and `post` schedules a call on the owner's thread.
    """

    def __init__(self, path: Path, what: str, code: str, post: Post) -> None:
        super().__init__(path, f"the {what}", durable=True)
        self.post = post
        self.failed: Emitter[ImpastoError] = Emitter()
        """Emitted when the content could not be saved; until the app closes, the unsaved content still applies."""
        self.resolved: Emitter[ImpastoError] = Emitter()
        """Emitted with the error last passed to `failed` when it is fixed or replaced by a new one."""
        self._code, self._content = code, what
        self._error: ImpastoError | None = None

    def _on_written(self, fault: OSError | None) -> None:
        error = self._error_of(fault) if fault else None
        self.post(lambda: self._report(error))

    def _report(self, error: ImpastoError | None) -> None:
        before, self._error = self._error, error
        if before:
            self.resolved.emit(before)
        if error:
            self.failed.emit(error)

    def _error_of(self, fault: OSError) -> ImpastoError:
        reason = "the disk is full" if is_disk_full(fault) else fault.strerror or fault
        return ImpastoError(
            self._code,
            f"Could not save the {self._content} in {self.path}: {reason}.",
            f"They apply for now. {write_remedy(fault)} Impasto tries again when it closes.",
        )
