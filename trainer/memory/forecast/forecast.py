"""Forecast a job's memory and time on a GPU by replaying its traces on a simulated allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import cycle, islice
from typing import Literal, NamedTuple, TypeVar

from trainer.dataset.sampling import Shape
from trainer.memory.allocator.allocator import Allocator
from trainer.memory.allocator.replay import (
    Failure,
    Moment,
    Replayed,
    SimulatedTrace,
    SurvivingStorage,
    by_kind,
    by_module,
    replay,
)
from trainer.memory.device import roofline
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.host_memory import host_bytes, streamed_bytes
from trainer.memory.forecast.peaks import HighPoint, high_points
from trainer.memory.forecast.results import RULES, ForecastResult, OomResult, is_full, most_reserved, without_details
from trainer.memory.forecast.schedule import (
    MOST_ROUNDS,
    GraphSchedule,
    PhaseCounts,
    PhaseTraces,
    RunSchedule,
    Seconds,
    bounding_shapes,
    parts,
    repeats,
    transitions,
)
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import MemoryTrace, Work, unet_block
from trainer.memory.trace.workload import Workload
from trainer.protocol.forecast import PHASES, RELEASE_POINTS, Forecast, ForecastPhase, Peak, PhaseForecast
from trainer.protocol.records import to_record

K = TypeVar("K")
V = TypeVar("V")
Join = Literal["replace", "extend", "highest"]
"""What to do with a phase's earlier result: replace it, extend it, or keep whichever reserves (or allocates) more."""
TraceGroups = tuple[tuple[int, ...], ...]
"""Identities (id()) of the traces replayed so far, by group; runs that replayed the same traces share a result."""

GROUPS_TO_TRAINING = 3
"""Number of trace groups up to and including training: loading, work before the first step, training."""
SAMPLES = 200
LARGEST_PARTS = 6
# Number of simulations to keep, at some megabytes each: enough for one or two plans.
MOST_KEPT = 64
MOST_PEAKS = 8
# Main memory that Python, PyTorch with CUDA and the libraries take before anything is loaded.
PROCESS_BYTES = 1_600_000_000
# Free bytes to assume if nothing limits a run: more than any machine has.
MAIN_MEMORY = 2**50
# Names of dtypes in traces, by their names in fit settings.
TRACE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass
class Simulation:
    """Simulation of a run, replayed phase by phase on one allocator until the run ends or memory runs out."""

    device_state: DeviceState
    capacity: int | None
    allocator: Allocator = field(init=False)
    names: dict[str, SurvivingStorage] = field(default_factory=dict)
    phases: dict[ForecastPhase, Replayed] = field(default_factory=dict)
    """Replayed phases; for a repeated phase, the occurrence that reserves (or else allocates) the most."""
    round_retries: tuple[int, ...] = ()
    """For each trace in the last round of training, how often all cached memory was returned to make room."""
    failure: Failure | None = None
    failed_in: ForecastPhase | None = None

    def __post_init__(self) -> None:
        """Create the allocator of an empty GPU."""
        self.allocator = Allocator(replace(self.device_state.allocator, capacity=self.capacity))

    def play(self, phase: ForecastPhase, traces: Iterable[MemoryTrace], *, join: Join = "replace") -> bool:
        """Replay traces as a phase; return False if memory ran out, now or earlier.

        Cached memory is returned to the driver at the points at which a real run does so.
        """
        former = self.phases.get(phase)
        played: list[SimulatedTrace] = list(former.played) if former and join == "extend" else []
        for trace in traces:
            if self.failure is not None:
                return False
            replayed = replay([trace], self.allocator, self.names, self.device_state.workspace_bytes)
            played += replayed.played
            self.failure = replayed.failure
            if self.failure is not None:
                self.failed_in = phase
            if trace.name in RELEASE_POINTS:  # where the trainer calls torch.cuda.empty_cache as well
                self.allocator.empty_cache()
        if played:
            now = Replayed(tuple(played), self.failure)
            self.phases[phase] = max(former, now, key=_peak_bytes) if former and join == "highest" else now
        return self.failure is None

    def copy(self, capacity: int | None) -> Simulation:
        """Return an independent copy that continues from here with a different limit."""
        twin = Simulation(self.device_state, capacity)
        twin.allocator = self.allocator.copy(capacity)
        twin.names, twin.phases = dict(self.names), dict(self.phases)
        twin.round_retries = self.round_retries
        twin.failure, twin.failed_in = self.failure, self.failed_in
        return twin

    @property
    def unlimited(self) -> bool:
        """Return whether no request was refused because of the memory limit."""
        return self.allocator.refused is None

    @property
    def oom_result(self) -> OomResult | None:
        """Return what the limit caused and the range of limits that cause the same; None if no request was refused."""
        if self.allocator.refused is None:
            return None
        return OomResult(self.allocator.admitted, self.allocator.refused, self.failed_in, self.round_retries)

    @property
    def reserved(self) -> int:
        """Return the most bytes reserved from the driver in any phase."""
        return max(int(played.reserved.max()) for phase in self.phases.values() for played in phase.played)


def _peak_bytes(phase: Replayed) -> tuple[int, int]:
    """Return the most bytes reserved and the most allocated in a phase.

    Reserved bytes often remain the same while allocated ones grow: by a workspace of cuBLAS, for instance, that the
    first step takes from cached memory and keeps.
    """
    return phase.reserved(phase.peak_reserved()), phase.allocated(phase.peak_allocated())


def simulate_run(schedule: RunSchedule, device_state: DeviceState, capacity: int | None) -> Simulation:
    """Simulate a whole run; ``capacity`` limits the bytes that the allocator reserves."""
    return RunSimulator(device_state).simulate(schedule, capacity)


class BudgetCheck(NamedTuple):
    """Effect of a memory budget on a run."""

    failed_in: ForecastPhase | None
    retry_seconds: float
    """Seconds per optimizer step spent on returning cached memory, after memory use has settled."""


class RunSimulator:
    """Simulator of whole runs on a GPU; work that several runs share is replayed only once.

    A plan compares dozens of fits, most of which differ only in training: loading and caching are replayed once.
    Results depend on the GPU only through its workspace sizes and allocator settings, so similar GPUs share them too.
    """

    def __init__(self, device_state: DeviceState, before_playing: Callable[[], None] = lambda: None) -> None:
        """Create a simulator; ``before_playing`` is called before each replay and may raise to cancel."""
        self.device_state = device_state
        self.before_playing = before_playing
        # By the identities of the traces. The traces are kept with the result: otherwise a new trace could get the
        # address of a freed one, and with it a wrong result.
        self._played: dict[tuple[int | None, TraceGroups], tuple[Simulation, Sequence[MemoryTrace]]] = {}
        self._outcomes: dict[str, ForecastResult] = {}
        self._oom_results: dict[str, tuple[OomResult, ...]] = {}

    def check_budget(self, schedule: RunSchedule, capacity: int) -> BudgetCheck:
        """Return the effect of a limit of ``capacity`` bytes on a run; simulate the run only if that is not known."""
        key = self.key(schedule)
        known = self._known_outcome(key, schedule, brief=True)
        # An expandable segment asks for more than it takes if it starts in free memory. So a limit can refuse a request
        # even though it exceeds everything that an unlimited run has reserved.
        expands = self.device_state.allocator.expandable
        if known is not None and not expands and most_reserved(known) <= capacity:
            return BudgetCheck(None, 0.0)
        oom_result = self._known_oom(key, schedule, capacity)
        if oom_result is None:
            simulation = self.simulate(schedule, capacity)
            oom_result = simulation.oom_result
            if oom_result is None:
                self._keep_outcome(key, schedule, _outcome(schedule.workload, simulation, brief=True))
                return BudgetCheck(None, 0.0)
            self._keep_oom(key, schedule, oom_result)
        return BudgetCheck(oom_result.failed_in, retry_seconds(schedule, oom_result.retries))

    def unlimited_result(self, schedule: RunSchedule, *, brief: bool) -> ForecastResult:
        """Return the forecasts of all phases without a memory limit; new results are saved to disk."""
        key = self.key(schedule)
        outcome = self._known_outcome(key, schedule, brief=brief)
        if outcome is None:
            outcome = _outcome(schedule.workload, self.simulate(schedule, None), brief=brief)
            self._keep_outcome(key, schedule, outcome)
        return outcome

    def key(self, schedule: RunSchedule) -> str:
        """Return the key under which the results of a run on this GPU are stored."""
        overheads = self.device_state.overheads
        workspaces = overheads.cublas_workspace_bytes, overheads.cudnn_workspace_share
        return schedule.key(RULES, to_record(self.device_state.allocator), workspaces)

    def _known_outcome(self, key: str, schedule: RunSchedule, *, brief: bool) -> ForecastResult | None:
        known = self._outcomes.get(key)
        if known is None or not (brief or is_full(known)):
            known = schedule.results.load(key, brief=brief)
            if known is not None:
                _remember(self._outcomes, key, known)
        return known and (without_details(known) if brief else known)

    def _known_oom(self, key: str, schedule: RunSchedule, capacity: int) -> OomResult | None:
        if key not in self._oom_results:
            _remember(self._oom_results, key, schedule.results.oom_result(key))
        return next((found for found in self._oom_results[key] if found.applies_to(capacity)), None)

    def _keep_oom(self, key: str, schedule: RunSchedule, found: OomResult) -> None:
        _remember(self._oom_results, key, (*self._oom_results[key], found))
        with suppress(OSError):  # as in _keep_outcome
            schedule.results.save_oom(key, found)

    def _keep_outcome(self, key: str, schedule: RunSchedule, outcome: ForecastResult) -> None:
        _remember(self._outcomes, key, outcome)
        with suppress(OSError):  # a full disk costs the next forecast a second, but does not fail this one
            schedule.results.save(key, outcome)

    def between_epochs(self, schedule: RunSchedule, capacity: int | None) -> Simulation:
        """Simulate encoding between epochs within ``capacity`` bytes, on top of the memory that training holds.

        Training holds the most late in a run, when validation and previews have fragmented its memory.
        """
        simulation = self.simulate(schedule, capacity).copy(capacity)
        simulation.phases = {}  # only what happens between epochs counts here
        _play_all(simulation, schedule.between_epochs())
        return simulation

    def simulate(self, schedule: RunSchedule, capacity: int | None, *, chapters: int | None = None) -> Simulation:
        """Simulate the run to its end, or until ``capacity`` bytes are not enough.

        With ``chapters``, only that many groups of traces are replayed. The returned simulation is shared, so callers
        must not replay anything else on it.
        """
        simulation = Simulation(self.device_state, capacity)
        read: TraceGroups = ()
        for traces, play in islice(_trace_groups(schedule), chapters):
            read = (*read, tuple(map(id, traces)))
            known = self._known(capacity, read)
            if known is None:
                self.before_playing()
                known = simulation.copy(capacity)  # the original may be shared with other runs
                play(known)
                # A limit that made no difference is stored as None, so every higher limit finds the result.
                _remember(self._played, (None if known.unlimited else capacity, read), (known, traces))
            simulation = known
            if simulation.failure is not None:
                break
        return simulation

    def _known(self, capacity: int | None, chapters: TraceGroups) -> Simulation | None:
        """Return a stored simulation with this limit, or an unlimited one that stayed within the limit; else None."""
        free, _ = self._played.get((None, chapters), (None, ()))
        if free is not None and (capacity is None or free.allocator.admitted <= capacity):
            return free
        within, _ = self._played.get((capacity, chapters), (None, ()))
        return within


def _remember(kept: dict[K, V], key: K, value: V) -> None:
    """Add an entry, and remove the oldest ones if there are more than MOST_KEPT."""
    kept[key] = value
    while len(kept) > MOST_KEPT:
        del kept[next(iter(kept))]


def _trace_groups(schedule: RunSchedule) -> Iterator[tuple[Sequence[MemoryTrace], Callable[[Simulation], object]]]:
    """Yield the parts of a run in order: the traces of each, and a function that replays them.

    Training occurs twice: the second time shows the effect of the fragmentation caused by validation, previews and
    saving.
    """
    before, start = schedule.before_training(), schedule.at_start()
    yield _traces(before), lambda simulation: _play_all(simulation, before)
    yield _traces(start), lambda simulation: _play_all(simulation, start)
    first, later, graphs = schedule.first_step(), schedule.round(), schedule.graphs()

    def train(simulation: Simulation) -> bool:
        done = simulation.play("first_step", first) and _train(simulation, later)
        done = done and (graphs is None or _record(simulation, graphs))
        simulation.round_retries = tuple(played.retries for played in simulation.phases["train"].played) if done else ()
        return done

    yield (*first, *later, *(graphs.traces if graphs else ())), train
    between = schedule.between_steps()
    yield _traces(between), lambda simulation: _play_all(simulation, between)
    # A step that replays a graph allocates almost nothing.
    again = graphs.uncaptured if graphs else later
    yield again, lambda simulation: _train(simulation, again, join="highest")


def _traces(phases: Iterable[PhaseTraces]) -> tuple[MemoryTrace, ...]:
    return tuple(trace for phase_traces in phases for trace in phase_traces.traces)


def _play_all(simulation: Simulation, phases: Iterable[PhaseTraces]) -> bool:
    return all(simulation.play(phase_traces.phase, phase_traces.traces, join="highest") for phase_traces in phases)


def _train(simulation: Simulation, traces: Sequence[MemoryTrace], *, join: Join = "replace") -> bool:
    """Replay optimizer steps until reserved memory stops growing; return False if memory ran out."""
    for _ in range(MOST_ROUNDS):  # the first round fragments the cache, so a later one may reserve more
        before = simulation.allocator.reserved
        if not simulation.play("train", traces, join=join):
            return False
        if simulation.allocator.reserved == before:
            return True
    return True


def _record(simulation: Simulation, graphs: GraphSchedule) -> bool:
    """Replay the capture of CUDA graphs into one pool, then steps without graphs; return False if memory ran out."""
    done = simulation.play("train", (*graphs.kept, *graphs.eager), join="extend")
    simulation.allocator.empty_cache()  # as torch.cuda.graph does
    # Captured memory stays reserved in a private pool, even between steps.
    with simulation.allocator.recording():
        done = done and simulation.play("train", graphs.recorded, join="extend")
    return done and simulation.play("train", (*graphs.compared, *graphs.uncaptured), join="extend")


def retry_seconds(schedule: RunSchedule, retries_by_trace: Sequence[int]) -> float:
    """Return the seconds per optimizer step spent on returning cached memory, after memory use has settled.

    ``retries_by_trace`` is how often memory was returned in each trace of the last round of training.
    """
    order = transitions(bounding_shapes(schedule.workload))
    times = [often for shape in order for often in repeats(schedule.workload, shape)]
    retries = sum(retries * often for retries, often in zip(retries_by_trace, cycle(times), strict=False))
    return roofline.RETRY_SECONDS * retries * len(times) / len(order) / max(len(retries_by_trace), 1)


def forecast(
    workload: Workload, device_state: DeviceState, traces: TraceLibrary, counts: PhaseCounts | None = None
) -> Forecast:
    """Forecast a workload on a GPU; missing traces are recorded first, which takes seconds.

    Raises OSError if a trace cannot be read.
    """
    schedule = RunSchedule(workload, traces, counts or PhaseCounts(), device_state.rate)
    return forecast_of(schedule, device_state)


def forecast_of(
    schedule: RunSchedule,
    device_state: DeviceState,
    *,
    runs: RunSimulator | None = None,
    brief: bool = False,
) -> Forecast:
    """Forecast a run; ``brief`` omits peaks and timelines, ``runs`` reuses simulations of similar runs."""
    factor = device_state.correction.time_factor

    def seconds(work: Iterable[Work]) -> float:
        return factor * roofline.seconds(work, device_state.rate)

    runs = runs or RunSimulator(device_state)
    failed_in, retrying = runs.check_budget(schedule, device_state.budget)
    between, alone = _between_epochs(schedule, runs, device_state.budget, brief=brief)
    timed = _seconds(schedule, seconds, retrying)
    if alone:  # the models are built again after each cache shard
        timed["train"] += schedule.counts.later.shards * schedule.loading()
    found = (
        max(phase, between.get(phase.phase, phase), key=_reserved_bytes)
        for phase in runs.unlimited_result(schedule, brief=brief)
    )
    phases = tuple(replace(phase, seconds=timed[phase.phase]) for phase in found)
    workload, steps = schedule.workload, schedule.workload.recipe.steps or 1
    return Forecast(
        gpu=device_state.gpu.name,
        phases=phases,
        allocated=max(phase.allocated for phase in phases),
        reserved=max(phase.reserved for phase in phases),
        outside=device_state.outside,
        margin=device_state.margin,
        budget=device_state.budget,
        fits=failed_in is None,
        seconds=sum(phase.seconds for phase in phases),
        step_seconds=_by_name({shape: each + retrying for shape, each in schedule.step_seconds(seconds).items()}),
        exact=workload.fit.quantize != "int8_products",  # the run decides at its start which layers use int8 products
        time_factor=factor,
        flops=float(steps * _step_flops(schedule)),
        flops_limit=1e12 * device_state.gpu.tflops.get(TRACE_DTYPES[workload.fit.dtype or "fp32"], 0.0),
        encodes_alone=alone,
    )


def _between_epochs(
    schedule: RunSchedule, runs: RunSimulator, budget: int, *, brief: bool
) -> tuple[Mapping[ForecastPhase, PhaseForecast], bool]:
    """Return the forecasts of encoding between epochs, and whether it exceeds the budget with training loaded.

    If it does, the run unloads its models while it encodes (trainer/training/recovery) and needs no more memory than
    before the first step. In that case, the forecasts are empty.
    """
    if not schedule.between_epochs():
        return {}, False
    free = runs.between_epochs(schedule, None)
    if free.reserved > budget and runs.between_epochs(schedule, budget).failure is not None:
        return {}, True
    return {phase.phase: phase for phase in _outcome(schedule.workload, free, brief=brief)}, False


def forecast_fp32_retry(workload: Workload, device_state: DeviceState, traces: TraceLibrary) -> PhaseForecast | None:
    """Forecast caching for a bf16 VAE that returns infinite or NaN values and is rerun in fp32; None for other dtypes.

    This takes as much memory as an fp32 VAE from the start: the weights are converted one by one after the memory of
    the first attempt is freed.
    """
    if workload.fit.vae_dtype != "bf16":
        return None
    widened = replace(workload, fit=workload.fit.replaced(vae_dtype="fp32"))
    simulation = Simulation(device_state, None)
    simulation.play(
        "cache_pictures", RunSchedule(widened, traces, PhaseCounts(), device_state.rate).traces("cache_pictures")
    )
    return _outcome(widened, simulation, brief=True)[0]


def _reserved_bytes(phase: PhaseForecast) -> int:
    return phase.reserved


def forecast_on_cpu(schedule: RunSchedule, device_state: DeviceState) -> Forecast:
    """Forecast a run on the CPU: its time, and the main memory for tensors and the process."""
    boundless = replace(device_state, free_bytes=MAIN_MEMORY)
    found = forecast_of(schedule, boundless)
    phases = tuple(
        replace(phase, host=PROCESS_BYTES + phase.allocated, allocated=0, reserved=0, timeline=(), peaks=())
        for phase in found.phases
    )
    return replace(found, phases=phases, allocated=0, reserved=0, outside=0, margin=0, budget=0, fits=True)


def _seconds(schedule: RunSchedule, seconds: Seconds, retrying: float) -> dict[ForecastPhase, float]:
    """Return the seconds that a run spends in each phase; ``retrying`` is the seconds lost to retries per step."""
    training = (schedule.mean_step_seconds(seconds) + retrying) * _steps(schedule)
    timed = schedule.other_seconds(seconds)
    timed["first_step"] = training / _steps(schedule)
    timed["train"] = training * (1.0 - 1.0 / _steps(schedule))
    return timed


def _outcome(workload: Workload, simulation: Simulation, *, brief: bool) -> ForecastResult:
    """Return the forecast of each phase that uses memory, in order."""
    loading = [simulation.phases[phase] for phase in ("load", "quantise") if phase in simulation.phases]
    streamed = streamed_bytes(played.trace for replayed in loading for played in replayed.played)
    return tuple(
        PhaseForecast(
            phase=phase,
            allocated=replayed.allocated(replayed.peak_allocated()),
            reserved=replayed.reserved(replayed.peak_reserved()),
            host=PROCESS_BYTES
            + _host_bytes(workload, phase, replayed)
            + (0 if phase in ("cache_pictures", "cache_texts") else streamed),
            seconds=0.0,
            peaks=() if brief else _peaks(replayed),
            timeline=() if brief else replayed.timeline(SAMPLES),
        )
        for phase, replayed in sorted(simulation.phases.items(), key=lambda item: PHASES.index(item[0]))
    )


def _host_bytes(workload: Workload, phase: ForecastPhase, replayed: Replayed) -> int:
    played = replayed.played
    return host_bytes(phase, workload, [each.trace for each in played], played[0].before.values())


def _by_name(step_seconds: Mapping[Shape, float]) -> dict[str, float]:
    """Return the seconds by name, such as "1024x1024", or "1024x1024, 150 tokens" if captions differ in length."""
    several = len({tokens for *_, tokens in step_seconds}) > 1
    return {f"{w}x{h}, {t} tokens" if several else f"{w}x{h}": each for (w, h, t), each in step_seconds.items()}


def _steps(schedule: RunSchedule) -> int:
    return schedule.workload.recipe.steps or 1


def _step_flops(schedule: RunSchedule) -> int:
    """Return the FLOPs of one optimizer step in the shape with the largest micro-batch."""
    shape = bounding_shapes(schedule.workload)[0]
    steps = schedule.step_summaries(shape)
    once, more = (
        sum(work.flops * work.count for work in trace.work) for trace in (steps.micro_first, steps.micro_more)
    )
    return once + (parts(schedule.workload, shape) - 1) * more


def _peaks(replayed: Replayed) -> tuple[Peak, ...]:
    """Return the memory peaks of a phase in chronological order; of several with the same name, only the highest."""
    points: dict[int, tuple[HighPoint, ...]] = {}
    highest: dict[str, tuple[int, Moment, HighPoint]] = {}
    for place, played in enumerate(replayed.played):
        if id(played.trace) not in points:
            points[id(played.trace)] = high_points(played.trace)
        for point in points[id(played.trace)]:
            if point.event < len(played.allocated):
                found = (int(played.allocated[point.event]), Moment(place, point.event), point)
                if point.name not in highest or found[0] > highest[point.name][0]:
                    highest[point.name] = found
    most = sorted(highest.values(), key=lambda found: -found[0])[:MOST_PEAKS]
    return tuple(_peak(replayed, *found) for found in sorted(most, key=lambda found: found[1]))


def _peak(replayed: Replayed, allocated: int, moment: Moment, point: HighPoint) -> Peak:
    alive = replayed.alive(moment)
    return Peak(
        name=point.name,
        module=point.module,
        stage=point.stage,
        allocated=allocated,
        by_kind={str(kind): size for kind, size in by_kind(alive).items()},
        largest=_largest_parts(by_module(alive)),
    )


def _largest_parts(modules: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    totals: dict[str, int] = {}
    for module, size in modules.items():
        totals[_part(module)] = totals.get(_part(module), 0) + size
    return tuple(sorted(totals.items(), key=lambda item: -item[1])[:LARGEST_PARTS])


@lru_cache(maxsize=8192)
def _part(module: str) -> str:
    """Return the name of the UNet block that contains a module, as shown to users; outside of blocks, the model's."""
    block = unet_block(module)
    return f"unet.{block}" if block else module.partition(".")[0]
