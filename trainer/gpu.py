"""Asks NVIDIA's driver which cards there are, how much of their memory is free and who uses it; needs no torch."""

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
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not speak to it",
    pynvml.NVML_ERROR_GPU_IS_LOST: "a card no longer answers",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "its library is damaged or far too old",
}
# By first compute capability, newest first; source: NVIDIA's table at https://developer.nvidia.com/cuda-gpus.
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


@dataclass(frozen=True, slots=True)
class Use:
    """A program that holds memory of a card; `bytes` is None where the driver does not tell, as on most Windows PCs."""

    pid: int
    name: str
    bytes: int | None
    kind: Literal["compute", "graphics"] = "compute"
    """Graphics is whatever draws, even if it computes too, as the desktop and browsers do."""


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
    """CUDA compute capability, which tells the generation."""
    uses: tuple[Use, ...]
    """Who else holds memory of it, the largest first."""
    load: int | None = None
    """Per cent of the last moment in which it was busy; None where the driver does not tell."""
    temperature: int | None = None
    """Of the chip in degrees Celsius; None where the driver does not tell."""

    @property
    def bf16(self) -> bool:
        """Whether it computes in bf16 itself: since Ampere."""
        return computes_bf16(self.capability)

    @property
    def generation(self) -> str:
        """Its architecture, such as "Ampere"; "older" before Maxwell."""
        return generation(self.capability)


def computes_bf16(capability: tuple[int, int]) -> bool:
    """Tell whether cards of a compute capability compute in bf16 themselves: since Ampere; earlier ones emulate it."""
    return capability >= (8, 0)


def generation(capability: tuple[int, int]) -> str:
    """Return the architecture's name of a compute capability, such as "Ampere"; "older" before Maxwell."""
    return next((name for first, name in _GENERATIONS.items() if capability >= first), "older")


def cublas_workspace(capability: tuple[int, int], *, deterministic: bool) -> str:
    """Return the CUBLAS_WORKSPACE_CONFIG that a run trains with: pairs of KiB and count, taken twice by a process.

    Stated, because PyTorch's default changed between the versions we support: 32 MiB is the default of Hopper in all,
    of consumer Blackwell only in newer ones (parseChosenWorkspaceSize in ATen/cuda/CublasHandlePool.cpp), and a
    forecast must know. Deterministic algorithms allow only ":4096:8" and ":16:8".
    """
    return ":4096:8" if deterministic or capability >= (9, 0) else ":4096:2:16:8"


def card_with_uuid(uuid: str, found: list[Card]) -> Card | None:
    """Return the one of the driver's cards that PyTorch means by `uuid`, which it gives without the "GPU-" before.

    None where the driver does not list it: a slice of a shared card, or a container that hides NVML.
    """
    wanted = uuid.lower().removeprefix("gpu-")
    return next((card for card in found if card.uuid.lower().removeprefix("gpu-") == wanted), None)


def others_named(card: Card, own_pid: int) -> str:
    """Name up to three other programs that hold memory of a GPU, such as "blender 3.2 GiB, chrome"; "" if none do."""
    others = [use for use in card.uses if use.pid != own_pid]
    return ", ".join(f"{use.name} {size(use.bytes)}" if use.bytes else use.name for use in others[:3])


def cards() -> list[Card]:
    """Return the NVIDIA cards of this machine as they are now; none where there is no card or no driver.

    A card that does not answer, or not to this user, is left out where another does. Raises ImpastoError "gpu.driver"
    when there is a driver that does not work, saying in what way.
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


def _answering(count: int, version: str, cuda: tuple[int, int]) -> list[Card]:
    found: list[Card] = []
    silent: list[pynvml.NVMLError] = []
    for index in range(count):
        try:
            found.append(_card(index, version, cuda))
        except pynvml.NVMLError as error:
            silent.append(error)
    if silent and not found:
        raise silent[0]
    return found


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
        load=_load(handle),
        temperature=_told(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
    )


def _load(handle: object) -> int | None:
    rates = _told(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else int(rates.gpu)


def _uses(handle: object) -> tuple[Use, ...]:
    """Return the programs that compute or draw on a card, the largest first; drivers need not tell all of them."""
    computing = _told(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    drawing = _told(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()
    kinds: dict[int, Literal["compute", "graphics"]] = {process.pid: "compute" for process in computing}
    kinds |= {process.pid: "graphics" for process in drawing}
    sizes = {process.pid: process.usedGpuMemory for process in (*computing, *drawing)}
    uses = [Use(pid, _program(pid), size, kinds[pid]) for pid, size in sizes.items()]
    return tuple(sorted(uses, key=lambda use: (-(use.bytes or 0), use.pid)))


def _program(pid: int) -> str:
    told = _told(pynvml.nvmlSystemGetProcessName, pid) or ""
    path = "".join(letter for letter in told if letter.isprintable()) or "unknown"
    # Takes both kinds of slashes, so it fits Linux too.
    return PureWindowsPath(path.split(" ")[0] if path.startswith("/") else path).name


def _told(ask: Callable[..., Any], *about: object) -> Any:
    """Return what the driver tells about something; None where this card or user is not told.

    Also for a program's path in another alphabet than UTF-8, or one cut off within a letter, which pynvml cannot read.
    """
    try:
        return ask(*about)
    except (pynvml.NVMLError, UnicodeDecodeError):
        return None
