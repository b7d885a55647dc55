"""Output, arguments and error handling that the commands share."""

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
from trainer.errors import EXIT_DONE, EXIT_FAULT, EXIT_RESUMABLE, ImpastoError, JobError, plain_reason, with_period
from trainer.protocol import events
from trainer.protocol.files import write_text
from trainer.protocol.places import home, user_error_of
from trainer.protocol.reading import file_being_read, read_text
from trainer.protocol.text import MOST_LINES, printable, printable_lines

if TYPE_CHECKING:
    from trainer.config.schema import Section

    _Section = TypeVar("_Section", bound=Section)

_STARTING = events.Notice("starting", "Starting (a few seconds)…")
_MOST_FAULTS = 10
_HEAD = "=== "
_MOST_PROBLEMS = 30


def echo(text: str = "") -> None:
    """Write one message to stdout; keep its line breaks, and indent all lines after the first."""
    write_lines(sys.stdout, printable_lines(text))


def echo_lines(lines: Iterable[str]) -> None:
    """Write each of `lines` to stdout as soon as the iterable yields it."""
    for line in lines:
        echo(line)


def echo_json(value: Any, *, indent: int | None = None) -> None:
    """Write a value to stdout as JSON, on one line unless `indent` is given.

    Non-ASCII characters are escaped, because the output may go to a terminal; parsers read the same values.
    """
    write_lines(sys.stdout, [json.dumps(value, indent=indent)])


def json_line(line: str) -> str:
    """Return a line of JSON with everything but printable ASCII escaped; its values stay the same."""
    return "".join(letter if " " <= letter <= "~" or letter == "\t" else json.dumps(letter)[1:-1] for letter in line)


def note(text: str, most: int = MOST_LINES) -> None:
    """Write a message or an error to stderr (results go to stdout); discard it if the stream has no reader."""
    try:
        write_lines(sys.stderr, printable_lines(text, most))
    except OSError:
        discard(sys.stderr)


def note_traceback(error: BaseException) -> None:
    """Write an error's traceback to stderr."""
    text = "".join(traceback.format_exception(error)).rstrip()
    note(text, most=text.count("\n") + 1)


def write_lines(stream: TextIO, lines: Iterable[str]) -> None:
    """Write lines that are already printable or JSON, and flush, because other programs may be reading them."""
    stream.write("".join(f"{line}\n" for line in lines))
    stream.flush()


def discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, including what is still in its buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class LogHandler(logging.Handler):
    """Logging handler that writes the log records of libraries to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        note(self.format(record))


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Parser(argparse.ArgumentParser):
    """Argument parser whose error messages quote arguments as printable text only."""

    def error(self, message: str) -> NoReturn:
        """Write usage and message to stderr and exit with code 2."""
        super().error(printable(message))


def add_command(
    commands: Commands, name: str, what: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Define a command with the help text `what` and return its parser; `run` executes it and returns the exit code."""
    parser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    # Accept --debug after the command too. SUPPRESS: without it, its default would overwrite the global option.
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.set_defaults(command=run)
    return parser


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the RUN argument."""
    parser.add_argument("run", metavar="RUN", help="the run's name or folder; `runs` lists them")


def add_base(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the --base option."""
    parser.add_argument(
        "--base",
        required=required,
        help="the base model: .safetensors checkpoint, diffusers folder, Hugging Face owner/name, or https link",
    )


def add_set(parser: argparse.ArgumentParser, what: str, metavar: str = "KEY=VALUE") -> None:
    """Add the repeatable --set option; `what` explains it. Names of other trainers work too: see `name_settings`."""
    parser.add_argument("--set", action="append", default=[], metavar=metavar, help=what)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the --json option for a command that shows a run's events."""
    parser.add_argument("--json", action="store_true", help="print the run's events as JSON lines, for scripts")


def protect_links(options: argparse.Namespace) -> Iterator[str]:
    """Remove passwords and tokens from the base links in the job file, --base and --set; yield a message for each link.

    These secrets are stored where the engine finds them (see `protect`), so no command can print or save them.
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


def name_settings(options: argparse.Namespace) -> Iterator[str]:
    """Put our keys in place of other programs' names in --set, such as network_dim; yield a message for each."""
    for number, text in enumerate(getattr(options, "set", None) or ()):
        word, equals, value = text.partition("=")
        if not equals or "." in word:
            continue
        from trainer.config.field_names import meant_by, value_called  # loads pydantic
        from trainer.config.job import Job

        key = None if word.strip() in Job.model_fields else meant_by(word)
        if key:
            ours = ",".join(value_called(key, each) or each for each in value.split(","))
            options.set[number] = f"{key}={ours}"
            yield f"{word.strip()} is {key} here: set {key} = {ours}."


def checked(section: type[_Section], **values: object) -> _Section:
    """Return a job section built from command-line values.

    Raises a JobError that names every invalid value.
    """
    from pydantic import ValidationError

    from trainer.config.problems import problems

    try:
        return section.model_validate(values)
    except ValidationError as error:
        faults = problems(error, section)
        sentence = "Could not use these settings: " + "; ".join(faults) + "."
        raise JobError("settings.invalid", sentence, "Correct them; --help explains each option.", faults) from error


def quieten() -> None:
    """Silence the libraries' notices, warnings and progress bars; call this before importing any of them."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Otherwise PyTorch logs a line for each failed allocation, even for those that it retries with success.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.basicConfig(level=logging.ERROR, handlers=[LogHandler()])
    warnings.simplefilter("ignore")


@contextmanager
def engine_imports(on_event: Callable[[events.Event], None]) -> Iterator[None]:
    """Report that starting takes a few seconds, and speed up imports of the engine within the `with` block."""
    from trainer.base.imports import quick_imports

    on_event(_STARTING)
    with quick_imports():
        yield


def guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command and return its exit code; write any error to stderr and return the code for it."""
    try:
        return command()
    except ImpastoError as error:
        note_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        note("Interrupted. Everything saved so far is kept. Run the command again to continue.")
        return EXIT_RESUMABLE
    except BrokenPipeError:
        discard(sys.stdout)  # the reader of our output has exited, as `| head` does
        return EXIT_DONE
    except OSError as error:
        refused = user_error_of(error)
        if refused is None:
            return _fault(error, debug=debug)
        note_error(refused)
        return refused.exit_code
    except Exception as error:  # noqa: BLE001 - the outermost frame of the process
        return _fault(error, debug=debug)


def note_error(error: ImpastoError) -> None:
    """Write an error to stderr: what happened, each problem on its own line, and what to do."""
    note(f"Error: {error.sentence}")
    if len(error.problems) <= _MOST_PROBLEMS:  # with more, the sentence lists the first ones and counts the rest
        for problem in error.unlisted_problems:
            note(f"  {problem}")
    note(f"What to do: {error.remedy}")


def _fault(error: Exception, *, debug: bool) -> int:
    if debug:
        note_traceback(error)
    else:
        reading = file_being_read(error)
        while_reading = f" while reading {reading}" if reading else ""
        where = getattr(error, "traceback_kept", "") or _save_traceback(error)
        note(with_period(f"Error: Something in Impasto went wrong{while_reading}: {plain_reason(error)}"))
        note(f"What to do: {where} Please report it.")
    return EXIT_FAULT


def _save_traceback(error: Exception) -> str:
    """Append an error's traceback to the fault file and return a sentence that says where to find it.

    The error may never occur again, so the traceback is saved even without --debug. The file holds the latest ten.
    """
    path = home() / "fault.txt"
    now = f"{_HEAD}{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, Impasto {__version__}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tracebacks = [*_faults(path)[1 - _MOST_FAULTS :], now + "".join(traceback.format_exception(error))]
        write_text(path, "\n".join(tracebacks))
    except OSError:
        return "Repeat the command with --debug to see the traceback."
    return f"The traceback is in {path}."


def _faults(path: Path) -> list[str]:
    """Return the tracebacks in a fault file, oldest first; empty if it cannot be read."""
    try:
        text = read_text(path, "text")
    except (OSError, ValueError):
        return []
    return [_HEAD + fault.rstrip("\n") + "\n" for fault in text.split(_HEAD)[1:]]
