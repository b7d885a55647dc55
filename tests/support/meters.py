"""Measures what a piece of work takes of a device's memory, by that device's own allocator."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.training.machine import card_of


@dataclass(frozen=True)
class Measured:
    """Peaks over a piece of work, and how long it took."""

    requested: int
    """Bytes asked for, as far as the device tells; else 0."""
    allocated: int
    reserved: int
    seconds: float


class Meter(Protocol):
    """Measures work on one device."""

    device: torch.device

    def measure(self, work: Callable[[], None]) -> Measured:
        """Runs ``work``; peaks count what was there before."""

    def outside(self) -> int:
        """Bytes that the driver counts for this process beside the allocator; 0 where there is no driver."""

    def reset(self) -> int:
        """Gives everything back between two subjects; returns the bytes that stayed allocated."""


class CudaMeter:
    """A CUDA card, by PyTorch's statistics and NVML."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.free_before = card_of(index).free_bytes  # before there is a context
        torch.cuda.init()  # type: ignore[no-untyped-call]

    def measure(self, work: Callable[[], None]) -> Measured:
        """Runs ``work``, by torch.cuda.max_memory_allocated and its kin."""
        torch.cuda.reset_peak_memory_stats(self.device)
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - started
        statistics = torch.cuda.memory_stats(self.device)
        return Measured(
            requested=statistics["requested_bytes.all.peak"],
            allocated=statistics["allocated_bytes.all.peak"],
            reserved=statistics["reserved_bytes.all.peak"],
            seconds=seconds,
        )

    def outside(self) -> int:
        """The driver's free bytes before this process began, less those now and those that the allocator holds."""
        used = self.free_before - card_of(self.device.index).free_bytes
        return used - torch.cuda.memory_reserved(self.device)

    def reset(self) -> int:
        """Also gives back the workspaces of cuBLAS, so that the next subject takes its own."""
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self.device)


CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")


class CpuMeter:
    """Main memory, by the events of PyTorch's CPU allocator: it has no pools, so only what is asked for is known."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.live = 0

    def measure(self, work: Callable[[], None]) -> Measured:
        """Runs ``work`` under the profiler and sums births and deaths in order."""
        gc.collect()
        started = time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
            gc.collect()
        seconds = time.perf_counter() - started
        assert profiler.profiler is not None
        peak = self.live
        for change in changes_of(profiler.profiler.kineto_results.events()):
            self.live += change
            peak = max(peak, self.live)
        return Measured(peak, 0, 0, seconds)

    def outside(self) -> int:
        """Nothing: there is no driver."""
        return 0

    def reset(self) -> int:
        """Begins to count anew; what the last subject left is not watched dying."""
        gc.collect()
        self.live = 0
        return 0


def changes_of(events: Iterable[Any]) -> list[int]:
    """Bytes taken and given back, in order, from a profiler's events; without what convolutions do inside themselves.

    The CPU unfolds their input or reorders it and the weights, in buffers that are gone when they end. A card's kernels
    take other ones, which are no part of what is compared.
    """
    events = list(events)
    spans = sorted((one.start_ns(), one.start_ns() + one.duration_ns()) for one in events if one.name() in CONVOLUTIONS)
    kept: list[int] = []
    inside: list[int] = []
    end = 0
    for time_ns, change in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
        if time_ns > end:
            kept += inside
            inside, end = [], 0
            while spans and spans[0][1] < time_ns:
                spans.pop(0)
            end = spans[0][1] if spans and spans[0][0] <= time_ns else 0
        if not end:
            kept.append(change)
        elif -change in inside:
            inside.remove(-change)
        else:
            inside.append(change)
    return kept + inside
