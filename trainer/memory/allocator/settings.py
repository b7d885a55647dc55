"""Settings of PyTorch's allocator, as given in PYTORCH_ALLOC_CONF. Does not require torch."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from trainer.protocol.records import json_keys

MIB = 2**20
LARGE_SEGMENT = 20 * MIB

# The number of size classes that roundup_power2_divisions can list: up to 2 MiB, up to 4 MiB, and so on.
_INTERVALS = 16
_SETTING = re.compile(r"(\w+):(\[[^\]]*\]|[^,]*)")
# The second is the older name, used if the first is unset.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@json_keys(
    "capacity", "expandable", "max_split_size", "roundup_power2_divisions", "garbage_collection_threshold",
    "large_segment_size",
)  # fmt: skip
@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings from PYTORCH_ALLOC_CONF and set_per_process_memory_fraction; the defaults are PyTorch's."""

    capacity: int | None = None
    """Maximum total bytes of the segments; None for no limit."""
    expandable: bool = False
    """Whether segments grow page by page (expandable_segments); on Windows, PyTorch warns and ignores it."""
    max_split_size: int | None = None
    """Blocks of at least this many bytes are never split; None if all blocks may be split."""
    roundup_power2_divisions: int | tuple[int, ...] = 0
    """Number of equal steps from one power of two to the next; requests are rounded up to a step (0 and 1: off).
    A tuple has one number for sizes below 2 MiB, one below 4 MiB, and so on; the last is for all larger sizes."""
    garbage_collection_threshold: float = 0.0
    """Share of ``capacity``; if more is reserved, long-unused segments are released before a new one is requested."""
    large_segment_size: int = LARGE_SEGMENT
    """Size in bytes of a segment shared by blocks of 1 to 10 MiB, and of a page in large expandable segments."""

    def divisions(self, size: int) -> int:
        """Return the number of rounding steps between two powers of two for a size of at least 1 byte."""
        divisions = self.roundup_power2_divisions
        if isinstance(divisions, int):
            return divisions
        return divisions[min(max(size.bit_length() - MIB.bit_length(), 0), len(divisions) - 1)]


def settings_here(environment: Mapping[str, str] = os.environ, system: str | None = None) -> AllocatorSettings:
    """Return the allocator settings that runs started by this process will use, as far as forecasts model them.

    Garbage collection is left out, because it only releases memory that a retry would release later anyway.
    """
    conf = next((environment[name] for name in _VARIABLES if environment.get(name)), "")
    settings = replace(settings_of(conf), garbage_collection_threshold=0.0)
    return replace(settings, expandable=False) if (system or platform.system()) == "Windows" else settings


def settings_of(conf: str) -> AllocatorSettings:
    """Parse a value of PYTORCH_ALLOC_CONF such as "expandable_segments:True,max_split_size_mb:128".

    Unknown keys and values that PyTorch would reject are ignored. The rules are those of
    c10/core/AllocatorConfig.cpp.
    """
    settings: dict[str, Any] = {}
    for key, value in _SETTING.findall("".join(conf.split())):
        if key in _READERS:
            name, read = _READERS[key]
            with suppress(ValueError, IndexError):
                settings[name] = read(value)
    return AllocatorSettings(**settings)


def _mebibytes(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if int(text) < least:
            raise ValueError(text)
        return int(text) * MIB

    return read


def _share(text: str) -> float:
    if not 0.0 < float(text) < 1.0:
        raise ValueError(text)
    return float(text)


def _boolean(text: str) -> bool:
    return ("False", "True").index(text) == 1


def _divisions(text: str) -> int | tuple[int, ...]:
    """Parse a number of steps, or a list such as [64:8,256:4,>:1] that maps sizes in MiB to numbers of steps.

    An entry applies from its size up to twice that size. The first entry also applies to all smaller sizes; ">"
    applies to all larger sizes and, as in PyTorch, replaces the entry before it.
    """
    if not text.startswith("["):
        return _power_of_two(text)
    found, last, first = [0] * _INTERVALS, 0, True
    for item in text[1:-1].split(","):
        bound, _, value = item.partition(":")
        divisions = _power_of_two(value) if int(value) else 0
        if bound == ">":
            found[last:] = [divisions] * (_INTERVALS - last)
            continue
        last = min(_power_of_two(bound).bit_length() - 1, _INTERVALS - 1)
        found[0 if first else last : last + 1] = [divisions] * (last + 1 if first else 1)
        first = False
    return tuple(found)


def _power_of_two(text: str) -> int:
    number = int(text)
    if number < 1 or number & (number - 1):
        raise ValueError(text)
    return number


_READERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable", _boolean),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    # At least 10 MiB: PyTorch's rule for segments smaller than the blocks that share them is not modeled.
    "large_segment_size_mb": ("large_segment_size", _mebibytes(10)),
    "max_split_size_mb": ("max_split_size", _mebibytes(LARGE_SEGMENT // MIB)),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
}
