"""What the planner answered, as the app reads it; see trainer/cli/planning.py for how it comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.core.words import QT_TRANSLATE_NOOP, sentence_of
from trainer.dataset.findings import Finding
from trainer.errors import ImpastoError
from trainer.protocol.forecast import CPU, SEARCHED, Forecast, PhaseForecast, forecast_from
from trainer.protocol.plan import MemoryAdvice, Remark
from trainer.protocol.records import build

if TYPE_CHECKING:
    from app.core.jobs.draft import Draft

_ORDER: Mapping[str, int] = {"error": 0, "warning": 1, "info": 2}
_SET_RIGHT = QT_TRANSLATE_NOOP("Preflight", "Fix this before you start.")
_CHOOSE_BASE = QT_TRANSLATE_NOOP("Preflight", "Choose a base: the model that the LoRA will change.")
_ADD_PICTURES = QT_TRANSLATE_NOOP("Preflight", "Add the images to train on.")
_TO_CHOOSE: Mapping[str, tuple[str, str]] = {
    "base": ("base.model", _CHOOSE_BASE),
    "base.model": ("base.model", _CHOOSE_BASE),
    "dataset": ("dataset.folders", _ADD_PICTURES),
    "dataset.folders": ("dataset.folders", _ADD_PICTURES),
}
"""What a new job lacks is no fault of the user's: it is asked for."""
_STILL_TO_COME = QT_TRANSLATE_NOOP(
    "Preflight",
    "The base is known once it is downloaded. Until then, choose a recipe for its family to see what it needs.",
)
_CHOOSE_ANOTHER = QT_TRANSLATE_NOOP("Preflight", "Choose another base.")
_IN_THE_APP: Mapping[str, tuple[str, str]] = {
    "run.folder": ("output.runs", QT_TRANSLATE_NOOP("Preflight", "Choose a folder you can write to.")),
    "run.room": (
        "output.runs",
        QT_TRANSLATE_NOOP("Preflight", "Free space on that disk, or choose a folder on another one."),
    ),
    "gpu.none": ("", QT_TRANSLATE_NOOP("Preflight", "Choose another GPU above to plan for.")),
    "job.invalid": ("", _SET_RIGHT),
    "job.toml": ("", _SET_RIGHT),
    "job.unreadable": ("", QT_TRANSLATE_NOOP("Preflight", "Choose another job on the left, or create a new one.")),
}
"""Errors by their codes whose remedies speak of commands and keys: the setting concerned, and what to do here."""
_THINK_OVER = QT_TRANSLATE_NOOP("Preflight", "Unusual value; please check.")


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What would end a training of the job as it is."""

    code: str
    """By which the app knows it, where it has a remedy of its own."""
    sentence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class PlannedCard:
    """The card that was planned for, in bytes."""

    name: str
    total: int
    free: int
    budget: int


@dataclass(frozen=True, slots=True)
class AnsweredPlan:
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
class PlanAnswer:
    """A plan, as far as it is known."""

    card: PlannedCard
    family: str
    effective_batch: int
    pick: AnsweredPlan | None
    """None where nothing fits."""
    quicker: AnsweredPlan | None
    missing: int
    """Bytes by which `quicker` is too large; without a pick, the smallest fit."""
    room: MemoryAdvice | None
    """How to free these bytes; None where nothing is missing."""
    smaller: AnsweredPlan | None
    quantised: AnsweredPlan | None
    lighter: AnsweredPlan | None
    """Where nothing fits: the plan with the smallest change that would."""
    changes: Mapping[str, Any]
    """That change, as keys below `recipe`."""
    ladder: tuple[Mapping[str, Any], ...]
    complete: bool
    """False where a better fit may exist."""
    remarks: tuple[Remark, ...]
    obstacles: tuple[Obstacle, ...]
    findings: tuple[Finding, ...]
    """Problems of the dataset, the worst first, without the paths of their files."""
    whole: bool
    """False while only the pick is known."""

    @property
    def on_cpu(self) -> bool:
        """Whether the job will train on the CPU."""
        return self.card.name == CPU

    @property
    def best(self) -> AnsweredPlan | None:
        """What is shown: the pick, or the smallest there is."""
        return self.pick or self.smaller


def answer_from(found: Mapping[str, Any], *, whole: bool) -> PlanAnswer:
    """Return an answer from its JSON; raises ValueError for anything else."""
    try:
        card, lighter = found["card"], found["lighter"] or {}
        return PlanAnswer(
            card=PlannedCard(card["name"], card["total"], card["free"], card["budget"]),
            family=found["family"],
            effective_batch=found["effective_batch"],
            pick=_plan(found["pick"]),
            quicker=_plan(found["quicker"]),
            missing=found["missing"],
            room=found["room"] and build(MemoryAdvice, found["room"]),
            smaller=_plan(found["smaller"]),
            quantised=_plan(found["quantised"]),
            lighter=_plan(lighter),
            changes=lighter.get("changes", {}),
            ladder=tuple(found["ladder"]),
            complete=found["complete"],
            remarks=tuple(build(Remark, remark) for remark in found["remarks"]),
            obstacles=tuple(Obstacle(**obstacle) for obstacle in found["obstacles"]),
            findings=tuple(Finding(one["code"], one["values"], severity=one["severity"]) for one in found["findings"]),
            whole=whole,
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no plan: {error!r}") from error


def _plan(found: Mapping[str, Any] | None) -> AnsweredPlan | None:
    return AnsweredPlan(found["fit"], found["quality"], forecast_from(found["forecast"])) if found else None


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """One thing, with what to do about it."""

    severity: Literal["error", "warning", "info"]
    """error: the run would not start or not fit."""
    sentence: str
    """Empty where the remedy says it all, and for a remark."""
    remedy: str = ""
    """Marked for translation in the context "Preflight", or the engine's own words."""
    key: str = ""
    """The setting concerned, if it is one."""
    remark: Remark | None = None
    """A remark of the engine, for the window to word."""


def preflight(draft: Draft, answer: PlanAnswer | None, error: ImpastoError | None) -> tuple[PreflightCheck, ...]:
    """Return all checks that have something to say, the worst first."""
    failed = [_of_error(draft, error)] if error else []
    found = [*_of_draft(draft), *failed, *(_of_answer(answer) if answer else ())]
    return tuple(sorted(dict.fromkeys(found), key=lambda check: _ORDER[check.severity]))


def _of_draft(draft: Draft) -> Iterator[PreflightCheck]:
    for key, reason in draft.problems:
        if reason.startswith("is missing") and key in _TO_CHOOSE:
            setting, wish = _TO_CHOOSE[key]
            yield PreflightCheck("error", "", wish, setting)
        else:
            yield PreflightCheck("error", sentence_of(reason), _SET_RIGHT, key)
    for key, reason in draft.doubts.items():
        yield PreflightCheck("warning", sentence_of(reason), _THINK_OVER, key)


def _of_error(draft: Draft, error: ImpastoError) -> PreflightCheck:
    if error.code == "plan.family":
        if Path(draft.base).is_absolute():
            return PreflightCheck("error", error.sentence, _CHOOSE_ANOTHER, "base.model")
        return PreflightCheck("warning", "", _STILL_TO_COME, "base.family")  # a Hub id or a link: no fault of the job's
    return _told(error)


def _told(error: ImpastoError | Obstacle) -> PreflightCheck:
    key, remedy = _IN_THE_APP.get(error.code, ("", error.remedy))
    return PreflightCheck("error", error.sentence, remedy, key)


def _of_answer(answer: PlanAnswer) -> Iterator[PreflightCheck]:
    for obstacle in answer.obstacles:
        yield _told(obstacle)
    for remark in answer.remarks:
        yield PreflightCheck("info", "", remark=remark)
    from app.core.health.findings import remedy_of  # with the edits that a remedy offers: not before the first answer

    for finding in answer.findings:
        yield PreflightCheck(finding.severity, finding.sentence, remedy_of(finding.code))
