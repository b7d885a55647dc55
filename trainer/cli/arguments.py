"""Defines commands and the words that several of them share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar

from trainer.config.credentials import protect
from trainer.errors import JobError
from trainer.protocol.printable import printable

if TYPE_CHECKING:
    from trainer.config.schema import Section

    _Section = TypeVar("_Section", bound=Section)

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
