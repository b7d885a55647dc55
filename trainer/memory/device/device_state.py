"""Determine the current state of a GPU or the CPU, on which a forecast depends. Does not require torch."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field, replace

from trainer.errors import JobError
from trainer.gpu import Gpu, GpuProcess
from trainer.host import versions
from trainer.memory.allocator.settings import AllocatorSettings, settings_here
from trainer.memory.device.calibration import Correction, Margin, calibration_file, corrections
from trainer.memory.device.gpu_specs import GpuSpec, Overheads, overheads_for, specs_of
from trainer.memory.device.roofline import rate_of
from trainer.memory.trace.memory_trace import Storage
from trainer.protocol.forecast import CPU, DeviceSpeed
from trainer.protocol.text import share, size

UNMEASURED = DeviceSpeed(CPU, (), 1.0, 0.0, 0.0)
"""Placeholder speed of a CPU that has not been measured yet; it cannot be used to estimate times."""


@dataclass(frozen=True)
class DeviceState:
    """State of a GPU: free memory, overheads, speed, and corrections learned from finished runs."""

    gpu: GpuSpec
    free_bytes: int
    overheads: Overheads
    correction: Correction
    rate: DeviceSpeed
    uses: tuple[GpuProcess, ...] = ()
    """Other processes that use the GPU's memory."""
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    """Settings of PyTorch's allocator, without a memory limit."""

    @property
    def on_cpu(self) -> bool:
        """Return whether this is the CPU, which uses main memory."""
        return self.gpu.name == CPU

    @property
    def outside(self) -> int:
        """Return the bytes used outside the allocator by this process, learned from finished runs or from a table."""
        learned = self.correction.context_bytes
        return self.overheads.context_bytes if learned is None else learned

    @property
    def kept_free(self) -> Margin:
        """Return the safety margin for forecast errors and its reason; it grows with the free memory."""
        return self.correction.margin(max(self.free_bytes - self.outside, 0))

    @property
    def margin(self) -> int:
        """Return the safety margin in bytes."""
        return self.kept_free.bytes

    @property
    def budget(self) -> int:
        """Return the bytes that the allocator may reserve."""
        return max(self.free_bytes - self.outside - self.margin, 0)

    def require_budget(self) -> None:
        """Raise JobError when none of the GPU's memory can be used: it is full, or the margin takes all of it."""
        if self.budget:
            return
        free = f"{share(self.free_bytes, self.gpu.total_bytes)} is free"
        needs = f"CUDA needs {size(self.outside)} of it, and {size(self.margin)} is kept free as a safety margin"
        programs = [f"{use.name} ({size(use.bytes)})" if use.bytes else use.name for use in self.uses[:3]]
        used = f" The largest programs on it: {', '.join(programs)}." if programs else ""
        remedy = "Close other programs that use the GPU, then try again."
        if self.kept_free.reason == "shortage":
            remedy = (
                "An earlier run ran out of memory, which made the margin this large. Delete "
                f"{calibration_file()} to start over, then try again."
            )
        raise JobError(
            "plan.no_memory",
            f"Could not plan for {self.gpu.name}: none of its memory can be used. {free}, {needs}.{used}",
            remedy,
        )

    def to_free(self, missing: int) -> int:
        """Return how many bytes to free so that the budget grows by ``missing`` bytes.

        This is more than ``missing``, because the margin grows with the free memory.
        """
        wanted = self.budget + missing
        low, high = missing, 2 * (self.outside + wanted) + self.margin
        while low < high:
            middle = (low + high) // 2
            if replace(self, free_bytes=self.free_bytes + middle).budget < wanted:
                low = middle + 1
            else:
                high = middle
        return low

    def workspace_bytes(self, storage: Storage) -> int:
        """Return a workspace's bytes: the configured size for cuBLAS, a share of the operands' bytes for cuDNN."""
        if storage.module.startswith("cublas"):
            return self.overheads.cublas_workspace_bytes
        return int(storage.bytes * self.overheads.cudnn_workspace_share)


def state_of_listed_gpu(gpu: GpuSpec, *, system: str | None = None, deterministic: bool = False) -> DeviceState:
    """Return the state of a GPU that is not in this machine, with nothing but a desktop running on it."""
    system = system or platform.system()
    overheads = overheads_for(gpu, system, deterministic=deterministic)
    return _device_state(gpu, gpu.total_bytes - overheads.desktop_bytes, overheads, system)


def state_of_local_gpu(
    gpu: Gpu, *, rate: DeviceSpeed | None = None, deterministic: bool = False, own: int | None = 0
) -> DeviceState:
    """Return the current state of a GPU in this machine; ``rate`` is its measured speed, if known.

    ``own`` is the number of bytes that this process already uses, or None for a CUDA context of unknown size. They
    count as free because the forecast includes the whole process with its context.
    """
    model, system = specs_of(gpu), platform.system()
    overheads = overheads_for(model, system, deterministic=deterministic)
    others = tuple(use for use in gpu.uses if use.pid != os.getpid())
    device_state = _device_state(model, gpu.free_bytes, overheads, system, rate, others)
    free = gpu.free_bytes + (device_state.outside if own is None else own)
    return replace(device_state, free_bytes=free, allocator=settings_here(system=system))


def state_of_cpu(rate: DeviceSpeed = UNMEASURED) -> DeviceState:
    """Return the state of the CPU, whose main memory has no caching allocator and no known limit."""
    gpu = GpuSpec(
        name=CPU,
        gigabytes=0,
        total_bytes=0,
        capability=(0, 0),
        tflops={},
        bandwidth=rate.bandwidth,
        windows_share=0.0,
        source="measured",
    )
    overheads = Overheads(0, 0, cublas_workspace_bytes=0, cudnn_workspace_share=0.0, sources={})
    return _device_state(gpu, 0, overheads, platform.system(), rate)


def _device_state(
    gpu: GpuSpec,
    free_bytes: int,
    overheads: Overheads,
    system: str,
    rate: DeviceSpeed | None = None,
    uses: tuple[GpuProcess, ...] = (),
) -> DeviceState:
    correction = corrections(gpu.name, system, versions())
    return DeviceState(gpu, free_bytes, overheads, correction, rate or rate_of(gpu, system), uses)
