"""Evaluate possible fits of a job on a GPU: first by bounds, then exactly from their memory traces."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

from trainer.config.fit import FitConfig
from trainer.dataset.sampling import Shape
from trainer.memory.device.roofline import STREAMING_LOSS
from trainer.memory.forecast.schedule import Seconds, bounding_shapes, step_seconds, training_totals
from trainer.memory.planner.search_space import Checkpointing, Placement, placement_of, within
from trainer.memory.trace.deadline import Deadline
from trainer.memory.trace.library import Steps, TraceLibrary
from trainer.memory.trace.memory_trace import (
    MemoryTrace,
    TraceSummary,
    UnetBlock,
    blocks,
    held_after_forward,
    total_in_sequence,
)
from trainer.memory.trace.workload import OPEN_FIT, TraceRequest, Workload

Candidate = TypeVar("Candidate")
_Contra = TypeVar("_Contra", contravariant=True)

# Differences in time below this share are ignored: a forecast cannot resolve them, and saving memory without need
# changes more settings and uses up a fallback step.
SAME_TIME = 0.01
# Places of the queue that are prefetched; fits that differ only in how previews are rendered are next to each other.
PREFETCHED = 16
# In the paths of all modules with weights that are quantized; see trainer.base.quantized, which needs torch.
QUANTIZED_BLOCKS = ".transformer_blocks."
# Bits per quantized weight, without its scales.
LEAST_BITS = {"int8": 8, "int8_products": 8, "nf4": 4}
QUALITIES = ("none", "int8", "int8_products", "nf4")
# Bounds are lowered by this factor, so that memory that does not grow with the micro-batch (such as a table of
# timesteps) cannot lift a bound above the true value.
SLACK = 0.97
# Recomputing a block costs at least this share of the forward time that its part of all weights suggests; measured 0.77
# to 1.08 in SD 1.5 and SDXL, unquantized and int8.
LEAST_RECOMPUTED = 0.7


class Preference(NamedTuple):
    """Sort key of a candidate: lower is better, and the first field that differs decides."""

    quality: int
    """Rank of the base's precision: 0 if unquantized, higher for fewer bits."""
    time: int
    """Seconds of all training steps on a logarithmic scale in increments of 1 %."""
    changes: int
    """Number of settings that differ from their defaults."""
    drawing: int
    """Total time of all previews, in the same units as ``time``; ranked low because previews take little time."""
    bytes: int
    """Peak bytes of tensors over all phases."""


class CandidateEvaluator(Protocol[_Contra]):
    """Provider of properties of candidates: bounds at first, exact values on request."""

    def preference(self, candidate: _Contra) -> Preference:
        """Return a candidate's sort key: exact if known, else a lower bound."""

    def exact(self, candidate: _Contra) -> bool:
        """Return whether ``preference`` returns the exact sort key and not just a lower bound."""

    def cannot_fit(self, candidate: _Contra) -> bool:
        """Return whether the candidate is already known not to fit."""

    def prefetch(self, following: Callable[[], Sequence[_Contra]]) -> None:
        """Set a function that returns the next candidates in the queue, for prefetching."""

    def refine(self, candidate: _Contra) -> None:
        """Do part of the work needed to know the exact sort key; this may raise the bounds of other candidates."""

    def fits(self, candidate: _Contra) -> bool:
        """Return whether the candidate fits; the first call may be slow and may raise (worsen) its sort key."""


def time_step(seconds: float) -> int:
    """Return seconds on a logarithmic scale in increments of 1 %."""
    return math.floor(math.log(max(seconds, 1e-9)) / math.log1p(SAME_TIME))


def best(candidates: Sequence[Candidate], appraiser: CandidateEvaluator[Candidate]) -> Candidate | None:
    """Return the most preferred candidate that fits, the first one if several tie; None if none fits.

    A bound never exceeds the exact sort key. If the first candidate in the queue is known exactly and fits, no other
    can be better, and the rest of the queue needs no evaluation (A*, Hart et al. 1968).
    """
    # The place breaks ties in favor of earlier candidates, whatever the order in which bounds become exact.
    line = [(appraiser.preference(candidate), place) for place, candidate in enumerate(candidates)]
    heapq.heapify(line)

    def following() -> list[Candidate]:
        return [candidates[place] for _, place in heapq.nsmallest(PREFETCHED, line)]

    while line:
        known, place = heapq.heappop(line)
        candidate = candidates[place]
        if appraiser.cannot_fit(candidate):
            continue
        if (now := appraiser.preference(candidate)) > known:  # other candidates have raised its bound
            heapq.heappush(line, (now, place))
        elif not appraiser.exact(candidate):
            appraiser.prefetch(following)
            appraiser.refine(candidate)
            heapq.heappush(line, (appraiser.preference(candidate), place))
        elif not appraiser.fits(candidate):
            continue
        elif (now := appraiser.preference(candidate)) > known:  # staying within the budget costs it time
            heapq.heappush(line, (now, place))
        else:
            return candidate
    return None


@dataclass(frozen=True, slots=True)
class Figures:
    """Time and memory of one phase with one fit."""

    seconds: float
    """Seconds that the whole run spends in the phase."""
    bytes: int
    """Peak bytes of live tensors, as requested from the allocator."""


NOTHING_KNOWN = Figures(0.0, 0)


@dataclass(frozen=True, slots=True)
class Anchor:
    """Figures of the fit with one image per micro-batch and no checkpointing, used to derive other fits' bounds."""

    weights: int
    """Bytes of the base and the adapter."""
    quantizable: int
    """Bytes of the base's transformer blocks, which contain all weights that are ever quantized."""
    lasting: int
    """Bytes that stay allocated between steps: weights and optimizer state."""
    gradients: int
    """Additional bytes that stay allocated from the first micro-batch of a step to the end of the step."""
    held: dict[str | None, int]
    """Bytes saved for backward, by UNet block."""
    blocks: tuple[UnetBlock, ...]
    steps: Steps[TraceSummary]
    kept: dict[str | None, int]
    """Bytes saved for backward by UNet block if all are checkpointed (recomputation inputs); empty until known.

    All anchors share them, because they do not depend on how the base is stored.
    """
    grown: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Minimum seconds of a micro-batch of more than one image, and of its forward pass alone, by micro-batch size."""


class Evaluator:
    """Evaluator of the fits in a search; see `CandidateEvaluator`."""

    def __init__(
        self,
        workload: Workload,
        traces: TraceLibrary,
        seconds: Seconds,
        budget: int,
        fits: Callable[[FitConfig], bool],
        *,
        previews: float,
        free_choice: bool,
        deadline: Deadline,
        later: Callable[[], Sequence[TraceRequest]] = tuple,
    ) -> None:
        """Create an evaluator for a run with ``previews`` rounds of previews.

        With ``free_choice``, quantized bases rank equally with unquantized ones. ``later`` returns requests to
        prefetch after those of the next fits in the queue. After ``deadline`` nothing more is traced.
        """
        self.workload = workload
        self.traces = traces
        # With the largest micro-batches: all fits are compared in the same shape.
        self.bucket = bounding_shapes(_with_micro_batch(workload, workload.recipe.effective_batch))[0]
        self.deadline = deadline
        self._seconds = seconds
        self._budget = budget
        self._fits = fits
        self._previews = previews
        self._free_choice = free_choice
        self._later = later
        self._anchors: dict[Placement, Anchor] = {}
        self._kept: dict[str | None, int] = {}
        self._steps: dict[tuple[Placement, Checkpointing, int], Figures] = {}
        self._preview_cache: dict[tuple[Placement, bool, bool], Figures] = {}
        self._retrying: dict[tuple[Placement, Checkpointing, int], float] = {}
        self._ruled_out: list[Callable[[FitConfig], bool]] = []

    def preference(self, fit: FitConfig) -> Preference:
        """Return a fit's sort key, which is a lower bound until its traces are known."""
        steps = self._steps.get(_step_key(fit)) or self._step_bound(fit)
        drawn = self._previews_of(fit) or self._previews_bound(fit)
        return Preference(
            quality=0 if self._free_choice else QUALITIES.index(fit.quantize or "none"),
            time=time_step(steps.seconds + self._retrying.get(_step_key(fit), 0.0)),
            changes=self._changes(fit),
            drawing=time_step(drawn.seconds),
            bytes=max(steps.bytes, drawn.bytes),
        )

    def exact(self, fit: FitConfig) -> bool:
        """Return whether the fit's traces are known.

        Its time may still increase: only a simulation shows how much time is lost to releasing cached blocks.
        """
        return _step_key(fit) in self._steps and self._previews_of(fit) is not None

    def cannot_fit(self, fit: FitConfig) -> bool:
        """Return whether the fit is ruled out, its tensors alone exceed the budget, or no time is left to trace it."""
        return self.exceeds_budget(fit) or any(rule(fit) for rule in self._ruled_out) or self.leaves_out(fit)

    def exceeds_budget(self, fit: FitConfig) -> bool:
        """Return whether the tensors that a fit is known to need exceed the budget."""
        return self.preference(fit).bytes > self._budget

    def leaves_out(self, fit: FitConfig) -> bool:
        """Return whether no time is left to trace the fit; if so, record that a candidate was left out."""
        return self.past_deadline(fit) and self.deadline.leaves_out(fit)

    def first_that_works(self, fits: Iterable[FitConfig]) -> FitConfig | None:
        """Return the first of these fits that works, regardless of the deadline; None if none does."""
        deadline, self.deadline = self.deadline, Deadline()
        try:
            found = next((fit for fit in fits if best([fit], self) is not None), None)
        finally:
            self.deadline = deadline
        if found is None:  # all of them have been evaluated, so nothing was left out after all
            deadline.left_out.clear()
        return found

    def prefetch(self, following: Callable[[], Sequence[FitConfig]]) -> None:
        """Prefetch missing traces of the next fits in the queue, which are likely to be needed."""
        self.traces.set_prefetch(lambda: [*self._missing_traces(following()), *self._later()])

    def refine(self, fit: FitConfig) -> None:
        """Load or record one missing trace: of the anchor, or of the fit's training steps or previews."""
        placement = placement_of(fit)
        if placement not in self._anchors:
            self.anchor(placement)
        elif not self.knows_steps(fit):
            first = self._most_telling(fit)
            self._steps[_step_key(first)] = self._step_figures(first)
        else:
            self._preview_cache[_preview_key(fit)] = self._preview_figures(fit)

    def record_steps(self, fit: FitConfig) -> None:
        """Load or record the fit's training traces, without those of the anchor."""
        if not self.knows_steps(fit):
            self._steps[_step_key(fit)] = self._step_figures(fit)

    def rule_out(self, rule: Callable[[FitConfig], bool]) -> None:
        """Rule out all fits for which ``rule`` returns True, because they share a phase that ran out of memory."""
        self._ruled_out.append(rule)

    def slowed(self, fit: FitConfig, seconds: float) -> None:
        """Add ``seconds`` lost over the whole run to the time of all fits with the same training steps as ``fit``."""
        self._retrying[_step_key(fit)] = seconds

    def past_deadline(self, fit: FitConfig) -> bool:
        """Return whether it is too late to record the missing traces of a fit."""
        return not self.exact(fit) and self.deadline.is_over and not self.is_traced(fit)

    def knows_steps(self, fit: FitConfig) -> bool:
        """Return whether the fit's training traces are known, even if its preview traces are not."""
        return _step_key(fit) in self._steps

    def is_traced(self, fit: FitConfig) -> bool:
        """Return whether the fit's training and preview traces are available without tracing."""
        workload = replace(self.workload, fit=fit)
        return self._has_steps(fit) and (not self._previews or self.traces.has_phase(workload, "preview"))

    def estimate(self, placement: Placement, checkpointing: Checkpointing, size: int) -> int:
        """Return a lower bound for training's bytes, precise enough to compare fits; 0 before the anchor is known."""
        anchor = self._anchors.get(placement)
        return 0 if anchor is None else _least_bytes(anchor, checkpointing, self._images(size))

    def fits(self, fit: FitConfig) -> bool:
        """Return whether a simulation stays within the budget."""
        return self._fits(fit)

    def anchor(self, placement: Placement) -> Anchor:
        """Return the figures of the fit with one image, no checkpointing, and this placement of the base."""
        if placement not in self._anchors:
            fit = _anchored(self.workload.fit.replaced(quantize=placement.quantize, stream=placement.stream))
            steps = self._traces(fit)
            summaries = self._summaries(fit)
            self._anchors[placement] = Anchor(
                weights=summaries.weights.totals.net,
                quantizable=sum(
                    storage.bytes
                    for storage in steps.weights.storages
                    if storage.kind == "weights" and QUANTIZED_BLOCKS in storage.module
                ),
                lasting=total_in_sequence([summaries.weights, summaries.micro_first, summaries.optimizer_first]).net,
                gradients=summaries.micro_first.totals.net,
                held=held_after_forward(steps.micro_first),
                blocks=tuple(blocks(steps.weights, steps.micro_first)),
                steps=summaries,
                kept=self._kept,
            )
            self._steps[_step_key(fit)] = self._step_figures(fit)
        return self._anchors[placement]

    def _has_steps(self, fit: FitConfig) -> bool:
        return self.traces.has_steps(*self._micro(fit))

    def _most_telling(self, fit: FitConfig) -> FitConfig:
        """Return the fit to trace next: the fit itself, or the fully checkpointed one if no such one is traced yet.

        What checkpointed blocks keep for one image nearly determines the memory of every block set and micro-batch.
        Therefore, block sets that are too large need no traces of their own.
        """
        saving = fit.replaced(gradient_checkpointing="full", micro_batch=1)
        if fit.gradient_checkpointing in (None, "none") or self._kept or self._has_steps(fit):
            return fit
        return saving

    def _missing_traces(self, fits: Iterable[FitConfig]) -> list[TraceRequest]:
        """Return the next missing trace of each fit that may fit the budget, in the order of ``fits``."""
        possible = (fit for fit in fits if not self.exact(fit) and not self.exceeds_budget(fit))
        return list({request.key: request for request in map(self._next_request, possible)}.values())

    def _next_request(self, fit: FitConfig) -> TraceRequest:
        if self.knows_steps(fit):
            return TraceRequest(replace(self.workload, fit=fit), "preview")
        fit = self._most_telling(fit) if placement_of(fit) in self._anchors else _anchored(fit)
        return self.micro_request(fit)

    def micro_request(self, fit: FitConfig) -> TraceRequest:
        """Return the request for the micro-batches in which a fit is compared with others."""
        workload, *micro = self._micro(fit)
        return TraceRequest(workload, "micro", tuple(micro))

    def _micro(self, fit: FitConfig) -> tuple[Workload, Shape, int]:
        """Return the workload with a fit, and shape and images of the micro-batches in which it is compared."""
        workload = replace(self.workload, fit=fit)
        return workload, self.bucket, workload.images_at_once(self.bucket)

    def _images(self, size: int) -> int:
        return _with_micro_batch(self.workload, size).images_at_once(self.bucket)

    def _traces(self, fit: FitConfig) -> Steps[MemoryTrace]:
        """Return the training traces of the compared micro-batches."""
        return self.traces.steps(*self._micro(fit))

    def _summaries(self, fit: FitConfig) -> Steps[TraceSummary]:
        return self.traces.step_summaries(*self._micro(fit))

    def _changes(self, fit: FitConfig) -> int:
        """Return how many keys of the fit differ from the defaults (no memory saving, undivided effective batch)."""
        plain = OPEN_FIT.quantize, OPEN_FIT.stream, OPEN_FIT.gradient_checkpointing, OPEN_FIT.vae_tiling
        now = fit.quantize, fit.stream, fit.gradient_checkpointing, fit.vae_tiling
        split = fit.micro_batch != self.workload.recipe.effective_batch
        moved = fit.preview_offload != OPEN_FIT.preview_offload
        return sum(one != other for one, other in zip(plain, now, strict=True)) + moved + split

    def _step_figures(self, fit: FitConfig) -> Figures:
        steps = self._summaries(fit)
        workload = replace(self.workload, fit=fit)
        if fit.gradient_checkpointing == "full" and fit.micro_batch == 1:
            self._kept.update(held_after_forward(self._traces(fit).micro_first))
        seconds = step_seconds(workload, self.bucket, steps, self._seconds)
        peak = training_totals(workload, self.bucket, steps).peak
        return Figures(seconds * (self.workload.recipe.steps or 1), peak)

    def _step_bound(self, fit: FitConfig) -> Figures:
        """Return lower bounds for training, derived from known fits with other settings and from anchors."""
        placement, checkpointing, size = _step_key(fit)
        bound = self._bound_at(placement, checkpointing, size)
        if placement.streams:
            # A streamed base computes the same; at best, none of its weights take memory and no copy is waited for.
            resident = placement._replace(stream="none")
            other = self._bound_at(resident, checkpointing, size)
            weights = self._anchors[resident].weights if resident in self._anchors else other.bytes
            seconds = max(bound.seconds, STREAMING_LOSS * other.seconds)
            bound = Figures(seconds, max(bound.bytes, other.bytes - weights))
        elif placement.quantize != "none":  # dequantizing only costs time, and activations stay as they are
            resident = Placement("none", "none")
            other = self._bound_at(resident, checkpointing, size)
            anchor = self._anchors.get(resident)
            saved = self._most_saved(placement) * anchor.quantizable if anchor else other.bytes
            bound = Figures(max(bound.seconds, other.seconds), max(bound.bytes, other.bytes - int(saved)))
        return Figures(SLACK * bound.seconds, int(SLACK * bound.bytes))

    def _most_saved(self, placement: Placement) -> float:
        """Return the share of the quantizable bytes that quantizing saves at most, as if it needed no scales."""
        kept = LEAST_BITS.get(placement.quantize, 0) / (32 if self.workload.fit.dtype == "fp32" else 16)
        return 1.0 - kept

    def _bound_at(self, placement: Placement, checkpointing: Checkpointing, size: int) -> Figures:
        """Return lower bounds for training without slack, from known fits and the anchor of one placement."""
        seconds, needed = 0.0, 0
        for (other, blocks_set, images), figures in self._steps.items():
            if other != placement:
                continue
            # Fewer checkpointed blocks and larger micro-batches are never slower, and never need less memory.
            if within(blocks_set, checkpointing) and images >= size:
                seconds = max(seconds, figures.seconds)
            if within(checkpointing, blocks_set) and images <= size:
                needed = max(needed, figures.bytes)
        if (anchor := self._anchors.get(placement)) is not None:
            # Copies may take longer than all computations, recomputed ones included.
            recomputed = "none" if placement.streams else checkpointing
            seconds = max(seconds, self._least_seconds(anchor, recomputed, size))
            needed = max(needed, _least_bytes(anchor, checkpointing, self._images(size)))
        return Figures(seconds, needed)

    def _least_seconds(self, anchor: Anchor, checkpointing: Checkpointing, size: int) -> float:
        """Return the minimum seconds of training: the anchor's, scaled to larger micro-batches, plus recomputation."""
        if size not in anchor.grown:
            anchor.grown[size] = self._scaled(anchor, size)
        whole, forward = anchor.grown[size]
        total = sum(block.cost for block in anchor.blocks) or 1.0
        again = sum(block.cost for block in anchor.blocks if _checkpointed(block.name, checkpointing)) / total
        micro = whole + LEAST_RECOMPUTED * again * forward
        return max(self.workload.recipe.effective_batch / size, 1.0) * micro * (self.workload.recipe.steps or 1)

    def _scaled(self, anchor: Anchor, size: int) -> tuple[float, float]:
        """Return the minimum seconds of a micro-batch and of its forward pass, as if only FLOPs grew with its size."""
        work = [replace(item, flops=item.flops * size) for item in anchor.steps.micro_first.work]
        return self._seconds(work), self._seconds(item for item in work if item.stage == "forward")

    def _preview_figures(self, fit: FitConfig) -> Figures:
        anchor = self.anchor(placement_of(fit))
        traces = self.traces.phase_summaries(replace(self.workload, fit=fit), "preview")
        seconds = sum(self._seconds(trace.work) for trace in traces)
        return Figures(seconds * self._previews, anchor.lasting + total_in_sequence(traces).peak)

    def _previews_of(self, fit: FitConfig) -> Figures | None:
        return self._preview_cache.get(_preview_key(fit)) if self._previews else NOTHING_KNOWN

    def _previews_bound(self, fit: FitConfig) -> Figures:
        """Return lower bounds for a fit's previews, from previews already traced.

        Tiling and offloading trade time for memory. Therefore, previews that use neither unless the fit does take no
        more time than the fit's; previews that use both if the fit does take no more memory.
        """
        placement, tiling, offload = _preview_key(fit)
        seconds, needed = 0.0, 0
        for (other, tiled, away), figures in self._preview_cache.items():
            if other == placement and tiled <= tiling and away <= offload:
                seconds = max(seconds, figures.seconds)
            if other == placement and tiled >= tiling and away >= offload:
                needed = max(needed, figures.bytes)
        return Figures(seconds, needed)


def _with_micro_batch(workload: Workload, size: int) -> Workload:
    return replace(workload, fit=workload.fit.replaced(micro_batch=size))


def _anchored(fit: FitConfig) -> FitConfig:
    return fit.replaced(gradient_checkpointing="none", micro_batch=1)


def _step_key(fit: FitConfig) -> tuple[Placement, Checkpointing, int]:
    return placement_of(fit), fit.gradient_checkpointing or "none", fit.micro_batch or 1


def _preview_key(fit: FitConfig) -> tuple[Placement, bool, bool]:
    return placement_of(fit), bool(fit.vae_tiling), bool(fit.preview_offload)


def _checkpointed(block: str, checkpointing: Checkpointing) -> bool:
    return checkpointing == "full" or (checkpointing != "none" and block in checkpointing)


def _least_bytes(anchor: Anchor, checkpointing: Checkpointing, size: int) -> int:
    """Return a lower bound for training's bytes: those kept throughout a step plus those saved when backward begins."""
    held = sum(
        anchor.kept.get(name, 0) if name is not None and _checkpointed(name, checkpointing) else held
        for name, held in anchor.held.items()
    )
    return anchor.lasting + anchor.gradients + held * size
