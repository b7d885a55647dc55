"""Reads a TOML file that somebody wrote or sent: its bytes, its text, its tables; each fault in plain words."""

from __future__ import annotations

import errno
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import JobError
from trainer.protocol import reading
from trainer.protocol.reading import UnusableFileError, open_file
from trainer.protocol.text import printable


@dataclass(frozen=True, slots=True)
class FileKind:
    """What sort of file is read: how it is called, the most bytes it may have, and what to do about a broken one."""

    word: str
    """"job" or "preset"; the first part of error codes."""
    largest: int
    """Bytes."""
    limit: str
    """The same in words: "1 MiB"."""
    remedy: str
    """Where a good file comes from."""
    wrong_file: str
    """What to do when the file is far too large to be one."""
    missing: str
    """What to do when there is no such file."""


# UTF-32 first: its mark begins as that of UTF-16 does.
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}

# What the parser says, and what that means to somebody who has never heard of TOML.
_TOML_WORDS = (
    (r"Cannot overwrite a value|[Dd]uplicate", "the key on this line stands in the file twice"),
    (r"Cannot declare .* twice", "this table stands in the file twice"),
    (
        r"Unescaped|[Ii]nvalid hex|Illegal backslash|escape",
        "a \\ in double quotes is a special sign; write Windows paths in 'single quotes'",
    ),
    (r"Expected '=' after a key", "a line must read key = value"),
    (r"Invalid value", 'this is no value; text needs quotes ("like this"), and true and false are written small'),
    (r"Expected newline or end", "there is more on this line after the value; text needs quotes around all of it"),
    (r"Unterminated|character '.n'|Expected \"", "a text is not closed; its last quote is missing"),
    (r"Illegal character", "a control character stands in it, which no text needs"),
    (r"Invalid statement|Invalid initial", "a line must read key = value, or [table]"),
    (r"Unclosed array", "a list is not closed; its ] is missing"),
    (r"Unclosed inline table", "a table in braces is not closed; its } is missing"),
    (r"Expected '\]'", "the name of a table is not closed; its ] is missing"),
)


def read_text(path: Path, kind: FileKind) -> str:
    """The text of a file, with or without a byte order mark; no more than ``kind.largest`` bytes are ever read.

    Raises JobError when it is missing, unreadable, too large or not UTF-8.
    """
    try:
        with open_file(path, "text") as file:
            data = file.read(kind.largest + 1)
    except UnusableFileError as error:
        if error.code == "file.size":
            raise _too_large(path, kind) from None
        sentence = f"The {kind.word} file {printable(str(path), 300)} cannot be read: {error.reason}."
        raise JobError(f"{kind.word}.unreadable", sentence, _remedy(path, kind)) from None
    except (OSError, ValueError) as error:
        named = printable(str(path), 300)
        sentence = f"The {kind.word} file {named} cannot be read: {_why(path, error)}."
        raise JobError(f"{kind.word}.unreadable", sentence, _remedy(path, kind)) from None
    if len(data) > kind.largest:
        raise _too_large(path, kind)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data, error.start, kind) from None


def parse_toml(text: str, source: str, kind: FileKind) -> dict[str, Any]:
    """Parse TOML; JobError naming the line and the likely mistake when it is none."""
    try:
        return reading.parse_toml(text, source, finite=False)
    except UnusableFileError as error:
        if error.code == "file.syntax":
            reason, line = _toml_reason(str(error.__cause__), text)
            sentence = f"{source} is not valid TOML: {reason}."
            raise JobError(f"{kind.word}.toml", sentence, f"Correct {line} and start again.", (reason,)) from None
        sentence = f"{source} is not a {kind.word} file: {error.reason}."
        raise JobError(f"{kind.word}.toml", sentence, kind.remedy) from None


def _why(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, ValueError):
        return "its path holds a character that none can"
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if error.errno == errno.ENAMETOOLONG:
        return "the path is longer than any can be"
    if isinstance(error, PermissionError):
        return "you have no permission to read it"
    return error.strerror or str(error)


def _remedy(path: Path, kind: FileKind) -> str:
    within = path / f"{kind.word}.toml"
    with suppress(OSError):
        if within.is_file():
            return f"Name the file in it: {within}"
    return kind.missing


def _too_large(path: Path, kind: FileKind) -> JobError:
    sentence = f"{path} is larger than {kind.limit}, so it is not a {kind.word} file."
    return JobError(f"{kind.word}.large", sentence, kind.wrong_file)


def _not_utf8(path: Path, data: bytes, at: int, kind: FileKind) -> JobError:
    line = data.count(b"\n", 0, at) + 1
    saved = next((name for mark, name in _MARKS.items() if data.startswith(mark)), None)
    what = f"it is saved as {saved}" if saved else f"line {line} holds a byte that is no UTF-8"
    return JobError(
        f"{kind.word}.encoding",
        f"{path.name} is not UTF-8 text: {what}.",
        "Save it as UTF-8 in your editor (Notepad: Save as, Encoding: UTF-8) and start again.",
    )


def _toml_reason(message: str, text: str) -> tuple[str, str]:
    """What is wrong in plain words with the line it stands on, and that line's name for the remedy."""
    said, _, where = message.rpartition(" (at ")
    plain = next((words for pattern, words in _TOML_WORDS if re.search(pattern, said)), said[:1].lower() + said[1:])
    number = re.match(r"line (\d+)", where)
    if number is None:
        return f"{plain}, at the end of the file", "the end of the file"
    line = text.split("\n")[int(number[1]) - 1].strip()
    return f"line {number[1]}, {printable(line, 80)}: {plain}", f"line {number[1]}"


def toml_value(value: Any) -> str:
    """A text, number, truth value or list of these as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's; only DEL has to be escaped in TOML and stays as it is in JSON.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value)
