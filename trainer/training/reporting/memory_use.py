"""Measures what each phase of a run takes of memory and time, beside which the forecast can be laid."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from trainer import gpu
from trainer.errors import ImpastoError
from trainer.host import private_bytes
from trainer.protocol import events
from trainer.protocol.forecast import ForecastPhase
from trainer.training.device.out_of_memory import card_of
from trainer.training.reporting.reporter import Reporter


@dataclass(slots=True)
class PhaseMemoryUse:
    """The most that a phase has held so far, in bytes, and its seconds; on the CPU only main memory is known."""

    allocated: int | None = None
    reserved: int | None = None
    host: int | None = None
    seconds: float = 0.0
    told: tuple[int | None, int | None] = (None, None)
    """What of the card's memory an event has told."""


class PhaseMemoryMeter:
    """Knows which phase is under way and what each has held at its peak.

    On a card the allocator itself keeps the peaks. Private main memory is looked at where a lap ends.
    """

    def __init__(self, device: torch.device, reporter: Reporter) -> None:
        self.device = device
        self.reporter = reporter
        self.phase: ForecastPhase = "load"
        self.latest: int | None = None
        """Bytes allocated on the card at the peak of the last lap; None on the CPU."""
        self._uses: dict[ForecastPhase, PhaseMemoryUse] = {}
        self._since = time.monotonic()

    def enter(self, phase: ForecastPhase) -> None:
        """Another phase begins, unless it is the one under way."""
        if phase == self.phase and phase in self._uses:
            return
        if self._uses:
            self.lap()
            self._tell_risen(self.phase)
        elif self.device.type == "cuda":
            # The peaks so far are those of timing kernels before the run, which no phase of it reaches.
            torch.cuda.reset_peak_memory_stats(self.device)
        self.phase = phase
        self._uses.setdefault(phase, PhaseMemoryUse())
        self._since = time.monotonic()

    def lap(self) -> None:
        """Adds what came since the last lap to the phase under way."""
        use, now = self._uses.setdefault(self.phase, PhaseMemoryUse()), time.monotonic()
        use.seconds, self._since = use.seconds + now - self._since, now
        use.host = _higher(use.host, private_bytes())
        if self.device.type == "cuda":
            # Read once a step, while the card waits: max_memory_allocated and its kin sort all of this each time.
            peaks = torch.cuda.memory_stats_as_nested_dict(self.device)
            self.latest = peaks["allocated_bytes"]["all"]["peak"]
            use.allocated = _higher(use.allocated, self.latest)
            use.reserved = _higher(use.reserved, peaks["reserved_bytes"]["all"]["peak"])
            torch.cuda.reset_peak_memory_stats(self.device)

    def knows(self, phase: ForecastPhase) -> bool:
        """Whether the phase has been entered and left or lapped before."""
        return phase in self._uses and self._uses[phase].seconds > 0

    def present(self) -> tuple[int | None, int | None]:
        """Bytes allocated and reserved on the card at this moment."""
        if self.device.type != "cuda":
            return None, None
        return torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)

    def close(self) -> None:
        """Tells every phase's memory and seconds once more, for the report."""
        self.lap()
        for phase in self._uses:
            self._tell(phase)

    def _tell_risen(self, phase: ForecastPhase) -> None:
        use = self._uses[phase]
        if use.told != (use.allocated, use.reserved) or use.seconds == 0.0:
            self._tell(phase)

    def _tell(self, phase: ForecastPhase) -> None:
        use = self._uses[phase]
        use.told = use.allocated, use.reserved
        outside = outside_bytes(self.device)
        device = None if use.reserved is None or outside is None else use.reserved + outside
        self.reporter.write(
            events.PhaseMemory(
                phase=phase,
                seconds=use.seconds,
                allocated=use.allocated,
                reserved=use.reserved,
                device=device,
                host=use.host,
            )
        )


def outside_bytes(device: torch.device) -> int | None:
    """Bytes that the driver counts for this process beyond PyTorch's allocator: context, libraries. None if unknown.

    Most Windows drivers do not tell what a process has, and a container may not know our process by our number.
    """
    if device.type != "cuda":
        return None
    mine: list[gpu.Use] = []
    with suppress(ImpastoError):
        mine = [use for use in card_of(device.index or 0).uses if use.pid == os.getpid()]
    if not mine or mine[0].bytes is None:
        return None
    return max(0, mine[0].bytes - torch.cuda.memory_reserved(device))


def _higher(first: int | None, second: int | None) -> int | None:
    known = [number for number in (first, second) if number is not None]
    return max(known, default=None)


def warn_of_allocator(device: torch.device, reporter: Reporter) -> None:
    """Report an allocator that has no cap and that no forecast describes."""
    if device.type == "cuda" and torch.cuda.get_allocator_backend() != "native":
        reporter.notice(
            "memory.allocator",
            "PYTORCH_CUDA_ALLOC_CONF chooses another allocator than PyTorch's own: forecasts do not hold for it, and "
            "the run cannot be kept from spilling into main memory. Remove backend: from that variable.",
        )
