"""Measurement of the memory and time that each phase of a run takes, to compare with the forecast."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from trainer import gpu
from trainer.errors import ImpastoError
from trainer.host import private_bytes
from trainer.protocol import events
from trainer.protocol.forecast import ForecastPhase
from trainer.training.device.out_of_memory import gpu_info
from trainer.training.reporting.memory_history import MemoryHistory
from trainer.training.reporting.reporter import Reporter

Memory = Literal["gpu", "main"]

# Seconds between two samples of a phase that reports progress: enough for a chart, and little in the file of events.
SAMPLE_SECONDS = 1.0
STEP_PHASES: tuple[ForecastPhase, ...] = ("first_step", "train")
"""Phases whose peaks are in the events of their steps."""


@dataclass(slots=True)
class PhaseMemoryUse:
    """A phase's peak bytes and seconds so far; on the CPU only main memory is known."""

    allocated: int | None = None
    reserved: int | None = None
    host: int | None = None
    seconds: float = 0.0
    reported: tuple[int | None, int | None] = (None, None)
    """Allocated and reserved bytes in the last event written for the phase."""


class PhaseMemoryMeter:
    """Measures the current phase and keeps the peaks of every phase.

    On a GPU the allocator records the peaks. Private main memory is only measured in `sample`.
    """

    def __init__(self, device: torch.device, reporter: Reporter, history: MemoryHistory | None = None) -> None:
        self.device = device
        self.reporter = reporter
        self.history = history
        """Recording of the memory events of all phases, if the user asked for memory snapshots."""
        self.phase: ForecastPhase = "load"
        self.latest: int | None = None
        """Peak bytes allocated on the GPU between the last two samples; None on the CPU."""
        self.latest_reserved: int | None = None
        """Peak bytes reserved from the driver between the last two samples; None on the CPU."""
        self.held: dict[Memory, int] = {}
        """Bytes held at the last sample, by the memory that they are in."""
        self._uses: dict[ForecastPhase, PhaseMemoryUse] = {}
        self._since = self._reported = time.monotonic()

    def enter(self, phase: ForecastPhase) -> None:
        """Start measuring a phase, which ends the previous one; if it is the current one, report progress in it."""
        if phase == self.phase and phase in self._uses:
            if phase not in STEP_PHASES and time.monotonic() - self._reported >= SAMPLE_SECONDS:
                self._sample_and_report()
            return
        if self._uses:
            self._sample_and_report()
            self._report_if_risen(self.phase)
        elif self.device.type == "cuda":
            # The peaks so far come from autotuning before the run and belong to no phase of it.
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.history is not None:
            self.history.enter(phase)
        self.phase = phase
        self._uses.setdefault(phase, PhaseMemoryUse())
        self._since = time.monotonic()

    def sample(self) -> None:
        """Add the time and peaks since the last sample to the current phase."""
        use, now = self._uses.setdefault(self.phase, PhaseMemoryUse()), time.monotonic()
        use.seconds, self._since = use.seconds + now - self._since, now
        if (main := private_bytes()) is not None:
            use.host = _higher(use.host, main)
            self.held["main"] = main
        if self.device.type == "cuda":
            # Read once per step, while the GPU idles: max_memory_allocated and the like sort all statistics each time.
            peaks = torch.cuda.memory_stats_as_nested_dict(self.device)
            self.latest = peaks["allocated_bytes"]["all"]["peak"]
            self.held["gpu"] = peaks["allocated_bytes"]["all"]["current"]
            use.allocated = _higher(use.allocated, self.latest)
            self.latest_reserved = peaks["reserved_bytes"]["all"]["peak"]
            use.reserved = _higher(use.reserved, self.latest_reserved)
            torch.cuda.reset_peak_memory_stats(self.device)

    def has_measured(self, phase: ForecastPhase) -> bool:
        """Return whether the phase has been measured, that is, sampled or left at least once."""
        return phase in self._uses and self._uses[phase].seconds > 0

    def current_bytes(self) -> tuple[int | None, int | None]:
        """Return the bytes currently allocated and reserved on the GPU; both are None on the CPU."""
        if self.device.type != "cuda":
            return None, None
        return torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)

    def close(self) -> None:
        """Write an event with the final memory and seconds of every phase, for the report; stop measuring."""
        self._sample_and_report()
        for phase in self._uses:
            self._report(phase)
        if self.history is not None:
            self.history.close()

    def _sample_and_report(self) -> None:
        """Sample the current phase and, outside of training, write an event with the peaks since the last sample."""
        self.sample()
        self._reported = time.monotonic()
        if self.phase not in STEP_PHASES and self.latest is not None and self.latest_reserved is not None:
            self.reporter.write(
                events.MemorySample(phase=self.phase, allocated=self.latest, reserved=self.latest_reserved)
            )

    def _report_if_risen(self, phase: ForecastPhase) -> None:
        use = self._uses[phase]
        if use.reported != (use.allocated, use.reserved) or use.seconds == 0.0:
            self._report(phase)

    def _report(self, phase: ForecastPhase) -> None:
        use = self._uses[phase]
        use.reported = use.allocated, use.reserved
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
    """Return this process's GPU bytes outside PyTorch's allocator (CUDA context, libraries); None if unknown.

    Most Windows drivers do not report memory by process, and in a container the driver may list this process under
    another id.
    """
    if device.type != "cuda":
        return None
    own: list[gpu.GpuProcess] = []
    with suppress(ImpastoError):
        own = [use for use in gpu_info(device.index or 0).uses if use.pid == os.getpid()]
    if not own or own[0].bytes is None:
        return None
    return max(0, own[0].bytes - torch.cuda.memory_reserved(device))


def _higher(first: int | None, second: int | None) -> int | None:
    values = [number for number in (first, second) if number is not None]
    return max(values, default=None)


def warn_of_allocator(device: torch.device, reporter: Reporter) -> None:
    """Warn if PyTorch uses an allocator that cannot be capped and that forecasts do not model."""
    if device.type == "cuda" and torch.cuda.get_allocator_backend() != "native":
        reporter.notice(
            "memory.allocator",
            "PYTORCH_CUDA_ALLOC_CONF selects an allocator other than PyTorch's own, so the memory forecast does not "
            'apply and the run may spill into main memory. Remove "backend:..." from that variable.',
        )
