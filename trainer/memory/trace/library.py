"""Provide a workload's traces: from memory or disk, derived from others, or else traced with torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from trainer.base.imports import quick_imports
from trainer.dataset.sampling import Shape
from trainer.host import usable_cores
from trainer.memory.trace.derive import IMAGE_COUNTS, DerivationRule, rules
from trainer.memory.trace.memory_trace import MemoryTrace, TraceSummary, summary_of
from trainer.memory.trace.prefetch import TracePrefetcher
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import TracePart, TraceRequest, Workload

Size = tuple[int, int]
T = TypeVar("T", MemoryTrace, TraceSummary)

# A trace of an SDXL UNet with blocks this wide takes a second, and a plan needs about a dozen of them: that justifies a
# second process, which takes three seconds to start. SD 1.5 is traced before it would be ready.
WIDE = 640
# Up to this many images one trace costs less than the two that larger micro-batches are derived from.
LARGEST_TRACED = 4
_PREPARING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Steps(Generic[T]):
    """Traces (or their summaries) of training on micro-batches of one shape, in execution order."""

    weights: T
    """Placement of base, adapter and master weights."""
    micro_first: T
    """The first micro-batch of an optimizer step, which allocates the master weights' gradients."""
    micro_more: T
    """Any further micro-batch of an optimizer step."""
    optimizer_first: T
    """The first optimizer step of a run, which allocates the optimizer's state."""
    optimizer: T
    """Any later optimizer step."""


class TraceLibrary:
    """Provider of the traces of any workload, cached in memory and in a store."""

    def __init__(
        self,
        store: TraceStore,
        before_tracing: Callable[[], None] = lambda: None,
        aside: TracePrefetcher | None = None,
    ) -> None:
        """Use ``store``; ``before_tracing`` is called whenever traces are missing and may raise to cancel.

        ``aside`` prefetches likely requests into the same store in a second process (see ``with_prefetcher``).
        """
        self.store = store
        self._before_tracing = before_tracing
        self.prefetcher = aside
        self.used: set[str] = set()
        """Keys of all entries that were loaded, derived or traced."""
        self.traced: list[str] = []
        """Keys of all requests that had to be traced, without what was traced along with them."""
        self._traces: dict[str, tuple[MemoryTrace, ...]] = {}
        self._summaries: dict[str, tuple[TraceSummary, ...]] = {}
        self._likely_requests: Callable[[], Sequence[TraceRequest]] = tuple

    @contextmanager
    def with_prefetcher(self) -> Iterator[None]:
        """Prefetch likely requests in a second process until the block ends."""
        self.prefetcher = TracePrefetcher(self.store, make_tracer)
        try:
            yield
        finally:
            self.prefetcher.close()
            self.prefetcher = None

    def stop_prefetching(self) -> None:
        """Stop prefetching after the current trace."""
        if self.prefetcher is not None:
            self.prefetcher.replace_requests(())

    def restart_prefetcher(self) -> None:
        """End the second process, which uses 0.8 GB of main memory; a new one starts when traces are missing again."""
        if self.prefetcher is not None:
            self.prefetcher.close()
            self.prefetcher = TracePrefetcher(self.store, make_tracer)

    def set_before_tracing(self, before_tracing: Callable[[], None]) -> None:
        """Call ``before_tracing`` whenever traces are missing; it may raise to cancel."""
        self._before_tracing = before_tracing

    def set_prefetch(self, requests: Callable[[], Sequence[TraceRequest]]) -> None:
        """Set a function that returns the likely next requests, most urgent first."""
        self._likely_requests = requests

    def steps(self, workload: Workload, bucket: Size | Shape, images: int) -> Steps[MemoryTrace]:
        """Return the traces of training on micro-batches of ``images`` images of size or shape ``bucket``."""
        micro = self.read(TraceRequest(workload, "micro", (bucket, images)))
        return Steps(*micro, *self.phase(workload, "optimizer"))

    def step_summaries(self, workload: Workload, bucket: Size | Shape, images: int) -> Steps[TraceSummary]:
        """Return the summaries of the traces that ``steps`` returns."""
        micro = self._read_summaries(TraceRequest(workload, "micro", (bucket, images)))
        return Steps(*micro, *self.phase_summaries(workload, "optimizer"))

    def phase(self, workload: Workload, part: TracePart) -> tuple[MemoryTrace, ...]:
        """Return the traces of a phase other than training, or of the optimizer step."""
        return self.read(TraceRequest(workload, part))

    def phase_summaries(self, workload: Workload, part: TracePart) -> tuple[TraceSummary, ...]:
        """Return the summaries of the traces that ``phase`` returns."""
        return self._read_summaries(TraceRequest(workload, part))

    def has_steps(self, workload: Workload, bucket: Size | Shape, images: int) -> bool:
        """Return whether these micro-batches and the optimizer step are available without tracing."""
        return self.has(TraceRequest(workload, "micro", (bucket, images))) and self.has_phase(workload, "optimizer")

    def has_phase(self, workload: Workload, part: TracePart) -> bool:
        """Return whether this phase is available without tracing."""
        return self.has(TraceRequest(workload, part))

    def has(self, request: TraceRequest) -> bool:
        """Return whether a request can be served without tracing."""
        if self._load_summaries(request.key) is not None:
            return True
        return any(all(map(self.has, rule.sources)) for rule in rules(request))

    def _read_summaries(self, request: TraceRequest) -> tuple[TraceSummary, ...]:
        found = self._load_summaries(request.key)
        return self._summarize(request.key, self.read(request)) if found is None else found

    def _stored_or_derived(self, request: TraceRequest) -> tuple[MemoryTrace, ...] | None:
        """Return a request's traces, or None if they have to be traced; empty if the fit does not have this phase."""
        here = self._load(request.key)
        return self._derive(request) if here is None else here

    def read(self, request: TraceRequest) -> tuple[MemoryTrace, ...]:
        """Return the traces of a request: stored, derived, or traced and then stored.

        Instead of a large micro-batch, two small ones are traced, from which it is derived. This is faster, and other
        micro-batch sizes can then be derived at almost no cost.
        """
        if (here := self._load(request.key)) is not None:
            return here
        found = self._derive(request)
        if found is None and request.part == "micro" and request.more[1] > LARGEST_TRACED:
            for images in IMAGE_COUNTS:  # the sources of the rule by micro-batch size
                self.read(replace(request, more=(request.more[0], images)))
            found = self._derive(request)
        if found is None:
            return self._trace(request)
        self._save(request.key, found)
        return found

    def _derive(self, request: TraceRequest) -> tuple[MemoryTrace, ...] | None:
        """Return a request's traces, derived from others that need no tracing; None if no rule applies."""
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

    def _load(self, key: str) -> tuple[MemoryTrace, ...] | None:
        if key not in self._traces and (traces := self.store.load(key)) is not None:
            self._traces[key] = traces
            self.used.add(key)
        return self._traces.get(key)

    def _load_summaries(self, key: str) -> tuple[TraceSummary, ...] | None:
        if key not in self._summaries and (summaries := self.store.summaries(key)) is not None:
            self._summaries[key] = summaries
            self.used.add(key)
        return self._summaries.get(key)

    def _summarize(self, key: str, traces: Sequence[MemoryTrace]) -> tuple[TraceSummary, ...]:
        """Return the summaries of ``traces``, which are cached under ``key``."""
        if key not in self._summaries:
            self._summaries[key] = tuple(map(summary_of, traces))
        return self._summaries[key]

    def _trace(self, request: TraceRequest) -> tuple[MemoryTrace, ...]:
        key = request.key
        self._before_tracing()
        self._prefetch_for(request)
        prepare()
        self._before_tracing()  # again: the import took seconds, in which the caller may have moved on
        self.traced.append(key)
        if self.prefetcher is not None:
            # The second process may be tracing just this: waiting for it is quicker than tracing it twice.
            self.prefetcher.finish(key)
            if (found := self._load(key)) is not None:
                return found
        for other, traces in _traced(request, self.has_phase).items():
            self._save(other, self._keep(other, traces))
        return self._traces[key]

    def _prefetch_for(self, request: TraceRequest) -> None:
        """Prefetch likely requests while ``request`` is traced; do nothing on a single core or for small models."""
        if self.prefetcher is not None and usable_cores() > 1 and _is_large(request.workload):
            self.prefetcher.replace_requests(
                [each for each in self._likely_requests() if each.key != request.key and not self.has(each)]
            )

    def _keep(self, key: str, traces: Sequence[MemoryTrace]) -> tuple[MemoryTrace, ...]:
        self._traces[key] = kept = tuple(traces)
        self._summaries[key] = tuple(map(summary_of, kept))
        self.used.add(key)
        return kept

    def _save(self, key: str, traces: Sequence[MemoryTrace]) -> None:
        with suppress(OSError):  # a full disk costs the next forecast some seconds, but does not fail this one
            self.store.save(key, traces)


def make_tracer(store: TraceStore) -> Callable[[TraceRequest], object]:
    """Return a function that traces requests into a store."""
    return TraceLibrary(store).read


def prepare() -> None:
    """Import the tracing code, which takes seconds the first time; other threads wait until it is imported."""
    with _PREPARING, quick_imports():
        from trainer.memory.trace import other_phases, train_step  # noqa: F401


def _is_large(workload: Workload) -> bool:
    return workload.family == "sdxl" and max(workload.unet_config["block_out_channels"]) >= WIDE


def _traced(
    request: TraceRequest, is_known: Callable[[Workload, TracePart], bool]
) -> dict[str, tuple[MemoryTrace, ...]]:
    """Return the traces of a request by its key, and those of other phases that are traced along with it.

    Micro-batches need models, whose building shows how they are loaded, and leave gradients, which the optimizer needs.
    """
    from trainer.memory.trace import other_phases
    from trainer.memory.trace.train_step import trace_micro, trace_optimizer

    workload = request.workload
    if request.part == "optimizer":
        return {request.key: trace_optimizer(workload)}
    if request.part != "micro":
        return {request.key: tuple(getattr(other_phases, request.part)(workload))}
    bucket, images = request.more
    along: list[TracePart] = [part for part in ("optimizer", "load", "quantise") if not is_known(workload, part)]
    traced = trace_micro(workload, [bucket], images, with_optimizer="optimizer" in along)
    found: dict[str, tuple[MemoryTrace, ...]] = {}
    found[request.key] = (traced.weights, traced.first[bucket], traced.more[bucket])
    for part in along:
        traces = traced.optimizer if part == "optimizer" else getattr(other_phases, part)(workload)
        found[workload.key(part)] = tuple(traces)
    return found
