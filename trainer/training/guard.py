"""Keeps a run off the edge of the card: a cap on what PyTorch may take, and an eye on steps that become slow."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress

import torch

from trainer import gpu
from trainer.errors import ImpastoError
from trainer.protocol import events
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.sizes import share, size
from trainer.training.loop import Engine, Progress, StepResult
from trainer.training.machine import card_of
from trainer.training.reporter import Reporter

MIB = 1 << 20
# CUDA loads kernels when they are first used, outside PyTorch's allocator: an idle context of 274 MiB grows to about
# half a GiB while training.
SPARE_BYTES = 256 * MIB

SLOW = 3.0
# Quick again: so far above the median that steps vary anyway, so far below SLOW that it is not told twice.
QUICK = 1.5
WARM_UP = 5
WINDOW = 50
# Cards of these generations begin to slow themselves down from about here on.
HOT_CELSIUS = 87
FULL_SHARE = 0.97
OTHERS_BUSY_BYTES = 512 * MIB


def cap_memory(device: torch.device, reporter: Reporter) -> int | None:
    """Lets PyTorch take no more than just under what is free on the card now; returns the cap in bytes.

    Without it the Windows driver goes on in main memory when the card is full, and a step takes minutes; so PyTorch
    raises OutOfMemoryError, which a run can answer. None on the CPU, and where another allocator than PyTorch's own is
    chosen in the environment, which keeps no such cap; that is told.
    """
    if device.type != "cuda":
        return None
    if torch.cuda.get_allocator_backend() != "native":
        reporter.notice(
            "memory.allocator",
            "PYTORCH_CUDA_ALLOC_CONF chooses another allocator than PyTorch's own: forecasts do not hold for it, and "
            "the run cannot be kept from spilling into main memory. Remove backend: from that variable.",
        )
        return None
    free, total = torch.cuda.mem_get_info(device)
    cap = max(0, torch.cuda.memory_reserved(device) + free - SPARE_BYTES)
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    return cap


class SlowSteps:
    """Says once, and again only after recovery, that steps take more than three times what such steps took before."""

    phase: ForecastPhase = "train"

    def __init__(
        self,
        engine: Engine,
        reporter: Reporter,
        clock: Callable[[], float] = time.monotonic,
        reason: Callable[[torch.device], tuple[str, str]] | None = None,
    ) -> None:
        self.engine = engine
        self.reporter = reporter
        self.clock = clock
        self.reason = reason or reason_for_slowness
        self._times: dict[object, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._last = -math.inf
        self._slow = False

    def at_start(self, progress: Progress) -> None:
        """Nothing: the first steps of an attempt are its warm-up."""

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Compares the step with those of the same sizes; one that something else came before is left out."""
        now, last = self.clock(), self._last
        self._last = now
        times = self._times[self._sizes(result.step - 1)]
        usual = statistics.median(times) if len(times) >= WARM_UP else math.inf
        # After a preview or a saved file memory has to be asked for again: that is no drift.
        waited = now - last - result.seconds
        if waited > min(usual, result.seconds):
            return
        if result.seconds > SLOW * usual:
            self._say(result, usual)
            return
        times.append(result.seconds)
        if result.seconds < QUICK * usual:
            self._slow = False

    def _sizes(self, step: int) -> object:
        """What the step's time depends on: the size and number of pictures of each micro-batch."""
        feed = self.engine.feed
        parts = feed.split(feed.batch(step))
        return tuple(sorted((part[0].picture.bucket, len(part)) for part in parts))

    def _say(self, result: StepResult, usual: float) -> None:
        if self._slow:
            return
        self._slow = True
        reason, detail = self.reason(self.engine.device)
        self.reporter.write(
            events.Slow(step=result.step, seconds=result.seconds, median=usual, reason=reason, detail=detail)
        )


def reason_for_slowness(device: torch.device) -> tuple[str, str]:
    """A code and what it rests on: "spilled" into main memory, "hot", "others" use the card too, "unknown"."""
    if device.type != "cuda":
        return "unknown", ""
    card: gpu.Card | None = None
    with suppress(ImpastoError):
        card = card_of(device.index or 0)
    return why_slow(card, os.getpid()) if card else ("unknown", "")


def why_slow(card: gpu.Card, own_pid: int) -> tuple[str, str]:
    """As :func:`reason_for_slowness`, from the card as the driver tells of it now."""
    held = card.total_bytes - card.free_bytes
    others = [use for use in card.uses if use.pid != own_pid]
    named = ", ".join(f"{use.name} {size(use.bytes)}" if use.bytes else use.name for use in others[:3])
    if held > FULL_SHARE * card.total_bytes:
        full = share(held, card.total_bytes)
        return "spilled", f"{full}; also there: {named}" if named else full
    if card.temperature is not None and card.temperature >= HOT_CELSIUS:
        return "hot", f"{card.temperature} °C"
    if any(use.kind == "compute" or (use.bytes or 0) > OTHERS_BUSY_BYTES for use in others):
        return "others", named
    return "unknown", ""
