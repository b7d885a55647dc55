"""Measures what a piece of work takes of a device's memory, by that device's own allocator."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.allocations import changes_of, outside, telling_main_memory
from trainer.training.device.out_of_memory import gpu_info


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
        self.free_before = gpu_info(index).free_bytes  # before there is a context
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
        used = self.free_before - gpu_info(self.device.index).free_bytes
        return used - torch.cuda.memory_reserved(self.device)

    def reset(self) -> int:
        """Also gives back the workspaces of cuBLAS, so that the next subject takes its own."""
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self.device)


# What these take and give back within themselves a card's kernels do not: the CPU unfolds the input of convolutions or
# reorders it and the weights, and bitsandbytes computes an update from many parts.
CPU_KERNELS = frozenset(
    {
        "aten::convolution",
        "aten::convolution_backward",
        "bitsandbytes::optimizer_update_8bit_blockwise",
        "bitsandbytes::optimizer_update_32bit",
    }
)


class CpuMeter:
    """Main memory, by the events of PyTorch's CPU allocator: it has no pools, so only what is asked for is known.

    Without what kernels do inside themselves, and what would lie in main memory beside a card, too.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.live = 0

    def measure(self, work: Callable[[], None]) -> Measured:
        """Runs ``work`` under the profiler and sums births and deaths in order."""
        gc.collect()
        started = time.perf_counter()
        with telling_main_memory(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
            work()
            gc.collect()
        seconds = time.perf_counter() - started
        peak = self.live
        for change in outside(changes_of(recorder.profiler), CPU_KERNELS):
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
