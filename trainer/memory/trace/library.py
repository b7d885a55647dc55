"""Gets the tapes of a subject: from memory, from the disk, and only where they are missing by tracing, with torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from trainer.base.imports import quick_imports
from trainer.host import usable_cores
from trainer.memory.trace.derive import PICTURES, DerivationRule, rules
from trainer.memory.trace.memory_trace import MemoryTrace, TraceSummary, outline_of
from trainer.memory.trace.prefetch import TracePrefetcher
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import TracePart, TraceRequest, Workload

Size = tuple[int, int]
T = TypeVar("T", MemoryTrace, TraceSummary)

# A UNet of SDXL whose blocks are as wide as this takes a second a trace, and a plan asks for a dozen: that is worth a
# process beside this one, which takes three to start. Those of SD 1.5 are traced before it has.
WIDE = 640
# Up to here one trace costs less than the two that larger micro-batches follow from.
LARGEST_TRACED = 4
_PREPARING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Steps(Generic[T]):
    """Training on micro-batches of one shape, as tapes or their outlines; in this order they follow on one another."""

    weights: T
    """Base, adapter and masters, as they are placed."""
    micro_first: T
    """The first micro-batch of an optimizer step, in which the masters' gradients are born."""
    micro_more: T
    """Any further one."""
    optimizer_first: T
    """The first optimizer step of a run, in which its state appears."""
    optimizer: T


class TraceLibrary:
    """The tapes of any subject; those asked for once are kept."""

    def __init__(
        self,
        store: TraceStore,
        before_tracing: Callable[[], None] = lambda: None,
        aside: TracePrefetcher | None = None,
    ) -> None:
        """``before_tracing`` is called whenever tapes are missing; what it raises ends the asking.

        ``aside`` traces into the same store meanwhile what is foreseen to be asked for, as ``helped`` lets one do.
        """
        self.store = store
        self.before_tracing = before_tracing
        self.aside = aside
        self.used: set[str] = set()
        """The keys of all entries that were asked for."""
        self.made: list[str] = []
        """Those of them that had to be traced."""
        self._traces: dict[str, tuple[MemoryTrace, ...]] = {}
        self._summaries: dict[str, tuple[TraceSummary, ...]] = {}
        self._likely_requests: Callable[[], Sequence[TraceRequest]] = tuple

    @contextmanager
    def helped(self) -> Iterator[None]:
        """Let a process beside this one trace what is foreseen, until the block ends."""
        self.aside = TracePrefetcher(self.store, tracer)
        try:
            yield
        finally:
            self.aside.close()
            self.aside = None

    def relax(self) -> None:
        """Have nothing more traced beside this but what is begun."""
        if self.aside is not None:
            self.aside.want(())

    def rest(self) -> None:
        """End the process beside this one until tapes are missing again: it holds 0.8 GB of main memory."""
        if self.aside is not None:
            self.aside.close()
            self.aside = TracePrefetcher(self.store, tracer)

    def foresee(self, requests: Callable[[], Sequence[TraceRequest]]) -> None:
        """Say what is likely to be asked for beside tapes that are missing, the soonest first: asked when some are."""
        self._likely_requests = requests

    def fulfil(self, request: TraceRequest) -> None:
        """Have these tapes on the disk."""
        self._ensure_traces(request)

    def steps(self, workload: Workload, bucket: Size, images: int) -> Steps[MemoryTrace]:
        """Training on micro-batches of ``pictures`` in ``bucket``."""
        micro = self._ensure_traces(TraceRequest(workload, "micro", (bucket, images)))
        return Steps(*micro, *self.phase(workload, "optimizer"))

    def step_outlines(self, workload: Workload, bucket: Size, images: int) -> Steps[TraceSummary]:
        """What the tapes of ``steps`` add up to."""
        micro = self._ensure_summaries(TraceRequest(workload, "micro", (bucket, images)))
        return Steps(*micro, *self.phase_outlines(workload, "optimizer"))

    def phase(self, workload: Workload, part: TracePart) -> tuple[MemoryTrace, ...]:
        """A phase other than training, or of training what the optimizer does."""
        return self._ensure_traces(TraceRequest(workload, part))

    def phase_outlines(self, workload: Workload, part: TracePart) -> tuple[TraceSummary, ...]:
        """What the tapes of ``phase`` add up to."""
        return self._ensure_summaries(TraceRequest(workload, part))

    def has_steps(self, workload: Workload, bucket: Size, images: int) -> bool:
        """Whether the tapes of these micro-batches need not be traced, nor those of the optimizer."""
        return self.has(TraceRequest(workload, "micro", (bucket, images))) and self.has_phase(workload, "optimizer")

    def has_phase(self, workload: Workload, part: TracePart) -> bool:
        """Whether the tapes of this phase need not be traced."""
        return self.has(TraceRequest(workload, part))

    def has(self, request: TraceRequest) -> bool:
        """Whether these tapes need not be traced."""
        if self._read_summaries(request.key) is not None:
            return True
        return any(all(map(self.has, rule.sources)) for rule in rules(request))

    def _ensure_summaries(self, request: TraceRequest) -> tuple[TraceSummary, ...]:
        found = self._read_summaries(request.key)
        return self._summarize(request.key, self._ensure_traces(request)) if found is None else found

    def _stored_or_derived(self, request: TraceRequest) -> tuple[MemoryTrace, ...] | None:
        """None where nothing is known; a phase that a fit does not have is no tape at all."""
        here = self._read(request.key)
        return self._derive(request) if here is None else here

    def _ensure_traces(self, request: TraceRequest) -> tuple[MemoryTrace, ...]:
        """What is here or follows from that, else what is traced: of many pictures, two micro-batches of few."""
        if (here := self._read(request.key)) is not None:
            return here
        found = self._derive(request)
        if found is None and request.part == "micro" and request.more[1] > LARGEST_TRACED:
            for images in PICTURES:
                self._ensure_traces(replace(request, more=(request.more[0], images)))
            found = self._derive(request)
        if found is None:
            return self._trace(request)
        self._save(request.key, found)
        return found

    def _derive(self, request: TraceRequest) -> tuple[MemoryTrace, ...] | None:
        """The tapes, if they follow exactly from others that are here or follow themselves."""
        for rule in rules(request):
            if all(map(self.has, rule.sources)) and (found := self._apply_rule(rule)) is not None:
                return self._keep(request.key, found)
        return None

    def _apply_rule(self, rule: DerivationRule) -> tuple[MemoryTrace, ...] | None:
        one, other = map(self._stored_or_derived, rule.sources)
        if one is None or other is None:
            return None
        traces = [rule.derive(a, b) for a, b in zip(one, other, strict=True)]
        whole = tuple(trace for trace in traces if trace is not None)
        return whole if len(whole) == len(traces) else None

    def _read(self, key: str) -> tuple[MemoryTrace, ...] | None:
        if key not in self._traces and (traces := self.store.load(key)) is not None:
            self._traces[key] = traces
            self.used.add(key)
        return self._traces.get(key)

    def _read_summaries(self, key: str) -> tuple[TraceSummary, ...] | None:
        if key not in self._summaries and (summaries := self.store.outlines(key)) is not None:
            self._summaries[key] = summaries
            self.used.add(key)
        return self._summaries.get(key)

    def _summarize(self, key: str, traces: Sequence[MemoryTrace]) -> tuple[TraceSummary, ...]:
        """What tapes add up to that are here by now: traced just now, or made by others meanwhile."""
        if key not in self._summaries:
            self._summaries[key] = tuple(map(outline_of, traces))
        return self._summaries[key]

    def _trace(self, request: TraceRequest) -> tuple[MemoryTrace, ...]:
        key = request.key
        self.before_tracing()
        self._prefetch_for(request)
        prepare()
        self.before_tracing()  # who asked may have asked for something else meanwhile
        self.made.append(key)
        if self.aside is not None:
            self.aside.finish(key)
            if (found := self._read(key)) is not None:
                return found
        traces = self._keep(key, _traced(request))
        self._save(key, traces)
        return traces

    def _prefetch_for(self, request: TraceRequest) -> None:
        """Have traced, in the process beside this one, what is foreseen beside a wish; on a single core nothing."""
        if self.aside is not None and usable_cores() > 1 and _is_large(request.subject):
            self.aside.want(
                [each for each in self._likely_requests() if each.key != request.key and not self.has(each)]
            )

    def _keep(self, key: str, traces: Sequence[MemoryTrace]) -> tuple[MemoryTrace, ...]:
        self._traces[key] = kept = tuple(traces)
        self._summaries[key] = tuple(map(outline_of, kept))
        self.used.add(key)
        return kept

    def _save(self, key: str, traces: Sequence[MemoryTrace]) -> None:
        with suppress(OSError):  # a full disk costs the next forecast some seconds, not this one its answer
            self.store.save(key, traces)


def tracer(store: TraceStore) -> Callable[[TraceRequest], None]:
    """Return what traces into a store."""
    return TraceLibrary(store).fulfil


def prepare() -> None:
    """Import what traces, which takes seconds the first time; other threads that ask for it wait."""
    with _PREPARING, quick_imports():
        from trainer.memory.trace import other_phases, train_step  # noqa: F401


def _is_large(workload: Workload) -> bool:
    return workload.family == "sdxl" and max(workload.unet_config["block_out_channels"]) >= WIDE


def _traced(request: TraceRequest) -> tuple[MemoryTrace, ...]:
    from trainer.memory.trace import other_phases
    from trainer.memory.trace.train_step import trace_micro, trace_optimizer

    if request.part == "optimizer":
        return trace_optimizer(request.subject)
    if request.part != "micro":
        return tuple(getattr(other_phases, request.part)(request.subject))
    bucket, images = request.more
    traced = trace_micro(request.subject, [bucket], images)
    return traced.weights, traced.first[bucket], traced.more[bucket]
