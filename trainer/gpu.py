"""NVIDIA GPUs as reported by their driver: free memory, and programs that use memory. Does not require torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Any, Literal

import pynvml

from trainer.errors import ImpastoError
from trainer.protocol.text import size

_REMEDY = "Restart the computer; if that does not help, install the newest driver from https://www.nvidia.com/drivers."
_BROKEN = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "it is installed but not running",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "it was updated, and the old one is still running",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user doesn't have permission to use it",
    pynvml.NVML_ERROR_GPU_IS_LOST: "a GPU no longer responds",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "its library is damaged or far too old",
}
# Lowest compute capability of each generation, newest first. Source: https://developer.nvidia.com/cuda-gpus
_GENERATIONS = {
    (10, 0): "Blackwell",
    (9, 0): "Hopper",
    (8, 9): "Ada",
    (8, 0): "Ampere",
    (7, 5): "Turing",
    (7, 0): "Volta",
    (6, 0): "Pascal",
    (5, 0): "Maxwell",
}

# Bytes per second of one PCIe lane by generation, without the share that encoding takes.
_LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Program that uses GPU memory; `bytes` is None if the driver does not report it, as on most Windows PCs."""

    pid: int
    name: str
    bytes: int | None
    kind: Literal["compute", "graphics"] = "compute"
    """Kind of use; programs that do both, such as desktops and browsers, count as graphics."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """NVIDIA GPU. `index` follows the driver's order, which may differ from PyTorch's; match GPUs by `uuid`."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    driver: str
    cuda: tuple[int, int]
    """Newest CUDA version that the driver supports."""
    capability: tuple[int, int]
    """CUDA compute capability, which determines the generation."""
    uses: tuple[GpuProcess, ...]
    """Programs that use the GPU's memory, those that use the most first."""
    load: int | None = None
    """Recent utilization in percent; None if the driver does not report it."""
    temperature: int | None = None
    """GPU temperature in degrees Celsius; None if the driver does not report it."""
    bus: float | None = None
    """Bytes per second of the PCIe link to its slot at full speed; None if the driver does not report it."""

    @property
    def bf16(self) -> bool:
        """Return whether the GPU computes bf16 natively, which requires Ampere or later."""
        return computes_bf16(self.capability)

    @property
    def generation(self) -> str:
        """Return the GPU's architecture, such as "Ampere"; "older" if it predates Maxwell."""
        return generation(self.capability)


def computes_bf16(capability: tuple[int, int]) -> bool:
    """Return whether GPUs with a compute capability compute bf16 natively; those before Ampere emulate it."""
    return capability >= (8, 0)


def generation(capability: tuple[int, int]) -> str:
    """Return the architecture of a compute capability, such as "Ampere"; "older" if it predates Maxwell."""
    return next((name for first, name in _GENERATIONS.items() if capability >= first), "older")


def cublas_workspace(capability: tuple[int, int], *, deterministic: bool) -> str:
    """Return the CUBLAS_WORKSPACE_CONFIG for a run: pairs of a buffer size in KiB and a number of buffers.

    Each process allocates these buffers twice.

    Runs set it explicitly because forecasts depend on it, and PyTorch's default differs between the supported versions:
    32 MiB for Hopper in all of them, but for consumer Blackwell only in newer ones (parseChosenWorkspaceSize in
    ATen/cuda/CublasHandlePool.cpp). Deterministic algorithms allow only ":4096:8" and ":16:8".
    """
    return ":4096:8" if deterministic or capability >= (9, 0) else ":4096:2:16:8"


def gpu_with_uuid(uuid: str, found: list[Gpu]) -> Gpu | None:
    """Return the driver's GPU with the `uuid` that PyTorch reports, which has no "GPU-" prefix.

    Returns None if the driver does not list it, as with a slice of a shared GPU or in a container that hides NVML.
    """
    wanted = uuid.lower().removeprefix("gpu-")
    return next((gpu for gpu in found if gpu.uuid.lower().removeprefix("gpu-") == wanted), None)


def other_processes_text(gpu: Gpu, own_pid: int) -> str:
    """Return the names of up to three other programs that use GPU memory: "blender 3.2 GiB, chrome"; "" if none do."""
    others = [use for use in gpu.uses if use.pid != own_pid]
    return ", ".join(f"{use.name} {size(use.bytes)}" if use.bytes else use.name for use in others[:3])


def list_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs in this PC in their current state; an empty list without a GPU or driver.

    GPUs that do not respond, or that this user may not query, are left out if another one responds. Raises ImpastoError
    "gpu.driver", with the reason, if the driver does not work.
    """
    try:
        with _driver():
            version = pynvml.nvmlSystemGetDriverVersion()
            number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            cuda = (number // 1000, number % 1000 // 10)
            return _answering(pynvml.nvmlDeviceGetCount(), version, cuda)
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


def _answering(count: int, version: str, cuda: tuple[int, int]) -> list[Gpu]:
    found: list[Gpu] = []
    silent: list[pynvml.NVMLError] = []
    for index in range(count):
        try:
            found.append(_gpu(index, version, cuda))
        except pynvml.NVMLError as error:
            silent.append(error)
    if silent and not found:
        raise silent[0]
    return found


def _gpu(index: int, driver: str, cuda: tuple[int, int]) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total,
        free_bytes=memory.free,
        driver=driver,
        cuda=cuda,
        capability=pynvml.nvmlDeviceGetCudaComputeCapability(handle),
        uses=_uses(handle),
        load=_load(handle),
        temperature=_query(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        bus=_bus(handle),
    )


def _bus(handle: object) -> float | None:
    """Return the bytes per second of a GPU's PCIe link.

    These are the maxima of GPU and slot together; an idle GPU slows its link down to save power.
    """
    generation = _query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = _query(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    rate = _LANE_RATES.get(generation)
    return lanes * rate if lanes and rate else None


def _load(handle: object) -> int | None:
    rates = _query(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else int(rates.gpu)


def _uses(handle: object) -> tuple[GpuProcess, ...]:
    """Return the programs that use a GPU, sorted by memory; drivers may not report all of them."""
    computing = _query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    drawing = _query(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()
    kinds: dict[int, Literal["compute", "graphics"]] = {process.pid: "compute" for process in computing}
    kinds |= {process.pid: "graphics" for process in drawing}
    sizes = {process.pid: process.usedGpuMemory for process in (*computing, *drawing)}
    uses = [GpuProcess(pid, _program(pid), size, kinds[pid]) for pid, size in sizes.items()]
    return tuple(sorted(uses, key=lambda use: (-(use.bytes or 0), use.pid)))


def _program(pid: int) -> str:
    name = _query(pynvml.nvmlSystemGetProcessName, pid) or ""
    path = "".join(letter for letter in name if letter.isprintable()) or "unknown"
    # PureWindowsPath splits at both kinds of slashes, so it works for Linux paths too.
    return PureWindowsPath(path.split(" ")[0] if path.startswith("/") else path).name


def _query(ask: Callable[..., Any], *arguments: object) -> Any:
    """Return the result of a driver query; None if this GPU does not support it or this user may not ask.

    Also returns None for a program path that pynvml cannot decode because it is not UTF-8 or is cut off in a character.
    """
    try:
        return ask(*arguments)
    except (pynvml.NVMLError, UnicodeDecodeError):
        return None
