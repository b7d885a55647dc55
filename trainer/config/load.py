"""Reads a job file: TOML to a checked Job, with everything that is wrong with it named at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.job import Job
from trainer.config.migrate import migrate
from trainer.config.overrides import apply_overrides
from trainer.config.paths import make_absolute
from trainer.config.problems import problems
from trainer.errors import JobError

LARGEST = 1024 * 1024
REMEDY = "Correct what is named and start again; `python -m trainer new` writes a job file with every key explained."

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
    (r"Invalid statement|Invalid initial", "a line must read key = value, or [table]"),
    (r"Unclosed array", "a list is not closed; its ] is missing"),
    (r"Unclosed inline table", "a table in braces is not closed; its } is missing"),
    (r"Expected '\]'", "the name of a table is not closed; its ] is missing"),
)


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Read the job file at ``path``; ``overrides`` are ``key=value`` texts that win over the file.

    Paths in the result are absolute, those of the file counted from its folder.
    Raises JobError, whose ``problems`` name every fault: unreadable file, wrong encoding, broken TOML, bad keys.
    """
    return parse_job(_read(path), path.name, path.absolute().parent, overrides)


def parse_job(text: str, source: str, folder: Path, overrides: Sequence[str] = ()) -> Job:
    """Make a Job of TOML ``text``; ``source`` names it in errors, ``folder`` is what its paths are relative to."""
    data = migrate(parse_toml(text, source))
    faults = apply_overrides(data, overrides)
    faults += make_absolute(data, folder)
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        faults = [*faults, *problems(error, Job)]
    if faults:
        # A command line may hold bytes that are no text, which no terminal would print.
        faults = [fault.encode("utf-8", "backslashreplace").decode("utf-8") for fault in faults]
        raise JobError("job.invalid", _sentence(source, faults), REMEDY, tuple(faults))
    return job


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML; JobError naming the line and the likely mistake when it is none."""
    try:
        # With a line break more, an error in the last line is reported there and not "at the end".
        return tomllib.loads(text + "\n")
    except tomllib.TOMLDecodeError as error:
        reason, line = _toml_reason(str(error), text)
        sentence = f"{source} is not valid TOML: {reason}."
        raise JobError("job.toml", sentence, f"Correct {line} and start again.", (reason,)) from None
    except (RecursionError, ValueError) as error:
        # Python refuses to read numbers of more than 4300 digits, and tomllib lets that error through.
        what = "a number has thousands of digits" if isinstance(error, ValueError) else "it is nested without end"
        raise JobError("job.toml", f"{source} is not a job file: {what}.", REMEDY) from None


def _read(path: Path) -> str:
    """The text of a job file, with or without a byte order mark."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        sentence = f"The job file {path} cannot be read: {_why(path, error)}."
        raise JobError("job.unreadable", sentence, _remedy(path)) from None
    if len(data) > LARGEST:
        sentence = f"{path} is larger than 1 MiB, so it is not a job file."
        raise JobError("job.large", sentence, "Name the job.toml itself, not a model or a picture.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data, error.start) from None


def _why(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if path.is_dir():
        return "it is a folder"
    if isinstance(error, PermissionError):
        return "you have no permission to read it"
    return error.strerror or str(error)


def _remedy(path: Path) -> str:
    if (path / "job.toml").is_file():
        return f"Name the file in it: {path / 'job.toml'}"
    return "Check the path, or write a new job with `python -m trainer new`."


def _not_utf8(path: Path, data: bytes, at: int) -> JobError:
    line = data.count(b"\n", 0, at) + 1
    utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    what = "it is saved as UTF-16" if utf16 else f"line {line} holds a byte that is no UTF-8"
    return JobError(
        "job.encoding",
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
    return f"line {number[1]}, {line[:80]}: {plain}", f"line {number[1]}"


def _sentence(source: str, faults: Sequence[str]) -> str:
    if len(faults) == 1:
        return f"{source}: {faults[0]}"
    return f"{source} has {len(faults)} problems:" + "".join(f"\n  {fault}" for fault in faults)
