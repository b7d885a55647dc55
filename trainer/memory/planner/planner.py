"""Plans: the fit that trains a recipe fastest on a card without changing what is learned, and what stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from trainer.config.fit import FallbackStep, FitConfig
from trainer.memory.device import roofline
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.forecast import BudgetCheck, RunSimulator, forecast_of
from trainer.memory.forecast.schedule import PhaseCounts, RunSchedule, bounding_buckets
from trainer.memory.planner.evaluator import Evaluator, best
from trainer.memory.planner.search_space import Checkpointing, candidates, ladder, nested_sets
from trainer.memory.planner.suggestions import RecipeChange, lighter
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import Work
from trainer.memory.trace.workload import TracePart, TraceRequest, Workload, complete_fit
from trainer.protocol.forecast import SEARCHED, Forecast, ForecastPhase, PhaseForecast

Quality = Literal["exact", "int8", "int8_products", "nf4"]

# A "smaller" plan may take this share of what the pick does, over the whole run: it leaves room for other programs.
SMALLER = 0.85
# Beside the pick, no more than so many are looked at for each of its companions: they are hints.
LOOKED_AT = 3
BEFORE_TRAINING: tuple[ForecastPhase, ...] = ("cache_pictures", "cache_texts", "load", "quantise")
"""These take the same however training and previews are fitted; loading, with a base in as many bits."""


@dataclass(frozen=True)
class Plan:
    """A fit together with its forecast."""

    fit: FitConfig
    forecast: Forecast

    @property
    def quality(self) -> Quality:
        """How the base is kept: "exact" is unquantised."""
        quantise = self.fit.quantise or "none"
        return "exact" if quantise == "none" else quantise


@dataclass(frozen=True)
class ReducedRecipe:
    """The smallest change of the recipe with which a plan fits."""

    change: RecipeChange
    plan: Plan


@dataclass(frozen=True)
class Planned:
    """What to do, and what else there is; each but the pick may be absent."""

    situation: DeviceState
    pick: Plan | None
    """None where nothing fits."""
    quicker: Plan | None = None
    """Quicker than the pick, but it needs more than there is."""
    missing: int = 0
    """Bytes that ``quicker`` lacks; without a pick, bytes that the smallest fit lacks."""
    smaller: Plan | None = None
    """Leaves room for other programs; without a pick, the smallest fit there is."""
    smallest: bool = False
    """Whether no other fit was found that takes much less than the pick."""
    floor: PhaseForecast | None = None
    """Why: a phase that takes about as much in every fit."""
    quantised: Plan | None = None
    """Quicker with a base in fewer bits, at a cost in fidelity."""
    lighter: ReducedRecipe | None = None
    """Where nothing fits: what would."""
    ladder: tuple[FallbackStep, ...] = ()
    complete: bool = True
    """False where time ran out before every fit had been looked at: a quicker one may exist."""
    complete_beside: bool = True
    """False where time ran out before all had been looked at that may stand beside the pick."""


def plan(
    subject: Workload,
    written: FitConfig,
    situation: DeviceState,
    traces: TraceLibrary,
    occasions: PhaseCounts,
    *,
    until: float | None = None,
    until_beside: float | None = None,
    others: bool = True,
    runs: RunSimulator | None = None,
    likely: FitConfig | None = None,
    on_soon: Callable[[Planned], None] | None = None,
    on_pick: Callable[[Planned], None] = lambda _: None,
) -> Planned:
    """The plan for ``subject`` in ``situation``; keys that the user has ``written`` into the fit stay as they are.

    Among the fits that end within the budget in a replay, the order of preference is: unquantised before int8 before
    nf4 (unless the fit allows quantising), the least time of training, the fewest changes from what is usual, the least
    time of previews, the least memory. Training takes the time of its work and, where a fit ends within the budget only
    because the cache is given back to the driver in every step, the time of that: such a fit may still be the pick, but
    not where another that is as quick does without.
    With ``until`` (of time.monotonic) nothing is traced after that moment but what it takes to find one that fits, or
    that none does, before the base is rounded. With ``others`` the plans beside the pick are worked out too, for which
    nothing is traced after ``until_beside``; ``on_pick`` is told the pick before that. Where a search has to trace,
    ``on_soon`` is told before it of one that fits and takes fewer traces: ``likely``, such as a former plan's pick, or
    one that saves most. ``runs`` are those of other questions on cards with like workspaces.

    Raises JobError when none of the GPU's memory can be used.
    """
    situation.require_budget()
    planning = _Planning(subject, written, situation, traces, occasions, until, runs)
    traces.foresee(lambda: planning.foreseen)

    def tell(soon: Plan) -> None:
        assert on_soon
        on_soon(Planned(situation, soon, complete=False))

    told = on_soon and likely is not None and planning.tell_likely(likely, tell)
    pick = planning.best(planning.choices, None if told or not on_soon else tell)
    if pick is None:
        return planning.nothing_fits(look_for_change=others)
    chosen = planning.plan_of(pick, brief=False)
    picked = Planned(
        situation,
        chosen,
        ladder=planning.ladder(pick),
        complete=not planning.appraisal.left_out,
    )
    on_pick(picked)
    if not others:
        return picked
    planning.appraisal.until, planning.appraisal.left_out = until_beside, False
    quicker = planning.quicker(pick)
    most = int(SMALLER * min(chosen.forecast.reserved, situation.budget))
    # Caches that are filled between epochs too take what lies beside them, which is another fit's matter.
    floor = _floor(chosen.forecast, most) if not occasions.later.portions else None
    smaller = planning.smaller(pick, most) if floor is None else None
    smallest = smaller is None and (floor is not None or not planning.appraisal.left_out)
    quantised = planning.quantised(pick)
    return replace(
        picked,
        quicker=quicker,
        missing=max(quicker.forecast.reserved - situation.budget, 1) if quicker else 0,
        smaller=smaller,
        smallest=smallest,
        floor=floor,
        quantised=quantised,
        complete_beside=not planning.appraisal.left_out,
    )


class _Planning:
    """One search, with what it finds out on the way."""

    def __init__(
        self,
        subject: Workload,
        written: FitConfig,
        situation: DeviceState,
        traces: TraceLibrary,
        occasions: PhaseCounts,
        until: float | None,
        runs: RunSimulator | None = None,
    ) -> None:
        dtype = "bf16" if situation.card.bf16 else "fp16"
        start = complete_fit(written.changed(dtype=written.dtype or dtype))
        self.subject = replace(subject, fit=start)
        self.written = written
        self.situation = situation
        self.traces = traces
        self.occasions = occasions if subject.previews else replace(occasions, previews=0)
        self.until = until
        self.appraisal = self._appraisal(self._fits, until)
        self._runs = runs or RunSimulator(situation)

    @property
    def qualities(self) -> tuple[str, ...]:
        """How the base may be kept."""
        return (self.written.quantise,) if self.written.quantise else ("none", "int8", "nf4")

    @property
    def foreseen(self) -> list[TraceRequest]:
        """What a search may ask for beside one picture without checkpointing: the optimizer, and what saves memory.

        Of two ways to keep the base, as a card that is too small for the first needs figures of both.
        """
        base, bucket = self.subject.fit, bounding_buckets(self.subject)[0]
        plain = base.changed(micro_batch=1, checkpointing="none")
        saving = base.changed(
            micro_batch=self.written.micro_batch or 1,
            checkpointing=self.written.checkpointing or "full",
            vae_tiling=True,
            preview_offload=True,
        )

        def wish(fit: FitConfig, part: TracePart, *more: object) -> TraceRequest:
            return TraceRequest(replace(self.subject, fit=fit), part, more)

        looked_at = self.qualities[:2]
        fits = [fit.changed(quantise=quantise) for quantise in looked_at for fit in (plain, saving)]
        steps = [wish(fit, "micro", bucket, fit.micro_batch) for fit in fits[1:]]
        last = plain.changed(quantise=looked_at[-1])
        parts: tuple[TracePart, ...] = ("load", "quantise", "validate")
        previews = [wish(fits[-1], "preview")] if self.occasions.previews else []
        return [wish(plain, "optimizer"), *steps, *previews, *(wish(last, part) for part in parts)]

    @cached_property
    def sets(self) -> tuple[Checkpointing, ...]:
        """What may be checkpointed; the blocks are ranked by one picture without any."""
        if self.written.checkpointing is not None:
            return (self.written.checkpointing,)
        return nested_sets(self.appraisal.anchor(self.qualities[0]).blocks)

    @cached_property
    def choices(self) -> list[FitConfig]:
        """Every fit that may be chosen."""
        return candidates(
            self.written,
            self.subject.fit,
            effective_batch=self.subject.recipe.effective_batch,
            checkpointing=self.sets,
            quantise=self.qualities,
            previews=bool(self.subject.previews),
        )

    def best(self, choices: Sequence[FitConfig], tell_soon: Callable[[Plan], None] | None = None) -> FitConfig | None:
        """The best that fits; a base is rounded only where none fits that is rounded less, however late it is.

        ``tell_soon`` is told of one that fits before those are traced that may be better.
        """
        for alike in self._by_quality(choices):
            if tell_soon is not None and self._has_to_trace(alike):
                tell_soon = None if self._tell(max(alike, key=self._saving), tell_soon) else tell_soon
            found = best(alike, self.appraisal)
            if found is None:
                found = self._past_its_time([fit for fit in alike if self.appraisal.late_for(fit)])
            if found is not None:
                return found
        return None

    def _by_quality(self, choices: Sequence[FitConfig]) -> list[list[FitConfig]]:
        """Those that are searched together, the most wanted first."""
        if self.written.allow_quantised:
            return [list(choices)]
        return [[fit for fit in choices if fit.quantise == quantise] for quantise in self.qualities]

    def _past_its_time(self, left_out: Sequence[FitConfig]) -> FitConfig | None:
        """Of those that time did not allow to look at, the first that fits.

        The quickest of which only previews are unknown come first: they take few traces more, and what saves most would
        be slow for the whole run. Then what saves most: where its tensors alone are too many, so are those of nearly
        all others, which then need no look.
        """
        self.appraisal.until = None
        saving_first = sorted(left_out, key=self._saving, reverse=True)
        half_known = [fit for fit in saving_first if self.appraisal.knows_steps(fit)]
        quickest_first = sorted(half_known, key=lambda fit: self.appraisal.preference(fit).time)
        in_order = (*quickest_first, *saving_first)
        found = next((fit for fit in in_order if best([fit], self.appraisal) is not None), None)
        self.appraisal.until = self.until
        self.appraisal.left_out = found is not None
        return found

    def tell_likely(self, likely: FitConfig, tell: Callable[[Plan], None]) -> bool:
        """Tells of a fit that may do, changed to what is stated, if it fits; not where a search is as quick."""
        stated = {name: value for name in SEARCHED if (value := getattr(self.written, name)) is not None}
        fit = self.subject.fit.changed(**{name: getattr(likely, name) for name in SEARCHED} | stated)
        fit = fit.changed(micro_batch=min(fit.micro_batch or 1, self.subject.recipe.effective_batch or 1))
        return not self.appraisal.is_traced(fit) and self._tell(fit, tell)

    def _tell(self, fit: FitConfig, tell: Callable[[Plan], None]) -> bool:
        """Tells of a fit, if it fits."""
        if self.appraisal.hopeless(fit) or not self._fits(fit):
            return False
        tell(self.plan_of(fit, brief=False))
        return True

    def _has_to_trace(self, choices: Sequence[FitConfig]) -> bool:
        """Whether the first of these that may do has to be traced."""
        if all(map(self.appraisal.hopeless, choices)):
            return False
        self.appraisal.anchor(choices[0].quantise or "none")
        may_do = [fit for fit in choices if not self.appraisal.hopeless(fit)]
        return bool(may_do) and not self.appraisal.is_traced(min(may_do, key=self.appraisal.preference))

    def plan_of(self, fit: FitConfig, *, brief: bool = True) -> Plan:
        """A fit with its forecast; the pick's is told at length."""
        return Plan(fit, forecast_of(self._course(fit), self.situation, runs=self._runs, brief=brief))

    def quicker(self, pick: FitConfig) -> Plan | None:
        """Of the fits of like quality that are quicker than the pick, the one that needs least."""
        preference = self.appraisal.preference
        for fit in sorted(self._quicker_ones(pick), key=lambda fit: preference(fit).bytes)[:LOOKED_AT]:
            if self._known_exactly(fit) and preference(fit).time < preference(pick).time:
                return self.plan_of(fit)
        return None

    def _quicker_ones(self, pick: FitConfig) -> list[FitConfig]:
        """Those with the base in as many bits that are, or may be, quicker: the search has ruled them all out."""
        time = self.appraisal.preference(pick).time
        alike = [fit for fit in self.choices if fit.quantise == pick.quantise]
        return [fit for fit in alike if self.appraisal.preference(fit).time < time]

    def _known_exactly(self, fit: FitConfig) -> bool:
        """Looks at a fit as closely as time allows."""
        while not self.appraisal.exact(fit):
            if self.appraisal.late_for(fit):
                self.appraisal.left_out = True
                return False
            self.appraisal.appraise(fit)
        return True

    def smaller(self, pick: FitConfig, most: int) -> Plan | None:
        """Of the fits of like quality whose whole run takes no more than ``most`` bytes, the best of the first few.

        What turns out to be too large in one, its steps or its previews, is not looked at again in others.
        """
        alike = [fit for fit in self.choices if fit.quantise == pick.quantise]
        looked_at: list[Plan] = []
        for fit in sorted(alike, key=self.appraisal.preference):
            if len(looked_at) == LOOKED_AT:
                break
            if any(_too_large_alike(fit, former, most) for former in looked_at) or not self._may_take(fit, most):
                continue
            looked_at.append(self.plan_of(fit))
            if looked_at[-1].forecast.reserved <= most:
                return looked_at[-1]
        return None

    def _may_take(self, fit: FitConfig, most: int) -> bool:
        """Whether a fit's tensors are no more than ``most``, as far as time allows to find out."""

        def within() -> bool:
            return self.appraisal.preference(fit).bytes <= most

        return within() and self._known_exactly(fit) and within()

    def quantised(self, pick: FitConfig) -> Plan | None:
        """The best with a base in fewer bits, where it is quicker than an unquantised pick.

        Bringing weights back to 16 bits only takes time, so it can only be one that would be quicker unquantised.
        """
        if pick.quantise != "none" or self.written.quantise is not None:
            return None
        preference = self.appraisal.preference
        ahead = {_but_quantise(fit) for fit in self._quicker_ones(pick)}
        quantised = [fit for fit in self.choices if fit.quantise != "none" and _but_quantise(fit) in ahead]
        found = best(quantised, self.appraisal)
        if found is None or preference(found).time >= preference(pick).time:
            return None
        return self.plan_of(found)

    def ladder(self, pick: FitConfig) -> tuple[FallbackStep, ...]:
        """The rungs below a fit."""
        looked_at = self.qualities if pick.allow_quantised else (pick.quantise or "none",)
        for quantise in looked_at:
            self.appraisal.anchor(quantise)
        return ladder(
            pick,
            self.written,
            sets=self.sets,
            effective_batch=self.subject.recipe.effective_batch,
            previews=bool(self.subject.previews),
            need=self.appraisal.estimate,
        )

    def nothing_fits(self, *, look_for_change: bool) -> Planned:
        """By how much the smallest fit is too large, and the smallest change of the recipe with which one fits."""
        smallest = self.plan_of(self.smallest, brief=False)
        missing = max(smallest.forecast.reserved - self.situation.budget, 1)
        found = self._lighter(self._within(self.smallest).failed_in) if look_for_change else None
        return Planned(self.situation, None, missing=missing, smaller=smallest, lighter=found)

    def _lighter(self, failed_in: ForecastPhase | None) -> ReducedRecipe | None:
        for change in lighter(self.subject):
            if failed_in == "cache_pictures" and "resolution" not in change.keys:
                continue  # encoding pictures depends on nothing else of a recipe
            subject = change.applied_to(self.subject)
            other = _Planning(
                subject, self.written, self.situation, self.traces, self.occasions, self.until, self._runs
            )
            if other.smallest_fits and (pick := other.best(other.choices)) is not None:
                return ReducedRecipe(change, other.plan_of(pick))
        return None

    @property
    def smallest(self) -> FitConfig:
        """The choice that saves wherever it can."""
        return max(self.choices, key=self._saving)

    def _saving(self, fit: FitConfig) -> tuple[int, ...]:
        """How much a choice saves, the first difference decides."""
        return (
            self.qualities.index(fit.quantise or "none"),
            self.sets.index(fit.checkpointing or "none"),
            -(fit.micro_batch or 1),
            bool(fit.vae_tiling),
            bool(fit.preview_offload),
        )

    @property
    def smallest_fits(self) -> bool:
        """Whether that choice fits; its tensors are added up first, which costs less."""
        if not self._known_exactly(self.smallest):
            return False
        return not self.appraisal.hopeless(self.smallest) and self._fits(self.smallest)

    def _appraisal(self, fits: Callable[[FitConfig], bool], until: float | None) -> Evaluator:
        return Evaluator(
            self.subject,
            self.traces,
            self._seconds,
            self.situation.budget,
            fits,
            previews=self.occasions.previews,
            free_choice=self.written.allow_quantised,
            until=until,
            later=lambda: self.foreseen,
        )

    def _seconds(self, work: Iterable[Work]) -> float:
        return roofline.seconds(work, self.situation.rate)

    def _course(self, fit: FitConfig) -> RunSchedule:
        """The course of a fit, which is about to be played."""
        course = RunSchedule(replace(self.subject, fit=fit), self.traces, self.occasions, self.situation.rate)
        self.traces.foresee(course.foreseen)
        return course

    def _within(self, fit: FitConfig) -> BudgetCheck:
        return self._runs.within(self._course(fit), self.situation.budget)

    def _fits(self, fit: FitConfig) -> bool:
        """Whether a run ends within the budget; a phase that fails rules out every fit that is alike up to there."""
        failed_in, seconds = self._within(fit)
        if failed_in in ("cache_pictures", "cache_texts"):
            self.appraisal.rule_out(lambda _: True)
        elif failed_in in ("load", "quantise"):
            self.appraisal.rule_out(lambda other: other.quantise == fit.quantise)
        elif failed_in in ("first_step", "train"):
            self.appraisal.rule_out(lambda other: _of_steps(other) == _of_steps(fit))
        if failed_in is None and seconds:
            self.appraisal.slowed(fit, seconds * (self.subject.recipe.steps or 1))
        return failed_in is None


def _floor(forecast: Forecast, most: int) -> PhaseForecast | None:
    """The phase that takes most of those that no fit makes smaller, where that is more than ``most`` bytes."""
    fixed = [phase for phase in forecast.phases if phase.phase in BEFORE_TRAINING and phase.reserved > most]
    return max(fixed, key=lambda phase: phase.reserved, default=None)


def _too_large_alike(fit: FitConfig, former: Plan, most: int) -> bool:
    """Whether a fit does the same as a former one in a phase that took more than ``most`` bytes there.

    What previews reserve includes what training left cached. So where steps took too much already, only what previews
    allocate counts against them.
    """
    found = former.forecast
    steps = any(phase.reserved > most for name in ("first_step", "train") if (phase := found.of(name)))
    if steps and _of_steps(fit) == _of_steps(former.fit):
        return True
    drawn = found.of("preview")
    if drawn is None or _of_previews(fit) != _of_previews(former.fit):
        return False
    return (drawn.allocated if steps else drawn.reserved) > most


def _of_steps(fit: FitConfig) -> tuple[object, ...]:
    return fit.quantise, fit.checkpointing, fit.micro_batch


def _of_previews(fit: FitConfig) -> tuple[object, ...]:
    return fit.quantise, fit.vae_tiling, fit.preview_offload


def _but_quantise(fit: FitConfig) -> tuple[object, ...]:
    return fit.checkpointing, fit.micro_batch, fit.vae_tiling, fit.preview_offload
