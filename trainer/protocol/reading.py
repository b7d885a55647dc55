"""Safe reading of files that another program, another computer or a failing disk may have written.

Every file that Impasto did not just write itself is opened with `open_file`, which refuses anything but regular files
(a pipe blocks forever, /dev/zero never ends) and files that are too large for their kind. Every JSON, TOML or YAML text
is parsed with `parse_json`, `parse_toml` or `parse_yaml`. All problems with the content raise `UnusableFileError`,
which is also a ValueError, so callers that try the next file catch only OSError and ValueError.

tests/unit/test_reading_lint.py fails if the code opens or parses files in any other way.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from trainer.errors import ImpastoError, plain_reason
from trainer.protocol import files
from trainer.protocol.text import in_json

T = TypeVar("T")

Kind = Literal["record", "settings", "config", "text", "list", "notes", "listing", "image", "part", "stream"]

_MIB = 1 << 20
LARGEST: Mapping[Kind, int] = {
    "record": 16 * _MIB,  # run.json of a thousand attempts, a queue entry with a job of 1 MiB escaped as JSON
    "settings": 4 * _MIB,  # the app's saved state, other tools' settings
    "config": 4 * _MIB,  # model configurations
    "text": 16 * _MIB,  # tag lists, prompts, logs that are read completely
    "list": 64 * _MIB,  # hashes, calibration, forecasts with timelines
    "notes": 256 * _MIB,  # one line per image: a million images at 250 bytes
    "listing": 1024 * _MIB,  # one line per image with all its captions
    "image": 1024 * _MIB,  # larger than any image that a decoder accepts
    "part": 65536 * _MIB,  # one file of a checkpoint, read whole: AdamW at rank 256 on SDXL takes 5 GiB, at 1024 24
    "stream": 1 << 62,  # mapped or read in blocks, never completely
}
"""Size limit in bytes by kind of file."""

DEEPEST = 64
"""Maximum nesting depth of tables and lists. Deeper ones can be parsed but would overflow the stack in later code."""
_DEEPEST_TOML = 32
# tomllib needs about 1 KiB per part of a key, and memory quadratic in the length of a dotted key while it reads it.
_MOST_TOML_SYNTAX = 30_000
_LARGEST_INTEGER = 1 << 64
_LONGEST_INTEGER = 20  # digits; longer ones exceed 64 bits, and Python converts them in quadratic time

_DIGITS = "a number has more than 64 bits"
_TOO_DEEP = "its tables or lists are nested too deeply"

# A string or comment in TOML, closed or not. It matches wherever one starts, so that no byte is scanned twice.
TOML_TEXT_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)'
    r"|'''.*?(?:'''|\Z)"
    r'|"(?:\\[^\n]|[^"\\\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|\#[^\n]*+",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?<![\w-])[\w-]+(?:[ \t]*\.[ \t]*[\w-]+){{{_DEEPEST_TOML}}}")

_NONBLOCKING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NOTE = "The file being read was "
_NUMBERS: Mapping[Any, tuple[type, ...]] = {float: (int, float), int: (int,)}


class UnusableFileError(ImpastoError, ValueError):
    """Error for a file or text with unusable content; `reason` is the part of the message after the colon."""

    reason: str = ""


class UnopenableFileError(UnusableFileError, OSError):
    """Error for a path that is not a regular file or is too large; also caught by code that catches only OSError."""


def unusable(source: object, code: str, reason: str) -> UnusableFileError:
    """Return the error for a file; `code` is "kind", "size", "encoding", "syntax", "depth", "number" or "content"."""
    named = f" {str(source)[:300]}" if str(source) else " this text"
    kind = UnopenableFileError if code in ("kind", "size") else UnusableFileError
    error = kind(
        f"file.{code}", f"Could not read{named}: {reason}.", "Restore the file from a backup, or move it away."
    )
    error.reason = reason
    if isinstance(error, UnopenableFileError):
        error.strerror = reason
    return error


def reason_of(error: BaseException) -> str:
    """Return why a file could not be read, as the end of a sentence, for any error raised while reading it."""
    return error.reason if isinstance(error, UnusableFileError) else plain_reason(error)


# --- opening


def open_file(path: Path, kind: Kind) -> BufferedReader:
    """Open a regular file for reading bytes; on Windows, retry for up to two seconds while it is locked.

    There are no retries on other systems: programs there don't lock files for a moment, and reading a folder of a
    thousand unreadable files would take half an hour.

    Raises OSError, and UnusableFileError for a folder, pipe, socket or device, or if the file is too large.
    """
    return files.with_retries(lambda: _open(path, kind)) if sys.platform == "win32" else _open(path, kind)


def read_bytes(path: Path, kind: Kind) -> bytes:
    """Return a file's entire content; raises UnusableFileError and OSError."""
    with open_file(path, kind) as file:
        # Don't just read up to the limit: read() allocates the requested size at once, and Windows commits it.
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1)
        if len(data) > size:  # the file has grown since, or reports no size, as in /proc
            data += file.read(LARGEST[kind] + 1 - len(data))
    if len(data) > LARGEST[kind]:
        raise _too_large(path, LARGEST[kind])
    return data


def read_text(path: Path, kind: Kind) -> str:
    r"""Return a UTF-8 file's text without a byte order mark, with "\n" line ends.

    Raises UnusableFileError and OSError.
    """
    return _decoded(read_bytes(path, kind), path).replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, kind: Kind) -> Any:
    """Return the value in a JSON file; raises UnusableFileError and OSError."""
    return parse_json(read_bytes(path, kind), path)


def read_toml(path: Path, kind: Kind) -> dict[str, Any]:
    """Return the tables of a TOML file; raises UnusableFileError and OSError."""
    return parse_toml(read_text(path, kind), path)


def read_record(path: Path, kind: Kind, decode: Callable[[Any], T]) -> T:
    """Read a JSON file and return its value as converted by `decode`.

    Raises OSError, and UnusableFileError for invalid content, including content for which `decode` fails.
    """
    return decoded(read_json(path, kind), decode, path)


def decoded(value: Any, decode: Callable[[Any], T], source: object) -> T:
    """Return `decode(value)` for a parsed value; raises UnusableFileError if `decode` fails."""
    try:
        with noting_file(source):
            return decode(value)
    except UnusableFileError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise unusable(source, "content", reason_of(error)) from error


def table(value: Any) -> dict[str, Any]:
    """Return a parsed value if it is a table; raises TypeError for anything else."""
    if not isinstance(value, dict):
        raise TypeError("it is not a table of names and values")
    return value


def path_of(value: Any) -> Path:
    """Return a string as a path; raises TypeError for other types and ValueError for an empty or invalid path."""
    if not isinstance(value, str):
        raise TypeError(f"{in_json(value)} is not a path")
    if not value or "\0" in value:
        raise ValueError(f"{in_json(value)} is not a path")
    return Path(value)


def _open(path: Path, kind: Kind) -> BufferedReader:
    target = files.long_path(path)
    _require_usable(path, target.stat(), kind)  # check before opening: some devices react to being opened
    handle = os.open(target, os.O_RDONLY | _NONBLOCKING)  # nonblocking, in case the file has been replaced by a pipe
    try:
        _require_usable(path, os.fstat(handle), kind)
        return open(handle, "rb")  # noqa: PTH123 - by its handle
    except BaseException:
        os.close(handle)
        raise


def _require_usable(path: Path, facts: os.stat_result, kind: Kind) -> None:
    if stat.S_ISDIR(facts.st_mode):
        raise unusable(path, "kind", "it is a folder")
    if not stat.S_ISREG(facts.st_mode):
        what = "a pipe" if stat.S_ISFIFO(facts.st_mode) else "a device or socket"
        raise unusable(path, "kind", f"it is {what}, not a file")
    if facts.st_size > LARGEST[kind]:
        raise _too_large(path, LARGEST[kind])


def _too_large(path: Path, most: int) -> UnusableFileError:
    return unusable(path, "size", f"it is larger than {most // _MIB:,} MiB, the limit for such a file")


# --- parsing


def parse_json(text: str | bytes, source: object = "", *, finite: bool = True) -> Any:
    """Return the value of a JSON text; raises UnusableFileError naming `source`.

    Also refuses encodings other than UTF-8, nesting deeper than DEEPEST, NaN and infinity in any form (such as 1e400),
    and integers over 64 bits. With `finite` false, NaN and infinity are accepted, because optimizer states may contain
    them.
    """
    if isinstance(text, bytes):
        text = _decoded(text, source)
    try:
        value = (_DECODER if finite else _ANY_FLOAT).decode(text.removeprefix("\ufeff"))
    except RecursionError:
        raise unusable(source, "depth", _TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise unusable(source, "syntax", _json_syntax(error)) from error
    except _BadNumberError as error:
        raise unusable(source, "number", str(error)) from None
    if text.count("[") + text.count("{") > DEEPEST:  # walking the value is slow, and few texts have so many brackets
        _require_modest(value, source, DEEPEST)
    return value


def parse_toml(text: str, source: object = "", *, finite: bool = True) -> dict[str, Any]:
    """Return the tables of a TOML text; raises UnusableFileError as `parse_json` does.

    With `finite` false, nan, inf and 1e400 are accepted and left to the caller's schema, which can name the key. The
    cause of a "file.syntax" error is tomllib's error, whose message names the line.
    """
    _require_modest_syntax(text, source)
    try:
        # With an extra line break, an error in the last line is reported there and not "at end of document".
        data = tomllib.loads(text.removeprefix("\ufeff") + "\n", parse_float=_finite if finite else float)
    except RecursionError:
        raise unusable(source, "depth", _TOO_DEEP) from None
    except tomllib.TOMLDecodeError as error:
        raise unusable(source, "syntax", f"it is not valid TOML: {error}") from error
    except _BadNumberError as error:
        raise unusable(source, "number", str(error)) from None
    except ValueError as error:  # a number of over 4,300 digits, or an impossible date
        reason = "a number has thousands of digits" if "digits" in str(error) else str(error)
        raise unusable(source, "number", reason) from None
    _require_modest(data, source, _DEEPEST_TOML)
    return data


def parse_yaml(text: str, source: object = "") -> Any:
    """Return the value of a YAML text with every scalar as a string; raises UnusableFileError.

    Aliases are refused, because a kilobyte of them can expand to gigabytes. A first pass finds aliases, and nesting
    that would overflow the stack in the second pass.
    """
    import yaml  # imported here: takes 20 ms, which would delay the first window

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # ten times as fast if the wheel contains libyaml
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent):
                raise unusable(source, "content", "it uses YAML aliases")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise unusable(source, "depth", _TOO_DEEP)
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it contains characters that YAML does not allow"
        raise unusable(source, "syntax", f"it is not valid YAML: {problem}{where}") from error


class _BadNumberError(ValueError):
    """Error for a number that is not finite or has too many digits."""


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _BadNumberError(f"the number {text[:40]} is not finite")
    return number


def _integer(text: str) -> int:
    if len(text) > _LONGEST_INTEGER:
        raise _BadNumberError(_DIGITS)
    return int(text)


def _refuse_constant(text: str) -> NoReturn:
    raise _BadNumberError(f"{text} is not a number")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_int=_integer, parse_constant=_refuse_constant)
_ANY_FLOAT = json.JSONDecoder(parse_int=_integer)


def _json_syntax(error: json.JSONDecodeError) -> str:
    return f"it is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg})"


def _decoded(data: bytes, source: object) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise unusable(source, "encoding", f"it is not UTF-8 text (line {line})") from None


def _require_modest_syntax(text: str, source: object) -> None:
    """Raise UnusableFileError for TOML that would take gigabytes or minutes to parse.

    Parsing a dotted key of 60 KB, for example, takes 3.8 GB of memory.
    """
    syntax = TOML_TEXT_OR_COMMENT.sub("_", text)
    if sum(map(syntax.count, "[{.=")) > _MOST_TOML_SYNTAX:
        raise unusable(source, "size", "it has too many keys and tables, or they are nested too deeply")
    if _LONG_KEY.search(syntax):
        raise unusable(source, "depth", _TOO_DEEP)


def _require_modest(value: Any, source: object, deepest: int) -> None:
    """Raise UnusableFileError for integers over 64 bits and nesting over `deepest`; does not recurse."""
    level = [value]
    for _ in range(deepest + 1):
        found: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                found += item.values()
            elif isinstance(item, list):
                found += item
            elif isinstance(item, int) and not -_LARGEST_INTEGER < item < _LARGEST_INTEGER:
                raise unusable(source, "number", _DIGITS)
        if not found:
            return
        level = found
    raise unusable(source, "depth", _TOO_DEEP)


# --- naming the file in unexpected errors


@contextlib.contextmanager
def noting_file(path: object) -> Iterator[None]:
    """Add a note that names the file being read to any unexpected error raised in the block."""
    try:
        yield
    except (ImpastoError, OSError):  # these already name their file
        raise
    except Exception as error:
        if file_being_read(error) is None:
            error.add_note(f"{_NOTE}{path}")
        raise


def file_being_read(error: BaseException) -> str | None:
    """Return the file named in the note that `noting_file` added to an error; None if there is no such note."""
    notes = getattr(error, "__notes__", ())
    return next((note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE)), None)
