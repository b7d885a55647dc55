"""Writes everything that the command line shows: text for people, made printable, and JSON for programs.

Nothing else in `trainer.cli` may print: file names, captions, metadata and messages come from other people, and a
control character in them would steer the terminal. The linter holds this (T201 and TID251 in pyproject.toml).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any, TextIO

from trainer.protocol.printable import MOST_LINES, printable_lines


def echo(text: str = "") -> None:
    """Write one message to stdout; line breaks in it are kept, and what follows them is indented."""
    write_lines(sys.stdout, printable_lines(text))


def echo_lines(lines: Iterable[str]) -> None:
    """Write each of `lines` to stdout as soon as it is known."""
    for line in lines:
        echo(line)


def echo_json(value: Any, *, indent: int | None = None) -> None:
    """Write a value to stdout as JSON, on one line unless it is indented.

    Everything beyond ASCII is escaped: a terminal may show the output of `--json` too, and readers get equal values.
    """
    write_lines(sys.stdout, [json.dumps(value, indent=indent)])


def json_line(line: str) -> str:
    """Return a line of JSON with everything beyond printable ASCII escaped, which leaves its values equal."""
    return "".join(letter if " " <= letter <= "~" or letter == "\t" else json.dumps(letter)[1:-1] for letter in line)


def note(text: str, most: int = MOST_LINES) -> None:
    """Write one message to stderr: a remark or an error, not the result; without a reader it is dropped."""
    try:
        write_lines(sys.stderr, printable_lines(text, most))
    except OSError:
        discard(sys.stderr)


def note_traceback(error: BaseException) -> None:
    """Write an error's traceback to stderr."""
    text = "".join(traceback.format_exception(error)).rstrip()
    note(text, most=text.count("\n") + 1)


def write_lines(stream: TextIO, lines: Iterable[str]) -> None:
    """Write lines that are already printable, or JSON, and flush: other programs may read along."""
    stream.write("".join(f"{line}\n" for line in lines))
    stream.flush()


def discard(stream: TextIO) -> None:
    """Send everything still written to a stream to nowhere, including what it has buffered until exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class LogHandler(logging.Handler):
    """Writes log records of libraries to stderr, like any other remark."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        note(self.format(record))
