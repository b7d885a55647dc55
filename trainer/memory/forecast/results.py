"""Store the results of simulated runs to avoid simulating them again. Does not require torch.

A result depends on the traces, the rules for replaying them, and the GPU's workspace sizes. A memory limit changes
nothing unless it is below what the run reserves. Limits that grant and refuse the same requests have the same effect;
the effect is stored together with the range of these limits.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from trainer.memory.trace.store import DAMAGED, TraceStore, evict, mark_used
from trainer.protocol import files
from trainer.protocol.forecast import ForecastPhase, PhaseForecast, phase_from
from trainer.protocol.reading import open_file, parse_json
from trainer.protocol.records import build, json_keys, to_record

T = TypeVar("T")

ForecastResult = tuple[PhaseForecast, ...]
"""Forecasts of all phases, with their seconds set to 0; either complete, or brief (without peaks and timelines)."""

_OOM_KEY = "hindered"  # appended to a result's key for the effects of memory limits

# Raised when the same traces give another result: other allocator rules, other phases, or other contents.
RULES = 5
MOST_OUTCOME_BYTES = 16 * 2**20  # some thousand results
OUTCOME_SUFFIX = ".zip"
OOM_SUFFIX = f".hindered{OUTCOME_SUFFIX}"
# Memory limits to keep for one run, the latest ones: the free memory of a GPU differs slightly each time.
MAX_OOM_RESULTS = 16


@json_keys("least", "beyond", "failed_in", "retries")
@dataclass(frozen=True)
class OomResult:
    """Out-of-memory result: what any memory limit from ``least`` to just below ``beyond`` bytes causes in a run.

    If releasing cached memory is enough for the run to continue, ``failed_in`` is None.
    """

    least: int
    beyond: int
    failed_in: ForecastPhase | None
    retries: tuple[int, ...]
    """For each trace in the last round of training, how often all cached memory was returned to make room."""

    def applies_to(self, capacity: int) -> bool:
        """Return whether this result applies to a limit of ``capacity`` bytes."""
        return self.least <= capacity < self.beyond


def without_details(outcome: ForecastResult) -> ForecastResult:
    """Return the result without peaks and timelines."""
    return tuple(replace(phase, peaks=(), timeline=()) for phase in outcome)


def is_full(outcome: ForecastResult) -> bool:
    """Return whether a result has peaks and timelines."""
    return any(phase.timeline for phase in outcome)


def most_reserved(outcome: ForecastResult) -> int:
    """Return the most bytes reserved from the driver in any phase."""
    return max(phase.reserved for phase in outcome)


def write_outcomes(
    path: Path, outcomes: Mapping[str, ForecastResult], oom_result: Mapping[str, Sequence[OomResult]] | None = None
) -> None:
    """Write results and out-of-memory results, both mapped by key, to one archive atomically."""
    entries: dict[str, Sequence[PhaseForecast] | Sequence[OomResult]] = {**outcomes}
    entries |= {f"{key}.{_OOM_KEY}": found for key, found in (oom_result or {}).items()}
    with files.staged(path, durable=False) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, content in entries.items():
            # A fixed date, so that equal results give equal files.
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, json.dumps(list(map(to_record, content)), separators=(",", ":")))


def read_outcome(path: Path, key: str) -> ForecastResult | None:
    """Return the result under ``key`` in an archive; None if there is none or its checksum shows damage."""
    return _read(path, key, phase_from) or None


def read_oom(path: Path, key: str) -> tuple[OomResult, ...]:
    """Return the out-of-memory results under ``key`` in an archive; empty if there are none or it is damaged."""
    return _read(
        path, f"{key}.{_OOM_KEY}", lambda found: build(OomResult, {**found, "retries": tuple(found["retries"])})
    )


def _read(path: Path, name: str, parse: Callable[[dict[str, Any]], T]) -> tuple[T, ...]:
    if not path.is_file():
        return ()
    try:
        # Opened here, because zipfile does not close the file of a broken archive.
        with open_file(path, "list") as file, zipfile.ZipFile(file) as archive:
            return tuple(map(parse, parse_json(archive.read(name))))
    except (*DAMAGED, AttributeError):
        return ()


class ResultStore:
    """Store of forecast results by key."""

    def __init__(self, folder: Path, shipped: Path | None = None) -> None:
        """Use the read-only archive ``shipped`` first, then the cache in ``folder``."""
        self.folder = folder
        self.shipped = shipped

    @classmethod
    def for_traces(cls, store: TraceStore) -> ResultStore:
        """Return a store for the results of the traces in ``store``; it uses the same folders."""
        return cls(store.outcomes, store.shipped_outcomes)

    def load(self, key: str, *, brief: bool) -> ForecastResult | None:
        """Return the result under ``key``, complete unless ``brief``; None if there is none or it is damaged."""
        own = self.folder / f"{key}{OUTCOME_SUFFIX}"
        for path in (own,) if self.shipped is None else (self.shipped, own):
            found = read_outcome(path, key)
            if found is not None and (brief or is_full(found)):
                if path == own:
                    mark_used(own)
                return without_details(found) if brief else found
        return None

    def save(self, key: str, outcome: ForecastResult) -> None:
        """Store a result under ``key`` atomically; raises OSError if it cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_outcomes(self.folder / f"{key}{OUTCOME_SUFFIX}", {key: outcome})
        evict(self.folder, OUTCOME_SUFFIX, MOST_OUTCOME_BYTES)

    def oom_result(self, key: str) -> tuple[OomResult, ...]:
        """Return the out-of-memory results under ``key``, each for a range of memory limits."""
        own = self.folder / f"{key}{OOM_SUFFIX}"
        shipped = () if self.shipped is None else read_oom(self.shipped, key)
        if found := read_oom(own, key):
            mark_used(own)
        return (*shipped, *found)

    def save_oom(self, key: str, found: OomResult) -> None:
        """Add an out-of-memory result to those under ``key``; raises OSError if it cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{key}{OOM_SUFFIX}"
        others = [other for other in read_oom(path, key) if other != found]
        write_outcomes(path, {}, {key: [*others, found][-MAX_OOM_RESULTS:]})
        evict(self.folder, OUTCOME_SUFFIX, MOST_OUTCOME_BYTES)
