"""The fit for a card by its memory, from a table; a planner that knows the job's true need may do better.

Rows follow traces of LoRA training at rank 16 with the base in 16 bits, and leave 1.5 GiB for driver and desktop:
SDXL at 1024 takes 5.8 GiB for one picture with checkpointing and 11.5 GiB without, each further picture 1 and 6.4 GiB
more; SD 1.5 at 512 takes 3 GiB without, 1.2 GiB more. An unquantised base comes first wherever one fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from trainer.config.base import Family

NATIVE_RESOLUTION: dict[Family, int] = {"sd15": 512, "sdxl": 1024}
LARGEST_MICRO_BATCH = 64  # beyond it no card gets faster


@dataclass(frozen=True, slots=True)
class Row:
    """What is chosen for cards of at least ``gigabytes`` (as sold)."""

    gigabytes: int
    quantise: Literal["none", "int8", "nf4"]
    checkpointing: Literal["none", "full"]
    micro_batch: int


_TABLE: dict[Family, tuple[Row, ...]] = {
    "sd15": (
        Row(0, "none", "full", 1),
        Row(4, "none", "full", 2),
        Row(6, "none", "none", 2),
        Row(8, "none", "none", 4),
        Row(12, "none", "none", 6),
        Row(16, "none", "none", 8),
        Row(24, "none", "none", 14),
        Row(32, "none", "none", 20),
    ),
    "sdxl": (
        Row(0, "nf4", "full", 1),
        Row(6, "int8", "full", 1),
        Row(8, "none", "full", 1),
        Row(12, "none", "full", 2),
        Row(16, "none", "none", 1),
        Row(24, "none", "none", 2),
        Row(32, "none", "none", 3),
        Row(48, "none", "none", 5),
        Row(80, "none", "none", 10),
    ),
}


# Weights, activations and gradients of text encoders that are trained along and so stay on the card.
_LIVE_TEXT_GIGABYTES: dict[Family, float] = {"sd15": 0.6, "sdxl": 2.5}


def row_for(family: Family, total_bytes: int, resolution: int, live_text: bool) -> Row:
    """The row for a card with ``total_bytes`` of memory, its micro-batch scaled from the family's native pixels.

    Where pictures are too large for even one without checkpointing, the largest row with checkpointing is taken.
    ``live_text`` says that a text encoder is trained too.
    """
    # A card reports a few per cent less than it is sold with.
    sold = total_bytes / 1024**3 * 1.06 - (_LIVE_TEXT_GIGABYTES[family] if live_text else 0.0)
    rows = [row for row in _TABLE[family] if row.gigabytes <= max(sold, 0.0)]
    share = (NATIVE_RESOLUTION[family] / resolution) ** 2
    fitting = rows[-1]
    if fitting.micro_batch * share < 1:
        fitting = next((row for row in reversed(rows) if row.checkpointing == "full"), fitting)
    return replace(fitting, micro_batch=min(max(1, int(fitting.micro_batch * share)), LARGEST_MICRO_BATCH))
