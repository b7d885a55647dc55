"""What whole runs came to that no limit hindered, as files: it is kept so that they need not be played again. No torch.

An outcome follows from the tapes, the rules by which they are played, and a card's workspaces. A limit that is not
below the most that a run takes from the driver changes nothing in it: so where the outcome is known, only a run that
the limit may hinder has to be played.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from trainer.memory.packing import DAMAGED
from trainer.protocol import atomic
from trainer.protocol.forecast import PhaseForecast, phase_from

Outcome = tuple[PhaseForecast, ...]
"""Every phase but for its time, which is 0: at length, or in brief, which is without peaks and timelines."""

# Raised when the same tapes come to something else: the allocator's rules, what is played, what is told of it.
RULES = 1


def in_brief(outcome: Outcome) -> Outcome:
    """The outcome without peaks and timelines."""
    return tuple(replace(phase, peaks=(), timeline=()) for phase in outcome)


def at_length(outcome: Outcome) -> bool:
    """Whether it has them."""
    return any(phase.timeline for phase in outcome)


def most_reserved(outcome: Outcome) -> int:
    """The most bytes taken from the driver in any phase."""
    return max(phase.reserved for phase in outcome)


def write_outcomes(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Writes outcomes by key as one archive, atomically."""
    with atomic.staged(path, durable=False) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for key, outcome in outcomes.items():
            # A fixed date: equal outcomes give equal files.
            entry = zipfile.ZipInfo(key)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, json.dumps([asdict(phase) for phase in outcome], separators=(",", ":")))


def read_outcome(path: Path, key: str) -> Outcome | None:
    """The outcome under ``key`` in an archive; None where there is none or it is damaged, as its check sums tell."""
    if not path.is_file():
        return None
    try:
        # Opened here: zipfile leaves the file of a broken archive open.
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return tuple(map(phase_from, json.loads(archive.read(key)))) or None
    except (*DAMAGED, AttributeError):
        return None
