"""Read an engine's log in chunks from the end, which opens logs of any size quickly. Call it on workers."""

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
"""Size of a chunk in bytes: about 1,500 lines, which a text field inserts in a few milliseconds."""
_BLOCK = 1 << 20
_WIDEST = 2_000
"""Maximum number of characters in a line, since a text field lays out each line as a whole."""
# Terminal escape sequences (ECMA-48) and other invisible characters.
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-_])")
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Whole lines of a log, from byte `start` to byte `end`."""

    start: int
    end: int
    size: int
    """Size of the file in bytes when the lines were read."""
    lines: tuple[str, ...]
    """Lines as a terminal would show them."""

    @property
    def more(self) -> bool:
        """Return whether at least one full chunk follows; a smaller remainder may be only an unfinished line."""
        return self.size - self.end >= CHUNK_BYTES


def read_end(log: Path, *, torn: bool, room: int = CHUNK_BYTES) -> LogChunk:
    """Return the last lines, including an unfinished last line if `torn`. Raises OSError."""
    size = _size(log)
    return read_before(log, size, room) if torn else read_before(log, _last_end(log, size), room)


def read_before(log: Path, end: int, room: int = CHUNK_BYTES) -> LogChunk:
    """Return the lines before byte `end`, which must be the end of a line or of the file. Raises OSError."""
    size = _size(log)
    end = min(end, size)
    start = max(0, end - room)
    data = _bytes(log, start, end)
    if start:  # skip the rest of a line that began before, unless the chunk is one line
        cut = data.find(b"\n") + 1
        start, data = (start + cut, data[cut:]) if 0 < cut < len(data) else (start, data)
    return LogChunk(start, end, size, lines_of(data))


def read_after(log: Path, start: int, *, torn: bool, room: int = CHUNK_BYTES) -> LogChunk:
    """Return the lines from byte `start`, which must be the start of a line.

    An unfinished last line is included only if `torn`. Raises OSError.
    """
    size = _size(log)
    data = _bytes(log, start, start + room)
    cut = data.rfind(b"\n") + 1
    # An unfinished line is left for the next read, unless its end will not come or it is too long.
    if not (torn and start + len(data) >= size) and not (cut == 0 and len(data) == room):
        data = data[:cut]
    return LogChunk(start, start + len(data), size, lines_of(data))


def find(log: Path, wanted: str, start: int, *, back: bool) -> int | None:
    """Return the start of the line with the first match at or after byte `start`.

    With `back`, the last match before `start` counts instead. Returns None if there is no match. ASCII letters match in
    either case. Raises OSError.
    """
    pattern = wanted.encode("utf-8").lower()
    size = _size(log)
    if not pattern:
        return None
    places = range(start, size, _BLOCK) if not back else range(start - _BLOCK, -_BLOCK, -_BLOCK)
    for place in places:
        low, high = max(0, place), min(size, place + _BLOCK, start if back else size)
        # A match across two blocks is found with the block it begins in.
        limit = min(start if back else size, high + len(pattern) - 1)
        data = _bytes(log, low, limit).lower()
        found = data.rfind(pattern) if back else data.find(pattern)
        if found >= 0:
            return _line_start(log, low + found)
    return None


def lines_of(data: bytes) -> tuple[str, ...]:
    """Return the decoded lines without overwritten text and invisible characters; very long lines are split."""
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
    """Return the end of the last finished line, or the end of the file if the last chunk has no line break."""
    start = max(0, size - CHUNK_BYTES)
    return start + (_bytes(log, start, size).rfind(b"\n") + 1 or size - start)


def _line_start(log: Path, place: int) -> int:
    start = max(0, place - CHUNK_BYTES)
    return start + _bytes(log, start, place).rfind(b"\n") + 1


# --- for a bug report


def report_on(run: RunDirectory, remarks: Iterable[str]) -> str:
    """Return the text of a bug report: versions, remarks, the job, and the end of the log.

    The home folder is replaced with "~". The computer's name and secrets in links, which runs of earlier versions can
    contain, are left out. Unreadable parts are replaced with the reason.
    """
    parts = [
        f"Run {run.name}",
        *_attempt(run),
        "",
        *remarks,
        "",
        "--- job.toml",
        _text(run.job),
        "--- last lines of console.log",
        *_end_of(run.console),
    ]
    return without_home(without_secrets_inside("\n".join(parts).rstrip() + "\n"), Path.home())


def without_home(text: str, home: Path) -> str:
    """Return the text with every spelling of the user's home folder replaced with "~"."""
    plain = str(home)
    forms = {plain, plain.replace("\\", "/"), plain.replace("\\", "\\\\"), json.dumps(plain)[1:-1]}
    for form in sorted(forms, key=len, reverse=True):
        if len(form) > 1:  # replacing "/" alone would destroy every path
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
