"""Defines commands and the words that several of them share."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeAlias, TypeVar

from trainer import __version__
from trainer.config.credentials import protect
from trainer.errors import EXIT_DONE, EXIT_FAULT, EXIT_RESUMABLE, ImpastoError, JobError, closed, plain_reason
from trainer.protocol import events
from trainer.protocol.files import write_text
from trainer.protocol.places import home, refusal
from trainer.protocol.reading import file_being_read, read_text
from trainer.protocol.text import MOST_LINES, printable, printable_lines

if TYPE_CHECKING:
    from trainer.config.schema import Section

    _Section = TypeVar("_Section", bound=Section)

_STARTING = events.Notice("starting", "Starting the engine, which takes some seconds.")
_MOST_FAULTS = 10
_HEAD = "=== "
_MOST_PROBLEMS = 30


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


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Parser(argparse.ArgumentParser):
    """A parser of command-line arguments that quotes them in its errors only as printable text."""

    def error(self, message: str) -> NoReturn:
        """Write usage and message to stderr and exit with code 2."""
        super().error(printable(message))


def add_command(
    commands: Commands, name: str, what: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Define a command that does `what` by calling `run`, which returns the exit code."""
    parser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    # Also behind the command, where people write it; suppressed, so that its absence there does not unset the other.
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.set_defaults(command=run)
    return parser


def positive(text: str) -> int:
    """Read a whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def add_run(parser: argparse.ArgumentParser) -> None:
    """Define RUN."""
    parser.add_argument("run", metavar="RUN", help="the run's name or folder; `runs` lists them")


def add_base(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Define --base."""
    parser.add_argument(
        "--base", required=required, help=".safetensors checkpoint, diffusers folder, owner/name, or https link"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Define --json, for every command that shows a run's events."""
    parser.add_argument("--json", action="store_true", help="print the run's events as JSON lines, for programs")


def protect_links(options: argparse.Namespace) -> Iterator[str]:
    """Take passwords and tokens out of every base link of a command: its job file, --base and --set.

    Yields a message for each. From here on no command knows them, so none can print or write them.
    """
    base = getattr(options, "base", None)
    for name in ("job", "what", "source"):
        path = Path(str(getattr(options, name, None)))
        if path.suffix == ".toml" and path.is_file():
            from trainer.config.load import secure_job_file  # loads pydantic: only for commands that read a job

            yield from filter(None, [secure_job_file(path)])
    if isinstance(base, str):
        options.base, message = protect(base)
        yield from filter(None, [message])
    for number, text in enumerate(getattr(options, "set", None) or ()):
        key, equals, value = text.partition("=")
        if key.strip() == "base.model":
            safe, message = protect(value.strip().strip("\"'"))
            if message:
                options.set[number] = f"{key}{equals}{safe}"
                yield message


def checked(section: type[_Section], **values: object) -> _Section:
    """Return a table of a job made of words of the command line; raises JobError naming each that cannot be."""
    from pydantic import ValidationError

    from trainer.config.problems import problems

    try:
        return section.model_validate(values)
    except ValidationError as error:
        faults = problems(error, section)
        sentence = "These settings cannot be used: " + "; ".join(faults) + "."
        raise JobError(
            "settings.invalid", sentence, "Correct what is named; --help explains each word.", faults
        ) from error


def quieten() -> None:
    """Silence the libraries' notices, warnings and bars below errors; call it before the first of them is imported."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a line for each allocation that fails, retried or not
    logging.basicConfig(level=logging.ERROR, handlers=[LogHandler()])
    warnings.simplefilter("ignore")


@contextmanager
def engine_imports(on_event: Callable[[events.Event], None]) -> Iterator[None]:
    """Let the engine be imported within the block: as quickly as can be, and after a word about the wait."""
    from trainer.base.imports import quick_imports

    on_event(_STARTING)
    with quick_imports():
        yield


def guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Return a command's exit code: its own, or that of the error it raised after telling it on stderr."""
    try:
        return command()
    except ImpastoError as error:
        note_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        note("Interrupted. Whatever was saved before is kept; run the command again to continue.")
        return EXIT_RESUMABLE
    except BrokenPipeError:
        discard(sys.stdout)  # the reader of our output has ended, as `| head` does
        return EXIT_DONE
    except OSError as error:
        refused = refusal(error)
        if refused is None:
            return _fault(error, debug=debug)
        note_error(refused)
        return refused.exit_code
    except Exception as error:  # noqa: BLE001 - the edge of the process
        return _fault(error, debug=debug)


def note_error(error: ImpastoError) -> None:
    """Write an error to stderr: what happened, each problem on a line of its own, what to do."""
    note(f"Error: {error.sentence}")
    if len(error.problems) <= _MOST_PROBLEMS:  # of more the sentence lists the first and counts the rest
        for problem in error.untold:
            note(f"  {problem}")
    note(f"What to do: {error.remedy}")


def _fault(error: Exception, *, debug: bool) -> int:
    if debug:
        note_traceback(error)
    else:
        reading = file_being_read(error)
        while_reading = f" while reading {reading}" if reading else ""
        where = getattr(error, "traceback_kept", "") or _kept(error)
        note(closed(f"Error: Something in Impasto went wrong{while_reading}: {plain_reason(error)}"))
        note(f"What to do: {where} Please report it.")
    return EXIT_FAULT


def _kept(error: Exception) -> str:
    """Add an error's traceback to the last ones in the per-user folder and say where: it may never come again."""
    path = home() / "fault.txt"
    now = f"{_HEAD}{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, Impasto {__version__}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [*_faults(path)[1 - _MOST_FAULTS :], now + "".join(traceback.format_exception(error))]
        write_text(path, "\n".join(kept))
    except OSError:
        return "Repeat the command with --debug to see where."
    return f"Its traceback is in {path}."


def _faults(path: Path) -> list[str]:
    """Return the tracebacks that a file holds, oldest first; none where it cannot be read."""
    try:
        text = read_text(path, "text")
    except (OSError, ValueError):
        return []
    return [_HEAD + fault.rstrip("\n") + "\n" for fault in text.split(_HEAD)[1:]]
