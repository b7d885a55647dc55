"""Measure the device memory that a piece of work takes, by that device's own allocator."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.allocations import changes_of, marking_main_memory, outside
from trainer.training.device.out_of_memory import gpu_info


@dataclass(frozen=True)
class Measured:
    """Peaks of a piece of work, and its duration."""

    requested: int
    """Requested bytes, if the device reports them; otherwise 0."""
    allocated: int
    reserved: int
    seconds: float


class Meter(Protocol):
    """Measures work on one device."""

    device: torch.device

    def measure(self, work: Callable[[], None]) -> Measured:
        """Run ``work``; peaks include what was allocated before."""

    def outside(self) -> int:
        """Return bytes that the driver counts for this process outside the allocator; 0 if there is no driver."""

    def reset(self) -> int:
        """Free everything between two workloads; return the bytes that stayed allocated."""


class CudaMeter:
    """A CUDA GPU, measured by PyTorch's statistics and NVML."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.free_before = gpu_info(index).free_bytes  # before a context exists
        torch.cuda.init()  # type: ignore[no-untyped-call]

    def measure(self, work: Callable[[], None]) -> Measured:
        """Run ``work``, measured by torch.cuda.max_memory_allocated and related statistics."""
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
        """Return what the driver counts for this process outside the allocator, from the change in free bytes."""
        used = self.free_before - gpu_info(self.device.index).free_bytes
        return used - torch.cuda.memory_reserved(self.device)

    def reset(self) -> int:
        """Also free the workspaces of cuBLAS, so that the next workload allocates its own."""
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self.device)


# A GPU's kernels do not allocate what these allocate and free within themselves: the CPU unfolds or reorders the input
# and weights of convolutions, and bitsandbytes computes an update from many parts.
CPU_KERNELS = frozenset(
    {
        "aten::convolution",
        "aten::convolution_backward",
        "bitsandbytes::optimizer_update_8bit_blockwise",
        "bitsandbytes::optimizer_update_32bit",
    }
)


class CpuMeter:
    """Main memory, measured by the events of PyTorch's CPU allocator: it has no pools, so only requests are known.

    Does not count what kernels allocate within themselves, or what would be in main memory on a GPU too.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.live = 0

    def measure(self, work: Callable[[], None]) -> Measured:
        """Run ``work`` under the profiler and add up allocations and frees in order."""
        gc.collect()
        started = time.perf_counter()
        with marking_main_memory(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
            work()
            gc.collect()
        seconds = time.perf_counter() - started
        peak = self.live
        for change in outside(changes_of(recorder.profiler), CPU_KERNELS):
            self.live += change
            peak = max(peak, self.live)
        return Measured(peak, 0, 0, seconds)

    def outside(self) -> int:
        """Return 0: there is no driver."""
        return 0

    def reset(self) -> int:
        """Start counting again; frees of the previous workload's memory are not observed."""
        gc.collect()
        self.live = 0
        return 0
