"""Plans with little time: what is traced first, what is taken when time ends, and what is not denied then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.exhaustive import AMPLE, OCCASIONS, Exhaustive, every_fit
from tests.support.plans import device_state_with, small_workload
from trainer.config.fit import FitConfig
from trainer.memory.forecast.forecast import simulate_run
from trainer.memory.forecast.schedule import RunSchedule
from trainer.memory.planner.planner import PlanResult, plan
from trainer.memory.planner.search_space import nested_sets
from trainer.memory.planner.suggestions import reduced_recipes
from trainer.memory.trace.deadline import Deadline
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import blocks
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("small_weights_are_streamed")


def test_changes_that_time_was_too_short_for_are_not_denied(traces: TraceLibrary, tmp_path: Path) -> None:
    """Whether a lower resolution fits takes traces; without time for them, the result says that it is incomplete."""
    subject = small_workload(previews=False, side=512, effective_batch=1)
    written, empty = FitConfig(quantize="none", gradient_checkpointing="none"), TraceLibrary(TraceStore(tmp_path))
    fitting = plan(subject, written, device_state_with(AMPLE), traces, OCCASIONS, others=False).pick
    assert fitting is not None
    less = device_state_with(fitting.forecast.reserved // 2)
    hurried = plan(subject, written, less, empty, OCCASIONS, deadline=Deadline(0))
    assert (hurried.pick, hurried.reduced_recipe, hurried.left_out) == (None, None, ("alternatives",))
    assert plan(subject, written, less, traces, OCCASIONS).left_out == ()


def test_even_late_a_change_that_fits_is_named(traces: TraceLibrary, tmp_path: Path) -> None:
    """Without time to find the mildest one, the strongest is traced: the result is not just that nothing fits."""
    subject = small_workload(previews=False, side=512, effective_batch=1)
    written, empty = FitConfig(quantize="none", gradient_checkpointing="none"), TraceLibrary(TraceStore(tmp_path))
    course = RunSchedule(
        small_workload(previews=False, side=448, effective_batch=1), traces, OCCASIONS, device_state_with(AMPLE).rate
    )
    budget = device_state_with(simulate_run(course, device_state_with(AMPLE), None).reserved)
    hurried = plan(subject, written, budget, empty, OCCASIONS, deadline=Deadline(0))
    assert (hurried.pick, hurried.left_out) == (None, ("alternatives",))
    assert hurried.reduced_recipe is not None
    assert hurried.reduced_recipe.change == reduced_recipes(subject)[-1][-1]
    assert hurried.reduced_recipe.plan.forecast.fits


def test_past_its_time_a_plan_takes_what_is_known(traces: TraceLibrary, tmp_path: Path) -> None:
    """With no tapes and no time left, what the search begins with is taken where it fits, not what saves most."""
    subject = small_workload(effective_batch=4)
    written = FitConfig(quantize="none")
    empty = TraceLibrary(TraceStore(tmp_path))
    hurried = plan(subject, written, device_state_with(AMPLE), empty, OCCASIONS, deadline=Deadline(0), others=False)
    assert hurried.pick is not None
    assert hurried.left_out == ("fits",)
    assert hurried.pick.forecast.fits
    assert (hurried.pick.fit.gradient_checkpointing, hurried.pick.fit.micro_batch) == ("none", 1)
    patient = plan(subject, written, device_state_with(AMPLE), traces, OCCASIONS, others=False)
    assert patient.pick is not None
    assert not patient.left_out
    assert patient.pick.forecast.seconds <= hurried.pick.forecast.seconds


def test_what_is_too_large_for_sure_is_not_traced(traces: TraceLibrary, tmp_path: Path) -> None:
    """Where only the fit that saves most has room, what one picture keeps rules out many that checkpoint nothing."""
    subject = small_workload(previews=False, effective_batch=4, side=1024)
    # The VAE must not be what takes most.
    saving = FitConfig(quantize="none", vae_dtype="bf16", gradient_checkpointing="full", micro_batch=1)
    least = plan(subject, saving, device_state_with(AMPLE), traces, OCCASIONS, others=False).pick
    assert least is not None
    plain = least.fit.replaced(gradient_checkpointing="none")
    steps = traces.steps(replace(subject, fit=plain), subject.buckets[0].size, 1)
    sets = nested_sets(blocks(steps.weights, steps.micro_first))
    *_, less, full = (
        Exhaustive(subject, traces).figures(least.fit.replaced(gradient_checkpointing=each))[2] for each in sets
    )
    assert full < less
    fresh, few = TraceLibrary(TraceStore(tmp_path)), device_state_with(less - 1)
    written = FitConfig(quantize="none", vae_dtype="bf16")
    planned = plan(subject, written, few, fresh, OCCASIONS, others=False)
    assert planned.pick is not None
    assert planned.pick.fit == least.fit
    fits = {micro_key(subject, fit): fit for fit in every_fit(subject, written, sets)}
    traced = [(fits[key].gradient_checkpointing, fits[key].micro_batch) for key in fresh.traced if key in fits]
    assert traced[:2] == [("none", 1), ("full", 1)]
    assert {size for checkpointing, size in traced if checkpointing == "none"} == {1}
    assert len(traced) < len(fits) - 2
    assert {fit.micro_batch for fit in fits.values()} == {1, 2, 4}


def micro_key(subject: Workload, fit: FitConfig) -> str:
    """Under which the tapes of its micro-batches are kept."""
    return replace(subject, fit=fit).key("micro", subject.buckets[0].size, fit.micro_batch or 1)


@pytest.mark.parametrize(
    "known", ["fits", *(pytest.param(name, marks=pytest.mark.slow) for name in ("does not fit", "none"))]
)
def test_before_a_search_has_to_trace_one_that_fits_is_told(traces: TraceLibrary, tmp_path: Path, known: str) -> None:
    """What was picked before, or one that saves most; the pick is that of a search without that."""
    subject = small_workload(effective_batch=4)
    whole = plan(subject, FitConfig(), device_state_with(AMPLE), traces, OCCASIONS, others=False)
    assert whole.pick is not None
    few = device_state_with(whole.pick.forecast.reserved * 9 // 10)
    wanted = plan(subject, FitConfig(), few, traces, OCCASIONS, others=False)
    assert wanted.pick is not None
    likely = {"fits": wanted.pick.fit, "does not fit": whole.pick.fit, "none": None}[known]
    told: list[PlanResult] = []
    fresh = TraceLibrary(TraceStore(tmp_path))
    plan(
        subject,
        FitConfig(),
        few,
        fresh,
        OCCASIONS,
        others=False,
        likely=likely,
        on_soon=told.append,
        on_pick=told.append,
    )
    soon, last = told
    assert soon.pick is not None
    if likely is not None:  # if its steps are too large, no other phase is traced for it
        assert fresh.traced[0] == micro_key(subject, likely)
    assert (soon.left_out, soon.pick.forecast.fits) == (("fits",), True)
    assert (soon.pick.fit == likely) == (known == "fits")
    assert soon.pick.quality == "exact"
    assert last == wanted
    told.clear()  # and nothing of the kind where all is known
    plan(subject, FitConfig(), few, traces, OCCASIONS, others=False, likely=likely, on_soon=told.append)
    assert not told


def test_a_likely_fit_is_taken_if_time_ends_before_the_search(traces: TraceLibrary, tmp_path: Path) -> None:
    """So that a run starts soon with a plan that works; without one, the search goes on until it has one."""
    subject = small_workload(effective_batch=4)
    likely = plan(subject, FitConfig(micro_batch=2), device_state_with(AMPLE), traces, OCCASIONS, others=False).pick
    assert likely is not None
    fresh = TraceLibrary(TraceStore(tmp_path))
    deadline = Deadline(1.0, clock=lambda: float(len(fresh.traced)))  # over as soon as its steps are traced
    hurried = plan(
        subject,
        FitConfig(),
        device_state_with(AMPLE),
        fresh,
        OCCASIONS,
        deadline=deadline,
        others=False,
        likely=likely.fit,
    )
    assert hurried.pick is not None
    assert (hurried.pick.fit, hurried.left_out) == (likely.fit, ("fits",))
    assert hurried.pick.forecast.reserved == likely.forecast.reserved
    steps = {micro_key(subject, fit) for fit in every_fit(subject, FitConfig(), ("none", "full"))}
    traced = [key for key in fresh.traced if key in steps]
    anchor = likely.fit.replaced(micro_batch=1)  # shows which blocks the fallback steps can checkpoint
    assert traced == [micro_key(subject, likely.fit), micro_key(subject, anchor)]


def test_what_stands_beside_the_pick_has_a_time_of_its_own(traces: TraceLibrary, tmp_path: Path) -> None:
    """The pick is that of a search without haste; beside it stands what is known by then, and nothing is denied."""
    subject = small_workload(effective_batch=4)
    room = plan(subject, FitConfig(), device_state_with(AMPLE), traces, OCCASIONS).smaller
    assert room is not None
    within = device_state_with(room.forecast.reserved)
    whole = plan(subject, FitConfig(), within, traces, OCCASIONS)
    hurried = plan(
        subject, FitConfig(), within, TraceLibrary(TraceStore(tmp_path)), OCCASIONS, alternatives_deadline=Deadline(0)
    )
    assert hurried.pick is not None
    assert whole.pick is not None
    assert hurried.pick.fit == whole.pick.fit
    assert (whole.left_out, hurried.left_out) == ((), ("alternatives",))
    assert whole.smallest or not hurried.smallest


def test_in_haste_nothing_smaller_is_not_denied(traces: TraceLibrary, tmp_path: Path) -> None:
    """A smaller plan that time did not allow to look at is not shown, and nobody is told that there is none."""
    subject, written = small_workload(previews=False, side=512, effective_batch=1), FitConfig(quantize="none")
    whole = plan(subject, written, device_state_with(AMPLE), traces, OCCASIONS)
    assert whole.smaller is not None
    empty = TraceLibrary(TraceStore(tmp_path))
    hurried = plan(subject, written, device_state_with(AMPLE), empty, OCCASIONS, alternatives_deadline=Deadline(0))
    assert (hurried.smaller, hurried.floor) == (None, None)
    assert not hurried.smallest


def test_haste_rounds_no_base(traces: TraceLibrary, tmp_path: Path) -> None:
    """With tapes of rounded bases at hand and no time, an unrounded one that fits is traced and taken all the same."""
    subject = small_workload(previews=False, effective_batch=4, side=1024)
    smallest = FitConfig(quantize="none", gradient_checkpointing="full", micro_batch=1)
    found = plan(subject, smallest, device_state_with(AMPLE), traces, OCCASIONS, others=False)
    assert found.pick is not None
    few, known = device_state_with(found.pick.forecast.reserved), TraceLibrary(TraceStore(tmp_path))
    rounded = plan(subject, FitConfig(quantize="int8"), few, known, OCCASIONS, others=False)
    assert rounded.pick is not None
    hurried = plan(subject, FitConfig(), few, known, OCCASIONS, deadline=Deadline(0), others=False)
    assert hurried.pick is not None
    assert (hurried.pick.quality, hurried.left_out) == ("exact", ("fits",))
