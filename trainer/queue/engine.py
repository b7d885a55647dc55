"""What an engine does for the entry of the queue that it was started for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

from trainer.errors import EXIT_DONE, ImpastoError, closed, joined, plain_reason
from trainer.protocol.files import long_path
from trainer.protocol.locks import occupied
from trainer.protocol.processes import speak_into
from trainer.protocol.queue import Entry, Queue, State
from trainer.protocol.run_directory import RunDirectory

Made = Callable[[Path], None]
"""Called with the run's folder as soon as there is one and it is this engine's, not that of another one."""


def carried_out(name: str, work: Callable[[Made], int]) -> int:
    """Do an entry of the user's queue by calling `work`, and enter how it goes and ends; returns the exit code.

    The entry and its lane are held meanwhile, so that whoever looks sees that it lives, also when the worker that
    began it is gone. Raises RunError when another engine does it already, and what `work` raises.
    """
    queue = Queue()
    with queue.engine(name):
        begun = time.time()
        entry = queue.change(name, _begun)
        try:
            with occupied(entry.lane or "cpu"):
                code = work(lambda run: _note_run(queue, name, run))
        except ImpastoError as error:
            _conclude(queue, name, "failed", _in_words(error))
            raise
        except Exception as error:
            _conclude(queue, name, "failed", f"Something in Impasto went wrong: {plain_reason(error)}")
            raise
        with contextlib.suppress(ImpastoError):  # an entry that was damaged meanwhile
            _conclude(queue, name, *(("done", "") if code == EXIT_DONE else _early(queue.get(name), begun)))
        return code


def _begun(entry: Entry) -> Entry:
    before = len(RunDirectory(entry.run).attempts()) if entry.run else 0
    return dataclasses.replace(entry, state="running", problem="", pid=os.getpid(), attempts=before)


def _note_run(queue: Queue, name: str, run: Path) -> None:
    """Enter the run; training does not end because that fails."""
    with contextlib.suppress(ImpastoError):
        queue.change(name, lambda entry: dataclasses.replace(entry, run=run))
    _speak_in(queue, name, run)


def _speak_in(queue: Queue, name: str, run: Path) -> None:
    """Let what is printed lie with the run, which outlives its entry; where the disk refuses, the entry has it."""
    with contextlib.suppress(OSError):
        speak_into(RunDirectory(run).console, queue.log(name))


def _early(entry: Entry, begun: float) -> tuple[State, str]:
    """Tell what the engine ended for before the end: what somebody asked for, else the system's request to end."""
    run = RunDirectory(entry.run) if entry.run else None
    status = run.read_status() if run else None
    if entry.wish == "stop" or (status and status.state == "stopped"):
        return "stopped", ""
    if entry.wish == "pause" or (run and _pause_was_asked(run, begun)):
        return "paused", ""
    return "interrupted", "The system ended it, with all its work saved: the computer was shut down."


def _pause_was_asked(run: RunDirectory, begun: float) -> bool:
    answered = long_path(run.commands / "done").glob("*-pause-*.json")
    # A file system may keep whole seconds only.
    return any(path.stat().st_mtime >= begun - 1.0 for path in answered)


def _conclude(queue: Queue, name: str, state: State, problem: str = "") -> None:
    """Enter the end; where the disk refuses, the worker finds it in the run's status."""
    with contextlib.suppress(ImpastoError):
        queue.conclude(name, state, problem)


def _in_words(error: ImpastoError) -> str:
    return joined(" ".join(map(closed, (error.sentence, *error.untold))), error.remedy)
