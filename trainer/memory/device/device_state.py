"""A card at one moment, with all that is known about it: what a forecast is made for. Needs no torch."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field, replace

from trainer import gpu
from trainer.errors import JobError
from trainer.host import versions
from trainer.memory.allocator.settings import AllocatorSettings, settings_here
from trainer.memory.device.calibration import Correction, Margin, calibration_file, corrections
from trainer.memory.device.gpu_specs import GpuSpec, Overheads, model_of, overheads_for
from trainer.memory.device.roofline import rate_of
from trainer.memory.trace.memory_trace import Storage
from trainer.protocol.forecast import CPU, Rate
from trainer.protocol.text import share, size

UNMEASURED = Rate(CPU, (), 1.0, 0.0, 0.0)
"""The rate of a CPU before it is measured, for which nothing can be timed."""


@dataclass(frozen=True)
class DeviceState:
    """A card, what is free on it, and what is known of how it works."""

    card: GpuSpec
    free_bytes: int
    overheads: Overheads
    correction: Correction
    rate: Rate
    uses: tuple[gpu.Use, ...] = ()
    """Who else holds memory of it."""
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    """How PyTorch's allocator is set there, but for its limit."""

    @property
    def on_cpu(self) -> bool:
        """Whether this is main memory and the CPU."""
        return self.card.name == CPU

    @property
    def outside(self) -> int:
        """Bytes that the process takes beside the allocator: as finished runs had it, else as the table says."""
        learned = self.correction.context_bytes
        return self.overheads.context_bytes if learned is None else learned

    @property
    def kept_free(self) -> Margin:
        """Bytes to keep free because forecasts err, and why so many; forecasts err less on small GPUs."""
        return self.correction.margin(max(self.free_bytes - self.outside, 0))

    @property
    def margin(self) -> int:
        """Bytes to keep free because forecasts err."""
        return self.kept_free.bytes

    @property
    def budget(self) -> int:
        """Bytes that the allocator may take."""
        return max(self.free_bytes - self.outside - self.margin, 0)

    def require_budget(self) -> None:
        """Raise JobError when nothing of the GPU can be used: it is full, or the margin takes all that is free."""
        if self.budget:
            return
        free = f"{share(self.free_bytes, self.card.total_bytes)} are free"
        needs = f"CUDA needs {size(self.outside)} of it, and {size(self.margin)} are kept free because forecasts err"
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
            f"Could not plan for {self.card.name}: none of its memory can be used. {free}, {needs}.{used}",
            remedy,
        )

    def to_free(self, missing: int) -> int:
        """Bytes that have to become free here for the budget to grow by ``missing``, since the margin grows too."""
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
        """How large a library's workspace is here: cuBLAS' as stated, cuDNN's as a share of what it works on."""
        if storage.module.startswith("cublas"):
            return self.overheads.cublas_workspace_bytes
        return int(storage.bytes * self.overheads.cudnn_workspace_share)


def situation_ahead(card: GpuSpec, *, system: str | None = None, deterministic: bool = False) -> DeviceState:
    """A card that is not here, with a desktop on it and nothing else running."""
    system = system or platform.system()
    overheads = overheads_for(card, system, deterministic=deterministic)
    return _device_state(card, card.total_bytes - overheads.desktop_bytes, overheads, system)


def situation_here(
    card: gpu.Card, *, rate: Rate | None = None, deterministic: bool = False, own: int | None = 0
) -> DeviceState:
    """A GPU of this machine as it is now; ``rate`` is what was measured on it, if anything was.

    ``own`` is what this process holds of it already, None for a CUDA context of unknown size. It counts as free, since
    the forecast adds the whole process, context included.
    """
    model, system = model_of(card), platform.system()
    overheads = overheads_for(model, system, deterministic=deterministic)
    others = tuple(use for use in card.uses if use.pid != os.getpid())
    device_state = _device_state(model, card.free_bytes, overheads, system, rate, others)
    free = card.free_bytes + (device_state.outside if own is None else own)
    return replace(device_state, free_bytes=free, allocator=settings_here(system=system))


def situation_on_cpu(rate: Rate = UNMEASURED) -> DeviceState:
    """Return main memory, which has no allocator that pools and no bound that a forecast knows."""
    card = GpuSpec(
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
    return _device_state(card, 0, overheads, platform.system(), rate)


def _device_state(
    card: GpuSpec,
    free_bytes: int,
    overheads: Overheads,
    system: str,
    rate: Rate | None = None,
    uses: tuple[gpu.Use, ...] = (),
) -> DeviceState:
    correction = corrections(card.name, system, versions())
    return DeviceState(card, free_bytes, overheads, correction, rate or rate_of(card, system), uses)
