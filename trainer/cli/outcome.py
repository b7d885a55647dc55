"""Runs a command and turns what becomes of it into words on stderr and an exit code; no traceback for users' errors."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from trainer.cli.output import discard, note, note_traceback
from trainer.errors import EXIT_DONE, EXIT_FAULT, EXIT_RESUMABLE, ImpastoError, closed, plain_reason
from trainer.protocol.atomic import write_text
from trainer.protocol.places import home, refusal


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
    for problem in error.untold:
        note(f"  {problem}")
    note(f"What to do: {error.remedy}")


def _fault(error: Exception, *, debug: bool) -> int:
    if debug:
        note_traceback(error)
    else:
        where = " ".join(getattr(error, "__notes__", ())) or _kept(error)  # hold() notes where it wrote the traceback
        note(closed(f"Error: Something in Impasto went wrong: {plain_reason(error)}"))
        note(f"What to do: {where} Please report it.")
    return EXIT_FAULT


def _kept(error: Exception) -> str:
    """Write an error's traceback into the per-user folder and say where: it may be one that comes but once."""
    path = home() / "fault.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(traceback.format_exception(error)))
    except OSError:
        return "Repeat the command with --debug to see where."
    return f"Its traceback is in {path}."
