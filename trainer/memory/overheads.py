"""What takes a card's memory and no trace shows: context, desktop, workspaces of libraries. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trainer import gpu
from trainer.files.assets import asset_path
from trainer.memory.cards import CardModel
from trainer.protocol.reading import read_toml

_MIB = 1 << 20
_LARGE_GIGABYTES = 16
_PAIR = re.compile(r":(\d+):(\d+)")


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


def overheads_for(card: CardModel, system: str, *, deterministic: bool = False) -> Overheads:
    """Return what to reckon with on a card under a system, "Windows" or else, as platform.system() says."""
    table = _table()
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


def _on_windows(card: CardModel, table: Mapping[str, Any]) -> int:
    if card.windows_share == 0.0:  # no screen, no desktop
        return _elsewhere(card, table)
    least: int = table["windows"]["least"] * _MIB
    return max(least, round(card.windows_share * card.total_bytes))


def _elsewhere(card: CardModel, table: Mapping[str, Any]) -> int:
    desktop: int = table["linux"]["desktop"] * _MIB if card.windows_share else 0
    share: float = table["linux"]["driver_share"]
    return desktop + round(share * card.total_bytes)


@cache
def _table() -> dict[str, Any]:
    return read_toml(asset_path("memory", "overheads.toml"), "config")
