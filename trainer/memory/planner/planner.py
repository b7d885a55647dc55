"""Find the fit that trains a recipe fastest on a GPU without changing the result, and alternatives to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from trainer.config.fit import FallbackStep, FitConfig
from trainer.memory.device import roofline
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.forecast import BudgetCheck, RunSimulator, forecast_of
from trainer.memory.forecast.schedule import PhaseCounts, RunSchedule
from trainer.memory.planner.evaluator import Evaluator, best, time_step
from trainer.memory.planner.search_space import (
    Checkpointing,
    Placement,
    candidates,
    fallbacks_below,
    nested_sets,
    placement_of,
    placements,
)
from trainer.memory.planner.suggestions import RecipeChange, StopSavings, mildest, reduced_recipes, stop_savings
from trainer.memory.trace.deadline import Deadline
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import Work
from trainer.memory.trace.workload import TracePart, TraceRequest, Workload, complete_fit
from trainer.protocol.forecast import SEARCHED_FIT_KEYS, Forecast, ForecastPhase, PhaseForecast

Quality = Literal["exact", "int8", "int8_products", "nf4"]
SearchPart = Literal["fits", "alternatives"]

# A "smaller" plan may reserve at most this share of the pick's memory, to leave some to other programs.
SMALLER = 0.85
# Fits evaluated at most for each alternative to the pick: alternatives are only suggestions.
LOOKED_AT = 3
# An 8-bit base is picked instead of a streamed one that takes more than this many times as long.
TOO_SLOW = 1.5
BEFORE_TRAINING: tuple[ForecastPhase, ...] = ("cache_pictures", "cache_texts", "load", "quantise")
"""Phases whose memory does not depend on the searched settings, except that loading depends on quantization."""


@dataclass(frozen=True)
class Plan:
    """A fit and its forecast."""

    fit: FitConfig
    forecast: Forecast

    @property
    def quality(self) -> Quality:
        """Return the precision of the base; "exact" means unquantized."""
        quantize = self.fit.quantize or "none"
        return "exact" if quantize == "none" else quantize


@dataclass(frozen=True)
class ReducedRecipe:
    """Smallest change that makes a recipe fit, and the plan of the changed recipe."""

    change: RecipeChange
    plan: Plan


@dataclass(frozen=True)
class PlanResult:
    """Result of a search: the pick (the best plan) and alternatives to it, each of which may be absent."""

    device_state: DeviceState
    pick: Plan | None
    """Best plan; None if nothing fits."""
    faster: Plan | None = None
    """Plan that is faster than the pick, but too large."""
    excess_bytes: int = 0
    """Bytes by which ``faster`` exceeds the budget; without a pick, bytes by which the smallest fit does."""
    smaller: Plan | None = None
    """Plan that leaves memory for other programs; without a pick, the plan that needs the least memory."""
    smallest: bool = False
    """Whether no fit was found that needs much less memory than the pick."""
    floor: PhaseForecast | None = None
    """Reason for ``smallest``: a phase that needs about the same memory with every fit."""
    quantized: Plan | None = None
    """Faster plan with a quantized base, at some cost in fidelity."""
    streamed: Plan | None = None
    """Plan with an unquantized base that is streamed, if the pick is quantized because it is much faster."""
    reduced_recipe: ReducedRecipe | None = None
    """Changed recipe that fits, if nothing else does."""
    stops: StopSavings | None = None
    fallbacks: tuple[FallbackStep, ...] = ()
    left_out: tuple[SearchPart, ...] = ()
    """Parts of the search that time ran out for: without all "fits", a better pick may exist."""


def plan(
    workload: Workload,
    written: FitConfig,
    device_state: DeviceState,
    traces: TraceLibrary,
    counts: PhaseCounts,
    *,
    deadline: Deadline | None = None,
    alternatives_deadline: Deadline | None = None,
    others: bool = True,
    runs: RunSimulator | None = None,
    likely: FitConfig | None = None,
    on_soon: Callable[[PlanResult], None] | None = None,
    on_pick: Callable[[PlanResult], None] = lambda _: None,
) -> PlanResult:
    """Return the plan for ``workload`` on a GPU; keys of the fit that the user has ``written`` do not change.

    Fits whose simulation stays within the budget are ranked by: unquantized before int8 before nf4 (unless the fit
    allows quantization), least training time, fewest changes from the defaults, least preview time, least memory. If a
    fit stays within the budget only by returning cached blocks to the driver in every step, its training time includes
    the time that this takes; such a fit is picked only if no other fit is as fast.

    After ``deadline`` nothing more is traced, with one exception: the search turns to a base with fewer bits only when
    it knows that no fit with more bits works. With ``others``, alternatives are searched as well, but nothing is traced
    for them after ``alternatives_deadline``; ``on_pick`` is called with the pick before this second search.
    If the search has to trace, ``likely`` is evaluated first, such as the pick of an earlier plan: if it works, a
    search that runs out of time has at least this fit. ``on_soon`` is called with it, or if it does not work, with the
    fit that saves the most memory. ``runs`` keeps simulations from earlier requests on GPUs with the same workspaces.

    Raises JobError if none of the GPU's memory can be used.
    """
    device_state.require_budget()
    deadline, alternatives_deadline = deadline or Deadline(), alternatives_deadline or Deadline()

    def report(soon: Plan) -> None:
        if on_soon:
            on_soon(PlanResult(device_state, soon, left_out=("fits",)))

    def search(encoding: Mapping[str, Any]) -> tuple[_Planning, FitConfig | None]:
        planning = _Planning(workload, written, device_state, traces, counts, deadline, runs, encoding)
        traces.set_prefetch(lambda: planning.prefetched)
        reported = likely is not None and planning.report_likely(likely, report)
        return planning, planning.best(planning.choices, None if reported or not on_soon else report)

    planning, pick = search({})
    # Encoding precedes training and depends on no key that is searched, so a search in which it fails finds nothing.
    for encoding in _encoding_ways(written, bf16=device_state.gpu.bf16):
        if pick is not None or not planning.failed_to_encode:
            break
        planning, pick = search(encoding)
    if pick is None:
        return planning.nothing_fits(look_for_change=others)
    chosen = planning.plan_of(pick, brief=False)
    skipped: tuple[SearchPart, ...] = ("fits",) if deadline.left_out else ()
    picked = PlanResult(device_state, chosen, fallbacks=planning.fallbacks(pick), left_out=skipped)
    on_pick(picked)
    if not others:
        return picked
    planning.evaluator.deadline = alternatives_deadline
    quicker = planning.faster(pick)
    most = int(SMALLER * min(chosen.forecast.reserved, device_state.budget))
    # Later shards are encoded while the model is loaded, so their memory depends on the fit and sets no floor.
    floor = _floor(chosen.forecast, most) if not counts.later.shards else None
    smaller = planning.smaller(pick, most) if floor is None else None
    searched_all = planning.knows_smallest and not alternatives_deadline.left_out
    smallest = smaller is None and (floor is not None or searched_all)
    quantized = planning.quantized(pick)
    streamed = planning.plan_of(planning.streamed) if planning.streamed else None
    return replace(
        picked,
        faster=quicker,
        # At least 1: with expandable segments a fit can fail although it would reserve no more than the budget.
        excess_bytes=max(quicker.forecast.reserved - device_state.budget, 1) if quicker else 0,
        smaller=smaller,
        smallest=smallest,
        floor=floor,
        quantized=quantized,
        streamed=streamed,
        stops=stop_savings(replace(workload, fit=pick), device_state, traces, alternatives_deadline),
        left_out=(*skipped, "alternatives") if alternatives_deadline.left_out else skipped,
    )


def _encoding_ways(written: FitConfig, *, bf16: bool) -> Iterator[Mapping[str, Any]]:
    """Yield ways to save memory when encoding images, as keys of the fit with values; the most precise way first.

    The user's keys do not change.
    """
    rounded = {"vae_dtype": "bf16"} if bf16 and written.vae_dtype is None else {}
    if rounded:
        yield rounded
    if written.vae_encode_tiling is None:
        yield {**rounded, "vae_encode_tiling": True}


class _Planning:
    """A search for the best fit, with its results so far."""

    def __init__(
        self,
        workload: Workload,
        written: FitConfig,
        device_state: DeviceState,
        traces: TraceLibrary,
        counts: PhaseCounts,
        deadline: Deadline,
        runs: RunSimulator | None = None,
        encoding: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Create a search; ``encoding`` contains keys of the fit for encoding images, which are not searched."""
        dtype = "bf16" if device_state.gpu.bf16 else "fp16"
        start = complete_fit(written.replaced(dtype=written.dtype or dtype, **encoding))
        self.workload = replace(workload, fit=start)
        self.written = written
        self.device_state = device_state
        self.traces = traces
        self.counts = counts if workload.previews else replace(counts, previews=0)
        self.knows_smallest = True
        """Whether the fit that needs the least memory was evaluated if no smaller plan was found."""
        self.failed_to_encode = False
        """Whether encoding images exceeds the budget, in which case no fit works."""
        self.streamed: FitConfig | None = None
        """Best streamed fit, if it was rejected because it is too slow."""
        self.evaluator = self._evaluator(self._fits, deadline)
        self._runs = runs or RunSimulator(device_state)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return the ways of storing the base to consider."""
        return placements(self.written)

    @property
    def prefetched(self) -> list[TraceRequest]:
        """Return requests for traces that the search will probably need: of fits that save much memory.

        They include two ways of storing the base, because the search needs both if the GPU is too small for the first.
        """
        base = self.workload.fit
        plain = base.replaced(micro_batch=1, gradient_checkpointing="none")
        saving = base.replaced(
            micro_batch=self.written.micro_batch or 1,
            gradient_checkpointing=self.written.gradient_checkpointing or "full",
            vae_tiling=True,
            preview_offload=True,
        )

        def request(fit: FitConfig, part: TracePart) -> TraceRequest:
            return TraceRequest(replace(self.workload, fit=fit), part)

        looked_at = self.placements[:2]
        fits = [
            fit.replaced(quantize=placement.quantize, stream=placement.stream)
            for placement in looked_at
            for fit in (plain, saving)
        ]
        steps = [self.evaluator.micro_request(fit) for fit in fits[1:]]
        last = plain.replaced(quantize=looked_at[-1].quantize, stream=looked_at[-1].stream)
        previews = [request(fits[-1], "preview")] if self.counts.previews else []
        # Traced one by one in this order: the search needs training steps before previews and other phases.
        return [*steps, *previews, request(last, "validate")]

    @cached_property
    def sets(self) -> tuple[Checkpointing, ...]:
        """Return the sets of blocks to try; blocks are ranked by the traces of one image without checkpointing."""
        if self.written.gradient_checkpointing is not None:
            return (self.written.gradient_checkpointing,)
        if self.placements[0].streams:  # no other set is combined with streaming
            return ("none", "full")
        return nested_sets(self.evaluator.anchor(self.placements[0]).blocks)

    @cached_property
    def choices(self) -> list[FitConfig]:
        """Return every fit in the search space."""
        return candidates(
            self.written,
            self.workload.fit,
            effective_batch=self.workload.recipe.effective_batch,
            checkpointing=self.sets,
            placements=self.placements,
            previews=bool(self.workload.previews),
        )

    def best(self, choices: Sequence[FitConfig], report: Callable[[Plan], None] | None = None) -> FitConfig | None:
        """Return the best fit that works; None if none does.

        Unless the fit allows quantization, the base is quantized further only if nothing else fits, which is checked
        even after the deadline, or if streaming it would be much slower. ``report`` is called with a fit that works
        before better ones are traced.
        """
        groups = self._by_precision(choices)
        for number, alike in enumerate(groups):
            if report is not None and self._has_to_trace(alike) and self._report_smallest(alike, report):
                report = None
            found = best(alike, self.evaluator)
            if found is None:
                found = self._first_fit_after_deadline([fit for fit in alike if self.evaluator.past_deadline(fit)])
            if found is not None:
                return self._unless_too_slow(found, groups[number + 1 :])
        return None

    def _unless_too_slow(self, found: FitConfig, groups: Sequence[Sequence[FitConfig]]) -> FitConfig:
        """Return the best 8-bit fit instead of a streamed one that takes more than `TOO_SLOW` times as long.

        The streamed fit is then kept as an alternative: it rounds nothing.
        """
        if not placement_of(found).streams:
            return found
        time = self.evaluator.preference

        def much_faster(fit: FitConfig) -> bool:
            return time(fit).time + time_step(TOO_SLOW) < time(found).time

        others = [fit for group in groups for fit in group if placement_of(fit) == Placement("int8", "none")]
        # By lower bounds at first: usually none can be so much faster, and nothing has to be traced to know that.
        quick = best([fit for fit in others if much_faster(fit)], self.evaluator)
        if quick is None or not much_faster(quick):
            return found
        self.streamed = found
        return quick

    def _by_precision(self, choices: Sequence[FitConfig]) -> list[list[FitConfig]]:
        """Return groups of fits to search together, the most preferred group first."""
        if self.written.allow_quantized:
            return [list(choices)]
        bits = dict.fromkeys(placement.quantize for placement in self.placements)
        return [[fit for fit in choices if fit.quantize == quantize] for quantize in bits]

    def _first_fit_after_deadline(self, skipped: Sequence[FitConfig]) -> FitConfig | None:
        """Return a fit that works among those ``skipped`` because time ran out; None if there is none.

        The fastest fits that lack only preview traces are tried first, because the fit that saves the most memory would
        be slow for the whole run. That fit is next: if its tensors alone exceed the budget, nearly all others are ruled
        out too.
        """
        saving_first = sorted(skipped, key=self._saving, reverse=True)
        half_known = [fit for fit in saving_first if self.evaluator.knows_steps(fit)]
        quickest_first = sorted(half_known, key=lambda fit: self.evaluator.preference(fit).time)
        # Regardless of the deadline, or these fits would be skipped again: a late plan is better than none.
        return self.evaluator.first_that_works((*quickest_first, *saving_first))

    def report_likely(self, likely: FitConfig, report: Callable[[Plan], None]) -> bool:
        """Report ``likely``, changed to the user's keys, if it works; return whether it was reported.

        A fit that is already traced is not reported.
        """
        stated = {name: value for name in SEARCHED_FIT_KEYS if (value := getattr(self.written, name)) is not None}
        fit = self.workload.fit.replaced(**{name: getattr(likely, name) for name in SEARCHED_FIT_KEYS} | stated)
        fit = fit.replaced(micro_batch=min(fit.micro_batch or 1, self.workload.recipe.effective_batch or 1))
        return not self.evaluator.is_traced(fit) and self._report(fit, report)

    def _report_smallest(self, choices: Sequence[FitConfig], report: Callable[[Plan], None]) -> bool:
        """Report the smallest fit that works, preferably one whose base is not streamed; return whether one does."""
        for streams in (False, True):
            alike = [fit for fit in choices if placement_of(fit).streams == streams]
            if alike and self._report(max(alike, key=self._saving), report):
                return True
        return False

    def _report(self, fit: FitConfig, report: Callable[[Plan], None]) -> bool:
        """Call ``report`` with the plan of a fit if the fit works; return whether it does."""
        if self.evaluator.cannot_fit(fit):
            return False
        self.evaluator.record_steps(fit)  # if they alone are too large, no other phase has to be traced
        if self.evaluator.exceeds_budget(fit) or not self._fits(fit):
            return False
        report(self.plan_of(fit, brief=False))
        return True

    def _has_to_trace(self, choices: Sequence[FitConfig]) -> bool:
        """Return whether the most preferred fit that may work still has to be traced."""
        if all(map(self.evaluator.cannot_fit, choices)):
            return False
        # The anchor is traced in any case, and its bounds rule out many fits that would otherwise count as possible.
        self.evaluator.anchor(placement_of(choices[0]))
        possible = [fit for fit in choices if not self.evaluator.cannot_fit(fit)]
        return bool(possible) and not self.evaluator.is_traced(min(possible, key=self.evaluator.preference))

    def plan_of(self, fit: FitConfig, *, brief: bool = True) -> Plan:
        """Return a fit with its forecast, which includes timeline and peaks unless `brief`."""
        return Plan(fit, forecast_of(self._schedule(fit), self.device_state, runs=self._runs, brief=brief))

    def faster(self, pick: FitConfig) -> Plan | None:
        """Return the smallest fit of the same precision that is faster than the pick; None if there is none."""
        preference = self.evaluator.preference
        for fit in sorted(self._faster_fits(pick), key=lambda fit: preference(fit).bytes)[:LOOKED_AT]:
            if self._known_exactly(fit) and preference(fit).time < preference(pick).time:
                return self.plan_of(fit)
        return None

    def _faster_fits(self, pick: FitConfig) -> list[FitConfig]:
        """Return the fits of the same precision that are or may be faster than the pick, all rejected by the search."""
        time = self.evaluator.preference(pick).time
        alike = [fit for fit in self.choices if fit.quantize == pick.quantize]
        return [fit for fit in alike if self.evaluator.preference(fit).time < time]

    def _known_exactly(self, fit: FitConfig) -> bool:
        """Record all of a fit's missing traces, so that its time is exact; return False if no time is left."""
        while not self.evaluator.exact(fit):
            if self.evaluator.leaves_out(fit):
                return False
            self.evaluator.refine(fit)
        return True

    def smaller(self, pick: FitConfig, most: int) -> Plan | None:
        """Return the best fit of the same precision that reserves at most ``most`` bytes; None if none was found.

        Only the first few candidates are simulated; the last of them is the one that needs the least memory, whose
        result decides whether there is any. Steps or previews that are too large in one fit rule out other fits that
        share them.
        """
        alike = [fit for fit in self.choices if fit.quantize == pick.quantize]
        least = max(alike, key=self._saving)
        # Tracing it only to deny that there is a smaller plan is not worth the seconds.
        self.knows_smallest = self.evaluator.is_traced(least)
        last = [least] if self.knows_smallest else []
        looked_at: list[Plan] = []
        for fit in (*sorted(alike, key=self.evaluator.preference), *last):
            if len(looked_at) >= LOOKED_AT - len(last) and fit is not least:
                continue
            if any(_too_large_alike(fit, former, most) for former in looked_at) or not self._may_take(fit, most):
                continue
            looked_at.append(self.plan_of(fit))
            if looked_at[-1].forecast.reserved <= most:
                return looked_at[-1]
        return None

    def _may_take(self, fit: FitConfig, most: int) -> bool:
        """Return whether a fit's tensors take at most ``most`` bytes; False if there is no time left to trace it."""

        def is_within() -> bool:
            return self.evaluator.preference(fit).bytes <= most

        # First by the lower bound, which is free; tracing costs seconds and may raise it.
        return is_within() and self._known_exactly(fit) and is_within()

    def quantized(self, pick: FitConfig) -> Plan | None:
        """Return the best plan with an 8-bit base, if it is faster than the pick and the pick is unquantized.

        Dequantizing only costs time, so only fits are considered that would be faster than the pick even without being
        quantized. A 4-bit base is never suggested just because it is faster. Returns None if there is no such plan, or
        if the user has set the quantization.
        """
        if pick.quantize != "none" or self.written.quantize is not None:
            return None
        preference = self.evaluator.preference
        ahead = {_without_quantization(fit) for fit in self._faster_fits(pick)}
        quantized = [fit for fit in self.choices if fit.quantize == "int8" and _without_quantization(fit) in ahead]
        found = best(quantized, self.evaluator)
        if found is None or preference(found).time >= preference(pick).time:
            return None
        return self.plan_of(found)

    def fallbacks(self, pick: FitConfig) -> tuple[FallbackStep, ...]:
        """Return the fallback steps that reduce the memory of the picked fit, in order."""
        for placement in self.placements if pick.allow_quantized else (placement_of(pick),):
            self.evaluator.anchor(placement)  # without it, `estimate` returns 0 for every fit
        return fallbacks_below(
            pick,
            self.written,
            sets=self.sets,
            effective_batch=self.workload.recipe.effective_batch,
            previews=bool(self.workload.previews),
            need=self.evaluator.estimate,
        )

    def nothing_fits(self, *, look_for_change: bool) -> PlanResult:
        """Return a result without a pick: the smallest fit, its excess, and the smallest recipe change that fits.

        Changes for which no time is left are "alternatives" that were left out.
        """
        smallest = self.plan_of(self.smallest, brief=False)
        missing = max(smallest.forecast.reserved - self.device_state.budget, 1)
        found = self._reduced_recipe(self._within(self.smallest).failed_in) if look_for_change else None
        return PlanResult(
            self.device_state,
            None,
            excess_bytes=missing,
            smaller=smallest,
            reduced_recipe=found,
            left_out=("alternatives",) if self.evaluator.deadline.left_out else (),
        )

    def _reduced_recipe(self, failed_in: ForecastPhase | None) -> ReducedRecipe | None:
        """Return the mildest change of the first group that has one that fits, with its plan; None if there is none."""
        # Encoding images depends on nothing in a recipe but the resolution.
        kinds = {"resolution"} if failed_in == "cache_pictures" else set()
        groups = [group for group in reduced_recipes(self.workload) if kinds <= group[0].keys.keys()]
        for change, other in (found for group in groups if (found := mildest(group, self._if_smallest_fits))):
            if (pick := other.best(other.choices)) is not None:
                return ReducedRecipe(change, other.plan_of(pick))
        # Something must be named, even if it takes longer: the strongest change, which is the most likely to fit.
        strongest = groups[-1][-1] if groups and self.evaluator.deadline.left_out else None
        late = strongest and self._if_smallest_fits(strongest, Deadline())
        return ReducedRecipe(strongest, late.plan_of(late.smallest)) if strongest and late else None

    def _if_smallest_fits(self, change: RecipeChange, deadline: Deadline | None = None) -> _Planning | None:
        """Return the planning of a changed recipe if its smallest fit works; rejecting others needs no search."""
        workload, state = change.applied_to(self.workload), self.device_state
        deadline = deadline or self.evaluator.deadline
        for encoding in ({}, *_encoding_ways(self.written, bf16=state.gpu.bf16)):
            other = _Planning(workload, self.written, state, self.traces, self.counts, deadline, self._runs, encoding)
            if other.smallest_fits:
                return other
            if not other.failed_to_encode:
                break
        return None

    @property
    def smallest(self) -> FitConfig:
        """Return the fit that saves the most memory."""
        return max(self.choices, key=self._saving)

    def _saving(self, fit: FitConfig) -> tuple[int, ...]:
        """Return a fit's sort key: the larger it is, the more memory the fit saves."""
        return (
            placement_of(fit).streams,
            self.placements.index(placement_of(fit)),
            self.sets.index(fit.gradient_checkpointing or "none"),
            -(fit.micro_batch or 1),
            bool(fit.vae_tiling),
            bool(fit.preview_offload),
        )

    @property
    def smallest_fits(self) -> bool:
        """Return whether the smallest fit works; its tensors are added up before the more expensive simulation."""
        if not self._known_exactly(self.smallest):
            return False
        return not self.evaluator.cannot_fit(self.smallest) and self._fits(self.smallest)

    def _evaluator(self, fits: Callable[[FitConfig], bool], deadline: Deadline) -> Evaluator:
        return Evaluator(
            self.workload,
            self.traces,
            self._seconds,
            self.device_state.budget,
            fits,
            previews=self.counts.previews,
            free_choice=self.written.allow_quantized,
            deadline=deadline,
            later=lambda: self.prefetched,
        )

    def _seconds(self, work: Iterable[Work]) -> float:
        return roofline.seconds(work, self.device_state.rate)

    def _schedule(self, fit: FitConfig) -> RunSchedule:
        """Return a fit's run schedule, and have the traces that its simulation needs prefetched."""
        schedule = RunSchedule(replace(self.workload, fit=fit), self.traces, self.counts, self.device_state.rate)
        self.traces.set_prefetch(schedule.prefetch_requests)
        return schedule

    def _within(self, fit: FitConfig) -> BudgetCheck:
        return self._runs.check_budget(self._schedule(fit), self.device_state.budget)

    def _fits(self, fit: FitConfig) -> bool:
        """Return whether a run stays within the budget; if a phase fails, rule out all fits that share that phase."""
        failed_in, seconds = self._within(fit)
        # A phase fails with every fit that shares the settings it depends on; ruling those out saves simulations.
        if failed_in in ("cache_pictures", "cache_texts"):
            self.evaluator.rule_out(lambda _: True)
            self.failed_to_encode = failed_in == "cache_pictures"
        elif failed_in in ("load", "quantise"):
            self.evaluator.rule_out(lambda other: placement_of(other) == placement_of(fit))
        elif failed_in in ("first_step", "train"):
            self.evaluator.rule_out(lambda other: _of_steps(other) == _of_steps(fit))
        if failed_in is None and seconds:
            self.evaluator.slowed(fit, seconds * (self.workload.recipe.steps or 1))
        return failed_in is None


def _floor(forecast: Forecast, most: int) -> PhaseForecast | None:
    """Return the largest phase whose memory no fit reduces; None if no such phase needs more than ``most`` bytes."""
    fixed = [phase for phase in forecast.phases if phase.phase in BEFORE_TRAINING and phase.reserved > most]
    return max(fixed, key=lambda phase: phase.reserved, default=None)


def _too_large_alike(fit: FitConfig, former: Plan, most: int) -> bool:
    """Return whether a fit has the same steps or previews as ``former``, and those took more than ``most`` bytes.

    Memory reserved in previews includes blocks cached by training. If the steps are already too large, only memory
    allocated in previews counts against the previews.
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
    return placement_of(fit), fit.gradient_checkpointing, fit.micro_batch


def _of_previews(fit: FitConfig) -> tuple[object, ...]:
    return placement_of(fit), fit.vae_tiling, fit.preview_offload


def _without_quantization(fit: FitConfig) -> tuple[object, ...]:
    return fit.stream, fit.gradient_checkpointing, fit.micro_batch, fit.vae_tiling, fit.preview_offload
