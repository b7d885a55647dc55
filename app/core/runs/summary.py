"""Summaries of runs for the list of runs. Read them on worker threads."""

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
"""Value of `RunDirectory.state`, or "unknown" if the folder cannot be read."""
Missing = Literal["gone", "unreachable"]
"""Gone: only the run's folder is missing. Unreachable: its parent is missing too, as on a removed disk."""

LIVE: frozenset[State] = frozenset({"running"})
RESUMABLE: frozenset[State] = frozenset({"paused", "stopped", "failed", "interrupted"})
_TAIL = 64 * 1024
"""Bytes read from the end of an interrupted run's events: about 200 steps."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Summary of one run."""

    path: Path
    name: str
    state: State
    phase: Phase | None = None
    step: int = 0
    steps: int = 0
    """Total steps; 0 if unknown."""
    heartbeat: float = 0.0
    """Unix time of the last status in seconds. It does not tell whether the run is alive; its lock does."""
    started: float = 0.0
    """Unix time in seconds when the latest attempt started."""
    attempts: int = 0
    """Number of attempts: the first start and each resumption."""
    problem: str = ""
    """Sentence that explains why the folder cannot be read, or ""."""
    missing: Missing | None = None
    """Why the folder cannot be found; None if it exists."""
    kept: int | None = None
    """Step of an interrupted run's last checkpoint; None if there is none."""
    status_fault: str = ""
    """Sentence that explains why the status cannot be read; such a run counts as interrupted."""
    ending: Ending | None = None
    """Pause or stop command of a running run, pending or being executed."""


def summarize(path: Path) -> RunSummary:
    """Return the summary of the run in a folder; its `problem` describes problems with the folder."""
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
        return _unreadable(path, f"Could not read this run's folder: {error.strerror or error}.")
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
    """Return the unfinished pause or stop command of a run; leftovers of a dead engine are ignored."""
    if state != "running":
        return None
    try:
        return commands.ending(run.commands)
    except OSError:
        return None


def _last_step(run: RunDirectory, stated: int) -> int:
    """Return the last step of the latest attempt; a killed engine may have completed steps after its last status."""
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
        problem = "This folder is no longer a run: its run.json is missing."
    elif long_path(path.parent).is_dir():
        problem = "This run's folder is gone: it was moved, renamed or deleted."
    else:
        missing = "unreachable"
        problem = (
            "Could not reach this run's folder: its disk is not connected, or its parent folder was moved. "
            "Connect the disk to see the run again."
        )
    return replace(_unreadable(path, problem), missing=missing)


def _unreadable(path: Path, problem: str) -> RunSummary:
    return RunSummary(path, path.name, "unknown", problem=problem)


def _started(attempts: list[dict[str, Any]]) -> float:
    started = attempts[-1].get("started") if attempts else None
    return float(started) if isinstance(started, int | float) else 0.0


class Summaries:
    """Cache of summaries: a run that has ended is read again only if its files changed.

    Only one worker may read at a time. Another may call `forget` at any time, since entries are checked against the
    files.
    """

    def __init__(self) -> None:
        self._cache: dict[Path, tuple[tuple[int, ...], RunSummary]] = {}

    def of(self, path: Path) -> RunSummary:
        """Return the current summary of a run."""
        stamp = _stamp(path)
        cached = self._cache.get(path)
        if cached and stamp and cached[0] == stamp and not _is_held(path):
            return cached[1]
        summary = summarize(path)
        if stamp and summary.state not in LIVE:
            self._cache[path] = (stamp, summary)
        return summary

    def forget(self, path: Path) -> None:
        """Drop a run from the cache."""
        self._cache.pop(path, None)


def _stamp(path: Path) -> tuple[int, ...]:
    """Return the modification times in ns of the files that a summary is read from; empty if one cannot be read."""
    try:
        return tuple(long_path(path / name).stat().st_mtime_ns for name in ("run.json", "status.json"))
    except OSError:
        return ()


def _is_held(path: Path) -> bool:
    try:
        return RunDirectory(path).is_alive()
    except OSError:
        return True  # makes `of` read the run again, which reports the problem
