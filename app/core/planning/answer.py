"""What the planner answered, as the app reads it; see trainer/cli/planning.py for how it comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.protocol.forecast import CPU, SEARCHED, Forecast, PhaseForecast, forecast_from

if TYPE_CHECKING:
    from trainer.dataset.findings import Severity  # with pydantic


@dataclass(frozen=True, slots=True)
class Use:
    """A program that holds memory of the card; `bytes` is None where the driver does not tell."""

    name: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What would end a training of the job as it is."""

    code: str
    """By which the app knows it, where it has a remedy of its own."""
    sentence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class DatasetFinding:
    """Something wrong or doubtful with the job's pictures."""

    severity: Severity
    sentence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class PlannedCard:
    """The card that was planned for, in bytes."""

    name: str
    total: int
    free: int
    budget: int
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A fit together with its forecast."""

    fit: Mapping[str, Any]
    quality: str
    """How the base is kept: "exact", "int8" or "nf4"."""
    forecast: Forecast

    @property
    def keys(self) -> dict[str, Any]:
        """The planned keys of a job that make it this plan."""
        return {f"fit.{name}": self.fit[name] for name in SEARCHED if name in self.fit}

    @property
    def decisive(self) -> PhaseForecast:
        """The phase that needs most."""
        return self.forecast.decisive

    def taken(self, reserved: int) -> int:
        """Bytes taken from the card: a run that fits gives back what is free before it passes the budget."""
        return min(reserved, self.forecast.budget) if self.forecast.fits else reserved

    @property
    def needed(self) -> int:
        """Bytes of the GPU that go to the run, with what CUDA itself takes; on a CPU, bytes of main memory."""
        if self.forecast.on_cpu:
            return self.forecast.host
        return self.taken(self.forecast.reserved) + self.forecast.outside


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan, as far as it is known."""

    card: PlannedCard
    family: str
    effective_batch: int
    pick: Plan | None
    """None where nothing fits."""
    quicker: Plan | None
    missing: int
    """Bytes that `quicker` lacks; without a pick, bytes that the smallest fit lacks."""
    smaller: Plan | None
    quantised: Plan | None
    lighter: Plan | None
    """Where nothing fits: the plan with the smallest change that would."""
    changes: Mapping[str, Any]
    """That change, as keys below `recipe`."""
    ladder: tuple[Mapping[str, Any], ...]
    complete: bool
    """False where a better fit may exist."""
    remarks: tuple[str, ...]
    """What was assumed, in sentences."""
    obstacles: tuple[Obstacle, ...]
    findings: tuple[DatasetFinding, ...]
    """What is wrong or doubtful with the pictures, the worst first."""
    whole: bool
    """False while only the pick is known."""

    @property
    def on_cpu(self) -> bool:
        """Whether the job will train on the CPU."""
        return self.card.name == CPU

    @property
    def best(self) -> Plan | None:
        """What is shown: the pick, or the smallest there is."""
        return self.pick or self.smaller


def answer_from(found: Mapping[str, Any], *, whole: bool) -> Answer:
    """Return an answer from its JSON; raises ValueError for anything else."""
    try:
        card, lighter = found["card"], found["lighter"] or {}
        uses = tuple(Use(use["name"], use["bytes"]) for use in card["uses"])
        return Answer(
            card=PlannedCard(card["name"], card["total"], card["free"], card["budget"], uses),
            family=found["family"],
            effective_batch=found["effective_batch"],
            pick=_plan(found["pick"]),
            quicker=_plan(found["quicker"]),
            missing=found["missing"],
            smaller=_plan(found["smaller"]),
            quantised=_plan(found["quantised"]),
            lighter=_plan(lighter),
            changes=lighter.get("changes", {}),
            ladder=tuple(found["ladder"]),
            complete=found["complete"],
            remarks=tuple(found["remarks"]),
            obstacles=tuple(Obstacle(**obstacle) for obstacle in found["obstacles"]),
            findings=tuple(DatasetFinding(**finding) for finding in found["findings"]),
            whole=whole,
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no plan: {error!r}") from error


def _plan(found: Mapping[str, Any] | None) -> Plan | None:
    return Plan(found["fit"], found["quality"], forecast_from(found["forecast"])) if found else None
