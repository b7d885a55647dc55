"""The allocator at one moment: its segments and the blocks they are cut into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PoolName = Literal["small", "large"]


@dataclass(frozen=True, slots=True)
class BlockState:
    """A piece of a segment."""

    address: int
    bytes: int
    requested: int | None
    """Bytes asked for; None where it is free."""


@dataclass(frozen=True, slots=True)
class SegmentState:
    """What was taken from the driver at once; of an expandable segment, its mapped pages."""

    address: int
    bytes: int
    pool: PoolName
    blocks: tuple[BlockState, ...]
    """By address, without gaps; those of an expandable segment leave out pages that are not mapped."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The allocator at one moment."""

    segments: tuple[SegmentState, ...]

    @property
    def fragmented(self) -> int:
        """Free bytes in segments that are partly in use: no other process gets them (inactive_split_bytes)."""
        in_use = (segment.blocks for segment in self.segments if len(segment.blocks) > 1)
        return sum(block.bytes for blocks in in_use for block in blocks if block.requested is None)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest block that can be handed out without asking the driver."""
        free = (block.bytes for segment in self.segments for block in segment.blocks if block.requested is None)
        return max(free, default=0)
