"""Find the configurations that fill a GPU best: batch, resolution, rank, checkpointing, bits and optimizer.

As in Salisbury (2024), a configuration that is larger in every respect than one that does not fit is skipped, and those
that come closest to the GPU's memory are shown. All memory is that of training, exact where the traces are; encoding,
validation and previews are not part of it, because a run can tile and offload them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.methods import ADAPTERS, MasterWeight
from trainer.config.optimizers.kinds import AdamW8bitConfig, AdamWConfig, Lion8bitConfig, LionConfig, OptimizerConfig
from trainer.errors import JobError
from trainer.memory.device import roofline
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.forecast import Simulation
from trainer.memory.forecast.schedule import MOST_ROUNDS
from trainer.memory.planner.evaluator import QUALITIES, time_step
from trainer.memory.planner.optimizers import (
    estimated_traces,
    estimated_work,
    master_weights,
    state_bytes,
    temporary_bytes,
)
from trainer.memory.planner.search_space import Checkpointing
from trainer.memory.trace.deadline import Deadline
from trainer.memory.trace.interpolate import StepFamily, StepShape, read_family
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.workload import Workload, complete_fit
from trainer.protocol.sweep import Sweep, SweepPoint

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
SIDES: dict[Family, tuple[int, ...]] = {
    "sd15": (512, 640, 768, 896, 1024),
    "sdxl": (512, 640, 768, 896, 1024, 1152, 1280, 1536),
}
RANKS = (4, 8, 16, 32, 64, 128)
# Configurations to show, and to simulate at most: each simulation takes a fifth of a second for SDXL.
SHOWN = 12
SIMULATIONS = 36
# Reserved bytes for each allocated one, until a simulation has shown the real ratio.
USUAL_OVERHEAD = 1.05
# A configuration expected to be 1 % too large is simulated after those that fill all but 2 % of the GPU.
PENALTY = 2.0


@dataclass(frozen=True, slots=True)
class _Method:
    """How a base is stored and which activations are kept, without regard to what is trained."""

    quantize: str
    checkpointing: str | tuple[str, ...]


def sweep(
    workload: Workload,
    written: FitConfig,
    device_state: DeviceState,
    traces: TraceLibrary,
    deadline: Deadline,
    check: Callable[[], None] = lambda: None,
) -> Sweep:
    """Return the configurations that fill a GPU best; keys of the fit that the user has ``written`` do not change.

    No trace is recorded after ``deadline``; what needs one is left out. ``check`` is called often and may raise to
    cancel. Raises JobError if none of the GPU's memory can be used, and for adapters whose size does not rise evenly
    with the rank, because most ranks are interpolated.
    """
    device_state.require_budget()
    if workload.recipe.adapter in ("lokr", "oft"):
        kind = ADAPTERS[workload.recipe.adapter].title
        raise JobError(
            "plan.sweep",
            f"Could not compare configurations: the size of {kind} does not rise evenly with the rank.",
            "Plan one rank at a time, without --sweep.",
        )
    began = time.monotonic()
    search = _Sweep(workload, written, device_state, traces, deadline, check)
    fitting = [point for method in search.methods for point in search.points_of(method)]
    best = list(_undominated(fitting))
    shown = search.simulated(best)
    keys = {_key(point) for point in shown}
    everything = _with_front([*shown, *(point for point in fitting if _key(point) not in keys)])
    return Sweep(
        points=tuple(everything[: len(shown)]),
        others=tuple(everything[len(shown) :]),
        total=search.total,
        computed=len(search.computed),
        missing=search.missing,
        dominated=len(fitting) - len(best),
        too_large=len(search.too_large),
        left_out=tuple((method.quantize, _name(method.checkpointing)) for method in search.left_out),
        budget=device_state.budget,
        seconds=time.monotonic() - began,
    )


@dataclass
class _Sweep:
    """A sweep in progress."""

    workload: Workload
    written: FitConfig
    device_state: DeviceState
    traces: TraceLibrary
    deadline: Deadline
    check: Callable[[], None]
    computed: set[tuple[object, ...]] = field(default_factory=set)
    too_large: set[tuple[object, ...]] = field(default_factory=set)
    missing: int = 0
    left_out: list[_Method] = field(default_factory=list)
    families: dict[_Method, StepFamily] = field(default_factory=dict)
    weights: dict[int, list[MasterWeight]] = field(default_factory=dict)
    """Sizes of the trained weights by rank."""
    simulations: list[SweepPoint] = field(default_factory=list)

    @property
    def methods(self) -> list[_Method]:
        """Return the combinations of quantization and checkpointing, the most precise and fastest first."""
        bits: tuple[str, ...] = (self.written.quantize,) if self.written.quantize else ("none", "int8", "nf4")
        stated = self.written.gradient_checkpointing
        sets: tuple[Checkpointing, ...] = (stated,) if stated is not None else ("none", "full")
        return [_Method(quantize, checkpointing) for quantize, checkpointing in product(bits, sets)]

    @property
    def batches(self) -> tuple[int, ...]:
        """Return the batches to try; a written micro-batch is the only one."""
        return (self.written.micro_batch,) if self.written.micro_batch else BATCHES

    @property
    def sides(self) -> tuple[int, ...]:
        """Return the resolutions to try, the recipe's own included."""
        return tuple(sorted({*SIDES[self.workload.family], self.workload.recipe.resolution or SIDES["sd15"][0]}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks to try, the recipe's own included."""
        return tuple(sorted({*RANKS, self.workload.recipe.rank}))

    @property
    def optimizers(self) -> tuple[OptimizerConfig, ...]:
        """Return the recipe's optimizer, and the same with 8-bit state if there is such a one."""
        own = self.workload.recipe.optimizer
        match own:
            case AdamWConfig():
                return own, AdamW8bitConfig()
            case LionConfig():
                return own, Lion8bitConfig()
        return (own,)

    @property
    def total(self) -> int:
        """Return the number of all combinations."""
        axes = (self.methods, self.optimizers, self.batches, self.sides, self.ranks)
        return len(list(product(*axes)))

    def points_of(self, method: _Method) -> Iterator[SweepPoint]:
        """Yield, for each rank, resolution and optimizer, the largest batch that fits."""
        family = self._family(method)
        absent = sum(family is None or not family.has(batch) for batch in self.batches)
        if absent:
            self.left_out.append(method)
            self.missing += absent * len(self.optimizers) * len(self.sides) * len(self.ranks)
        if family is None:
            return
        for optimizer in self.optimizers:
            # A larger rank or resolution never needs less memory, so the largest batch only falls.
            allowed = {side: len(self.batches) for side in self.sides}
            for rank, side in product(self.ranks, self.sides):
                self.check()
                count = min(allowed[smaller] for smaller in self.sides if smaller <= side)
                while count and (point := self._point(method, optimizer, rank, side, count)) is None:
                    count -= 1
                allowed[side] = count
                if count and point is not None:
                    yield point

    def simulated(self, candidates: Iterable[SweepPoint]) -> list[SweepPoint]:
        """Return the fullest candidates that fit when they are simulated, the fullest first.

        Blocks that are cached but not used take up to a tenth of the memory. What earlier simulations have shown
        decides which candidates are simulated next, so that few turn out to be too large.
        """
        waiting = {_key(point): point for point in candidates}
        found: list[SweepPoint] = []
        for _ in range(SIMULATIONS):
            if not waiting or len(found) == SHOWN:
                break
            self.check()
            point = waiting.pop(_key(max(waiting.values(), key=self._promise)))
            reserved = self._reserved(point)
            played = replace(point, reserved=reserved, fill=reserved / self.device_state.budget)
            self.simulations.append(played)
            if played.fill <= 1.0:
                found.append(played)
                continue
            self.too_large.add(_key(point))
            count = self.batches.index(point.batch)
            if smaller := count and self._point(
                _method_of(point), self._optimizer_of(point), point.rank, point.resolution, count
            ):
                waiting[_key(smaller)] = smaller
        return sorted(found, key=lambda point: -point.fill)

    def _promise(self, point: SweepPoint) -> float:
        """Return a sort key: how full the GPU is expected to be, lowered if that is more than full."""
        alike = [known for known in self.simulations if _method_of(known) == _method_of(point)]
        nearest = min(alike, key=lambda known: _distance(known, point), default=None)
        overhead = (nearest.reserved or 0) / nearest.allocated if nearest else USUAL_OVERHEAD
        expected = point.fill * overhead
        # The overhead is only guessed, so a configuration that may be slightly too large is worth a simulation.
        return expected if expected <= 1.0 else 1.0 - PENALTY * (expected - 1.0)

    def _family(self, method: _Method) -> StepFamily | None:
        if method not in self.families:
            dtype = "bf16" if self.device_state.gpu.bf16 else "fp16"
            fit = complete_fit(self.written.replaced(dtype=self.written.dtype or dtype))
            fit = fit.replaced(quantize=method.quantize, gradient_checkpointing=method.checkpointing)
            self.check()
            family = read_family(replace(self.workload, fit=fit), self.traces, self.deadline)
            if family is None:
                return None
            self.families[method] = family
        return self.families[method]

    def _point(
        self, method: _Method, optimizer: OptimizerConfig, rank: int, side: int, count: int
    ) -> SweepPoint | None:
        """Return the configuration with the ``count``-th batch; None if it does not fit or cannot be computed."""
        family, shape = self.families[method], StepShape(self.batches[count - 1], side, rank)
        if not family.has(shape.batch):
            return None
        weights = self._weights(family, rank)
        placed, step = family.weights_totals(rank), family.step_totals(shape)
        state, temporary = state_bytes(optimizer, weights), temporary_bytes(optimizer, weights)
        steady = placed.net + state + max(step.peak, step.net + temporary)
        allocated = max(placed.peak, steady)
        point = SweepPoint(
            batch=shape.batch,
            resolution=side,
            rank=rank,
            gradient_checkpointing=method.checkpointing,
            quantize=method.quantize,
            optimizer=optimizer.name,
            allocated=allocated,
            reserved=None,
            fill=allocated / self.device_state.budget,
            seconds_per_image=0.0,
        )
        self.computed.add(_key(point))
        if point.fill > 1.0:
            self.too_large.add(_key(point))
            return None
        work = [*family.work(shape), estimated_work(optimizer, weights)]
        return replace(point, seconds_per_image=roofline.seconds(work, self.device_state.rate) / shape.batch)

    def _weights(self, family: StepFamily, rank: int) -> list[MasterWeight]:
        if rank not in self.weights:
            self.weights[rank] = master_weights(family.weights_trace(rank), self.workload.at_rank(rank))
        return self.weights[rank]

    def _optimizer_of(self, point: SweepPoint) -> OptimizerConfig:
        return next(each for each in self.optimizers if each.name == point.optimizer)

    def _reserved(self, point: SweepPoint) -> int:
        """Return the most bytes that training reserves from the driver, by replaying it on the allocator."""
        family, optimizer = self.families[_method_of(point)], self._optimizer_of(point)
        placed, micro = family.traces(StepShape(point.batch, point.resolution, point.rank))
        first, later = estimated_traces(optimizer, self._weights(family, point.rank), micro)
        simulation = Simulation(self.device_state, None)
        simulation.play("load", [placed])
        simulation.play("first_step", [micro, first])
        for _ in range(MOST_ROUNDS):  # the first round fragments the cache, so a later one may reserve more
            before = simulation.allocator.reserved
            simulation.play("train", [micro, later])
            if simulation.allocator.reserved == before:
                break
        return simulation.reserved


def _undominated(points: Sequence[SweepPoint]) -> Iterator[SweepPoint]:
    """Yield the configurations that no other one equals or beats in every respect; of equal ones, the first."""
    ranked = [(_merits(point), point) for point in points]
    for place, (merits, point) in enumerate(ranked):
        beaten = any(
            other != place and _at_least(theirs, merits) and (theirs != merits or other < place)
            for other, (theirs, _) in enumerate(ranked)
        )
        if not beaten:
            yield point


def _merits(point: SweepPoint) -> tuple[int, ...]:
    """Return what is good about a configuration; more is better."""
    return (
        point.batch,
        point.resolution,
        point.rank,
        -QUALITIES.index(point.quantize),
        not point.optimizer.endswith("8bit"),
        -time_step(point.seconds_per_image),
    )


def _at_least(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(mine >= theirs for mine, theirs in zip(one, other, strict=True))


def _with_front(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Return the points with those marked that are on the Pareto front of memory and time of their resolution."""
    marked: dict[int, SweepPoint] = {}
    for side in {point.resolution for point in points}:
        alike = [(point.allocated, point.seconds_per_image, place) for place, point in enumerate(points)
                 if point.resolution == side]  # fmt: skip
        fastest = float("inf")
        for _, seconds, place in sorted(alike):
            if seconds < fastest:
                fastest = seconds
                marked[place] = replace(points[place], front=True)
    return [marked.get(place, point) for place, point in enumerate(points)]


def _key(point: SweepPoint) -> tuple[object, ...]:
    return (
        point.batch,
        point.resolution,
        point.rank,
        point.gradient_checkpointing,
        point.quantize,
        point.optimizer,
    )


def _distance(one: SweepPoint, other: SweepPoint) -> float:
    """Return by how many doublings of batch, side and rank two configurations differ."""
    pairs = ((one.batch, other.batch), (one.resolution, other.resolution), (one.rank, other.rank))
    return sum(abs(math.log2(first / second)) for first, second in pairs)


def _method_of(point: SweepPoint) -> _Method:
    return _Method(point.quantize, point.gradient_checkpointing)


def _name(checkpointing: str | tuple[str, ...]) -> str:
    return checkpointing if isinstance(checkpointing, str) else "some"
