"""Read plans from the plan server (trainer/cli/planning.py), and collect the problems of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.core.words import QT_TRANSLATE_NOOP, sentence_of
from trainer.dataset.findings import Finding
from trainer.errors import ImpastoError
from trainer.protocol.forecast import CPU, SEARCHED_FIT_KEYS, Forecast, PhaseForecast, forecast_from
from trainer.protocol.plan import MemoryAdvice, Remark
from trainer.protocol.records import build

if TYPE_CHECKING:
    from app.core.jobs.draft import Draft

_ORDER: Mapping[str, int] = {"error": 0, "warning": 1, "info": 2}
_FIX_FIRST = QT_TRANSLATE_NOOP("Preflight", "Fix this before you start.")
_CHOOSE_BASE = QT_TRANSLATE_NOOP("Preflight", "Choose a base: the model that the LoRA will change.")
_ADD_IMAGES = QT_TRANSLATE_NOOP("Preflight", "Add the images to train on.")
_CHOICES_TO_MAKE: Mapping[str, tuple[str, str]] = {
    "base": ("base.model", _CHOOSE_BASE),
    "base.model": ("base.model", _CHOOSE_BASE),
    "dataset": ("dataset.folders", _ADD_IMAGES),
    "dataset.folders": ("dataset.folders", _ADD_IMAGES),
}
"""By key that a new job can lack: the setting that the user must choose, and the prompt to show instead of an error."""
_NOT_DOWNLOADED = QT_TRANSLATE_NOOP(
    "Preflight",
    "The base's family is unknown until the base is downloaded. "
    "Until then, choose a recipe for its family to get a forecast.",
)
_CHOOSE_ANOTHER = QT_TRANSLATE_NOOP("Preflight", "Choose another base.")
_IN_THE_APP: Mapping[str, tuple[str, str]] = {
    "run.folder": ("output.runs", QT_TRANSLATE_NOOP("Preflight", "Choose a folder you can write to.")),
    "run.room": (
        "output.runs",
        QT_TRANSLATE_NOOP("Preflight", "Free up space on that disk, or choose a folder on another one."),
    ),
    "gpu.none": ("", QT_TRANSLATE_NOOP("Preflight", "Choose another GPU above to plan for.")),
    "job.invalid": ("", _FIX_FIRST),
    "job.toml": ("", _FIX_FIRST),
    "job.unreadable": ("", QT_TRANSLATE_NOOP("Preflight", "Choose another job on the left, or create a new one.")),
}
"""Setting at fault and remedy, by error code; the engine's remedies mention commands and keys, unlike the app's."""
_UNUSUAL = QT_TRANSLATE_NOOP("Preflight", "Unusual value; please check.")


@dataclass(frozen=True, slots=True)
class Obstacle:
    """An error that would prevent the job from running."""

    code: str
    """Error code; for some, the app shows its own remedy."""
    sentence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """The GPU that the plan is for; its memory is in bytes."""

    name: str
    total: int
    free: int
    budget: int


@dataclass(frozen=True, slots=True)
class AnsweredPlan:
    """Fit settings with their forecast."""

    fit: Mapping[str, Any]
    quality: str
    """Precision of the base: "exact", "int8", "int8_products" or "nf4"."""
    forecast: Forecast

    @property
    def keys(self) -> dict[str, Any]:
        """Return the job settings that apply this plan, as values by key."""
        return {f"fit.{name}": self.fit[name] for name in SEARCHED_FIT_KEYS if name in self.fit}

    @property
    def decisive(self) -> PhaseForecast:
        """Return the phase that needs the most memory."""
        return self.forecast.decisive

    def reserved(self, reserved: int) -> int:
        """Return the bytes that the run reserves: `reserved`, but at most the budget if the run fits in memory.

        A run that fits frees cached blocks to stay within the budget.
        """
        return min(reserved, self.forecast.budget) if self.forecast.fits else reserved

    @property
    def needed(self) -> int:
        """Return the bytes of GPU memory that the run needs, including CUDA's own; on a CPU, bytes of main memory."""
        if self.forecast.on_cpu:
            return self.forecast.host
        return self.reserved(self.forecast.reserved) + self.forecast.outside


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """The answer to a request, as far as it has been computed."""

    gpu: PlannedGpu
    family: str
    effective_batch: int
    pick: AnsweredPlan | None
    """The best plan that fits; None if nothing fits."""
    faster: AnsweredPlan | None
    missing: int
    """Bytes by which `faster` (or, if nothing fits, `smaller`) exceeds the free memory."""
    memory_advice: MemoryAdvice | None
    """How to free the missing bytes; None if nothing is missing."""
    smaller: AnsweredPlan | None
    quantized: AnsweredPlan | None
    streamed: AnsweredPlan | None
    """The best plan with an unquantized, streamed base, if `pick` is quantized because it is much faster."""
    reduced_recipe: AnsweredPlan | None
    """If nothing fits, the plan that fits with the smallest change to the recipe."""
    changes: Mapping[str, Any]
    """Recipe settings that `reduced_recipe` changes: the new values, by key without `recipe.`."""
    fallbacks: tuple[Mapping[str, Any], ...]
    remarks: tuple[Remark, ...]
    obstacles: tuple[Obstacle, ...]
    findings: tuple[Finding, ...]
    """Problems in the dataset, the worst first, without file paths."""
    whole: bool
    """Whether the alternatives to the pick have been computed too."""

    @property
    def on_cpu(self) -> bool:
        """Return whether the job will train on the CPU."""
        return self.gpu.name == CPU

    @property
    def best(self) -> AnsweredPlan | None:
        """Return the plan to show: the pick, or the smallest fit if none fits."""
        return self.pick or self.smaller


def answer_from(found: Mapping[str, Any], *, whole: bool) -> PlanAnswer:
    """Build an answer from parsed JSON. Raises ValueError if it is not a plan."""
    try:
        gpu, reduced = found["gpu"], found["reduced_recipe"] or {}
        return PlanAnswer(
            gpu=PlannedGpu(gpu["name"], gpu["total"], gpu["free"], gpu["budget"]),
            family=found["family"],
            effective_batch=found["effective_batch"],
            pick=_plan(found["pick"]),
            faster=_plan(found["quicker"]),
            missing=found["missing"],
            memory_advice=found["room"] and build(MemoryAdvice, found["room"]),
            smaller=_plan(found["smaller"]),
            quantized=_plan(found["quantized"]),
            streamed=_plan(found["streamed"]),
            reduced_recipe=_plan(reduced),
            changes=reduced.get("changes", {}),
            fallbacks=tuple(found["fallbacks"]),
            remarks=tuple(build(Remark, remark) for remark in found["remarks"]),
            obstacles=tuple(Obstacle(**obstacle) for obstacle in found["obstacles"]),
            findings=tuple(
                Finding(item["code"], item["values"], severity=item["severity"]) for item in found["findings"]
            ),
            whole=whole,
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no plan: {error!r}") from error


def _plan(found: Mapping[str, Any] | None) -> AnsweredPlan | None:
    return AnsweredPlan(found["fit"], found["quality"], forecast_from(found["forecast"])) if found else None


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """One problem or remark, with what to do about it."""

    severity: Literal["error", "warning", "info"]
    """An error means that the run would not start or would not fit in memory."""
    sentence: str
    """What is wrong; empty for remarks and where the remedy is enough."""
    remedy: str = ""
    """What to do: a text marked for translation in the context "Preflight", or the engine's own text."""
    key: str = ""
    """Key of the setting that causes the problem, or ""."""
    remark: Remark | None = None
    """A remark from the engine, which the window puts into words."""
    title: str = ""
    """Label of the setting, after the folder, block or prompt that it belongs to; "" without a key."""


def preflight(draft: Draft, answer: PlanAnswer | None, error: ImpastoError | None) -> tuple[PreflightCheck, ...]:
    """Return all problems and remarks about a job, the worst first."""
    from app.core.jobs.settings import full_title  # late: it imports the job's schema

    failed = _of_error(draft, error) if error else ()
    checks = [*_of_draft(draft), *failed, *(_of_answer(answer) if answer else ())]
    found = [replace(each, title=full_title(each.key, draft.values)) if each.key else each for each in checks]
    return tuple(sorted(dict.fromkeys(found), key=lambda check: _ORDER[check.severity]))


def _of_draft(draft: Draft) -> Iterator[PreflightCheck]:
    for key, reason in draft.problems:
        if reason.startswith("is missing") and key in _CHOICES_TO_MAKE:
            setting, request = _CHOICES_TO_MAKE[key]
            yield PreflightCheck("error", "", request, setting)
        else:
            yield _of_setting(key, reason)
    for key, reason in draft.doubts.items():
        yield PreflightCheck("warning", sentence_of(reason), _UNUSUAL, key)


def _of_setting(key: str, reason: str) -> PreflightCheck:
    return PreflightCheck("error", sentence_of(reason), _FIX_FIRST, key)


def _of_error(draft: Draft, error: ImpastoError) -> Iterator[PreflightCheck]:
    if error.code == "plan.family" and Path(draft.base).is_absolute():
        yield PreflightCheck("error", error.sentence, _CHOOSE_ANOTHER, "base.model")
    elif error.code == "plan.family":  # a Hub id or a link is valid, but its family is unknown until the download
        yield PreflightCheck("warning", "", _NOT_DOWNLOADED, "base.family")
    elif error.code == "job.unsuitable":
        for problem in error.problems:
            key, _, reason = problem.partition(": ")
            yield _of_setting(key, reason)
    else:
        yield _of_obstacle(error)


def _of_obstacle(error: ImpastoError | Obstacle) -> PreflightCheck:
    key, remedy = _IN_THE_APP.get(error.code, ("", error.remedy))
    return PreflightCheck("error", error.sentence, remedy, key)


def _of_answer(answer: PlanAnswer) -> Iterator[PreflightCheck]:
    for obstacle in answer.obstacles:
        yield _of_obstacle(obstacle)
    for remark in answer.remarks:
        yield PreflightCheck("info", "", remark=remark)
    from app.core.health.findings import remedy_of  # late: it imports the edits that remedies offer

    for finding in answer.findings:
        yield PreflightCheck(finding.severity, finding.sentence, remedy_of(finding.code))
