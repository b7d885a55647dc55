"""Cards to plan for, known by name, by size, or because they are here: memory, abilities and rates. Needs no torch."""

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
# Words of full names that tell no two cards of the table apart.
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
_MEBIBYTES = re.compile(r"\b(\d{4,6})\s*(?:mb|mib)\b")  # as nvidia-smi tells sizes
_MIB = 1 << 20
_LARGE_GIGABYTES = 16
_PAIR = re.compile(r":(\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """A card as far as a forecast depends on it."""

    name: str
    """Such as "RTX 3060 12GB"; for one that is here, as the driver calls it."""
    gigabytes: int
    """As sold."""
    total_bytes: int
    """As NVML reports it."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    tflops: Mapping[str, float]
    """Dense matrix rate in TFLOP/s with fp32 accumulation, by "float32", "tf32", "float16" and, where it has it,
    "bfloat16"."""
    bandwidth: float
    """Of its memory, bytes a second."""
    windows_share: float
    """Of its memory, what driver and desktop take on Windows before any program starts; 0 where it drives no screen."""
    source: str
    """Where the figures are from."""
    unsure: tuple[str, ...] = ()
    """Facts that no source settles, as the table calls them: "mib", "fp32", "half", or "rates" for a stand-in's."""

    @property
    def bf16(self) -> bool:
        """Whether it computes in bf16 itself."""
        return gpu.computes_bf16(self.capability)

    @property
    def generation(self) -> str:
        """Its architecture, such as "Ampere"."""
        return gpu.generation(self.capability)


def find_card(text: str) -> GpuSpec:
    """Return the card that a user means: "RTX 3060", "3060 12gb", "4060ti 16", "8GB" (a typical card), or "here".

    Of a card sold with several memory sizes the table's first, the commonest, is taken unless one is named.
    Raises ImpastoError "gpu.unknown" with near names, or "gpu.none" when "here" is asked for on a machine without an
    NVIDIA card.
    """
    if text.strip().lower() == "here":
        return _card_here()
    words, gigabytes = _read(text)
    if not words and gigabytes is not None:
        return _typical(gigabytes)
    named = _named(words)
    sizes = [card for card in named if gigabytes in (None, card.gigabytes)]
    if not sizes:
        raise _unknown(text, named)
    return sizes[0]


def model_of(card: gpu.Card) -> GpuSpec:
    """Return what the table knows of a real card, with its real name, memory and capability.

    One that the table does not list gets the rates of the listed card of its generation that is nearest in memory.
    """
    words, _ = _read(card.name)
    listed = _named(words)
    alike = listed or [model for model in known_cards() if model.generation == card.generation] or known_cards()
    near = min(alike, key=lambda model: abs(model.total_bytes - card.total_bytes))
    return replace(
        near,
        name=card.name,
        gigabytes=near.gigabytes if listed else round(card.total_bytes / (1 << 30)),
        total_bytes=card.total_bytes,
        capability=card.capability,
        unsure=near.unsure if listed else ("rates",),
    )


@cache
def known_cards() -> tuple[GpuSpec, ...]:
    """Return every card of the table."""
    return tuple(_model(row, group) for group in _spec_table()["groups"] for row in group["cards"])


def _card_here() -> GpuSpec:
    found = gpu.cards()
    if not found:
        raise ImpastoError(
            "gpu.none",
            "This machine has no NVIDIA card, or no driver for it, so there is none to plan for.",
            'Name a card, such as --gpu "RTX 3060" or --gpu 8GB; `python -m trainer doctor` says what it finds here.',
        )
    return model_of(max(found, key=lambda card: card.free_bytes))


def _typical(gigabytes: float) -> GpuSpec:
    named: dict[str, str] = _spec_table()["typical"]
    size = f"{gigabytes:g}"
    if size in named:
        return find_card(f"{named[size]} {size}GB")
    sizes = ", ".join(named)
    raise ImpastoError(
        "gpu.unknown",
        f"No card with {size} GB of memory is known here.",
        f"Give one of {sizes} GB, or the name of a card, such as RTX 3060.",
    )


def _unknown(text: str, named: list[GpuSpec]) -> ImpastoError:
    plain = {" ".join(_words_of(card)): card.name.rpartition(" ")[0] for card in known_cards()}
    words = " ".join(word for word in _read(text)[0] if word not in _PREFIXES)
    near = [plain[name] for name in difflib.get_close_matches(words, plain, 4, 0.5)]
    listed = ", ".join([card.name for card in named] or near)
    hint = f"Did you mean one of: {listed}? Otherwise give" if listed else "Give"
    return ImpastoError(
        "gpu.unknown",
        f'No card called "{text.strip()[:60]}" is known here.',
        f"{hint} the memory of a card, such as 8GB, or `here` for the one in this machine.",
    )


def _named(words: Iterable[str]) -> list[GpuSpec]:
    """Return the cards, one for each memory size, whose name is the longest among those that the words contain."""
    given = set(words)
    found = [(len(own), card) for card in known_cards() if (own := set(_words_of(card))) <= given <= own | _NOISE]
    longest = max((length for length, _ in found), default=0)
    return [card for length, card in found if length == longest]


def _words_of(card: GpuSpec) -> list[str]:
    return [word for word in _read(card.name)[0] if word not in _PREFIXES]


def _read(text: str) -> tuple[list[str], float | None]:
    """Return the words of a card's name in order, and the gigabytes where they are named, and named once."""
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
    """Bytes to be reckoned with beside what a trace shows."""

    context_bytes: int
    """CUDA context and libraries of one process, outside PyTorch's allocator."""
    desktop_bytes: int
    """What driver and desktop hold before any program starts: total less this is free, where nobody can be asked."""
    cublas_workspace_bytes: int
    """Taken from the allocator at the first matrix product of the forward thread, and again at autograd's."""
    cudnn_workspace_share: float
    """Of input, output and weight of a convolution together, taken from the allocator while it runs."""
    sources: Mapping[str, str]
    """Where each is from, by field."""


def overheads_for(card: GpuSpec, system: str, *, deterministic: bool = False) -> Overheads:
    """Return what to reckon with on a card under a system, "Windows" or else, as platform.system() says."""
    table = _overhead_table()
    area = "windows" if system == "Windows" else "linux"
    size = "large" if card.gigabytes >= _LARGE_GIGABYTES else "small"
    return Overheads(
        context_bytes=table["context"][card.generation][size] * _MIB,
        desktop_bytes=_on_windows(card, table) if area == "windows" else _elsewhere(card, table),
        cublas_workspace_bytes=cublas_workspace_bytes(card.capability, deterministic=deterministic),
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
    """Return the bytes of one cuBLAS workspace: what CUBLAS_WORKSPACE_CONFIG asks for, by the user or else by a run.

    The format is ":KiB:count" pairs, added up as PyTorch does (parseChosenWorkspaceSize in CublasHandlePool.cpp).
    """
    stated = gpu.cublas_workspace(capability, deterministic=deterministic)
    pairs = _PAIR.findall(environment.get("CUBLAS_WORKSPACE_CONFIG", "")) or _PAIR.findall(stated)
    return sum(int(kib) * 1024 * int(count) for kib, count in pairs)


def _on_windows(card: GpuSpec, table: Mapping[str, Any]) -> int:
    if card.windows_share == 0.0:  # no screen, no desktop
        return _elsewhere(card, table)
    least: int = table["windows"]["least"] * _MIB
    return max(least, round(card.windows_share * card.total_bytes))


def _elsewhere(card: GpuSpec, table: Mapping[str, Any]) -> int:
    desktop: int = table["linux"]["desktop"] * _MIB if card.windows_share else 0
    share: float = table["linux"]["driver_share"]
    return desktop + round(share * card.total_bytes)


@cache
def _overhead_table() -> dict[str, Any]:
    return read_toml(asset_path("memory", "overheads.toml"), "config")
