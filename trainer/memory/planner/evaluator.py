"""What is known of each fit of one job on one card: first bounds, and from its tapes the exact figures."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

from trainer.config.fit import FitConfig
from trainer.memory.forecast.schedule import Seconds, bounding_buckets, step_seconds, training_sums
from trainer.memory.planner.search_space import Checkpointing, within
from trainer.memory.trace.library import Steps, TraceLibrary
from trainer.memory.trace.memory_trace import MemoryTrace, TraceSummary, UnetBlock, blocks, held_after_forward, in_a_row
from trainer.memory.trace.workload import OPEN_FIT, TraceRequest, Workload

Candidate = TypeVar("Candidate")
_Contra = TypeVar("_Contra", contravariant=True)

# Differences in time below this share decide nothing: a forecast cannot tell them apart, and what saves memory
# without need makes a run harder to follow and leaves its ladder a rung less.
SAME_TIME = 0.01
# So many places of the line are told ahead; fits that differ only in how previews are drawn stand side by side.
TOLD_AHEAD = 16
QUALITIES = ("none", "int8", "int8_products", "nf4")
# Bounds are taken a little below what they follow from, so that what does not grow with the micro-batch (a table of
# timesteps, say) cannot lift one above the truth.
SLACK = 0.97
# Computing a block again costs at least this share of what its part of all weights has of the forward: 0.77 to 1.08 in
# SD 1.5 and SDXL, unquantised and int8.
LEAST_RECOMPUTED = 0.7


class Preference(NamedTuple):
    """How much a candidate is wanted: the smaller the better, the first difference decides."""

    quality: int
    """How much the base is rounded: 0 not at all; the more, the fewer bits."""
    time: int
    """Seconds of all training steps, on a scale of one per cent."""
    changes: int
    """How many settings are not what they are by default."""
    drawing: int
    """Seconds of all previews, on the same scale. Next to training they are few: they decide nothing before this."""
    bytes: int
    """What its tensors need at the highest moment of all phases."""


class Appraiser(Protocol[_Contra]):
    """Who knows about candidates, first roughly and on request exactly."""

    def preference(self, candidate: _Contra) -> Preference:
        """The exact preference if it is known, else one that is no larger."""

    def exact(self, candidate: _Contra) -> bool:
        """Whether ``preference`` is exact."""

    def hopeless(self, candidate: _Contra) -> bool:
        """Whether what is known already rules out that it fits."""

    def foresee(self, following: Callable[[], Sequence[_Contra]]) -> None:
        """Learns how to ask which candidates come next in line, while it appraises one."""

    def appraise(self, candidate: _Contra) -> None:
        """Makes ``preference`` exact; may raise what was known of others."""

    def fits(self, candidate: _Contra) -> bool:
        """Whether it fits, exactly; may take long the first time, and may raise the candidate's own preference."""


def time_step(seconds: float) -> int:
    """Seconds on a scale whose steps are one per cent."""
    return math.floor(math.log(max(seconds, 1e-9)) / math.log1p(SAME_TIME))


def best(candidates: Sequence[Candidate], appraiser: Appraiser[Candidate]) -> Candidate | None:
    """The most preferred candidate that fits, the earlier of equal ones; None where none does.

    What is known of a candidate never exceeds its true preference. So when the first in line is known exactly and
    fits, no other can be better: those behind it need no closer look (A*, Hart et al. 1968).
    """
    line = [(appraiser.preference(candidate), place) for place, candidate in enumerate(candidates)]
    heapq.heapify(line)

    def following() -> list[Candidate]:
        return [candidates[place] for _, place in heapq.nsmallest(TOLD_AHEAD, line)]

    while line:
        known, place = heapq.heappop(line)
        candidate = candidates[place]
        if appraiser.hopeless(candidate):
            continue
        if (now := appraiser.preference(candidate)) > known:  # others told more of it meanwhile
            heapq.heappush(line, (now, place))
        elif not appraiser.exact(candidate):
            appraiser.foresee(following)
            appraiser.appraise(candidate)
            heapq.heappush(line, (appraiser.preference(candidate), place))
        elif not appraiser.fits(candidate):
            continue
        elif (now := appraiser.preference(candidate)) > known:  # fitting costs it time
            heapq.heappush(line, (now, place))
        else:
            return candidate
    return None


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one phase under one fit."""

    seconds: float
    """Over the whole run."""
    bytes: int
    """The highest sum of what lives, as asked for."""


NOTHING_KNOWN = Figures(0.0, 0)


@dataclass(frozen=True, slots=True)
class Anchor:
    """A single picture without checkpointing: what the others are bounded by."""

    lasting: int
    """Bytes of what lives between steps: weights, adapter, optimizer state."""
    gradients: int
    """Bytes that live beside that from the first micro-batch of a step to its end."""
    held: dict[str | None, int]
    """Bytes waiting for backward, by block."""
    blocks: tuple[UnetBlock, ...]
    steps: Steps[TraceSummary]
    kept: dict[str | None, int] = field(default_factory=dict)
    """The same where all blocks are checkpointed, once that is known: what they are computed again from."""
    grown: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds that a larger micro-batch takes at the least, and its forward, by its size."""


class Evaluator:
    """Tells the search how good each fit is; see :class:`trainer.memory.planner.evaluator.Appraiser`."""

    def __init__(
        self,
        subject: Workload,
        traces: TraceLibrary,
        seconds: Seconds,
        budget: int,
        fits: Callable[[FitConfig], bool],
        *,
        previews: float,
        free_choice: bool,
        until: float | None = None,
        later: Callable[[], Sequence[TraceRequest]] = tuple,
    ) -> None:
        """``previews`` rounds are drawn; with ``free_choice`` quantised bases rank with the others.

        ``later`` is what the plan is likely to ask for besides. After ``until`` (of time.monotonic) nothing is traced
        any more.
        """
        self.subject = subject
        self.traces = traces
        self.bucket = bounding_buckets(subject)[0]
        self.until = until
        self.left_out = False
        """Whether something was passed over for want of time."""
        self._seconds = seconds
        self._budget = budget
        self._fits = fits
        self._previews = previews
        self._free_choice = free_choice
        self._later = later
        self._anchors: dict[str, Anchor] = {}
        self._steps: dict[tuple[str, Checkpointing, int], Figures] = {}
        self._drawn: dict[tuple[str, bool, bool], Figures] = {}
        self._retrying: dict[tuple[str, Checkpointing, int], float] = {}
        self._ruled_out: list[Callable[[FitConfig], bool]] = []

    def preference(self, fit: FitConfig) -> Preference:
        """How much the fit is wanted; while its tapes are not known, a bound."""
        steps = self._steps.get(_step_key(fit)) or self._step_bound(fit)
        drawn = self._drawn_of(fit) or self._drawn_bound(fit)
        return Preference(
            quality=0 if self._free_choice else QUALITIES.index(fit.quantise or "none"),
            time=time_step(steps.seconds + self._retrying.get(_step_key(fit), 0.0)),
            changes=self._changes(fit),
            drawing=time_step(drawn.seconds),
            bytes=max(steps.bytes, drawn.bytes),
        )

    def exact(self, fit: FitConfig) -> bool:
        """Whether its tapes are known; whether it has to give memory back to fit comes out when that is played."""
        return _step_key(fit) in self._steps and self._drawn_of(fit) is not None

    def hopeless(self, fit: FitConfig) -> bool:
        """Whether its tensors alone are more than the budget, or it is too late to find out."""
        if self.preference(fit).bytes > self._budget or any(rule(fit) for rule in self._ruled_out):
            return True
        late = self.late_for(fit)
        self.left_out |= late
        return late

    def foresee(self, following: Callable[[], Sequence[FitConfig]]) -> None:
        """Have traced meanwhile what the next fits in line lack, as their turn is likely to come."""
        self.traces.foresee(lambda: [*self._lacking(following()), *self._later()])

    def appraise(self, fit: FitConfig) -> None:
        """Reads or traces one thing more of what is missing: the anchor, the fit's steps, its previews."""
        quantise = fit.quantise or "none"
        if quantise not in self._anchors:
            self.anchor(quantise)
        elif not self.knows_steps(fit):
            first = self._most_telling(fit)
            self._steps[_step_key(first)] = self._step_figures(first)
        else:
            self._drawn[_draw_key(fit)] = self._draw_figures(fit)

    def rule_out(self, rule: Callable[[FitConfig], bool]) -> None:
        """From now on, fits of which ``rule`` holds are hopeless: what failed in one is the same in them."""
        self._ruled_out.append(rule)

    def slowed(self, fit: FitConfig, seconds: float) -> None:
        """From now on, steps as in ``fit`` take so much longer over the whole run."""
        self._retrying[_step_key(fit)] = seconds

    def late_for(self, fit: FitConfig) -> bool:
        """Whether it is too late to find out about a fit whose tapes are missing."""
        return not self.exact(fit) and self._is_late() and not self.is_traced(fit)

    def knows_steps(self, fit: FitConfig) -> bool:
        """Whether its tapes of training are known, if not those of its previews."""
        return _step_key(fit) in self._steps

    def is_traced(self, fit: FitConfig) -> bool:
        """Whether its tapes of training and previews need not be traced."""
        subject = replace(self.subject, fit=fit)
        return self._has_steps(fit) and (not self._previews or self.traces.has_phase(subject, "preview"))

    def estimate(self, quantise: str, checkpointing: Checkpointing, size: int) -> int:
        """Bytes that training takes at the least; sets and sizes compare well by it. 0 without an anchor."""
        anchor = self._anchors.get(quantise)
        return 0 if anchor is None else _least_bytes(anchor, checkpointing, size)

    def fits(self, fit: FitConfig) -> bool:
        """Whether a replay within the budget ends."""
        return self._fits(fit)

    def anchor(self, quantise: str) -> Anchor:
        """What one picture without checkpointing does, with the base in these bits."""
        if quantise not in self._anchors:
            fit = _anchored(self.subject.fit.changed(quantise=quantise))
            steps = self._tapes(fit)
            outlines = self._outlines(fit)
            self._anchors[quantise] = Anchor(
                lasting=in_a_row([outlines.weights, outlines.micro_first, outlines.optimizer_first]).net,
                gradients=outlines.micro_first.sums.net,
                held=held_after_forward(steps.micro_first),
                blocks=tuple(blocks(steps.weights, steps.micro_first)),
                steps=outlines,
            )
            self._steps[_step_key(fit)] = self._step_figures(fit)
        return self._anchors[quantise]

    def _has_steps(self, fit: FitConfig) -> bool:
        return self.traces.has_steps(replace(self.subject, fit=fit), self.bucket, fit.micro_batch or 1)

    def _most_telling(self, fit: FitConfig) -> FitConfig:
        """The fit itself; where it is checkpointed and not traced yet, first the one that tells most of all like it.

        From what checkpointed blocks keep of one picture follows nearly what each set takes with any number of them,
        so that those which are too large need no trace.
        """
        saving = fit.changed(checkpointing="full", micro_batch=1)
        if fit.checkpointing in (None, "none") or self.knows_steps(saving) or self._has_steps(fit):
            return fit
        return saving

    def _lacking(self, fits: Iterable[FitConfig]) -> list[TraceRequest]:
        """The next tapes that would be asked for of each fit that may do, in their order."""
        may_do = (fit for fit in fits if not self.exact(fit) and self.preference(fit).bytes <= self._budget)
        return list({wish.key: wish for wish in map(self._next_wish, may_do)}.values())

    def _next_wish(self, fit: FitConfig) -> TraceRequest:
        if self.knows_steps(fit):
            return TraceRequest(replace(self.subject, fit=fit), "preview")
        fit = self._most_telling(fit) if (fit.quantise or "none") in self._anchors else _anchored(fit)
        return TraceRequest(replace(self.subject, fit=fit), "micro", (self.bucket, fit.micro_batch or 1))

    def _tapes(self, fit: FitConfig) -> Steps[MemoryTrace]:
        """Those of training in the bucket with most pixels."""
        return self.traces.steps(replace(self.subject, fit=fit), self.bucket, fit.micro_batch or 1)

    def _outlines(self, fit: FitConfig) -> Steps[TraceSummary]:
        return self.traces.step_outlines(replace(self.subject, fit=fit), self.bucket, fit.micro_batch or 1)

    def _is_late(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def _changes(self, fit: FitConfig) -> int:
        """How many keys are not as they are by default: nothing saved, the whole effective batch at once."""
        plain = (OPEN_FIT.quantise, OPEN_FIT.checkpointing, OPEN_FIT.vae_tiling, OPEN_FIT.preview_offload)
        now = (fit.quantise, fit.checkpointing, fit.vae_tiling, fit.preview_offload)
        split = fit.micro_batch != self.subject.recipe.effective_batch
        return sum(one != other for one, other in zip(plain, now, strict=True)) + split

    def _step_figures(self, fit: FitConfig) -> Figures:
        steps = self._outlines(fit)
        subject = replace(self.subject, fit=fit)
        if fit.checkpointing == "full" and fit.micro_batch == 1 and (fit.quantise or "none") in self._anchors:
            self._anchors[fit.quantise or "none"].kept.update(held_after_forward(self._tapes(fit).micro_first))
        seconds = step_seconds(subject, steps, self._seconds)
        return Figures(seconds * (self.subject.recipe.steps or 1), training_sums(subject, steps).peak)

    def _step_bound(self, fit: FitConfig) -> Figures:
        """What is known from fits that checkpoint less or more, from other micro-batches, and from the anchor."""
        quantise, checkpointing, size = _step_key(fit)
        seconds, needed = 0.0, 0
        for (other, set_, pictures), figures in self._steps.items():
            if other != quantise:
                continue
            if within(set_, checkpointing) and pictures >= size:
                seconds = max(seconds, figures.seconds)
            if within(checkpointing, set_) and pictures <= size:
                needed = max(needed, figures.bytes)
        if (anchor := self._anchors.get(quantise)) is not None:
            seconds = max(seconds, self._least_seconds(anchor, checkpointing, fit))
            needed = max(needed, _least_bytes(anchor, checkpointing, size))
        return Figures(SLACK * seconds, int(SLACK * needed))

    def _least_seconds(self, anchor: Anchor, checkpointing: Checkpointing, fit: FitConfig) -> float:
        """What the anchor takes in larger micro-batches at the least, and what computing blocks again does."""
        size = fit.micro_batch or 1
        if size not in anchor.grown:
            anchor.grown[size] = self._grown(anchor, size)
        whole, forward = anchor.grown[size]
        total = sum(block.cost for block in anchor.blocks) or 1.0
        again = sum(block.cost for block in anchor.blocks if _checkpointed(block.name, checkpointing)) / total
        micro = whole + LEAST_RECOMPUTED * again * forward
        return max(self.subject.recipe.effective_batch / size, 1.0) * micro * (self.subject.recipe.steps or 1)

    def _grown(self, anchor: Anchor, size: int) -> tuple[float, float]:
        """Seconds of a micro-batch and of its forward, as if only arithmetic grew: weights are read once for all."""
        work = [replace(item, flops=item.flops * size) for item in anchor.steps.micro_first.work]
        return self._seconds(work), self._seconds(item for item in work if item.stage == "forward")

    def _draw_figures(self, fit: FitConfig) -> Figures:
        anchor = self.anchor(fit.quantise or "none")
        tapes = self.traces.phase_outlines(replace(self.subject, fit=fit), "preview")
        seconds = sum(self._seconds(tape.work) for tape in tapes)
        return Figures(seconds * self._previews, anchor.lasting + in_a_row(tapes).peak)

    def _drawn_of(self, fit: FitConfig) -> Figures | None:
        return self._drawn.get(_draw_key(fit)) if self._previews else NOTHING_KNOWN

    def _drawn_bound(self, fit: FitConfig) -> Figures:
        """Tiles and a UNet that leaves and returns take longer and need less."""
        quantise, tiling, offload = _draw_key(fit)
        seconds, needed = 0.0, 0
        for (other, tiled, away), figures in self._drawn.items():
            if other == quantise and tiled <= tiling and away <= offload:
                seconds = max(seconds, figures.seconds)
            if other == quantise and tiled >= tiling and away >= offload:
                needed = max(needed, figures.bytes)
        return Figures(seconds, needed)


def _anchored(fit: FitConfig) -> FitConfig:
    return fit.changed(checkpointing="none", micro_batch=1)


def _step_key(fit: FitConfig) -> tuple[str, Checkpointing, int]:
    return fit.quantise or "none", fit.checkpointing or "none", fit.micro_batch or 1


def _draw_key(fit: FitConfig) -> tuple[str, bool, bool]:
    return fit.quantise or "none", bool(fit.vae_tiling), bool(fit.preview_offload)


def _checkpointed(block: str, checkpointing: Checkpointing) -> bool:
    return checkpointing == "full" or (checkpointing != "none" and block in checkpointing)


def _least_bytes(anchor: Anchor, checkpointing: Checkpointing, size: int) -> int:
    """What lives through every step, and what all blocks hold when backward begins."""
    held = sum(
        anchor.kept.get(name, 0) if name is not None and _checkpointed(name, checkpointing) else held
        for name, held in anchor.held.items()
    )
    return anchor.lasting + anchor.gradients + held * size
