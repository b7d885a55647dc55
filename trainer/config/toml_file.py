"""Read untrusted TOML files (jobs and presets), and report errors in plain language."""

from __future__ import annotations

import datetime
import errno
import json
import re
from collections.abc import Iterator, Mapping
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
    """Kind of file: its name, its size limit, and the remedies in its error messages."""

    word: str
    """"job" or "preset", which is also the first part of error codes."""
    largest: int
    """Size limit in bytes."""
    limit: str
    """The size limit as text: "1 MiB"."""
    remedy: str
    """How to get a valid file."""
    wrong_file: str
    """What to do when the file is too large."""
    missing: str
    """What to do when the file does not exist."""


# UTF-32 first: its byte order mark starts with that of UTF-16.
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}

# Messages of the parser (regular expressions), and what they mean in plain words.
_TOML_WORDS = (
    (r"Cannot overwrite a value|[Dd]uplicate", "the key on this line is in the file twice"),
    (r"Cannot declare .* twice", "this table is in the file twice"),
    (
        r"Unescaped|[Ii]nvalid hex|Illegal backslash|escape",
        "a \\ in double quotes is a special character; write Windows paths in 'single quotes'",
    ),
    (r"Expected '=' after a key", "a line must have the form key = value"),
    (r"Invalid value", 'this is not a valid value; text needs quotes ("like this"), and true and false are lowercase'),
    (r"Expected newline or end", "there is something after the value; text needs quotes around all of it"),
    (r"Unterminated|character '.n'|Expected \"", "a closing quote is missing"),
    (r"Illegal character", "it contains a control character"),
    (r"Invalid statement|Invalid initial", "a line must have the form key = value or [table]"),
    (r"Unclosed array", "a closing ] of a list is missing"),
    (r"Unclosed inline table", "a closing } of a table is missing"),
    (r"Expected '\]'", "the closing ] of a table name is missing"),
)


def read_text(path: Path, kind: FileKind) -> str:
    """Return the text of a file without a byte order mark, reading at most ``kind.largest`` bytes.

    Raises JobError if the file is missing, unreadable, too large or not UTF-8.
    """
    try:
        with open_file(path, "text") as file:
            data = file.read(kind.largest + 1)
    except UnusableFileError as error:
        if error.code == "file.size":
            raise _too_large(path, kind) from None
        sentence = f"Could not read the {kind.word} file {printable(str(path), 300)}: {error.reason}."
        raise JobError(f"{kind.word}.unreadable", sentence, _remedy(path, kind)) from None
    except (OSError, ValueError) as error:
        named = printable(str(path), 300)
        sentence = f"Could not read the {kind.word} file {named}: {_why(path, error)}."
        raise JobError(f"{kind.word}.unreadable", sentence, _remedy(path, kind)) from None
    if len(data) > kind.largest:
        raise _too_large(path, kind)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data, error.start, kind) from None


def parse_toml(text: str, source: str, kind: FileKind) -> dict[str, Any]:
    """Parse TOML; raises JobError with the line and the likely mistake if it is invalid."""
    try:
        return reading.parse_toml(text, source, finite=False)
    except UnusableFileError as error:
        if error.code == "file.syntax":
            reason, line = _toml_reason(str(error.__cause__), text)
            sentence = f"{source} is not valid TOML: {reason}."
            raise JobError(f"{kind.word}.toml", sentence, f"Fix {line} and start again.", (reason,)) from None
        sentence = f"{source} is not a {kind.word} file: {error.reason}."
        raise JobError(f"{kind.word}.toml", sentence, kind.remedy) from None


def _why(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, ValueError):
        return "the path contains an invalid character"
    if isinstance(error, FileNotFoundError):
        return "file not found"
    if error.errno == errno.ENAMETOOLONG:
        return "the path is too long"
    if isinstance(error, PermissionError):
        return "you don't have permission to read it"
    return error.strerror or str(error)


def _remedy(path: Path, kind: FileKind) -> str:
    within = path / f"{kind.word}.toml"
    with suppress(OSError):
        if within.is_file():
            return f"Use the file inside it: {within}"
    return kind.missing


def _too_large(path: Path, kind: FileKind) -> JobError:
    sentence = f"{path} is larger than {kind.limit}, so it is not a {kind.word} file."
    return JobError(f"{kind.word}.large", sentence, kind.wrong_file)


def _not_utf8(path: Path, data: bytes, at: int, kind: FileKind) -> JobError:
    line = data.count(b"\n", 0, at) + 1
    saved = next((name for mark, name in _MARKS.items() if data.startswith(mark)), None)
    what = f"it is saved as {saved}" if saved else f"line {line} contains an invalid byte"
    return JobError(
        f"{kind.word}.encoding",
        f"{path.name} is not UTF-8 text: {what}.",
        "Save it as UTF-8 in your editor (Notepad: Save as, Encoding: UTF-8) and start again.",
    )


def _toml_reason(message: str, text: str) -> tuple[str, str]:
    """Return a TOML error in plain language, and its place ("line 3" or "the end of the file") for the remedy."""
    said, _, where = message.rpartition(" (at ")
    plain = next((words for pattern, words in _TOML_WORDS if re.search(pattern, said)), said[:1].lower() + said[1:])
    number = re.match(r"line (\d+)", where)
    if number is None:
        return f"{plain}, at the end of the file", "the end of the file"
    line = text.split("\n")[int(number[1]) - 1].strip()
    return f"line {number[1]}, {printable(line, 80)}: {plain}", f"line {number[1]}"


def toml_value(value: Any) -> str:
    """Return a string, number, Boolean, date, list or table in TOML notation, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes are valid TOML; only DEL must be escaped in TOML but not in JSON.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_key(key)} = {toml_value(inner)}" for key, inner in value.items()) + "}"
    return repr(value)


def toml_key(key: str) -> str:
    """Return a key in TOML notation: quoted unless it consists of ASCII letters, digits, - and _."""
    plain = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if plain else toml_value(key)


def table_lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the lines of a table: its own keys, then its tables under headers that begin with `path` ("recipe.")."""
    yield from (f"{toml_key(name)} = {toml_value(value)}" for name, value in table.items() if not is_table(value))
    for name, value in table.items():
        if is_table(value):
            key, many = path + toml_key(name), isinstance(value, list)
            for item in value if many else (value,):
                yield f"\n[[{key}]]" if many else f"\n[{key}]"
                yield from table_lines(item, f"{key}.")


def is_table(value: Any) -> bool:
    """Return whether a value is a table, or a list of at least one table and nothing else."""
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(isinstance(item, dict) for item in items)
