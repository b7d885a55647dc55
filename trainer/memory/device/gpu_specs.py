"""Look up specs and overheads of GPUs by name, by memory size, or in this machine. Does not require torch."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from trainer import gpu
from trainer.errors import ImpastoError
from trainer.files.assets import asset_path
from trainer.protocol.reading import read_toml

MIB = 1 << 20

_PREFIXES = frozenset({"rtx", "gtx"})
# Words in full names that do not distinguish any two GPUs of the table.
_NOISE = _PREFIXES | {
    "nvidia",
    "geforce",
    "tesla",
    "gpu",
    "graphics",
    "card",
    "generation",
    "with",
    "max",
    "q",
    "design",
}
_NOISE |= {"blackwell", "workstation", "server", "edition"}
_NOISE |= {"pcie", "sxm", "sxm2", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3"}
_SAME = {"mobile": "laptop", "notebook": "laptop"}
_SIZE = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d+)?)\s*(gb|gib|g)?(?![\w.])")
_MEBIBYTES = re.compile(r"\b(\d{4,6})\s*(?:mb|mib)\b")  # as nvidia-smi prints sizes
_MIB = 1 << 20
_LARGE_GIGABYTES = 16
_PAIR = re.compile(r":(\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """The properties of a GPU that a forecast depends on."""

    name: str
    """Name such as "RTX 3060 12GB"; for a GPU in this machine, the name that the driver reports."""
    gigabytes: int
    """Advertised memory in GB."""
    total_bytes: int
    """Memory in bytes as NVML reports it."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    tflops: Mapping[str, float]
    """Dense matrix rate in TFLOP/s with fp32 accumulation, by "float32", "tf32", "float16" and, if supported,
    "bfloat16"."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    windows_share: float
    """Share of memory that the driver and desktop use on Windows before any program starts; 0 for data center GPUs."""
    source: str
    """Sources of the figures."""
    unsure: tuple[str, ...] = ()
    """Unreliable figures as named in the table ("mib", "fp32", "half"), or "rates" if they come from a similar GPU."""
    bus: float | None = None
    """Bytes per second of its PCIe link; None for a GPU that is not in this machine, because its slot is unknown."""

    @property
    def bf16(self) -> bool:
        """Return whether the GPU supports bf16 in hardware."""
        return gpu.computes_bf16(self.capability)

    @property
    def generation(self) -> str:
        """Return the GPU architecture, such as "Ampere"."""
        return gpu.generation(self.capability)


def find_gpu(text: str) -> GpuSpec:
    """Return the GPU that a user means by text such as "RTX 3060", "3060 12gb", "4060ti 16", "8GB" or "here".

    A name without a memory size means the first match in the table, which is the most common variant; a memory size
    alone means a typical GPU of that size. Raises ImpastoError "gpu.unknown" with similar names, or "gpu.none" for
    "here" on a machine without an NVIDIA GPU.
    """
    if text.strip().lower() == "here":
        return _gpu_here()
    words, gigabytes = _read(text)
    if not words and gigabytes is not None:
        return _typical(gigabytes)
    named = _named(words)
    sizes = [spec for spec in named if gigabytes in (None, spec.gigabytes)]
    if not sizes:
        raise _unknown(text, named)
    return sizes[0]


def specs_of(device: gpu.Gpu) -> GpuSpec:
    """Return the specs of an installed GPU, with its own name, memory and compute capability.

    A GPU that is not in the table gets the rates of the GPU of the same generation with the closest memory size.
    """
    words, _ = _read(device.name)
    listed = _named(words)
    # Without a listed name, a GPU of the same architecture is the best guess for rates and bandwidth.
    alike = listed or [model for model in known_gpus() if model.generation == device.generation] or known_gpus()
    near = min(alike, key=lambda model: abs(model.total_bytes - device.total_bytes))
    return replace(
        near,
        name=device.name,
        gigabytes=near.gigabytes if listed else round(device.total_bytes / (1 << 30)),
        total_bytes=device.total_bytes,
        capability=device.capability,
        unsure=near.unsure if listed else ("rates",),
        bus=device.bus,
    )


@cache
def known_gpus() -> tuple[GpuSpec, ...]:
    """Return every GPU in the table."""
    return tuple(_model(row, group) for group in _spec_table()["groups"] for row in group["cards"])


def _gpu_here() -> GpuSpec:
    found = gpu.list_gpus()
    if not found:
        raise ImpastoError(
            "gpu.none",
            "Could not find an NVIDIA GPU to plan for: this PC has none, or its driver is not installed.",
            'Name a GPU, such as --gpu "RTX 3060" or --gpu 8GB; `python -m trainer doctor` shows what was found.',
        )
    # As a run without fit.device does: the GPU with the most free memory.
    return specs_of(max(found, key=lambda spec: spec.free_bytes))


def _typical(gigabytes: float) -> GpuSpec:
    named: dict[str, str] = _spec_table()["typical"]
    size = f"{gigabytes:g}"
    if size in named:
        return find_gpu(f"{named[size]} {size}GB")
    sizes = ", ".join(named)
    raise ImpastoError(
        "gpu.unknown",
        f"Could not plan for a GPU with {size} GB: no such GPU is known.",
        f"Use a known size ({sizes} GB) or the name of a GPU, such as RTX 3060.",
    )


def _unknown(text: str, named: list[GpuSpec]) -> ImpastoError:
    plain = {" ".join(_words_of(spec)): spec.name.rpartition(" ")[0] for spec in known_gpus()}
    words = " ".join(word for word in _read(text)[0] if word not in _PREFIXES)
    near = [plain[name] for name in difflib.get_close_matches(words, plain, 4, 0.5)]
    listed = ", ".join([spec.name for spec in named] or near)
    hint = f"Did you mean {listed}? Otherwise, use" if listed else "Use"
    return ImpastoError(
        "gpu.unknown",
        f'Could not plan for the GPU "{text.strip()[:60]}": its name is not known.',
        f"{hint} the memory size of a GPU, such as 8GB, or `here` for the one in this PC.",
    )


def _named(words: Iterable[str]) -> list[GpuSpec]:
    """Return the GPUs with the longest name that the given words contain: one GPU per memory size."""
    given = set(words)
    found = [(len(own), spec) for spec in known_gpus() if (own := set(_words_of(spec))) <= given <= own | _NOISE]
    longest = max((length for length, _ in found), default=0)
    return [spec for length, spec in found if length == longest]


def _words_of(gpu: GpuSpec) -> list[str]:
    return [word for word in _read(gpu.name)[0] if word not in _PREFIXES]


def _read(text: str) -> tuple[list[str], float | None]:
    """Return the words of a GPU's name in order, and its memory in GB if exactly one size is given."""
    plain = re.sub(r"[^a-z0-9.]+|(?<!\d)\.|\.(?!\d)", " ", text.lower())
    plain = _MEBIBYTES.sub(lambda found: f"{round(int(found[1]) / 1024)}gb", plain)
    plain = re.sub(r"\b([rg]tx)(\d)", r"\1 \2", plain)
    plain = re.sub(r"\b(\d{4})([a-z]+)", r"\1 \2", plain)
    numbers = _SIZE.findall(plain)
    sizes = {float(number) for number, unit in numbers if unit} or {float(number) for number, _ in numbers}
    words = _SIZE.sub(" ", plain).split()
    return [_SAME.get(word, word) for word in words], sizes.pop() if len(sizes) == 1 else None


def _model(row: Mapping[str, Any], group: Mapping[str, Any]) -> GpuSpec:
    capability: tuple[int, int] = tuple(group["capability"])
    fp32 = row["fp32"]
    tflops = {"float32": fp32, "tf32": fp32 * group["tf32"], "float16": fp32 * group["half"]}
    if gpu.computes_bf16(capability):
        tflops["bfloat16"] = tflops["float16"]
    return GpuSpec(
        name=f"{row['name']} {row['gb']}GB",
        gigabytes=row["gb"],
        total_bytes=row["mib"] * MIB,
        capability=capability,
        tflops=tflops,
        bandwidth=row["bandwidth"] * 1e9,
        windows_share=row.get("windows_share", group["windows_share"]),
        source="; ".join(group["sources"]),
        unsure=(*group.get("unsure", ()), *row.get("unsure", ())),
    )


@cache
def _spec_table() -> dict[str, Any]:
    return read_toml(asset_path("memory", "cards.toml"), "config")


@dataclass(frozen=True, slots=True)
class Overheads:
    """Memory in bytes that a trace does not include."""

    context_bytes: int
    """Memory of one process's CUDA context and libraries, outside PyTorch's allocator."""
    desktop_bytes: int
    """Memory that the driver and desktop use before any program starts, for GPUs whose free memory is unknown."""
    cublas_workspace_bytes: int
    """Size of a cuBLAS workspace; the forward thread and autograd's thread each allocate one at their first GEMM."""
    cudnn_workspace_share: float
    """Size of a convolution's cuDNN workspace as a share of the combined bytes of input, output and weight."""
    sources: Mapping[str, str]
    """Source of each figure, by field."""


def overheads_for(gpu: GpuSpec, system: str, *, deterministic: bool = False) -> Overheads:
    """Return a GPU's overheads on ``system``, a platform.system() name (only "Windows" differs)."""
    table = _overhead_table()
    area = "windows" if system == "Windows" else "linux"
    size = "large" if gpu.gigabytes >= _LARGE_GIGABYTES else "small"
    return Overheads(
        context_bytes=table["context"][gpu.generation][size] * _MIB,
        desktop_bytes=_on_windows(gpu, table) if area == "windows" else _elsewhere(gpu, table),
        cublas_workspace_bytes=cublas_workspace_bytes(gpu.capability, deterministic=deterministic),
        cudnn_workspace_share=table["cudnn"]["workspace_share"],
        sources={
            "context_bytes": table["context"]["source"],
            "desktop_bytes": table[area]["source"],
            "cublas_workspace_bytes": "stated by the run itself, see trainer/gpu.py",
            "cudnn_workspace_share": table["cudnn"]["source"],
        },
    )


def cublas_workspace_bytes(
    capability: tuple[int, int], *, deterministic: bool, environment: Mapping[str, str] = os.environ
) -> int:
    """Return the size of a cuBLAS workspace in bytes, from CUBLAS_WORKSPACE_CONFIG or else the run's own setting.

    The variable contains ":KiB:count" pairs, which are added up as in PyTorch (parseChosenWorkspaceSize in
    CublasHandlePool.cpp).
    """
    stated = gpu.cublas_workspace(capability, deterministic=deterministic)
    pairs = _PAIR.findall(environment.get("CUBLAS_WORKSPACE_CONFIG", "")) or _PAIR.findall(stated)
    return sum(int(kib) * 1024 * int(count) for kib, count in pairs)


def _on_windows(gpu: GpuSpec, table: Mapping[str, Any]) -> int:
    if gpu.windows_share == 0.0:  # no screen, no desktop
        return _elsewhere(gpu, table)
    least: int = table["windows"]["least"] * _MIB
    return max(least, round(gpu.windows_share * gpu.total_bytes))


def _elsewhere(gpu: GpuSpec, table: Mapping[str, Any]) -> int:
    desktop: int = table["linux"]["desktop"] * _MIB if gpu.windows_share else 0
    share: float = table["linux"]["driver_share"]
    return desktop + round(share * gpu.total_bytes)


@cache
def _overhead_table() -> dict[str, Any]:
    return read_toml(asset_path("memory", "overheads.toml"), "config")
