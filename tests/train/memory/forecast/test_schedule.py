"""The course of a run: what a step takes where effective batches are short or mixed of several shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.cpu_steps import tiny_workload
from tests.support.images import make_picture, recipe_of
from tests.support.plans import device_state_with
from trainer.cli import plan_text
from trainer.dataset.image import ImageRecord
from trainer.dataset.sampling import EpochBatches, Shape, micro_batches
from trainer.memory.allocator.allocator import MIB, Allocator
from trainer.memory.allocator.replay import SurvivingStorage, replay
from trainer.memory.device import roofline
from trainer.memory.forecast.forecast import GROUPS_TO_TRAINING, RunSimulator
from trainer.memory.forecast.results import most_reserved
from trainer.memory.forecast.schedule import (
    DRIVER_BYTES,
    PhaseCounts,
    RunSchedule,
    batch_compositions,
    bounding_shapes,
    optimizer_step,
    parts,
    split,
    training_totals,
    transitions,
)
from trainer.memory.planner.suggestions import padding_saved
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import MemoryTrace, Work
from trainer.memory.trace.meta_models import job_of
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import BucketUse, TraceRequest, Workload, workload_of_job
from trainer.protocol.forecast import DeviceSpeed

SIZES = ((96, 64), (64, 96), (64, 64), (32, 64))
COUNTS = (5, 2, 1, 1)
SITUATION = device_state_with(400 * MIB)
LENGTHS = {"effective_batch": 4, "steps": 9, "seed": 1, "token_chunks": 225, "caption_padding": "caption"}
FACTS = ("family", "unet_config", "vae_config", "text_configs", "prediction", "zero_terminal_snr")
RATE = DeviceSpeed("none", (), 1.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceLibrary:
    return TraceLibrary(TraceStore(tmp_path_factory.mktemp("tapes")))


def pictures(counts: Sequence[int] = COUNTS) -> list[ImageRecord]:
    sizes = [size for size, count in zip(SIZES, counts, strict=True) for _ in range(count)]
    return [make_picture(number, bucket=size, width=200, height=300) for number, size in enumerate(sizes)]


def course_of(traces: TraceLibrary, micro_batch: int) -> RunSchedule:
    """Nine pictures in four shapes, four to an effective batch: one full batch, the rest mixed or short."""
    recipe = {"effective_batch": 4, "steps": 9, "seed": 1}
    subject = tiny_workload("sd15", recipe, {"micro_batch": micro_batch}, SIZES)
    uses = tuple(BucketUse(*size, count, most=count) for size, count in zip(SIZES, COUNTS, strict=True))
    batches = batch_compositions(pictures(), subject.recipe)
    return RunSchedule(replace(subject, buckets=uses), traces, PhaseCounts(batches=batches), RATE)


def real_parts(subject: Workload) -> list[list[tuple[Shape, int]]]:
    """The micro-batches of every step of the run, as it deals them."""
    steps = [batch for epoch in range(3) for batch in EpochBatches(pictures(), subject.recipe, epoch)]
    most = subject.fit.micro_batch or 1
    return [[(part[0].shape, len(part)) for part in micro_batches(step, most)] for step in steps[:9]]


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_makeups_are_the_batches_that_a_run_deals(most: int) -> None:
    recipe = recipe_of(64, effective_batch=4, steps=8, seed=1)
    found = [
        tuple(split(makeup, most)) for makeup, times in batch_compositions(pictures(), recipe) for _ in range(times)
    ]
    dealt = [batch for epoch in range(3) for batch in EpochBatches(pictures(), recipe, epoch)][:8]
    real = [tuple((p[0].shape, len(p)) for p in micro_batches(batch, most)) for batch in dealt]
    assert sorted(found) == sorted(real)
    assert any(len({size for size, _ in step}) > 1 for step in real)
    assert batch_compositions([], recipe) == ()


def test_epochs_without_captions_have_short_texts() -> None:
    recipe = recipe_of(64, **LENGTHS, captions={"dropout_every_epochs": 2})
    shown = pictures_with_captions()
    found = Counter(dict(batch_compositions(shown, recipe)))
    run = [batch for epoch in range(3) for batch in EpochBatches(shown, recipe, epoch)]
    assert found == Counter(tuple(Counter(sample.shape for sample in batch).items()) for batch in run)


def operations(work: Iterable[Work]) -> float:
    return float(sum(one.count for one in work))


def flops(work: Iterable[Work]) -> float:
    return float(sum(one.count * one.flops for one in work))


@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_mean_step_does_what_the_runs_steps_do(traces: TraceLibrary, most: int) -> None:
    """As in the run's own micro-batches, each traced in its shape and size; single pictures spare themselves copies."""
    course = course_of(traces, most)
    steps = real_parts(course.workload)
    assert any(len(step) != -(-4 // most) for step in steps)  # mixed and short ones are not like full ones
    for measure in (operations, flops):
        real = 0.0
        for first, *further in steps:
            known = {part: traces.steps(course.workload, *part) for part in (first, *further)}
            real += measure(known[first].micro_first.work) + measure(known[first].optimizer.work)
            real += sum(measure(known[part].micro_more.work) for part in further)
        assert course.mean_step_seconds(measure) == pytest.approx(real / len(steps), rel=0.06)


def workload_with(images: Sequence[ImageRecord], most: int, **recipe: object) -> Workload:
    """Return the workload of a dataset, as the forecast of its job has it."""
    subject = tiny_workload("sd15", LENGTHS | recipe, {"micro_batch": most}, SIZES)
    source = SimpleNamespace(**{key: getattr(subject, key) for key in FACTS})
    return replace(workload_of_job(job_of(subject), source, images), fit=subject.fit)  # type: ignore[arg-type]


def largest_part(images: Sequence[ImageRecord], workload: Workload) -> int:
    """Return the most pixels in any micro-batch of thirty epochs, as a run composes them."""
    batches = [batch for epoch in range(30) for batch in EpochBatches(images, workload.recipe, epoch)]
    most = workload.fit.micro_batch or 1
    shapes = [(*part[0].shape, len(part)) for batch in batches for part in micro_batches(batch, most)]
    return max(width * height * count for width, height, _, count in shapes)


@pytest.mark.parametrize("most", [1, 2, 3, 4])
@pytest.mark.parametrize("counts", [(5, 2, 1, 1), (1, 1, 1, 1), (1, 1, 3, 1), (1, 2, 9, 4)])
def test_the_largest_micro_batch_of_a_forecast_is_one_of_the_run(counts: tuple[int, ...], most: int) -> None:
    images = pictures(counts)
    workload = workload_with(images, most, caption_padding="limit")
    width, height, _ = shape = bounding_shapes(workload)[0]
    assert width * height * workload.images_at_once(shape) == largest_part(images, workload)


def test_a_forecast_never_assumes_fewer_images_than_an_epoch_can_have() -> None:
    """Regularization images take turns, and captions that lose tags change their lengths."""
    taking_turns = [replace(one, kind="regularization") for one in pictures((1, 0, 1, 0))]
    images = [*pictures((1, 0, 2, 1)), *taking_turns]
    longer = [replace(one, captions=("cat, " * 100,)) for one in pictures((4, 0, 0, 1))]
    for drawn, recipe in ((images, {}), (longer, {"captions": {"tag_dropout": 0.5}})):
        workload = workload_with(drawn, 4, **recipe)
        found = [shape[0] * shape[1] * workload.images_at_once(shape) for shape in bounding_shapes(workload)]
        assert max(found) >= largest_part(drawn, workload)


def test_a_rare_shape_shares_its_effective_batch() -> None:
    """Its micro-batch comes on top of gradients, unless no other image is left to fill the batch with."""
    rare, alone = (workload_with(pictures(counts), 4) for counts in ((1, 0, 0, 7), (3, 0, 0, 0)))
    assert [(shape[:2], parts(rare, shape)) for shape in bounding_shapes(rare)] == [((32, 64), 1), ((96, 64), 4)]
    assert [parts(alone, shape) for shape in bounding_shapes(alone)] == [1]
    assert alone.images_at_once(alone.shapes[0]) == 3
    without_dataset = tiny_workload("sd15", {"effective_batch": 4}, {"micro_batch": 4}, SIZES)
    assert {without_dataset.images_at_once(shape) for shape in without_dataset.shapes} == {4}


def test_batches_of_other_shapes_or_sizes_count_for_nothing(traces: TraceLibrary) -> None:
    course = course_of(traces, 4)
    full = course.step_seconds(operations)
    shown = dict(zip(course.workload.shapes, COUNTS, strict=True))
    by_shape = sum(full[size] * count for size, count in shown.items()) / sum(COUNTS)
    smaller = replace(course.workload, recipe=course.workload.recipe.replaced(effective_batch=3))
    fewer = replace(course.workload, buckets=course.workload.buckets[:2])
    assert RunSchedule(smaller, traces, course.counts, RATE).mean_step_seconds(operations) < by_shape * 1.01
    assert RunSchedule(fewer, traces, course.counts, RATE).mean_step_seconds(operations) == pytest.approx(
        full[*SIZES[0], 75]
    )
    assert course.mean_step_seconds(operations) > 1.2 * by_shape


# Captions of several lengths.


def pictures_with_captions() -> list[ImageRecord]:
    words = (10, 100, 10, 100, 10, 100, 10, 10, 200)
    return [replace(one, captions=("cat " * count,)) for one, count in zip(pictures(), words, strict=True)]


def course_with_lengths(traces: TraceLibrary, most: int, **recipe: object) -> RunSchedule:
    workload = workload_with(pictures_with_captions(), most, **recipe)
    counts = PhaseCounts(batches=batch_compositions(pictures_with_captions(), workload.recipe))
    return RunSchedule(workload, traces, counts, RATE)


def test_lengths_of_captions_are_part_of_the_shapes(traces: TraceLibrary) -> None:
    course = course_with_lengths(traces, 2)
    uses = {shape: bucket.images for shape, bucket in zip(course.workload.shapes, course.workload.buckets, strict=True)}
    assert uses == {
        (64, 96, 150): 1, (64, 96, 75): 1,
        (96, 64, 150): 2, (96, 64, 75): 3,
        (64, 64, 75): 1, (32, 64, 225): 1,
    }  # fmt: skip
    assert bounding_shapes(course.workload) == ((96, 64, 150), (32, 64, 225)), "the second one never has two images"
    lengths = course.workload.lengths
    assert lengths is not None and (lengths.encoded, lengths.previewed) == (225, 75)
    dropped = course_with_lengths(traces, 2, captions={"dropout": 0.1})
    others = set(dropped.workload.shapes) - set(uses)
    assert others == {(32, 64, 75)}, "a dropped caption"
    assert len(split([part for batch, _ in course.counts.batches for part in batch], 2)) > len(uses)


@pytest.mark.parametrize("most", [1, 4])
def test_a_mean_step_counts_short_captions_as_short(traces: TraceLibrary, most: int) -> None:
    course = course_with_lengths(traces, most)
    real = 0.0
    batches = [
        batch for epoch in range(3) for batch in EpochBatches(pictures_with_captions(), course.workload.recipe, epoch)
    ]
    for batch in batches[:9]:
        (first, *further) = ((part[0].shape, len(part)) for part in micro_batches(batch, most))
        known = traces.steps(course.workload, *first)
        real += flops(known.micro_first.work) + flops(known.optimizer.work)
        real += sum(flops(traces.steps(course.workload, *part).micro_more.work) for part in further)
    assert course.mean_step_seconds(flops) == pytest.approx(real / 9, rel=0.06)
    padded = course_with_lengths(traces, most, caption_padding="limit")
    assert course.mean_step_seconds(flops) < 0.97 * padded.mean_step_seconds(flops)


def test_the_peak_of_captions_of_several_lengths_is_that_of_all_shapes(traces: TraceLibrary) -> None:
    """Against a replay of every shape after every other, and below the peak of padding to the limit."""
    course = course_with_lengths(traces, 2)
    padded = course_with_lengths(traces, 2, caption_padding="limit")

    def allocated(schedule: RunSchedule) -> int:
        outcome = RunSimulator(SITUATION).unlimited_result(schedule, brief=True)
        return next(one for one in outcome if one.phase == "train").allocated

    every = course_with_lengths(traces, 2)
    order = transitions(every.workload.shapes)
    tapes = [trace for shape in order for trace in optimizer_step(every.workload, shape, every.steps(shape))]
    names: dict[str, SurvivingStorage] = {}
    allocator = Allocator()
    before = [trace for phase in every.before_training() for trace in phase.traces]
    replay([*before, *every.first_step()], allocator, names, SITUATION.workspace_bytes)
    replayed = replay(tapes, allocator, names, SITUATION.workspace_bytes)
    assert allocated(course) == replayed.allocated(replayed.peak_allocated())
    assert allocated(course) < allocated(padded)


def test_a_plan_says_what_padding_each_caption_to_its_own_length_saves(traces: TraceLibrary) -> None:
    course, padded = (course_with_lengths(traces, 2, caption_padding=padding) for padding in ("caption", "limit"))
    counts = replace(course.counts, padded=padded.counts.batches)
    saved = padding_saved(course.workload, counts, SITUATION, traces)
    assert saved is not None and saved.tokens == 225
    assert padding_saved(padded.workload, padded.counts, SITUATION, traces) is None

    def seconds(schedule: RunSchedule) -> float:
        return schedule.mean_step_seconds(lambda work: roofline.seconds(work, SITUATION.rate))

    assert (saved.step_seconds, saved.padded_step_seconds) == (seconds(course), seconds(padded))
    largest = (
        training_totals(one.workload, shape, one.step_summaries(shape)).peak
        for one in (padded, course)
        for shape in bounding_shapes(one.workload)[:1]
    )
    assert saved.saved == next(largest) - next(largest) > 0
    (line,) = [" ".join(plan_text.padding(replace(saved, saved=24 << 20, step_seconds=0.98, padded_step_seconds=1.0)))]
    assert "24.0 MiB less at the peak of training and 2.0% less time per step" in line


def test_jobs_share_the_traces_of_equal_lengths(traces: TraceLibrary) -> None:
    """So a job with a higher limit takes the shipped traces of short captions, and of all that reads no caption."""
    course, short = course_with_lengths(traces, 2), course_of(traces, 2)
    of_short = TraceRequest(short.workload, "micro", ((96, 64), 2)).key
    assert (
        TraceRequest(course.workload, "micro", ((96, 64, 75), 2)).key
        == of_short
        == short.workload.key("micro", (96, 64), 2)
    )
    assert TraceRequest(course.workload, "micro", ((96, 64, 150), 2)).key != of_short
    for part in ("optimizer", "load"):
        assert TraceRequest(course.workload, part).key == TraceRequest(short.workload, part).key  # type: ignore[arg-type]


# Steps that are recorded as CUDA graphs.


def with_graphs(course: RunSchedule, traces: TraceLibrary) -> RunSchedule:
    subject = replace(course.workload, fit=course.workload.fit.replaced(cuda_graphs=True))
    return RunSchedule(subject, traces, course.counts, RATE)


def reserved_by(allocator: Allocator, tapes: Sequence[MemoryTrace]) -> int:
    """What it takes for tapes that begin with nothing of others."""
    names: dict[str, SurvivingStorage] = {}
    assert replay(tapes, allocator, names, SITUATION.workspace_bytes).failure is None
    return allocator.reserved


def test_what_was_recorded_stays_taken_and_serves_nobody(traces: TraceLibrary) -> None:
    """One shape: after plain steps all that is free is given back, and from then on nothing but a pool is needed."""
    plain = course_of(traces, 2)
    subject = replace(plain.workload, buckets=plain.workload.buckets[:1])
    plain = RunSchedule(subject, traces, PhaseCounts(), RATE)
    graphed = with_graphs(plain, traces)
    graphs = graphed.graphs()
    assert graphs is not None and not graphs.uncaptured and plain.graphs() is None
    runs = RunSimulator(SITUATION)
    simulation = runs.simulate(plain, None, chapters=GROUPS_TO_TRAINING).copy(None)
    found = runs.simulate(graphed, None, chapters=GROUPS_TO_TRAINING).allocator
    beside, pool = simulation.allocator, Allocator()
    replay((*graphs.kept, *graphs.eager), beside, simulation.names, SITUATION.workspace_bytes)
    beside.empty_cache()
    captured = reserved_by(pool, graphs.recorded)
    replay(graphs.compared, beside, simulation.names, SITUATION.workspace_bytes)
    assert (found.reserved, found.allocated) == (beside.reserved + captured, beside.allocated + pool.allocated)
    masters = [each.bytes for each in plain.steps(SIZES[0]).weights.storages if each.name.startswith("master.")]  # type: ignore[union-attr]
    accumulated, _, eager = graphs.eager
    for copy in (accumulated, eager, graphs.compared[0]):  # gradients are copied one by one
        assert [each.bytes for each in copy.storages] == masters
    (kept,) = graphs.kept
    operations = sum(work.count for work in plain.steps(SIZES[0]).micro_more.work)
    assert [each.bytes for each in kept.storages] == [sum(masters), operations * DRIVER_BYTES]
    found = found.copy(None)
    found.empty_cache()
    beside.empty_cache()
    assert found.reserved == beside.reserved + captured


def test_a_shape_that_comes_late_is_computed_beside_what_was_recorded(traces: TraceLibrary) -> None:
    plain = course_of(traces, 2)
    graphed = with_graphs(plain, traces)
    graphs = graphed.graphs()
    assert graphs is not None and graphs.uncaptured == plain.round()
    runs = RunSimulator(SITUATION)
    plainly, taken = (runs.unlimited_result(course, brief=True) for course in (plain, graphed))
    before, after = (next(one for one in outcome if one.phase == "train").reserved for outcome in (plainly, taken))
    assert after >= before + reserved_by(Allocator(), graphs.recorded)
    assert runs.key(plain) != runs.key(graphed)
    here = replace(graphed.workload, fit=graphed.workload.fit.replaced(device="cpu"))
    assert RunSchedule(here, traces, graphed.counts, RATE).graphs() is None
    # Where there is room for the plain run alone, the forecast says so.
    room = most_reserved(plainly)
    assert runs.check_budget(plain, room).failed_in is None
    assert runs.check_budget(graphed, room).failed_in == "train"


def test_shapes_are_counted_as_a_run_deals_them(traces: TraceLibrary) -> None:
    for most in (1, 2, 4):
        course = with_graphs(course_of(traces, most), traces)
        dealt = {part for step in real_parts(course.workload) for part in step}
        assert course._graph_shapes() == len(dealt)
