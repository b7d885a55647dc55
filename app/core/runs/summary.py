"""How a run stands, in a few numbers: what the list of runs shows. Read on worker threads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from app.core.words import full_message
from trainer.errors import RunError
from trainer.protocol import commands
from trainer.protocol.commands import Ending
from trainer.protocol.events import AttemptStarted, Phase, StepEvent, from_line, read_lines
from trainer.protocol.files import long_path
from trainer.protocol.run_directory import RunDirectory, newest_step

State = Literal["new", "running", "paused", "stopped", "done", "failed", "interrupted", "unknown"]
"""As `RunDirectory.state` tells; "unknown" where the folder cannot be read."""
Missing = Literal["gone", "unreachable"]
"""Whether the place where it was is there without it, or is not there itself, as of a disk that was taken away."""

LIVE: frozenset[State] = frozenset({"running"})
RESUMABLE: frozenset[State] = frozenset({"paused", "stopped", "failed", "interrupted"})
_TAIL = 64 * 1024
"""Bytes of the events of an interrupted run that are looked at: some 200 steps."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of the list."""

    path: Path
    name: str
    state: State
    phase: Phase | None = None
    step: int = 0
    steps: int = 0
    """0 when not known."""
    heartbeat: float = 0.0
    """Unix time in seconds of the last status; that a run is alive its lock tells, not this."""
    started: float = 0.0
    """Unix time in seconds of the latest start."""
    attempts: int = 0
    """How often it was started."""
    problem: str = ""
    """Why nothing more can be told, in a sentence."""
    missing: Missing | None = None
    """What is known of a run that is not where it was; None where it is there."""
    kept: int | None = None
    """The step of the last checkpoint of one that was interrupted; None where there is none."""
    status_fault: str = ""
    """Why its status cannot be read, in a sentence, of one that counts as interrupted because of that."""
    ending: Ending | None = None
    """The command that ends a running one now or soon, as its command files say."""


def summarise(path: Path) -> RunSummary:
    """Return how the run in a folder stands; whatever is wrong with the folder is in its `problem`."""
    run = RunDirectory(path)
    try:
        if not long_path(run.run).is_file():
            return _missing(path)
        state = run.state()
        attempts = run.attempts()
        started, times = _started(attempts), len(attempts)
        kept = newest_step(run.checkpoints) if state == "interrupted" else None
    except RunError as error:
        return _unreadable(path, full_message(error))
    except OSError as error:
        return _unreadable(path, f"This run's folder cannot be read: {error.strerror or error}.")
    status = run.read_status()
    found = RunSummary(path, path.name, state, started=started, attempts=times, ending=_ending(run, state))
    if status:
        phase = status.phase if state == "running" else None
        found = replace(found, phase=phase, step=status.step, steps=status.steps, heartbeat=status.heartbeat)
    if state != "interrupted":
        return found
    step = _last_step(run, status.step if status else kept or 0)
    return replace(found, step=step, kept=kept, status_fault="" if status else run.status_fault())


def _ending(run: RunDirectory, state: State) -> Ending | None:
    """Return the command that ends a run; commands that a dead engine left mean nothing."""
    if state != "running":
        return None
    try:
        return commands.ending(run.commands)
    except OSError:
        return None


def _last_step(run: RunDirectory, stated: int) -> int:
    """Return the last step of the latest start: a killed engine told of steps after it had written its status."""
    try:
        size = long_path(run.events).stat().st_size
        lines, _ = read_lines(run.events, max(0, size - _TAIL))
    except OSError:
        return stated
    for event in map(from_line, reversed(lines)):
        match event:
            case StepEvent():
                return event.step
            case AttemptStarted():
                break
    return stated


def _missing(path: Path) -> RunSummary:
    missing: Missing = "gone"
    if long_path(path).is_dir():
        problem = "This folder is no run any more: its run.json is gone."
    elif long_path(path.parent).is_dir():
        problem = "This run's folder is gone: it was moved, renamed or deleted."
    else:
        missing = "unreachable"
        problem = (
            "This run's folder cannot be reached: its disk is not there, or the folder around it was moved. "
            "Connect the disk, and the run is here again."
        )
    return replace(_unreadable(path, problem), missing=missing)


def _unreadable(path: Path, problem: str) -> RunSummary:
    return RunSummary(path, path.name, "unknown", problem=problem)


def _started(attempts: list[dict[str, Any]]) -> float:
    started = attempts[-1].get("started") if attempts else None
    return float(started) if isinstance(started, int | float) else 0.0


class Summaries:
    """Reads many runs again and again: one that has ended and was not touched since is not read twice.

    For one worker at a time; another may forget meanwhile: what is kept then all the same is of files as they are.
    """

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[tuple[int, ...], RunSummary]] = {}

    def of(self, path: Path) -> RunSummary:
        """Return how a run stands now."""
        stamp = _stamp(path)
        kept = self._kept.get(path)
        if kept and stamp and kept[0] == stamp and not _is_held(path):
            return kept[1]
        summary = summarise(path)
        if stamp and summary.state not in LIVE:
            self._kept[path] = (stamp, summary)
        return summary

    def forget(self, path: Path) -> None:
        """Drop what is kept of a run."""
        self._kept.pop(path, None)


def _stamp(path: Path) -> tuple[int, ...]:
    """Return when the files that a summary rests on were written last; nothing where one cannot be asked."""
    try:
        return tuple(long_path(path / name).stat().st_mtime_ns for name in ("run.json", "status.json"))
    except OSError:
        return ()


def _is_held(path: Path) -> bool:
    try:
        return RunDirectory(path).is_alive()
    except OSError:
        return True  # to be read again, which finds the words
