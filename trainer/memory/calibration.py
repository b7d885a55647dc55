"""Learns from finished runs on this machine how far its forecasts were off, and says what to correct and keep free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.protocol import atomic, locks, places, reading
from trainer.protocol.report import RunReport, report_from

_MIB = 1 << 20
_SCHEMA = 1

# Runs kept of each card and system: the newest, and the one that erred most.
KEPT = 50
# Finished runs after which half of what can be given up of the margin is given up.
HALF_TRUSTED = 5
_FIRST = (0.03, 256 * _MIB)
_LAST = (0.005, 64 * _MIB)
# A forecast weighs as much as this many finished runs, and a run of so many seconds half of a long one: a short one may
# have met a busy machine, or be little but its beginning. Times further off than this are no matter of a factor.
_PRIOR_RUNS = 1
_HALF_SECONDS = 60.0
_FACTORS = (0.2, 10.0)


@dataclass(frozen=True, slots=True)
class Correction:
    """What finished runs on one card and system say about the next forecast."""

    runs: int = 0
    """How many of them there are with this version of PyTorch; others count for what is learned, not for trust."""
    context_bytes: int | None = None
    """The most that a run held of the card outside PyTorch's allocator; None while no run could tell."""
    time_factor: float = 1.0
    """What forecast seconds are to be multiplied with."""
    worst_share: float = 0.0
    """By how much a run exceeded its forecast of reserved memory at worst, as a share of the forecast; 0 or more."""
    worst_bytes: int = 0
    """The same in bytes; of another run perhaps."""
    damage: str | None = None
    """A sentence when the file was damaged, wholly or in part; what could not be read does not count."""

    def margin_bytes(self, reserved: int) -> int:
        """Return the bytes to keep free beside a forecast of ``reserved`` bytes.

        margin = max(last + (first - last) k / (k + n), worst share x reserved, worst bytes)

        with first = 3 % + 256 MiB before any evidence, last = 0.5 % + 64 MiB after endless evidence without error,
        k = 5 and n = runs. It never grows with n, never shrinks with the worst error, and is never below it.
        """
        first, last = (round(share * reserved) + fixed for share, fixed in (_FIRST, _LAST))
        trusted = last + math.ceil((first - last) * HALF_TRUSTED / (HALF_TRUSTED + self.runs))
        return max(trusted, math.ceil(self.worst_share * reserved), self.worst_bytes)


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What one finished run says."""

    card: str
    system: str
    torch: str | None
    context_bytes: int | None
    excess_share: float
    excess_bytes: int
    time_ratio: float | None
    time_weight: float


def calibration_file() -> Path:
    """Return where this user's calibration lies."""
    return places.home() / "calibration.json"


def corrections(card: str, system: str, versions: Mapping[str, str]) -> Correction:
    """Return what this user's finished runs say about ``card`` ("cpu" too) under ``system``; never raises.

    ``versions`` is as in a run's report: evidence of another PyTorch is taken for want of better.
    """
    path = calibration_file()
    try:
        found, damage = _read(path)
    except OSError as error:
        reason = error.strerror or str(error)
        found, damage = [], f"What earlier runs taught about forecasts in {path} cannot be read: {reason}."
    evidence = [piece for piece in map(_evidence, found) if piece is not None]
    if len(evidence) < len(found):
        damage = f"{len(found) - len(evidence)} of the {len(found)} finished runs in {path} cannot be read."
    here = [piece for piece in evidence if (piece.card, piece.system) == (card, system)]
    same = [piece for piece in here if piece.torch == versions.get("torch")]
    nearest = same or here
    contexts = [piece.context_bytes for piece in nearest if piece.context_bytes is not None]
    return Correction(
        runs=len(same),
        context_bytes=max(contexts, default=None),
        time_factor=_time_factor(nearest),
        worst_share=max((piece.excess_share for piece in here), default=0.0),
        worst_bytes=max((piece.excess_bytes for piece in here), default=0),
        damage=damage,
    )


def learn(report: RunReport) -> str | None:
    """Add a finished run to this user's calibration; returns a sentence when that was not possible.

    A damaged file is put aside under another name and begun anew.
    """
    path = calibration_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locks.held(path.with_suffix(".lock"), patience=10.0):
            found, damage = _read(path)
            if damage is not None:
                atomic.replace(path, path.with_suffix(".damaged.json"))
            atomic.write_json(path, {"schema": _SCHEMA, "runs": _pruned([*found, asdict(report)])})
    except locks.LockBusyError:
        return f"What this run taught about forecasts was not kept: {path} is in use by another program."
    except OSError as error:
        return f"What this run taught about forecasts was not kept: {path}: {error.strerror or error}."
    return None


def _read(path: Path) -> tuple[list[Any], str | None]:
    """Return the reports on file, and a sentence when the file holds none although it is there; raises OSError."""
    try:
        found = reading.read_json(path, "list")
        if found["schema"] == _SCHEMA and isinstance(found["runs"], list):
            return found["runs"], None
        reason = "another version of Impasto wrote it"
    except FileNotFoundError:
        return [], None
    except (ValueError, TypeError, KeyError):
        reason = "it is damaged"
    return [], f"What earlier runs taught about forecasts in {path} is not used: {reason}."


def _pruned(found: list[Any]) -> list[Any]:
    """Return the reports worth keeping, in order: of each card and system the newest, and the one that erred most."""
    groups: dict[tuple[str, str], list[tuple[int, _Evidence]]] = defaultdict(list)
    for place, report in enumerate(found):
        piece = _evidence(report)
        if piece is not None:
            groups[piece.card, piece.system].append((place, piece))
    kept: set[int] = set()
    for group in groups.values():
        kept.update(place for place, _ in group[-KEPT:])
        kept.add(max(group, key=lambda one: one[1].excess_share)[0])
        kept.add(max(group, key=lambda one: one[1].excess_bytes)[0])
    return [found[place] for place in sorted(kept)]


def _evidence(found: Any) -> _Evidence | None:
    """Return what a report says; None for one that cannot be read."""
    try:
        report = report_from(found)
        excesses = list(_excesses(report))
        measured, forecast = _times(report)
        return _Evidence(
            card=report.card,
            system=report.system,
            torch=report.versions.get("torch"),
            context_bytes=_context_bytes(report),
            excess_share=max((excess / forecast for excess, forecast in excesses), default=0.0),
            excess_bytes=max((excess for excess, _ in excesses), default=0),
            time_ratio=measured / (forecast / report.time_factor) if measured > 0 < forecast else None,
            time_weight=measured / (measured + _HALF_SECONDS),
        )
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
        return None


def _excesses(report: RunReport) -> Iterator[tuple[int, int]]:
    """Yield by phase how many bytes more than forecast were reserved or asked for, and what was forecast."""
    for phase in report.phases.values():
        if phase.forecast is not None and phase.measured is not None:
            demanded = phase.measured.reserved + phase.shortfall
            yield max(0, demanded - phase.forecast.reserved), max(1, phase.forecast.reserved)


def _context_bytes(report: RunReport) -> int | None:
    measured = [phase.measured for phase in report.phases.values() if phase.measured is not None]
    beyond = [peak.device - peak.reserved for peak in measured if peak.device is not None]
    return max((size for size in beyond if size > 0), default=None)


def _times(report: RunReport) -> tuple[float, float]:
    """Return measured and forecast seconds: of the phases that have both, else of all."""
    pairs = [(phase.seconds, phase.forecast_seconds) for phase in report.phases.values() if phase.forecast_seconds]
    if not pairs:
        return report.seconds, report.forecast_seconds or 0.0
    return sum(seconds for seconds, _ in pairs), sum(seconds or 0.0 for _, seconds in pairs)


def _time_factor(evidence: Sequence[_Evidence]) -> float:
    """Return the geometric mean of the ratios by their weights, and of as many ones as the forecast itself counts for.

    Earlier corrections are taken out of the ratios.
    """
    weighed = [(piece.time_weight, piece.time_ratio) for piece in evidence if piece.time_ratio is not None]
    total = sum(weight for weight, _ in weighed) + _PRIOR_RUNS
    mean = math.exp(sum(weight * math.log(ratio) for weight, ratio in weighed) / total)
    return min(max(mean, _FACTORS[0]), _FACTORS[1])
