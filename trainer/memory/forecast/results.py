"""What whole runs came to, as files: it is kept so that they need not be played again. No torch.

An outcome follows from the tapes, the rules by which they are played, and a card's workspaces. A limit that is not
below the most that a run takes from the driver changes nothing in it. A lower one hinders the run, all the way as every
other does that would have admitted and refused the same: so what came of it is kept with the bounds of those.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from trainer.memory.trace.store import DAMAGED, TraceStore, make_room, mark_used
from trainer.protocol import files
from trainer.protocol.forecast import ForecastPhase, PhaseForecast, phase_from
from trainer.protocol.reading import open_file, parse_json
from trainer.protocol.records import build, json_keys, to_record

T = TypeVar("T")

Outcome = tuple[PhaseForecast, ...]
"""Every phase but for its time, which is 0: at length, or in brief, which is without peaks and timelines."""

_OOM_KEY = "hindered"  # follows a key, for what is kept of limits

# Raised when the same tapes come to something else: the allocator's rules, what is played, what is told of it.
RULES = 3
MOST_OUTCOME_BYTES = 16 * 2**20  # some thousand, too
OUTCOME_SUFFIX = ".zip"
HINDERED_SUFFIX = f".hindered{OUTCOME_SUFFIX}"
# Of one run so many are kept that limits hindered, the latest: a card has a bit more or less to give each time.
MOST_HINDERED = 16


@json_keys("least", "beyond", "failed_in", "retries")
@dataclass(frozen=True)
class OomResult:
    """How a run goes within every limit from ``least`` to below ``beyond`` bytes."""

    least: int
    beyond: int
    failed_in: ForecastPhase | None
    retries: tuple[int, ...]
    """How often everything returnable was returned to make room, by the tapes of the last round of training."""

    def holds(self, capacity: int) -> bool:
        """Whether it says how the run goes within so many bytes."""
        return self.least <= capacity < self.beyond


def in_brief(outcome: Outcome) -> Outcome:
    """The outcome without peaks and timelines."""
    return tuple(replace(phase, peaks=(), timeline=()) for phase in outcome)


def at_length(outcome: Outcome) -> bool:
    """Whether it has them."""
    return any(phase.timeline for phase in outcome)


def most_reserved(outcome: Outcome) -> int:
    """The most bytes taken from the driver in any phase."""
    return max(phase.reserved for phase in outcome)


def write_outcomes(
    path: Path, outcomes: Mapping[str, Outcome], oom_result: Mapping[str, Sequence[OomResult]] | None = None
) -> None:
    """Writes outcomes, and what came of limits, by key as one archive, atomically."""
    entries: dict[str, Sequence[PhaseForecast] | Sequence[OomResult]] = {**outcomes}
    entries |= {f"{key}.{_OOM_KEY}": found for key, found in (oom_result or {}).items()}
    with files.staged(path, durable=False) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, content in entries.items():
            # A fixed date: equal outcomes give equal files.
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, json.dumps(list(map(to_record, content)), separators=(",", ":")))


def read_outcome(path: Path, key: str) -> Outcome | None:
    """The outcome under ``key`` in an archive; None where there is none or it is damaged, as its check sums tell."""
    return _read(path, key, phase_from) or None


def read_hindered(path: Path, key: str) -> tuple[OomResult, ...]:
    """What came of limits under ``key`` in an archive; nothing where it is damaged."""
    return _read(
        path, f"{key}.{_OOM_KEY}", lambda found: build(OomResult, {**found, "retries": tuple(found["retries"])})
    )


def _read(path: Path, name: str, parse: Callable[[dict[str, Any]], T]) -> tuple[T, ...]:
    if not path.is_file():
        return ()
    try:
        # Opened here: zipfile leaves the file of a broken archive open.
        with open_file(path, "list") as file, zipfile.ZipFile(file) as archive:
            return tuple(map(parse, parse_json(archive.read(name))))
    except (*DAMAGED, AttributeError):
        return ()


class OutcomeStore:
    """What runs come to, by key."""

    def __init__(self, folder: Path, shipped: Path | None = None) -> None:
        """``shipped`` is an archive, which comes before what is in ``folder`` and is never changed."""
        self.folder = folder
        self.shipped = shipped

    @classmethod
    def beside(cls, store: TraceStore) -> OutcomeStore:
        """Return the results of runs on the traces in ``store``, kept in the same folders."""
        return cls(store.outcomes, store.shipped_outcomes)

    def load(self, key: str, *, brief: bool) -> Outcome | None:
        """The outcome under ``key``; None where none is sound and, if it is not to be ``brief``, at length."""
        own = self.folder / f"{key}{OUTCOME_SUFFIX}"
        for path in (own,) if self.shipped is None else (self.shipped, own):
            found = read_outcome(path, key)
            if found is not None and (brief or at_length(found)):
                if path == own:
                    mark_used(own)
                return in_brief(found) if brief else found
        return None

    def save(self, key: str, outcome: Outcome) -> None:
        """Keeps ``outcome`` under ``key``, atomically; raises OSError when the disk refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_outcomes(self.folder / f"{key}{OUTCOME_SUFFIX}", {key: outcome})
        make_room(self.folder, OUTCOME_SUFFIX, MOST_OUTCOME_BYTES)

    def hindered(self, key: str) -> tuple[OomResult, ...]:
        """What came of limits under ``key``."""
        own = self.folder / f"{key}{HINDERED_SUFFIX}"
        shipped = () if self.shipped is None else read_hindered(self.shipped, key)
        if found := read_hindered(own, key):
            mark_used(own)
        return (*shipped, *found)

    def save_hindered(self, key: str, found: OomResult) -> None:
        """Keeps what came of one more limit, as ``save`` does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{key}{HINDERED_SUFFIX}"
        others = [other for other in read_hindered(path, key) if other != found]
        write_outcomes(path, {}, {key: [*others, found][-MOST_HINDERED:]})
        make_room(self.folder, OUTCOME_SUFFIX, MOST_OUTCOME_BYTES)
