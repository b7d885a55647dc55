"""What became of an entry of the queue whose engine is gone without having said so."""

from __future__ import annotations

from trainer.errors import RunError, joined
from trainer.protocol.detached import last_words
from trainer.protocol.queue import Entry, Queue, State
from trainer.protocol.rundir import RunDirectory

_BROKEN_OFF = "Its process was ended from outside, or the computer went down."


def outcome(queue: Queue, entry: Entry, code: int | None = None) -> tuple[State, str]:
    """Return how an entry ended and why; `code` is its engine's exit code where that is known."""
    if entry.run is not None:
        said = _said(RunDirectory(entry.run), entry.attempts)
        if said is not None:
            return said
    if entry.wish is not None and code != 1:  # before there was a run, it was simply ended
        return ("paused" if entry.wish == "pause" else "stopped"), ""
    if code is not None and code > 0 and entry.run is None:
        words = last_words(queue.log(entry.id))
        return "failed", words or f"It ended with exit code {code} and said nothing."
    return "interrupted", _BROKEN_OFF


def _said(run: RunDirectory, before: int) -> tuple[State, str] | None:
    """Return what the run itself tells; None where it says nothing of the start that came after `before` others."""
    try:
        state, status = run.state(), run.read_status()
    except RunError as error:
        return "failed", joined(error.sentence, error.remedy)
    if state == "running":
        return "interrupted", "Another process goes on with this run."
    if status is None or status.attempt <= before or state == "new" or state == "interrupted":
        return None
    return state, "" if state != "failed" else "It failed; its log tells why."
