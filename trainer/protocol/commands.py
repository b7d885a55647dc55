"""What may be asked of a running engine: one file a command, moved to `commands/done/` with its outcome."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from trainer.protocol import atomic

if TYPE_CHECKING:  # rundir imports this module
    from trainer.protocol.rundir import RunDirectory

CommandName = Literal["stop", "pause", "save", "sample"]
CommandOutcome = Literal["done", "refused", "failed", "void"]

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
class Answer:
    """What became of a command: `detail` is a sentence, or the file that was written."""

    outcome: CommandOutcome
    detail: str


def send(run: RunDirectory, name: CommandName, arguments: Mapping[str, object] | None = None) -> Path:
    """Ask something of a run's engine; the path returned is what `answer` takes. Raises OSError."""
    sent = time.time()
    # The name sorts by time, so that commands are carried out in the order they came; Windows' clock goes in 16 ms.
    path = run.commands / f"{time.time_ns():020d}-{next(_NUMBERS):06d}-{name}-{secrets.token_hex(4)}.json"
    atomic.write_json(path, {"name": name, "arguments": dict(arguments or {}), "sent": sent})
    return path


def pending(run: RunDirectory) -> list[Command]:
    """Return the commands that wait, the oldest first; a file that is no command is refused."""
    waiting = []
    for path in sorted(atomic.long_path(run.commands).glob("*.json")):
        if atomic.long_path(path.parent / "done" / path.name).exists():
            path.unlink(missing_ok=True)  # answered, then killed before it was taken away
            continue
        command = _read(path)
        if isinstance(command, Command):
            waiting.append(command)
        else:
            _conclude(path, command, "refused", "This engine knows no such command.")
    return waiting


def finish(command: Command, outcome: CommandOutcome, detail: str = "") -> None:
    """Answer a command: its file appears whole, with the outcome, in `done` and then leaves `commands`."""
    asked = {"name": command.name, "arguments": dict(command.arguments), "sent": command.sent}
    _conclude(command.path, asked, outcome, detail)


def answer(sent: Path) -> Answer | None:
    """Return what became of the command that `send` put at `sent`; None while it waits."""
    try:
        fields = json.loads(atomic.read_text(sent.parent / "done" / sent.name))
    except FileNotFoundError:
        return None
    return Answer(fields["outcome"], fields["detail"])


def unread(run: RunDirectory) -> frozenset[str]:
    """Return the names of the files that wait; before a run is held, these are what a former attempt left."""
    return frozenset(path.name for path in atomic.long_path(run.commands).glob("*.json"))


def void(run: RunDirectory, leftovers: frozenset[str]) -> None:
    """Answer "void" to the commands in these files that a former attempt left: they were not meant for this one."""
    for command in pending(run):
        if command.path.name in leftovers:
            finish(command, "void", "The run ended before it read this.")


def _read(path: Path) -> Command | dict[str, object]:
    """Return the command in a file, or what else the file holds."""
    try:
        fields = json.loads(atomic.read_text(path))
        if fields["name"] in get_args(CommandName) and isinstance(fields["arguments"], dict):
            return Command(fields["name"], fields["arguments"], path, float(fields["sent"]))
    except (ValueError, KeyError, TypeError):
        pass
    return {"name": path.name}


def _conclude(path: Path, asked: Mapping[str, object], outcome: CommandOutcome, detail: str) -> None:
    answered = {**asked, "outcome": outcome, "detail": detail, "finished": time.time()}
    atomic.write_json(path.parent / "done" / path.name, answered)
    atomic.long_path(path).unlink(missing_ok=True)
