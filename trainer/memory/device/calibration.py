"""Measure how accurate forecasts were for finished runs on this machine, and correct the next forecasts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from trainer.protocol import files, locks, places, reading
from trainer.protocol.records import to_record
from trainer.protocol.report import RunReport, report_from

_MIB = 1 << 20
# Files of schema 1 compared phases with forecasts that returned more cached memory than the run did. They are ignored,
# and the next finished run replaces them.
_SCHEMA = 2

# Runs to keep per GPU and system: the newest ones, plus the one with the largest error.
KEPT = 50
# Number of finished runs after which half of the reducible margin is given up.
HALF_TRUSTED = 5
_FIRST = (0.03, 256 * _MIB)
_LAST = (0.005, 64 * _MIB)
# An error adds at most this share of a forecast to the margin, unless a run has run out of memory. A larger error that
# caused no failure is more likely an error of the comparison, and would give the next run a worse plan.
LARGEST_SHARE = 0.15
# The forecast weighs as much as this many finished runs, and a run of this many seconds weighs half of a long one: the
# machine may have been busy, and a short run is mostly startup. Factors outside of the range have another cause.
_PRIOR_RUNS = 1
_HALF_SECONDS = 60.0
_FACTORS = (0.2, 10.0)


Reason = Literal["no_runs", "runs", "excess", "limit", "shortage"]
"""Why a margin has its size: there are no runs yet ("no_runs"), runs matched their forecasts ("runs"), a run exceeded
its forecast ("excess"; "limit": by more than the largest margin), or a run ran out of memory ("shortage")."""


@dataclass(frozen=True, slots=True)
class Excess:
    """Largest excess of runs over their forecasts; share and bytes may be from different runs."""

    share: float = 0.0
    """Excess as a share of the highest forecast of any phase in the run."""
    bytes: int = 0

    def of(self, reserved: int) -> int:
        """Return the bytes by which a run may exceed a forecast of ``reserved`` bytes, according to this excess."""
        return max(math.ceil(self.share * reserved), self.bytes)


@dataclass(frozen=True, slots=True)
class Margin:
    """Bytes to keep free in addition to a forecast."""

    bytes: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Correction:
    """Corrections to the next forecast, learned from finished runs on one GPU and system."""

    runs: int = 0
    """Number of runs with this PyTorch version; other runs are used for corrections, but don't reduce the margin."""
    context_bytes: int | None = None
    """Largest number of bytes that a run used outside PyTorch's allocator; None if no run could measure it."""
    time_factor: float = 1.0
    """Factor by which forecast seconds are multiplied."""
    worst: Excess = Excess()
    """Largest excess of reserved memory, in phases that had enough memory."""
    shortage: Excess = Excess()
    """Largest excess of needed memory, in phases that ran out of memory."""
    damage: str | None = None
    """Message if all or part of the calibration file was unreadable and is ignored; None if it could be read."""

    def margin(self, reserved: int) -> Margin:
        """Return the margin for a forecast of ``reserved`` bytes, and the reason for its size.

        margin = max(trusted, min(worst, 15% of reserved), shortage)
        trusted = last + (first - last) k / (k + n)

        with first = 3% + 256 MiB (no runs yet), last = 0.5% + 64 MiB (the limit after many accurate runs), k = 5 and
        n = runs. The margin never grows with n and never shrinks as the worst error grows.
        """
        first, last = (round(share * reserved) + fixed for share, fixed in (_FIRST, _LAST))
        trusted = last + math.ceil((first - last) * HALF_TRUSTED / (HALF_TRUSTED + self.runs))
        worst, shortage, limit = self.worst.of(reserved), self.shortage.of(reserved), int(LARGEST_SHARE * reserved)
        found = Margin(trusted, "runs" if self.runs else "no_runs")
        if min(worst, limit) > trusted:
            found = Margin(limit, "limit") if worst > limit else Margin(worst, "excess")
        return Margin(shortage, "shortage") if shortage > found.bytes else found


@dataclass(frozen=True, slots=True)
class _Evidence:
    """The data from one finished run that corrections are computed from."""

    gpu: str
    system: str
    torch: str | None
    context_bytes: int | None
    excess: Excess
    shortage: Excess
    time_ratio: float | None
    time_weight: float


def calibration_file() -> Path:
    """Return the path of this user's calibration file."""
    return places.home() / "calibration.json"


def corrections(gpu: str, system: str, versions: Mapping[str, str]) -> Correction:
    """Return corrections learned from finished runs on ``gpu`` (a name, or "cpu") and ``system``; never raises.

    ``versions`` is as in a run's report. Runs with another PyTorch version are used if there are none with this one.
    """
    path = calibration_file()
    try:
        found, damage = _read(path)
    except OSError as error:
        reason = error.strerror or str(error)
        found, damage = [], f"Could not read the forecast calibration {path}: {reason}."
    evidence = [piece for piece in map(_evidence, found) if piece is not None]
    if len(evidence) < len(found):
        damage = f"Could not read {len(found) - len(evidence)} of the {len(found)} finished runs in {path}."
    here = [piece for piece in evidence if (piece.gpu, piece.system) == (gpu, system)]
    same = [piece for piece in here if piece.torch == versions.get("torch")]
    nearest = same or here
    contexts = [piece.context_bytes for piece in nearest if piece.context_bytes is not None]
    return Correction(
        runs=len(same),
        context_bytes=max(contexts, default=None),
        time_factor=_time_factor(nearest),
        worst=_largest(piece.excess for piece in here),
        shortage=_largest(piece.shortage for piece in here),
        damage=damage,
    )


def learn(report: RunReport) -> str | None:
    """Add a finished run to this user's calibration; return a message if that was not possible.

    A damaged file is renamed, and a new one is started.
    """
    path = calibration_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locks.hold_lock(path.with_suffix(".lock"), patience=10.0):
            found, damage = _read(path)
            if damage is not None:
                files.replace(path, path.with_suffix(".damaged.json"))
            files.write_json(path, {"schema": _SCHEMA, "runs": _pruned([*found, to_record(report)])})
    except locks.LockBusyError:
        return f"Could not update the forecast calibration {path}: it is in use by another program."
    except OSError as error:
        return f"Could not update the forecast calibration {path}: {error.strerror or error}."
    return None


def _read(path: Path) -> tuple[list[Any], str | None]:
    """Return the stored reports, and a message if the file exists but is unusable (else None); raises OSError."""
    try:
        found = reading.read_json(path, "list")
        if found["schema"] == _SCHEMA and isinstance(found["runs"], list):
            return found["runs"], None
        if found["schema"] in range(1, _SCHEMA) and isinstance(found["runs"], list):
            return [], None
        reason = "another version of Impasto wrote it"
    except FileNotFoundError:
        return [], None
    except (ValueError, TypeError, KeyError):
        reason = "it is damaged"
    return [], f"The forecast calibration {path} is not used: {reason}."


def _pruned(found: list[Any]) -> list[Any]:
    """Return the reports to keep, in their order: the latest per GPU and system, and those with the largest excess."""
    groups: dict[tuple[str, str], list[tuple[int, _Evidence]]] = defaultdict(list)
    for place, report in enumerate(found):
        piece = _evidence(report)
        if piece is not None:
            groups[piece.gpu, piece.system].append((place, piece))
    kept: set[int] = set()
    for group in groups.values():
        kept.update(place for place, _ in group[-KEPT:])
        for figure in map(attrgetter, ("excess.share", "excess.bytes", "shortage.share", "shortage.bytes")):
            figures = [figure(piece) for _, piece in group]
            kept.add(group[figures.index(max(figures))][0])
    return [found[place] for place in sorted(kept)]


def _evidence(found: Any) -> _Evidence | None:
    """Return the data that corrections need from a report; None if the report cannot be read."""
    try:
        report = report_from(found)
        measured, forecast = _times(report)
        return _Evidence(
            gpu=report.gpu,
            system=report.system,
            torch=report.versions.get("torch"),
            context_bytes=_context_bytes(report),
            excess=_excess(report, ran_out=False),
            shortage=_excess(report, ran_out=True),
            time_ratio=measured / (forecast / report.time_factor) if measured > 0 < forecast else None,
            time_weight=measured / (measured + _HALF_SECONDS),
        )
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
        return None


def _excess(report: RunReport, *, ran_out: bool) -> Excess:
    """Return the largest excess of a phase over its own forecast; 0 if no forecast was exceeded.

    If ``ran_out``, only phases that ran out of memory are compared, else only the others. The share is relative to
    the highest forecast of any phase, since an excess of 200 MiB during caption encoding says little about a phase of
    10 GiB.
    """
    compared = [phase for phase in report.phases.values() if phase.forecast is not None and phase.measured is not None]
    highest = max((phase.forecast.reserved for phase in compared if phase.forecast), default=0)
    beyond = (
        phase.measured.reserved + phase.shortfall - phase.forecast.reserved
        for phase in compared
        if phase.forecast and phase.measured and bool(phase.shortfall) == ran_out
    )
    most = max([0, *beyond])
    return Excess(most / max(highest, 1), most)


def _largest(found: Iterable[Excess]) -> Excess:
    every = list(found)
    return Excess(max((one.share for one in every), default=0.0), max((one.bytes for one in every), default=0))


def _context_bytes(report: RunReport) -> int | None:
    measured = [phase.measured for phase in report.phases.values() if phase.measured is not None]
    beyond = [peak.device - peak.reserved for peak in measured if peak.device is not None]
    return max((size for size in beyond if size > 0), default=None)


def _times(report: RunReport) -> tuple[float, float]:
    """Return (measured, forecast) seconds of the phases that have a forecast; of the whole run if none has one."""
    pairs = [(phase.seconds, phase.forecast_seconds) for phase in report.phases.values() if phase.forecast_seconds]
    if not pairs:
        return report.seconds, report.forecast_seconds or 0.0
    return sum(seconds for seconds, _ in pairs), sum(seconds or 0.0 for _, seconds in pairs)


def _time_factor(evidence: Sequence[_Evidence]) -> float:
    """Return the weighted geometric mean of the runs' ratios of measured to forecast time, limited to ``_FACTORS``.

    The forecast itself counts as a run with a ratio of 1. Ratios are relative to forecasts without earlier corrections.
    """
    weighed = [(piece.time_weight, piece.time_ratio) for piece in evidence if piece.time_ratio is not None]
    total = sum(weight for weight, _ in weighed) + _PRIOR_RUNS
    mean = math.exp(sum(weight * math.log(ratio) for weight, ratio in weighed) / total)
    return min(max(mean, _FACTORS[0]), _FACTORS[1])
