"""Schedule a run: which traces are replayed in each phase, and how often their work is done."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Literal

import numpy as np

from trainer.config.fit import MAX_CUDA_GRAPHS
from trainer.config.job import Job
from trainer.config.recipe import RecipeConfig
from trainer.dataset.cache_keys import CacheKeys, text_batch_size
from trainer.dataset.image import ImageRecord
from trainer.dataset.sampling import (
    Shape,
    batched_shapes,
    drops_captions,
    measured_samples,
    padded_tokens,
    prompt_texts,
    steps_per_epoch,
    usual_shape,
)
from trainer.memory.device.roofline import loading_seconds
from trainer.memory.forecast.cache_shards import NO_LATER_SHARDS, LaterShards, first_shard, later_shards
from trainer.memory.forecast.host_memory import streamed_bytes
from trainer.memory.forecast.results import ResultStore
from trainer.memory.trace.library import Steps, T, TraceLibrary
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, Totals, TraceSummary, Work, total_in_sequence
from trainer.memory.trace.workload import SourceFacts, TracePart, TraceRequest, Workload, learns_texts, sizes_of_parts
from trainer.protocol.forecast import AT_START, BETWEEN_STEPS, DeviceSpeed, ForecastPhase

Part = tuple[Shape, int]
"""Images of one shape in a batch: width and height in pixels, tokens of the captions; and the number of images."""
BatchComposition = tuple[Part, ...]
"""Contents of an effective batch: its shapes in the order in which they are trained on, with numbers of images."""

# Epochs differ slightly in how leftovers are mixed; listing all epochs of a long run would take seconds.
MOST_EPOCHS = 8
DRIVER_BYTES = 64 << 10
"""Bytes that the driver uses for each operation in a CUDA graph, according to PyTorch's authors; not measured."""
GRAPH_RULES = 3
"""Version of the rules for replaying runs with CUDA graphs; increase it when the same traces give another result."""
_BEFORE: tuple[OtherPhase, ...] = ("cache_pictures", "cache_texts", "load", "quantise")
# Maximum rounds to replay until reserved memory stops growing; in each, every shape follows every other.
MOST_ROUNDS = 4


def batch_compositions(images: Sequence[ImageRecord], recipe: RecipeConfig) -> tuple[tuple[BatchComposition, int], ...]:
    """Return each batch composition with its number of occurrences in the run's first epochs (up to MOST_EPOCHS).

    The batches come from the run's own sampling, so mixed and short batches occur as often as in training.
    """
    an_epoch, steps = steps_per_epoch(images, recipe), recipe.steps or 1
    # Drawing the captions of every epoch of a large dataset would take seconds.
    trained = [image for image in images if image.kind != "validation"]
    usual = {id(image): usual_shape(image, recipe) for image in trained}
    without_captions = {id(image): (*image.bucket, padded_tokens("", recipe)) for image in trained}
    found: Counter[BatchComposition] = Counter()
    for epoch in range(min(MOST_EPOCHS, -(-steps // an_epoch)) if an_epoch else 0):
        shapes_of = without_captions if drops_captions(recipe.captions, epoch) else usual
        batches = batched_shapes(images, recipe, epoch, partial(_shape_in, shapes_of))
        found.update(tuple(Counter(shapes).items()) for shapes in batches[: steps - epoch * an_epoch])
    return tuple(found.items())


def _shape_in(shapes: Mapping[int, Shape], image: ImageRecord) -> Shape:
    return shapes[id(image)]


def split(batch: Iterable[Part], most: int) -> list[Part]:
    """Split an effective batch into micro-batches of one shape and at most ``most`` images each."""
    return [(shape, part) for shape, count in batch for part in sizes_of_parts(count, most)]


def scaled_work(work: Iterable[Work], share: float) -> Iterator[Work]:
    """Yield a micro-batch's operations, each shrunk as if there were only ``share`` times as many images."""
    return (replace(one, flops=round(one.flops * share), bytes=round(one.bytes * share)) for one in work)


@dataclass(frozen=True)
class GraphSchedule:
    """Extra traces of a run that captures CUDA graphs; they are replayed in this order, after steps without graphs."""

    kept: tuple[MemoryTrace, ...]
    """Traces of storages that are never freed."""
    eager: tuple[MemoryTrace, ...]
    """Traces of the micro-batch that is run without a graph for comparison, and of the copies of the gradients."""
    recorded: tuple[MemoryTrace, ...]
    """Micro-batches to replay in the graphs' private pool."""
    compared: tuple[MemoryTrace, ...]
    """Traces of comparing the graph's gradients with the eager ones, then of freeing all copies."""
    uncaptured: tuple[MemoryTrace, ...]
    """Steps without graphs, for shapes that are not captured yet."""

    @property
    def traces(self) -> tuple[MemoryTrace, ...]:
        """Return all traces in the order in which they are replayed."""
        return (*self.kept, *self.eager, *self.recorded, *self.compared, *self.uncaptured)


def graph_schedule(
    steps: Sequence[Steps[MemoryTrace]], uncaptured: Sequence[MemoryTrace], shapes: int
) -> GraphSchedule:
    """Return the schedule for ``shapes`` CUDA graphs; ``steps`` are the training traces of the bounding shapes."""
    first, more = steps[0].micro_first, steps[0].micro_more
    accumulated, eager, difference, freed = _gradient_copies(steps[0].weights)
    return GraphSchedule(
        kept=(_kept(first, more, shapes),),
        eager=(accumulated, more, eager),
        recorded=tuple(_as_recorded(each.micro_more) for each in steps),
        compared=(difference, freed),
        uncaptured=tuple(uncaptured),
    )


# Cached, because RunSimulator recognizes traces that it has replayed by their identity.
@lru_cache(maxsize=8)
def _kept(first: MemoryTrace, more: MemoryTrace, shapes: int) -> MemoryTrace:
    """Return a trace that allocates what CUDA graphs keep: gradients at fixed addresses, and driver memory.

    The driver's memory is included although PyTorch's allocator does not allocate it, because it has to fit as well.
    """
    # Every graph has a node for each operation of a micro-batch.
    driver = shapes * DRIVER_BYTES * sum(work.count for work in more.work)
    on_driver = Storage(driver, "temporary", "graphs", "graphs", "graphs.driver")
    storages = (*_named(first, "master_gradient.", "kept"), on_driver)
    return MemoryTrace("graphs", storages, np.arange(len(storages), dtype=np.int32), ())


@lru_cache(maxsize=8)
def _gradient_copies(weights: MemoryTrace) -> tuple[MemoryTrace, ...]:
    """Return traces that allocate three copies of the gradients one by one, and a last trace that frees all three.

    The gradients share one block of memory, but a copy has a tensor for each master weight that ``weights`` places.
    """
    copies = [_named(weights, "master.", name) for name in ("accumulated", "eager", "difference")]
    born = (MemoryTrace("graphs", each, np.arange(len(each), dtype=np.int32), ()) for each in copies)
    everything = tuple(storage for each in copies for storage in each)
    return (*born, MemoryTrace("graphs", everything, ~np.arange(len(everything), dtype=np.int32), ()))


def _named(trace: MemoryTrace, start: str, copy: str) -> tuple[Storage, ...]:
    """Return storages for copies of those in ``trace`` whose names begin with ``start``."""
    return tuple(
        Storage(each.bytes, "gradients", "graphs", "graphs", f"graphs.{copy}.{each.name}")
        for each in trace.storages
        if (each.name or "").startswith(start)
    )


@lru_cache(maxsize=8)
def _as_recorded(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace with its workspaces renamed, because libraries allocate separate ones for the capture stream."""
    storages = tuple(
        replace(each, name=f"{each.name} of graphs") if each.kind == "workspace" and each.name else each
        for each in trace.storages
    )
    return replace(trace, storages=storages)


Seconds = Callable[[Iterable[Work]], float]
OtherPhase = Literal["cache_pictures", "cache_texts", "load", "quantise", "validate", "preview", "checkpoint", "save"]


@dataclass(frozen=True)
class PhaseCounts:
    """Amounts of work outside training steps; the defaults suit a dataset of twenty images."""

    images: int = 20
    """Number of distinct images that the VAE encodes."""
    texts: int = 20
    """Number of distinct texts that are encoded."""
    measured: int = 8
    """Number of images per validation."""
    validations: int = 11
    """Number of validations."""
    previews: int = 6
    """Number of times that all preview prompts are rendered."""
    batches: tuple[tuple[BatchComposition, int], ...] = ()
    """Batch compositions, each with its number of batches. If empty, every batch is assumed to be full and of one
    shape, and each shape to occur in proportion to its number of images."""
    padded: tuple[tuple[BatchComposition, int], ...] = ()
    """Batch compositions as they would be with all captions padded to the limit, if captions differ in length."""
    later: LaterShards = NO_LATER_SHARDS
    """Cache shards that are encoded between epochs."""


def phase_counts(
    job: Job, source: SourceFacts, images: Sequence[ImageRecord], cached: CacheKeys | None = None
) -> PhaseCounts:
    """Return the amounts of work in a frozen job; items that are already ``cached`` are not counted as encoded."""
    steps, report = job.recipe.steps or 1, job.report
    samples = measured_samples(images, job.recipe)
    prompts = report.previews.prompts
    later = later_shards(job, images, () if learns_texts(job.recipe) else source.text_configs, cached)
    images_encoded, texts_encoded = first_shard(
        job,
        images,
        later,
        samples=samples,
        texts=[text for prompt in prompts for text in prompt_texts(prompt, job.recipe)],
        cached=cached,
    )
    return PhaseCounts(
        images=images_encoded,
        texts=texts_encoded,
        measured=len(samples),
        # Before the first step, at intervals, and after the last step.
        validations=1 + -(-steps // (report.validation.every or steps)),
        previews=(report.previews.first is not False) + -(-steps // (report.previews.every or steps)) if prompts else 0,
        batches=batch_compositions(images, job.recipe),
        padded=batch_compositions(images, job.recipe.replaced(caption_padding="limit"))
        if job.recipe.has_caption_lengths
        else (),
        later=later,
    )


@dataclass(frozen=True)
class PhaseTraces:
    """Traces of one phase, in the order in which they are replayed."""

    phase: ForecastPhase
    traces: tuple[MemoryTrace, ...]


def bounding_shapes(workload: Workload) -> tuple[Shape, ...]:
    """Return the shapes that determine the peak: those with the largest and the smallest micro-batch.

    How shapes follow each other decides how memory gets fragmented; further ones would cost traces and change little.
    A micro-batch is as large as the pixels of all its images, because nearly all of its memory grows with them. With
    captions of several lengths, the largest are those that no other exceeds in both pixels and tokens.
    """
    # Stable: of equally large ones, the shape with the most pixels stays first.
    ordered = sorted(workload.shapes, key=lambda shape: -_pixels(shape) * workload.images_at_once(shape))
    largest: list[Shape] = []
    for shape in ordered:
        if not largest or shape[2] > largest[-1][2]:
            largest.append(shape)
    return tuple(dict.fromkeys((*largest, ordered[-1])))


def transitions(buckets: Sequence[Shape]) -> list[Shape]:
    """Return a cyclic order of shapes in which every shape follows every shape, itself included."""
    order = [buckets[0]]
    waiting = {(first, second) for first in buckets for second in buckets}
    while waiting:  # an Eulerian circuit of the complete graph with loops
        # Pairs that have not occurred yet; the shape itself first and the starting one last, so that the cycle closes.
        here = order[-1]
        ahead = [bucket for bucket in (here, *reversed(buckets)) if (here, bucket) in waiting]
        waiting.discard((here, ahead[0]))
        order.append(ahead[0])
    return order[:-1]


def optimizer_step(workload: Workload, shape: Shape, steps: Steps[T], *, first: bool = False) -> list[T]:
    """Return the traces of one optimizer step; micro-batches after the second one are omitted as repetitions."""
    last = steps.optimizer_first if first else steps.optimizer
    return [steps.micro_first, last] if parts(workload, shape) == 1 else [steps.micro_first, steps.micro_more, last]


def repeats(workload: Workload, shape: Shape) -> tuple[int, ...]:
    """Return how often each trace of ``optimizer_step`` occurs in a step."""
    return (1, 1) if parts(workload, shape) == 1 else (1, parts(workload, shape) - 1, 1)


def training_totals(workload: Workload, shape: Shape, steps: Steps[TraceSummary]) -> Totals:
    """Return a lower bound for the memory of training: the totals of one shape's traces in sequence.

    The sequence is: placing the weights, the first step, a later step.
    """
    first, later = (optimizer_step(workload, shape, steps, first=first) for first in (True, False))
    return total_in_sequence([steps.weights, *first, *later])


def parts(workload: Workload, shape: Shape) -> int:
    """Return the number of micro-batches in an effective batch, if all are as large as the largest of one shape.

    In a shape that never fills an effective batch, micro-batches of other shapes complete it.
    """
    return -(-workload.images_per_step // workload.images_at_once(shape))


def step_seconds(workload: Workload, shape: Shape, steps: Steps[TraceSummary], seconds: Seconds) -> float:
    """Return the seconds of one full optimizer step in one shape, as if it had enough images."""
    first, *further = sizes_of_parts(workload.recipe.effective_batch, workload.fit.micro_batch or 1)
    traced = workload.images_at_once(shape)
    once = seconds([*scaled_work(steps.micro_first.work, first / traced), *steps.optimizer.work])
    more = Counter(further).items()
    return once + sum(times * seconds(scaled_work(steps.micro_more.work, part / traced)) for part, times in more)


class RunSchedule:
    """The phases of one workload, in order; missing traces are recorded when they are needed."""

    def __init__(self, workload: Workload, traces: TraceLibrary, counts: PhaseCounts, rate: DeviceSpeed) -> None:
        self.workload = workload
        self.counts = counts
        self.rate = rate
        self.results = ResultStore.for_traces(traces.store)
        self._traces = traces

    def steps(self, bucket: Shape) -> Steps[MemoryTrace]:
        """Return the traces of training on the largest micro-batches of one shape."""
        return self._traces.steps(self.workload, bucket, self.workload.images_at_once(bucket))

    def step_summaries(self, bucket: Shape) -> Steps[TraceSummary]:
        """Return the summaries of the traces that ``steps`` returns."""
        return self._traces.step_summaries(self.workload, bucket, self.workload.images_at_once(bucket))

    def before_training(self) -> list[PhaseTraces]:
        """Return the phases before training: caching, then placing base, adapter and master weights."""
        return [PhaseTraces(phase, self.traces(phase)) for phase in _BEFORE]

    def between_epochs(self) -> list[PhaseTraces]:
        """Return the caching phases between epochs, which run on top of the memory that training holds."""
        later = self.counts.later
        encoded: dict[OtherPhase, int] = {"cache_pictures": later.images, "cache_texts": later.texts}
        return [PhaseTraces(phase, self.traces(phase)) for phase, count in encoded.items() if count]

    def at_start(self) -> list[PhaseTraces]:
        """Return the phases between loading and the first step."""
        return [PhaseTraces(phase, self.traces(phase)) for phase in AT_START]

    def between_steps(self) -> list[PhaseTraces]:
        """Return the phases between two steps, which run on top of what training left allocated and cached."""
        return [PhaseTraces(phase, self.traces(phase)) for phase in BETWEEN_STEPS]

    def prefetch_requests(self) -> list[TraceRequest]:
        """Return requests for all phases except training, the last phase first.

        A simulation traces the first phases itself, so the prefetching process begins with the last one.
        """
        return [TraceRequest(_as_traced(self.workload, part), part) for part in reversed((*_BEFORE, *BETWEEN_STEPS))]

    def other_seconds(self, seconds: Seconds) -> dict[ForecastPhase, float]:
        """Return the seconds that the whole run spends in each phase except training."""
        measured = self.counts.validations * self.counts.measured
        return {
            "cache_pictures": self._image_seconds(seconds),
            "cache_texts": self._text_seconds(seconds),
            "load": self.loading(),
            "quantise": self.loading(),
            "validate": measured * seconds(self._work("validate")),
            "preview": self.counts.previews * seconds(self._work("preview")),
            "checkpoint": 0.0,
            "save": 0.0,
        }

    def key(self, *more: object) -> str:
        """Return the SHA-256 (hex) of everything that a run replays and of ``more`` values that affect its result."""
        workload, shapes = self.workload, bounding_shapes(self.workload)
        others = [TraceRequest(_as_traced(workload, part), part).key for part in (*_BEFORE, *BETWEEN_STEPS)]
        steps = [TraceRequest(workload, "micro", (shape, workload.images_at_once(shape))).key for shape in shapes]
        steps.append(TraceRequest(workload, "optimizer").key)
        several = [parts(workload, shape) > 1 for shape in shapes]
        # Changing these lists invalidates all stored results, the shipped ones included.
        content: list[object] = [others, steps, several if len(set(several)) > 1 else several[0], more]
        if self._records:  # only then, because keys without graphs must not change
            content.append([GRAPH_RULES, self._graph_shapes()])
        return hashlib.sha256(json.dumps(content).encode("utf-8")).hexdigest()

    def first_step(self) -> tuple[MemoryTrace, ...]:
        """Return the traces of the first optimizer step, which allocates optimizer state, in the largest shape."""
        shape = bounding_shapes(self.workload)[0]
        return tuple(optimizer_step(self.workload, shape, self.steps(shape), first=True))

    def round(self) -> tuple[MemoryTrace, ...]:
        """Return the traces of later optimizer steps in which every bounding shape follows every other.

        One case is left out: a batch of leftover images in several shapes, in a run whose full batches are a single
        micro-batch. It has several micro-batches, and the master weights' gradients stay allocated between them. That
        needs more memory only if the adapter is larger than the memory that the missing images would take.
        """
        order = transitions(bounding_shapes(self.workload))
        return tuple(trace for shape in order for trace in optimizer_step(self.workload, shape, self.steps(shape)))

    def graphs(self) -> GraphSchedule | None:
        """Return the traces that CUDA graphs add to a run; None for a job without graphs."""
        if not self._records:
            return None
        recorded = [self.steps(shape) for shape in bounding_shapes(self.workload)]
        # A shape that occurs late is first computed without a graph, next to all captured ones; it may be any shape.
        uncaptured = self.round() if self._graph_shapes() > 1 else ()
        return graph_schedule(recorded, uncaptured, min(self._graph_shapes(), MAX_CUDA_GRAPHS))

    @property
    def _records(self) -> bool:
        return self.workload.fit.cuda_graphs and self.workload.fit.device != "cpu"

    def _graph_shapes(self) -> int:
        """Return the number of distinct micro-batches, which differ in shape or number of images."""
        most = self.workload.fit.micro_batch or 1
        parts = {part for batch in self._batch_counts() for part in split(batch, most)}
        # Captions that are shortened at random bring shapes that the batches were not counted with.
        others = set(self.workload.shapes) - {shape for shape, _ in parts} if self.workload.lengths else ()
        return len(parts) + len(others) if parts else len(self.workload.buckets)

    def step_seconds(self, seconds: Seconds) -> dict[Shape, float]:
        """Return the seconds of a full optimizer step by shape."""
        of_shape = self._interpolated(
            lambda shape: step_seconds(self.workload, shape, self.step_summaries(shape), seconds)
        )
        return {shape: of_shape(shape) for shape in self.workload.shapes}

    def mean_step_seconds(self, seconds: Seconds) -> float:
        """Return the mean seconds of an optimizer step, with mixed and short batches weighted by their frequency."""
        if not (batch_counts := self._batch_counts()):
            full = self.step_seconds(seconds)
            images = (bucket.images for bucket in self.workload.buckets)
            shown = dict(zip(self.workload.shapes, images, strict=True))
            weights = shown if any(shown.values()) else dict.fromkeys(full, 1)
            return sum(full[shape] * weight for shape, weight in weights.items()) / sum(weights.values())
        most = self.workload.fit.micro_batch or 1

        @cache  # the same few parts occur in many batch compositions
        def of_part(part: Part, place: Literal["micro_first", "micro_more"]) -> float:
            shape, count = part

            def of_known(known: Shape) -> float:
                share = count / self.workload.images_at_once(known)
                return seconds(scaled_work(getattr(self.step_summaries(known), place).work, share))

            return self._interpolated(of_known)(shape)

        total = seconds(self.step_summaries(bounding_shapes(self.workload)[0]).optimizer.work) * sum(
            batch_counts.values()
        )
        for batch, times in batch_counts.items():
            first, *further = split(batch, most)
            total += times * (of_part(first, "micro_first") + sum(of_part(part, "micro_more") for part in further))
        return total / sum(batch_counts.values())

    def _batch_counts(self) -> dict[BatchComposition, int]:
        """Return how often each batch composition occurs; empty if the counts do not match the workload's shapes.

        They do not match if the planner has changed the workload's shapes or batch without counting again.
        """
        shapes = set(self.workload.shapes)
        same = all(
            shapes.issuperset(shape for shape, _ in batch)
            and sum(count for _, count in batch) <= self.workload.recipe.effective_batch
            for batch, _ in self.counts.batches
        )
        return dict(self.counts.batches) if same else {}

    def _interpolated(self, seconds: Callable[[Shape], float]) -> Callable[[Shape], float]:
        """Return ``seconds`` as a function that interpolates linearly in pixels between two of the bounding shapes.

        Captions of other lengths change the seconds by the factor by which they change those of the largest images.
        """
        # Other shapes have no traces: one for each shape would take seconds each.
        known = bounding_shapes(self.workload)
        (*size, _), small = max(known, key=_pixels), min(reversed(known), key=_pixels)
        by_tokens = {shape[2]: seconds((size[0], size[1], shape[2])) for shape in self.workload.shapes}
        large, least = by_tokens[small[2]], seconds(small)
        pixels = size[0] * size[1]
        between = pixels - _pixels(small)
        slope = (large - least) / between if between else large / pixels

        def of_shape(shape: Shape) -> float:
            if shape == small:
                return least
            return by_tokens[shape[2]] / large * (large - slope * (pixels - _pixels(shape)))

        return of_shape

    def traces(self, part: TracePart) -> tuple[MemoryTrace, ...]:
        """Return the traces of a phase other than training."""
        return self._traces.phase(_as_traced(self.workload, part), part)

    def _work(self, part: TracePart, stage: str | None = None) -> list[Work]:
        summaries = self._traces.phase_summaries(_as_traced(self.workload, part), part)
        return [work for each in summaries for work in each.work if stage is None or work.stage == stage]

    def _text_seconds(self, seconds: Seconds) -> float:
        """Return the total seconds of encoding captions; a partial last batch takes as long as a full one."""
        texts = self.counts.texts + self.counts.later.texts
        return -(-texts // text_batch_size(self.workload.fit)) * seconds(self._work("cache_texts", "texts"))

    def _image_seconds(self, seconds: Seconds) -> float:
        """Return the total seconds of encoding images, weighted by the share of images in each shape."""
        shown = sum(bucket.images for bucket in self.workload.buckets) or 1
        return sum(
            (self.counts.images + self.counts.later.images)
            * bucket.images
            / shown
            * seconds(self._work("cache_pictures", f"encode {bucket.width}x{bucket.height}"))
            for bucket in self.workload.buckets
        )

    def loading(self) -> float:
        """Return the seconds to load all weights that training needs."""
        traces = (*self.traces("load"), *self.traces("quantise"))
        size = sum(storage.bytes for trace in traces for storage in trace.storages if storage.kind == "weights")
        return loading_seconds(size + streamed_bytes(traces), self.rate)


def _pixels(shape: Shape) -> int:
    return shape[0] * shape[1]


def _as_traced(workload: Workload, part: TracePart) -> Workload:
    """Return the workload with the settings removed that do not affect a phase, to share one trace between many fits.

    Validation is independent of checkpointing because it has no backward.
    """
    return (
        replace(workload, fit=workload.fit.replaced(gradient_checkpointing="none")) if part == "validate" else workload
    )
