"""Send commands to a running engine: one file per command, moved to `commands/done/` with its outcome.

A command is pending while its file is in `commands/`. The engine claims it by moving the file to
`commands/accepted/`, carries it out, and writes the file with the outcome to `commands/done/`. To withdraw a pending
command, a process claims it in the same way and finishes it with the outcome "withdrawn". A move succeeds only once,
so a command is either carried out or withdrawn, never both. The functions take the folder `RunDirectory.commands`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trainer.protocol import files, reading
from trainer.protocol.records import moment

CommandName = Literal["stop", "pause", "save", "sample"]
CommandOutcome = Literal["done", "refused", "failed", "void", "withdrawn"]
EndingName = Literal["stop", "pause"]
"""Name of a command that ends a run."""

_NUMBERS = itertools.count()
"""Counter of the commands that this process has sent."""


@dataclass(frozen=True)
class Command:
    """Pending command in the file `path`."""

    name: CommandName
    arguments: Mapping[str, object]
    path: Path
    sent: float = 0.0
    """Unix time in seconds when it was sent."""


@dataclass(frozen=True)
class Ending:
    """Stop or pause command that has no outcome yet."""

    name: EndingName
    accepted: bool
    """Whether the engine is carrying out the command, which can then no longer be withdrawn."""


@dataclass(frozen=True)
class CommandResult:
    """Result of a command; `detail` is a sentence, or the name of a file that the command wrote."""

    outcome: CommandOutcome
    detail: str


def send(folder: Path, name: CommandName, arguments: Mapping[str, object] | None = None) -> Path:
    """Send a command to a run's engine and return the path to pass to `answer`; raises OSError if that fails."""
    sent = time.time()
    # Names sort by time, so that commands run in order; the counter is for the Windows clock, which ticks every 16 ms.
    path = folder / f"{time.time_ns():020d}-{next(_NUMBERS):06d}-{name}-{secrets.token_hex(4)}.json"
    files.write_json(path, {"name": name, "arguments": dict(arguments or {}), "sent": sent})
    return path


def pending(folder: Path) -> list[Command]:
    """Return the pending commands, oldest first; give files that are not commands the outcome "refused".

    Engines call this many times a second; without commands it costs one directory listing.
    """
    waiting = []
    for path in _files(folder):
        if files.long_path(path.parent / "done" / path.name).exists():
            files.long_path(path).unlink(
                missing_ok=True
            )  # the engine answered, then was killed before it removed the file
            continue
        command = _read(path)
        if isinstance(command, Command):
            waiting.append(command)
        elif command is not None:
            _conclude(path, command, "refused", "The engine does not know this command.")
    return waiting


def accept(command: Command) -> bool:
    """Claim a pending command; return False if it was withdrawn or claimed by another process.

    If the file cannot be moved, the command counts as accepted, because ignoring it would be worse.
    """
    try:
        _claim(command.path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def withdraw(folder: Path, name: CommandName) -> bool:
    """Withdraw all pending commands of this name; return whether there was one. Raises OSError if that fails."""
    withdrawn = False
    for path in _files(folder):
        command = _read(path)
        if isinstance(command, Command) and command.name == name:
            with contextlib.suppress(FileNotFoundError):  # the engine claimed it first
                _claim(path)
                finish(command, "withdrawn", "It was withdrawn before the run read it.")
                withdrawn = True
    return withdrawn


def ending(folder: Path) -> Ending | None:
    """Return the stop or pause command that is being carried out, else a pending one, else None.

    This changes no files, so watchers may call it. A run that has ended may have left commands that no longer matter.
    """
    for place in (_accepted(folder), folder):
        for path in _files(place):
            command = _read(path)
            if isinstance(command, Command) and command.name in get_args(EndingName):
                return Ending("stop" if command.name == "stop" else "pause", place != folder)
    return None


def finish(command: Command, outcome: CommandOutcome, detail: str = "") -> None:
    """Write a command with its outcome to `done` atomically, then remove its previous file."""
    _conclude(command.path, _fields(command), outcome, detail)


def answer(sent: Path) -> CommandResult | None:
    """Return the result of the command that `send` wrote to `sent`; None while it is pending."""
    try:
        return reading.read_record(sent.parent / "done" / sent.name, "record", _answer)
    except FileNotFoundError:
        return None
    except (OSError, reading.UnusableFileError) as error:
        return CommandResult("failed", f"Could not read the result: {reading.reason_of(error)}.")


def unread(folder: Path) -> frozenset[str]:
    """Return the file names of commands without an outcome; before a run is locked, these are from earlier attempts."""
    return frozenset(path.name for place in (folder, _accepted(folder)) for path in _files(place))


def void(folder: Path, leftovers: frozenset[str]) -> None:
    """Give the commands in `leftovers`, which were meant for an earlier attempt, the outcome "void"."""
    for command in pending(folder):
        if command.path.name in leftovers:
            finish(command, "void", "The run ended before it read the command.")
    for path in _files(_accepted(folder)):
        if path.name in leftovers:
            found = _read(path)
            asked = _fields(found) if isinstance(found, Command) else {"name": path.name}
            _conclude(folder / path.name, asked, "void", "The run ended before this was done.")


def _accepted(commands: Path) -> Path:
    """Return the folder of the commands that an engine is carrying out."""
    return commands / "accepted"


def _files(folder: Path) -> list[Path]:
    """Return the command files in a folder, oldest first; empty if the folder does not exist."""
    try:
        with os.scandir(files.long_path(folder)) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(".json")]
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names)]


def _claim(path: Path) -> None:
    """Move a pending command to `accepted`; raises FileNotFoundError if it is no longer pending."""
    target = _accepted(path.parent) / path.name
    files.long_path(target.parent).mkdir(exist_ok=True)
    files.replace(path, target)


def _read(path: Path) -> Command | dict[str, object] | None:
    """Return the command in a file, a dict with the file name if it is not a command, or None if it is gone."""
    try:
        return reading.read_record(path, "record", lambda fields: _command(fields, path))
    except FileNotFoundError:  # answered, claimed or withdrawn since the folder was listed
        return None
    except (OSError, reading.UnusableFileError):
        return {"name": path.name}


def _command(fields: Any, path: Path) -> Command:
    if fields["name"] not in get_args(CommandName) or not isinstance(fields["arguments"], dict):
        raise ValueError("it is not a command")
    return Command(fields["name"], fields["arguments"], path, moment(fields["sent"]))


def _answer(fields: Any) -> CommandResult:
    if fields["outcome"] not in get_args(CommandOutcome):
        raise ValueError("it is not an answer")
    return CommandResult(fields["outcome"], str(fields["detail"]))


def _fields(command: Command) -> dict[str, object]:
    return {"name": command.name, "arguments": dict(command.arguments), "sent": command.sent}


def _conclude(path: Path, asked: Mapping[str, object], outcome: CommandOutcome, detail: str) -> None:
    answered = {**asked, "outcome": outcome, "detail": detail, "finished": time.time()}
    files.write_json(path.parent / "done" / path.name, answered)
    for former in (path, _accepted(path.parent) / path.name):
        files.long_path(former).unlink(missing_ok=True)
