"""Asks NVIDIA's driver which cards there are, how much of their memory is free and who uses it; needs no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Any

import pynvml

from trainer.errors import ImpastoError

_REMEDY = "Restart the computer; if that does not help, install the newest driver from https://www.nvidia.com/drivers."
_BROKEN = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "it is installed but not running",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "it was updated, and the old one is still running",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not speak to it",
    pynvml.NVML_ERROR_GPU_IS_LOST: "a card no longer answers",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "its library is damaged or far too old",
}


@dataclass(frozen=True, slots=True)
class Use:
    """A program that holds memory of a card; `bytes` is None where the driver does not tell, as on most Windows PCs."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Card:
    """One NVIDIA card. `index` counts in the driver's order, which PyTorch's may differ from: compare `uuid`."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    driver: str
    cuda: tuple[int, int]
    """The newest CUDA version that the driver speaks."""
    capability: tuple[int, int]
    """CUDA compute capability: 7.5 is Turing, 8.x Ampere and Ada, 9.0 Hopper, 10 and 12 Blackwell."""
    uses: tuple[Use, ...]

    @property
    def bf16(self) -> bool:
        """Whether it computes in bf16 itself: since Ampere."""
        return self.capability >= (8, 0)


def cards() -> list[Card]:
    """Return the NVIDIA cards of this machine as they are now; none where there is no card or no driver.

    Raises ImpastoError "gpu.driver" when there is a driver that does not work, saying in what way.
    """
    try:
        with _driver():
            version = pynvml.nvmlSystemGetDriverVersion()
            number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            cuda = (number // 1000, number % 1000 // 10)
            return [_card(index, version, cuda) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError_LibraryNotFound:
        return []
    except pynvml.NVMLError as error:
        reason = _BROKEN.get(error.value, str(error))
        raise ImpastoError("gpu.driver", f"The NVIDIA driver does not work: {reason}.", _REMEDY) from error


@contextlib.contextmanager
def _driver() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _card(index: int, driver: str, cuda: tuple[int, int]) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Card(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total,
        free_bytes=memory.free,
        driver=driver,
        cuda=cuda,
        capability=pynvml.nvmlDeviceGetCudaComputeCapability(handle),
        uses=_uses(handle),
    )


def _uses(handle: object) -> tuple[Use, ...]:
    """Return the programs that compute or draw on a card, the largest first; drivers need not tell all of them."""
    asked = (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses)
    found = {process.pid: process for ask in asked for process in _told(ask, handle) or ()}
    uses = [Use(pid, _program(pid), process.usedGpuMemory) for pid, process in found.items()]
    return tuple(sorted(uses, key=lambda use: (-(use.bytes or 0), use.pid)))


def _program(pid: int) -> str:
    path = _told(pynvml.nvmlSystemGetProcessName, pid) or "unknown"
    # Takes both kinds of slashes, so it fits Linux too.
    return PureWindowsPath(path.split(" ")[0] if path.startswith("/") else path).name


def _told(ask: Callable[[Any], Any], about: object) -> Any:
    """Return what the driver tells about something; None where this card or user is not told."""
    try:
        return ask(about)
    except pynvml.NVMLError:
        return None
