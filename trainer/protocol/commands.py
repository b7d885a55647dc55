"""Send commands to a running engine: one file per command, moved to `commands/done/` with its outcome.

A command is pending while its file is in `commands/`. The engine claims it by renaming the file into
`commands/accepted/`, carries it out, and writes the file with the outcome to `commands/done/`. Whoever withdraws a
pending command claims it in the same way and finishes it with the outcome "withdrawn". A rename succeeds once, so a
command is either carried out or withdrawn, never both. Functions take that folder, a run's `RunDirectory.commands`.
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
"""Commands that end a run."""

_NUMBERS = itertools.count()
"""How many commands this process has sent."""


@dataclass(frozen=True)
class Command:
    """A command that waits in `path`."""

    name: CommandName
    arguments: Mapping[str, object]
    path: Path
    sent: float = 0.0
    """Unix time in seconds."""


@dataclass(frozen=True)
class Ending:
    """A command to end a run that has no outcome yet."""

    name: EndingName
    accepted: bool
    """Whether the engine is carrying it out, so that it can no longer be withdrawn."""


@dataclass(frozen=True)
class CommandResult:
    """What became of a command: `detail` is a sentence, or the file that was written."""

    outcome: CommandOutcome
    detail: str


def send(folder: Path, name: CommandName, arguments: Mapping[str, object] | None = None) -> Path:
    """Ask something of a run's engine; the path returned is what `answer` takes. Raises OSError."""
    sent = time.time()
    # The name sorts by time, so that commands are carried out in the order they came; Windows' clock goes in 16 ms.
    path = folder / f"{time.time_ns():020d}-{next(_NUMBERS):06d}-{name}-{secrets.token_hex(4)}.json"
    files.write_json(path, {"name": name, "arguments": dict(arguments or {}), "sent": sent})
    return path


def pending(folder: Path) -> list[Command]:
    """Return the pending commands, the oldest first; a file that is not a command is refused.

    Engines call this many times a second, so a folder without commands costs one listing.
    """
    waiting = []
    for path in _files(folder):
        if files.long_path(path.parent / "done" / path.name).exists():
            files.long_path(path).unlink(missing_ok=True)  # answered, then killed before it was removed
            continue
        command = _read(path)
        if isinstance(command, Command):
            waiting.append(command)
        elif command is not None:
            _conclude(path, command, "refused", "This engine knows no such command.")
    return waiting


def accept(command: Command) -> bool:
    """Claim a pending command to carry it out; return False when it was withdrawn or claimed by another process.

    A folder that does not allow the rename is no reason to ignore the command, so it counts as accepted.
    """
    try:
        _claim(command.path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def withdraw(folder: Path, name: CommandName) -> bool:
    """Withdraw every pending command of this name; return whether there was one. Raises OSError."""
    withdrawn = False
    for path in _files(folder):
        command = _read(path)
        if isinstance(command, Command) and command.name == name:
            with contextlib.suppress(FileNotFoundError):  # the engine was first
                _claim(path)
                finish(command, "withdrawn", "It was withdrawn before the run read it.")
                withdrawn = True
    return withdrawn


def ending(folder: Path) -> Ending | None:
    """Return the command that ends this run now or soon; one that is being carried out comes first.

    For watchers: changes no file. A run that is not alive may have left commands that mean nothing any more.
    """
    for place in (_accepted(folder), folder):
        for path in _files(place):
            command = _read(path)
            if isinstance(command, Command) and command.name in get_args(EndingName):
                return Ending("stop" if command.name == "stop" else "pause", place != folder)
    return None


def finish(command: Command, outcome: CommandOutcome, detail: str = "") -> None:
    """Answer a command: its file appears whole, with the outcome, in `done`; then its former file is removed."""
    _conclude(command.path, _fields(command), outcome, detail)


def answer(sent: Path) -> CommandResult | None:
    """Return what became of the command that `send` put at `sent`; None while it waits."""
    try:
        return reading.read_record(sent.parent / "done" / sent.name, "record", _answer)
    except FileNotFoundError:
        return None
    except (OSError, reading.UnusableFileError) as error:
        return CommandResult("failed", f"The answer cannot be read: {reading.reason_of(error)}.")


def unread(folder: Path) -> frozenset[str]:
    """Return the names of the files without an outcome; before a run is held, a former attempt left these."""
    return frozenset(path.name for place in (folder, _accepted(folder)) for path in _files(place))


def void(folder: Path, leftovers: frozenset[str]) -> None:
    """Answer "void" to the commands in these files that a former attempt left: they were not meant for this one."""
    for command in pending(folder):
        if command.path.name in leftovers:
            finish(command, "void", "The run ended before it read this.")
    for path in _files(_accepted(folder)):
        if path.name in leftovers:
            found = _read(path)
            asked = _fields(found) if isinstance(found, Command) else {"name": path.name}
            _conclude(folder / path.name, asked, "void", "The run ended before this was done.")


def _accepted(commands: Path) -> Path:
    """Return the folder of the commands that an engine is carrying out."""
    return commands / "accepted"


def _files(folder: Path) -> list[Path]:
    """Return the command files in a folder, the oldest first; none where there is no folder yet."""
    try:
        with os.scandir(files.long_path(folder)) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(".json")]
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names)]


def _claim(path: Path) -> None:
    """Move a pending command to the accepted ones; raises FileNotFoundError when it is not pending any more."""
    target = _accepted(path.parent) / path.name
    files.long_path(target.parent).mkdir(exist_ok=True)
    files.replace(path, target)


def _read(path: Path) -> Command | dict[str, object] | None:
    """Return the command in a file, or what else the file holds; None when the file is gone."""
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
