"""Keep a run within the GPU's memory: a cap, an error that says who holds the memory, and a watch on slow steps."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from trainer import gpu
from trainer.errors import ImpastoError
from trainer.protocol import events
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.sizes import share, size
from trainer.training.loop import Engine, Progress, StepResult
from trainer.training.machine import card_of
from trainer.training.reporter import Reporter
from trainer.training.shortage import concerns_gpu, gpu_of, is_out_of_memory, requested_bytes

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


@contextmanager
def gpu_guard(action: str) -> Iterator[None]:
    """Turn a shortage of memory inside into an error for users; ``action`` completes "Could not ...".

    Wrap it around everything that touches a GPU: on a full one the first tensor fails, wherever that is, and a kernel
    that is only tried. A run that has started answers most shortages itself (trainer.training.recovery).
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise memory_full(error, action) from error


def memory_full(error: BaseException, action: str) -> ImpastoError:
    """Return a shortage as an error for users, which names the programs that hold the memory."""
    requested = requested_bytes(error)
    more = f"{size(requested)} more requested" if requested else ""
    if not concerns_gpu(error):
        details = f" ({more})" if more else ""
        return ImpastoError(
            "memory.full",
            f"Could not {action}: there is not enough free main memory{details}.",
            "Close other programs, then try again.",
        )
    card = _card_short_of_memory(gpu_of(error))
    free = f"{size(card.free_bytes)} of {size(card.total_bytes)} free" if card else ""
    details = ", ".join(filter(None, (free, more)))
    return ImpastoError(
        "memory.full",
        f"Could not {action}: {card.name if card else 'the GPU'} does not have enough free memory"
        f"{f' ({details})' if details else ''}.",
        f"{closing(card)}, then try again.",
    )


def closing(card: gpu.Card | None) -> str:
    """Return the advice to close the programs that hold memory of a GPU, by name where they are known."""
    others = gpu.others_named(card, os.getpid()) if card else ""
    return f"Close other programs that use the GPU{f' ({others})' if others else ''}"


def card_in_use(device: torch.device) -> gpu.Card | None:
    """Return the run's GPU as it is now; None on the CPU and where the driver does not answer."""
    if device.type == "cuda":
        with suppress(ImpastoError, RuntimeError):
            return card_of(device.index or 0)
    return None


def _card_short_of_memory(index: int | None) -> gpu.Card | None:
    """Return GPU ``index`` of PyTorch's, else the one that the driver says is fullest."""
    if index is not None:
        return card_in_use(torch.device("cuda", index))
    found: list[gpu.Card] = []
    with suppress(ImpastoError):
        found = gpu.cards()
    return min(found, key=lambda card: card.free_bytes, default=None)


def cap_memory(device: torch.device) -> int | None:
    """Let PyTorch take no more than just under what is free on the GPU now; return the cap in bytes.

    Without it the Windows driver continues in main memory when the GPU is full, and a step takes minutes; with it
    PyTorch raises OutOfMemoryError, which a run can answer. Call it before anything is timed, and again when training
    starts. None on the CPU, and where the environment chooses another allocator, which has no such cap.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    free, total = torch.cuda.mem_get_info(device)
    cap = max(0, torch.cuda.memory_reserved(device) + free - SPARE_BYTES)
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    return cap


def warn_of_allocator(device: torch.device, reporter: Reporter) -> None:
    """Report an allocator that has no cap and that no forecast describes."""
    if device.type == "cuda" and torch.cuda.get_allocator_backend() != "native":
        reporter.notice(
            "memory.allocator",
            "PYTORCH_CUDA_ALLOC_CONF chooses another allocator than PyTorch's own: forecasts do not hold for it, and "
            "the run cannot be kept from spilling into main memory. Remove backend: from that variable.",
        )


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
    card = card_in_use(device)
    return why_slow(card, os.getpid()) if card else ("unknown", "")


def why_slow(card: gpu.Card, own_pid: int) -> tuple[str, str]:
    """As :func:`reason_for_slowness`, from the card as the driver tells of it now."""
    held = card.total_bytes - card.free_bytes
    others = [use for use in card.uses if use.pid != own_pid]
    named = gpu.others_named(card, own_pid)
    if held > FULL_SHARE * card.total_bytes:
        full = share(held, card.total_bytes)
        return "spilled", f"{full}; also there: {named}" if named else full
    if card.temperature is not None and card.temperature >= HOT_CELSIUS:
        return "hot", f"{card.temperature} °C"
    if any(use.kind == "compute" or (use.bytes or 0) > OTHERS_BUSY_BYTES for use in others):
        return "others", named
    return "unknown", ""
