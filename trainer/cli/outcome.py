"""Runs a command and turns what becomes of it into words on stderr and an exit code; no traceback for users' errors."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import TextIO

from trainer.errors import EXIT_DONE, EXIT_FAULT, EXIT_RESUMABLE, ImpastoError
from trainer.protocol.atomic import write_text
from trainer.protocol.places import home, refusal


def guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Return a command's exit code: its own, or that of the error it raised after telling it on stderr."""
    try:
        return command()
    except ImpastoError as error:
        say(in_words(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("Interrupted. Whatever was saved before is kept; start again to go on.")
        return EXIT_RESUMABLE
    except BrokenPipeError:
        forget(sys.stdout)  # whoever read our output has left, as `| head` does
        return EXIT_DONE
    except OSError as error:
        refused = refusal(error)
        if refused is None:
            return _fault(error, debug=debug)
        say(in_words(refused))
        return refused.exit_code
    except Exception as error:  # noqa: BLE001 - the edge of the process
        return _fault(error, debug=debug)


def in_words(error: ImpastoError) -> str:
    """Return an error as the user reads it: what happened, each problem on a line of its own, what to do."""
    listed = [f"  {problem}" for problem in error.untold]
    return "\n".join([f"Error: {error.sentence}", *listed, f"What to do: {error.remedy}"])


def say(text: str) -> None:
    """Write a line for the user that is not the command's result; where nobody can read it any more, nobody does."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        forget(sys.stderr)


def forget(stream: TextIO) -> None:
    """Lead all that is still written to a stream into nothing, what it holds back until the exit included."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fault(error: Exception, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    else:
        where = " ".join(getattr(error, "__notes__", ())) or _kept(error)  # hold() notes where it wrote the traceback
        say(f"Error: Something in Impasto went wrong: {type(error).__name__}: {error}")
        say(f"What to do: {where} Please report it.")
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
