"""Plans for small real models: the pick is that of an exhaustive search, ladders go down, advice where nothing fits."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise, product
from pathlib import Path

import pytest

from tests.support.exhaustive import AMPLE, OCCASIONS, Exhaustive, every_fit
from tests.support.plans import device_state_with, small_workload
from trainer.cli.planning import request_for_preset
from trainer.config.fit import FitConfig
from trainer.config.job import PromptConfig
from trainer.memory.forecast.forecast import RunSimulator, Simulation, forecast, forecast_of, simulate_run
from trainer.memory.forecast.schedule import RunSchedule, bounding_shapes, transitions
from trainer.memory.planner.evaluator import Evaluator
from trainer.memory.planner.planner import PlanResult, plan
from trainer.memory.planner.search_space import Placement, nested_sets
from trainer.memory.planner.suggestions import RecipeChange, changed, mildest, reduced_recipes
from trainer.memory.trace.deadline import Deadline
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import blocks
from trainer.memory.trace.meta_models import empty_engine
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import BucketUse, complete_fit

pytestmark = pytest.mark.usefixtures("small_weights_are_streamed")
MIB = 2**20


@pytest.fixture(scope="module")
def searched(traces: TraceLibrary) -> list[Exhaustive]:
    """Recipes that differ in their traces, in how long they run, in whether previews are drawn and in what is large."""
    subjects = [
        small_workload(effective_batch=4),
        small_workload(previews=False, effective_batch=8),
        small_workload(effective_batch=1, steps=1000),
        small_workload(previews=False, effective_batch=4, steps=10),
        small_workload(previews=False, effective_batch=2, side=64, channels=256),
    ]
    return [Exhaustive(subject, traces) for subject in subjects]


@lru_cache(maxsize=16)
def encoding_ways(one: Exhaustive, traces: TraceLibrary) -> tuple[Exhaustive, ...]:
    """Return the same workload with images encoded in fp32, in bf16, and in bf16 and tiles."""
    fit = one.workload.fit
    others = (fit.replaced(vae_dtype="bf16"), fit.replaced(vae_dtype="bf16", vae_encode_tiling=True))
    return (one, *(Exhaustive(replace(one.workload, fit=other), traces) for other in others))


def random_constraints(chance: random.Random, *, free_base: bool) -> FitConfig:
    written: dict[str, object] = {}
    if not free_base or chance.random() < 0.3:
        written["quantize"] = chance.choice(("none", "nf4")) if free_base else "none"
    if chance.random() < 0.2:
        written["gradient_checkpointing"] = chance.choice(("none", "full", ("mid_block",)))
    if chance.random() < 0.2:
        written["vae_tiling"] = chance.random() < 0.5
    if chance.random() < 0.1:
        written["micro_batch"] = 1
    if chance.random() < 0.2:
        written["allow_quantized"] = True
    return FitConfig.model_validate(written)


@pytest.mark.timeout(900)  # so many searches, each done twice
@pytest.mark.parametrize("cases", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_the_pick_is_that_of_an_exhaustive_search(cases: int, searched: list[Exhaustive], traces: TraceLibrary) -> None:
    chance = random.Random(7)
    found = {
        "pick": 0,
        "nothing": 0,
        "quantized": 0,
        "streamed": 0,
        "other encoding": 0,
        "partial": 0,
        "split": 0,
        "with retries": 0,
    }
    runs = RunSimulator(
        device_state_with(AMPLE)
    )  # what was played for one question serves the next, as in the resident planner
    for case in range(cases):
        one = chance.choice(searched)
        # Quantized bases have tapes of their own, so the one with the most micro-batches goes without.
        written = random_constraints(chance, free_base=one is not searched[1])
        anchor = one.workload.fit.replaced(
            quantize=written.quantize or "none", gradient_checkpointing="none", micro_batch=1
        )
        one_in_fp32 = one
        steps = traces.steps(replace(one.workload, fit=anchor), one.workload.buckets[0].size, 1)
        choices = every_fit(one.workload, written, nested_sets(blocks(steps.weights, steps.micro_first)))
        # Around what one of them takes, or little more than its tensors sum to: that is where mistakes would be made.
        aimed_at = chance.choice(choices)
        taken, needed = one.free(aimed_at), one.figures(aimed_at)[2]
        budget = int(chance.choice((taken * chance.uniform(0.85, 1.05), needed * chance.uniform(1.0, 1.2))))
        situation = device_state_with(budget)
        one = next((other for other in encoding_ways(one, traces) if other.encodes(situation)), one)
        fits = [
            fit.replaced(vae_dtype=one.workload.fit.vae_dtype, vae_encode_tiling=one.workload.fit.vae_encode_tiling)
            for fit in choices
        ]
        chosen = one.chosen(fits, situation, free_choice=written.allow_quantized)
        found["other encoding"] += one is not one_in_fp32
        planned = plan(one_in_fp32.workload, written, situation, traces, OCCASIONS, others=False, runs=runs)
        picked = planned.pick.fit if planned.pick else None
        assert picked == chosen, f"case {case}: {written}"
        found["pick" if picked else "nothing"] += 1
        if picked is not None and planned.pick is not None:
            assert planned.pick.forecast.fits
            found["quantized"] += picked.quantize != "none"
            found["streamed"] += picked.stream == "full"
            found["partial"] += isinstance(picked.gradient_checkpointing, tuple)
            found["split"] += picked.micro_batch != one.workload.recipe.effective_batch
            found["with retries"] += planned.pick.forecast.reserved > budget
    assert min(found.values()) > 1 or cases < 24, found  # 24 are the fewest that meet everything


@pytest.fixture(scope="module")
def ample(searched: list[Exhaustive], traces: TraceLibrary) -> PlanResult:
    return plan(searched[0].workload, FitConfig(allow_quantized=True), device_state_with(AMPLE), traces, OCCASIONS)


def test_with_room_for_everything_nothing_is_saved(ample: PlanResult) -> None:
    assert ample.pick is not None
    fit = ample.pick.fit
    assert (fit.quantize, fit.gradient_checkpointing, fit.micro_batch, fit.preview_offload) == (
        "none",
        "none",
        4,
        False,
    )
    assert (ample.pick.quality, ample.faster, ample.excess_bytes, ample.left_out) == ("exact", None, 0, ())
    assert ample.pick.forecast.budget == AMPLE
    assert ample.smaller is not None
    assert ample.smaller.forecast.allocated < ample.pick.forecast.allocated
    assert ample.smaller.forecast.seconds > ample.pick.forecast.seconds


ENCODING = ("vae_dtype", "vae_encode_tiling", "text_encoder_batch_size")


def test_each_rung_of_the_ladder_needs_less_than_the_one_before(searched: list[Exhaustive], ample: PlanResult) -> None:
    one = searched[0]
    assert ample.pick is not None
    fit = ample.pick.fit.replaced(vae_tiling=False)
    kinds, needs = [], [one.training(fit)]
    for fallback in ample.fallbacks:
        changes = fallback.model_dump(exclude={"exact"}, exclude_none=True)
        (key,) = changes
        fit = fit.replaced(**changes)
        kinds.append((key, fallback.exact))
        if key not in ("vae_tiling", "preview_offload", *ENCODING):
            needs.append(one.training(fit))
    assert all(later < former for former, later in pairwise(needs)), needs
    order = [key for key, _ in dict.fromkeys(kinds)]
    assert order == ["preview_offload", "gradient_checkpointing", "micro_batch", "stream", "quantize", *ENCODING]
    assert all(exact == (key in ("preview_offload", "gradient_checkpointing", "stream")) for key, exact in kinds)
    # In so small a model the tables of nf4 weigh more than it saves, so that it is no fallback.
    assert (fit.gradient_checkpointing, fit.micro_batch, fit.quantize) == ("full", 1, "int8")


def test_a_quantised_base_is_a_rung_only_where_the_job_allows_it(
    searched: list[Exhaustive], traces: TraceLibrary
) -> None:
    planned = plan(searched[0].workload, FitConfig(), device_state_with(AMPLE), traces, OCCASIONS, others=False)
    assert planned.fallbacks
    assert all(fallback.quantize is None for fallback in planned.fallbacks)


def test_the_ladder_leaves_alone_what_the_user_wrote(searched: list[Exhaustive], traces: TraceLibrary) -> None:
    written = FitConfig(gradient_checkpointing="none", preview_offload=False)
    planned = plan(searched[0].workload, written, device_state_with(AMPLE), traces, OCCASIONS, others=False)
    assert [fallback.model_dump(exclude_none=True) for fallback in planned.fallbacks] == [
        {"exact": False, "micro_batch": 2},
        {"exact": False, "micro_batch": 1},
        {"exact": True, "stream": "full"},
        *({"exact": False, **changes} for changes in ({"vae_dtype": "bf16"}, {"vae_encode_tiling": True})),
        {"exact": False, "text_encoder_batch_size": 1},
    ]


def test_what_is_just_out_of_reach_is_said_with_what_it_lacks(searched: list[Exhaustive], traces: TraceLibrary) -> None:
    one = searched[1]
    fastest = plan(one.workload, FitConfig(quantize="none"), device_state_with(AMPLE), traces, OCCASIONS, others=False)
    assert fastest.pick is not None
    budget = fastest.pick.forecast.reserved - 8 * MIB
    planned = plan(one.workload, FitConfig(quantize="none"), device_state_with(budget), traces, OCCASIONS)
    assert planned.pick is not None
    assert planned.faster is not None
    assert planned.faster.forecast.seconds < planned.pick.forecast.seconds
    assert not planned.faster.forecast.fits
    assert planned.excess_bytes == planned.faster.forecast.reserved - budget > 0
    # With just that much more it fits.
    more = device_state_with(budget + planned.excess_bytes)
    again = plan(one.workload, FitConfig(quantize="none"), more, traces, OCCASIONS, others=False)
    assert again.pick is not None
    assert again.pick.forecast.seconds <= planned.faster.forecast.seconds


def test_where_nothing_fits_the_smallest_change_is_offered(traces: TraceLibrary) -> None:
    """The pictures of a larger resolution alone are too much; everything else would fit."""
    subject = small_workload(previews=False, side=512, effective_batch=1)
    written = FitConfig(quantize="none", gradient_checkpointing="none")
    smallest = small_workload(previews=False, side=448, effective_batch=1)
    course = RunSchedule(smallest, traces, OCCASIONS, _rate())
    budget = simulate_run(course, device_state_with(AMPLE), None).reserved
    planned = plan(subject, written, device_state_with(budget), traces, OCCASIONS)
    assert planned.pick is None
    assert planned.excess_bytes > 0
    assert planned.smaller is not None
    assert not planned.smaller.forecast.fits
    assert planned.reduced_recipe is not None
    assert planned.reduced_recipe.change.keys == {"resolution": 448}
    assert planned.reduced_recipe.plan.forecast.fits


def test_bounds_of_quantized_fits_are_never_above_their_memory(traces: TraceLibrary) -> None:
    """They follow from the unquantized base, so that fits that are too large are ruled out without being traced."""
    subject = small_workload(previews=False, side=64, channels=256, effective_batch=4)
    workload = replace(subject, fit=complete_fit(FitConfig(dtype="bf16", quantize="none")))
    evaluator = Evaluator(
        workload, traces, lambda _: 0.0, AMPLE, lambda _: True, previews=0, free_choice=False, deadline=Deadline()
    )
    sets = nested_sets(evaluator.anchor(Placement("none", "none")).blocks)
    evaluator.refine(workload.fit.replaced(gradient_checkpointing="full", micro_batch=1))
    one, above = Exhaustive(workload, traces), 0
    for quantize, blocks_set, size in product(("int8", "nf4"), sets, (1, 2, 4)):
        fit = workload.fit.replaced(quantize=quantize, gradient_checkpointing=blocks_set, micro_batch=size)
        bound = evaluator.preference(fit).bytes
        assert 0 < bound <= one.figures(fit)[2]
        above += bound > 0.8 * one.figures(fit)[2]
    assert above > len(sets)  # most are close enough to rule fits out


def test_a_4_bit_base_is_no_alternative() -> None:
    """Some fits with 4 bits are faster than the unquantized pick on 6 GB, but nobody has allowed them."""
    request, shipped = request_for_preset("sdxl", "style", "6GB"), TraceLibrary(TraceStore.of_user())
    found = plan(request.workload, request.written, request.device_state, shipped, request.counts)
    assert found.pick is not None and found.pick.quality == "exact"
    assert found.quantized is None or found.quantized.quality == "int8"
    assert not shipped.traced


def _rate():  # type: ignore[no-untyped-def]
    return device_state_with(AMPLE).rate


def test_changes_of_a_recipe_begin_with_the_least() -> None:
    subject = small_workload(side=512, rank=16, alpha=8.0, text_encoder={"learning_rate": 1e-5})
    groups = [[dict(change.keys) for change in group] for group in reduced_recipes(subject)]
    assert list(map(len, groups)) == [1, 1, 2, 4, 2, 4]
    assert groups[4][0] == {"optimizer.name": "adamw8bit", "text_encoder.learning_rate": 0.0, "rank": 8, "alpha": 4.0}
    keys = [*chain.from_iterable(groups)]
    assert keys[:4] == [
        {"optimizer.name": "adamw8bit"},
        {"text_encoder.learning_rate": 0.0},
        {"rank": 8, "alpha": 4.0},
        {"rank": 4, "alpha": 2.0},
    ]
    assert keys[4] == {"resolution": 448}
    assert keys[-1] == {"optimizer.name": "adamw8bit", "text_encoder.learning_rate": 0.0, "rank": 4, "alpha": 2.0} | {
        "resolution": keys[-1]["resolution"]
    }
    recipe = changed(subject.recipe, keys[2])
    assert recipe.alpha / recipe.rank == subject.recipe.alpha / subject.recipe.rank
    assert changed(subject.recipe, keys[0]).optimizer.name == "adamw8bit"


def test_shapes_follow_a_changed_resolution() -> None:
    subject = replace(small_workload(side=512), buckets=(BucketUse(512, 512, 3), BucketUse(384, 640, 2)))
    as_large, taller = (PromptConfig(prompt="", width=512, height=height) for height in (512, 768))
    subject = replace(subject, previews=(as_large, taller), validation_buckets=(BucketUse(640, 384, 1),))
    changes = chain.from_iterable(reduced_recipes(subject))
    changed_workload = next(change for change in changes if change.keys.get("resolution") == 256).applied_to(subject)
    assert changed_workload.buckets == (BucketUse(256, 256, 3), BucketUse(192, 320, 2))
    assert changed_workload.validation_buckets == (BucketUse(320, 192, 1),)
    assert [(prompt.width, prompt.height) for prompt in changed_workload.previews] == [(256, 256), (512, 768)]


@pytest.mark.parametrize("first", range(6))
def test_of_several_changes_the_mildest_that_works_is_found_in_few_checks(first: int) -> None:
    changes, checked = [RecipeChange({"rank": rank}) for rank in (64, 32, 16, 8, 4)], []

    def check(change: RecipeChange) -> str | None:
        checked.append(change)
        return f"plan of {change.keys['rank']}" if changes.index(change) >= first else None

    found = mildest(changes, check)
    assert found == ((changes[first], f"plan of {changes[first].keys['rank']}") if first < 5 else None)
    assert len(checked) == 1 if first == 5 else len(checked) <= 4


def test_runs_that_begin_alike_are_those_played_apart(searched: list[Exhaustive]) -> None:
    one = searched[0]
    fits = [
        one.workload.fit.replaced(quantize=quantize, micro_batch=size, vae_tiling=tiling, preview_offload=offload)
        for quantize, size in (("none", 2), ("none", 1), ("int8", 2))
        for tiling, offload in ((True, False), (False, False), (True, True))
    ]
    need = sorted(one.free(fit) for fit in fits)
    outcomes = set()
    runs = RunSimulator(device_state_with(AMPLE))
    for budget in (need[-1], need[0], int(0.9 * need[len(need) // 2])):
        for fit in fits:
            for capacity in (budget, None):
                shared = runs.simulate(one.timeline(fit), capacity)
                apart = simulate_run(one.timeline(fit), device_state_with(budget), capacity)
                assert (shared.failed_in, shared.allocator.retries) == (apart.failed_in, apart.allocator.retries)
                assert shared.allocator.snapshot() == apart.allocator.snapshot()
                assert shared.phases.keys() == apart.phases.keys()
                assert shared.reserved == apart.reserved
                outcomes.add((shared.failed_in is None, shared.allocator.retries > 0))
    assert outcomes >= {(True, False), (False, True)}


def test_what_gives_memory_back_in_every_step_is_slower_by_that(traces: TraceLibrary) -> None:
    one = Exhaustive(small_workload(previews=False, effective_batch=4, steps=10, side=512), traces)
    fit = one.workload.fit.replaced(micro_batch=4, gradient_checkpointing="none")
    free = forecast_of(one.timeline(fit), device_state_with(AMPLE))
    for share in range(99, 50, -1):  # until a replay gives memory back in steps
        situation = device_state_with(one.free(fit) * share // 100)
        slowed = one.retrying(fit, situation)
        if slowed is None or slowed:
            break
    assert slowed, "a budget at which steps go on by giving back"
    steps = one.workload.recipe.steps or 1
    told = forecast_of(one.timeline(fit), situation)
    assert told.fits
    assert told.seconds == pytest.approx(free.seconds + slowed)
    assert told.step_seconds["512x512"] == pytest.approx(free.step_seconds["512x512"] + slowed / steps)
    # So another that is slower else, but does without, is the pick.
    written = FitConfig(quantize="none", gradient_checkpointing="none")
    first, *passed_over_for = one.picks(every_fit(one.workload, written, ()), situation, free_choice=False)
    assert first == fit
    planned = plan(one.workload, written, situation, traces, OCCASIONS, others=False)
    assert passed_over_for
    assert planned.pick is not None
    assert planned.pick.fit == passed_over_for[-1]


def test_tapes_are_traced_once_and_come_from_the_disk_afterwards(traces: TraceLibrary, tmp_path: Path) -> None:
    subject = small_workload(previews=False, effective_batch=1)
    first = TraceLibrary(TraceStore(tmp_path))
    plan(subject, FitConfig(quantize="none"), device_state_with(AMPLE), first, OCCASIONS, others=False)
    assert first.traced

    def never() -> None:
        raise AssertionError("traced again")

    again = TraceLibrary(TraceStore(tmp_path), never)
    planned = plan(subject, FitConfig(quantize="none"), device_state_with(AMPLE), again, OCCASIONS, others=False)
    assert planned.pick is not None
    assert again.used <= first.used


# Forecasts


def test_a_forecast_tells_of_every_phase(ample: PlanResult, searched: list[Exhaustive]) -> None:
    assert ample.pick is not None
    found = ample.pick.forecast
    assert [phase.phase for phase in found.phases] == [
        "cache_pictures", "cache_texts", "load", "first_step", "train", "validate", "checkpoint", "save", "preview"
    ]  # fmt: skip
    assert found.allocated == max(phase.allocated for phase in found.phases)
    assert found.reserved == max(phase.reserved for phase in found.phases)
    assert found.seconds == pytest.approx(sum(phase.seconds for phase in found.phases))
    assert set(found.step_seconds) == {"256x256"}
    steps = searched[0].workload.recipe.steps or 0
    trained = sum(phase.seconds for phase in found.phases if phase.phase in ("first_step", "train"))
    assert trained == pytest.approx(steps * found.step_seconds["256x256"])
    train = found.of("train")
    assert train is not None
    highest = max(train.peaks, key=lambda peak: peak.allocated)
    assert highest.allocated == train.allocated
    assert sum(highest.by_kind.values()) <= highest.allocated
    assert max(allocated for allocated, _ in train.timeline) == train.allocated
    assert found.flops > 0


def test_a_plan_says_what_is_saved_once_text_encoders_stop(traces: TraceLibrary) -> None:
    """At least gradients and AdamW's two moments of the text encoder, in fp32; nothing if it never stops."""

    def planned(stop: float | None, deadline: Deadline | None = None) -> PlanResult:
        trained = {"learning_rate": 1e-4, "rank": 64, "stop_after": stop}
        workload = small_workload(previews=False, text_encoder=trained)
        given, later = FitConfig(micro_batch=2), deadline or Deadline()
        return plan(workload, given, device_state_with(AMPLE), traces, OCCASIONS, alternatives_deadline=later)

    found = planned(0.4)
    assert found.pick is not None and found.stops is not None and found.stops.step == 40
    engine = empty_engine(small_workload(text_encoder={"learning_rate": 1e-4, "rank": 64}))
    masters = engine.master_weights.masters.items()
    numbers = sum(weight.numel() for key, weight in masters if engine.adapter.part_of[key] == "text_encoder")
    assert 12 * numbers <= found.stops.bytes < found.pick.forecast.allocated
    assert 0 < found.stops.seconds < found.pick.forecast.seconds
    assert planned(None).stops is None and planned(100).stops is None


def test_shapes_follow_on_each_other_in_every_order(traces: TraceLibrary) -> None:
    sizes = [(256, 256), (128, 256), (64, 64), (256, 64)]
    for count in range(1, 5):
        order = transitions(sizes[:count])
        turns = set(zip(order, [*order[1:], order[0]], strict=True))
        assert turns == {(first, second) for first in sizes[:count] for second in sizes[:count]}
        assert order[0] == sizes[0]
    subject = replace(
        small_workload(previews=False), buckets=(BucketUse(256, 256, 5), BucketUse(192, 256, 0), BucketUse(128, 128, 1))
    )
    assert bounding_shapes(subject) == ((256, 256, 75), (128, 128, 75))
    uses = (
        BucketUse(256, 256, 5, 75),
        BucketUse(192, 256, 1, 225),
        BucketUse(192, 256, 1, 75),
        BucketUse(128, 128, 1, 150),
    )
    largest = ((256, 256, 75), (192, 256, 225), (128, 128, 150))
    assert bounding_shapes(replace(subject, buckets=uses)) == largest, "no other exceeds them in pixels and tokens"
    found = forecast(subject, device_state_with(AMPLE), traces, OCCASIONS)
    large, middle, small = (found.step_seconds[size] for size in ("256x256", "192x256", "128x128"))
    assert large > middle > small
    one = forecast(small_workload(previews=False), device_state_with(AMPLE), traces, OCCASIONS)
    assert one.step_seconds["256x256"] == large
    assert found.reserved >= one.reserved


def test_reserved_memory_has_stopped_growing(traces: TraceLibrary) -> None:
    """Ten more rounds change nothing."""
    subject = replace(small_workload(previews=False), buckets=(BucketUse(256, 256, 5), BucketUse(128, 128, 1)))
    course = RunSchedule(subject, traces, OCCASIONS, _rate())
    playing = Simulation(device_state_with(AMPLE), None)
    for act in (*course.before_training(), *course.at_start()):
        playing.play(act.phase, act.traces)
    playing.play("first_step", course.first_step())
    reserved = []
    for _ in range(12):
        playing.play("train", course.round())
        reserved.append(playing.allocator.reserved)
    settled = simulate_run(course, device_state_with(AMPLE), None).phases["train"]
    assert settled.reserved(settled.peak_reserved()) == reserved[-1]


def test_a_forecast_within_a_budget_says_whether_it_fits(searched: list[Exhaustive]) -> None:
    one = searched[1]
    fit = one.workload.fit.replaced(micro_batch=8)
    need = one.free(fit)
    assert forecast_of(one.timeline(fit), device_state_with(need)).fits
    assert not forecast_of(one.timeline(fit), device_state_with(need // 2)).fits
    told = forecast_of(one.timeline(fit), device_state_with(need // 2))
    assert told.reserved == need, "what it would take stays what it is"
