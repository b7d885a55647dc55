"""What an engine printed: pieces of its log, so that one of any size opens at its end at once. For workers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.config.credentials import without_secrets_inside
from trainer.errors import RunError
from trainer.protocol.files import long_path
from trainer.protocol.reading import open_file, read_text, reason_of
from trainer.protocol.run_directory import RunDirectory

CHUNK_BYTES = 128 * 1024
"""Bytes of one piece: some 1,500 lines, which a text field takes in a few milliseconds."""
_BLOCK = 1 << 20
_WIDEST = 2_000
"""Characters of a line; a field lays out each line as a whole."""
# Colours and moves of the cursor, as terminals know them (ECMA-48), and whatever else is not to be seen.
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-_])")
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Whole lines of a log, from byte `start` to byte `end`."""

    start: int
    end: int
    size: int
    """Of the file when they were read."""
    lines: tuple[str, ...]
    """As a terminal would show them."""

    @property
    def more(self) -> bool:
        """Whether more than a line that is still being written comes after them."""
        return self.size - self.end >= CHUNK_BYTES


def read_end(log: Path, *, torn: bool, room: int = CHUNK_BYTES) -> LogChunk:
    """Return the last lines; `torn` tells whether an unfinished last line is to be taken too. Raises OSError."""
    size = _size(log)
    return read_before(log, size, room) if torn else read_before(log, _last_end(log, size), room)


def read_before(log: Path, end: int, room: int = CHUNK_BYTES) -> LogChunk:
    """Return lines that end at byte `end`, where a line ends too. Raises OSError."""
    size = _size(log)
    end = min(end, size)
    start = max(0, end - room)
    data = _bytes(log, start, end)
    if start:  # up to the first line that begins here, unless there is none
        cut = data.find(b"\n") + 1
        start, data = (start + cut, data[cut:]) if 0 < cut < len(data) else (start, data)
    return LogChunk(start, end, size, lines_of(data))


def read_after(log: Path, start: int, *, torn: bool, room: int = CHUNK_BYTES) -> LogChunk:
    """Return lines from byte `start` on, where a line begins; nothing where none is finished. Raises OSError."""
    size = _size(log)
    data = _bytes(log, start, start + room)
    cut = data.rfind(b"\n") + 1
    # An unfinished line waits for its end, unless none will come or it is longer than any line should be.
    if not (torn and start + len(data) >= size) and not (cut == 0 and len(data) == room):
        data = data[:cut]
    return LogChunk(start, start + len(data), size, lines_of(data))


def find(log: Path, wanted: str, start: int, *, back: bool) -> int | None:
    """Return where the line begins that holds `wanted`, the next after byte `start` or the last before it, or None.

    Large and small letters of ASCII count as one. Raises OSError.
    """
    sought = wanted.encode("utf-8").lower()
    size = _size(log)
    if not sought:
        return None
    places = range(start, size, _BLOCK) if not back else range(start - _BLOCK, -_BLOCK, -_BLOCK)
    for place in places:
        low, high = max(0, place), min(size, place + _BLOCK, start if back else size)
        # What lies across two blocks is found with the one it begins in.
        limit = min(start if back else size, high + len(sought) - 1)
        data = _bytes(log, low, limit).lower()
        found = data.rfind(sought) if back else data.find(sought)
        if found >= 0:
            return _line_start(log, low + found)
    return None


def lines_of(data: bytes) -> tuple[str, ...]:
    """Return the lines in some bytes: the last state of lines that were written over, without what is not seen."""
    text = data.decode("utf-8", "replace")
    lines = [] if not text else text.removesuffix("\n").split("\n")
    return tuple(part for line in lines for part in _folded(_as_shown(line)))


def _as_shown(line: str) -> str:
    last = line.rstrip("\r").rpartition("\r")[2]
    return _INVISIBLE.sub("", _ESCAPES.sub("", last)).rstrip()


def _folded(line: str) -> Iterable[str]:
    yield line[:_WIDEST]
    for place in range(_WIDEST, len(line), _WIDEST):
        yield line[place : place + _WIDEST]


def _size(log: Path) -> int:
    try:
        return long_path(log).stat().st_size
    except FileNotFoundError:
        return 0  # nothing was printed yet


def _bytes(log: Path, start: int, end: int) -> bytes:
    if end <= start:
        return b""
    with open_file(log, "stream") as file:
        file.seek(start)
        return file.read(end - start)


def _last_end(log: Path, size: int) -> int:
    """Return where the last finished line ends; the file's end where none is in reach."""
    start = max(0, size - CHUNK_BYTES)
    return start + (_bytes(log, start, size).rfind(b"\n") + 1 or size - start)


def _line_start(log: Path, place: int) -> int:
    start = max(0, place - CHUNK_BYTES)
    return start + _bytes(log, start, place).rfind(b"\n") + 1


# --- for a bug report


def report_on(run: RunDirectory, remarks: Iterable[str]) -> str:
    """Return all that helps to understand what went wrong: versions, remarks, the job, the end of the log.

    The user's home folder is written "~", and the computer's name and secrets in links, which runs of earlier versions
    hold, are left out. What cannot be read is said.
    """
    parts = [
        f"Run {run.name}",
        *_attempt(run),
        "",
        *remarks,
        "",
        "--- job.toml",
        _text(run.job),
        "--- the end of console.log",
        *_end_of(run.console),
    ]
    return without_home(without_secrets_inside("\n".join(parts).rstrip() + "\n"), Path.home())


def without_home(text: str, home: Path) -> str:
    """Return a text with the user's home folder as "~", however its path is written."""
    plain = str(home)
    forms = {plain, plain.replace("\\", "/"), plain.replace("\\", "\\\\"), json.dumps(plain)[1:-1]}
    for form in sorted(forms, key=len, reverse=True):
        if len(form) > 1:  # "/" is nobody's home
            text = re.sub(re.escape(form) + r"(?![\w-])", "~", text, flags=re.IGNORECASE if os.name == "nt" else 0)
    return text


def _attempt(run: RunDirectory) -> list[str]:
    try:
        state, attempts = run.state(), run.attempts()
    except RunError as error:
        return [error.sentence]
    facts = {key: value for key, value in (attempts[-1] if attempts else {}).items() if key != "host"}
    return [f"State: {state}, attempt {len(attempts)}", json.dumps(facts, ensure_ascii=False)]


def _text(path: Path) -> str:
    try:
        return read_text(path, "text")
    except (OSError, ValueError) as error:
        return f"({reason_of(error)})"


def _end_of(log: Path) -> Iterable[str]:
    try:
        return read_end(log, torn=True).lines
    except (OSError, ValueError) as error:
        return [f"({error})"]
