"""Runs a command and turns what becomes of it into words on stderr and an exit code; no traceback for users' errors."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from trainer import __version__
from trainer.cli.output import discard, note, note_traceback
from trainer.errors import EXIT_DONE, EXIT_FAULT, EXIT_RESUMABLE, ImpastoError, closed, plain_reason
from trainer.protocol.files import write_text
from trainer.protocol.places import home, refusal
from trainer.protocol.reading import file_being_read, read_text

_MOST_FAULTS = 10
_HEAD = "=== "

_MOST_PROBLEMS = 30


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
