"""How fast a device works, as plain data: measured on it, or computed from what is known of a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Operation(Protocol):
    """Operations of one kind and size, as a trace counts them."""

    @property
    def kind(self) -> str:
        """gemm, conv, attention, or other, which is bound by memory."""

    @property
    def dtype(self) -> str:
        """The number format it computes in, such as "bfloat16"."""

    @property
    def stage(self) -> str:
        """Such as "forward" or "backward"."""

    @property
    def flops(self) -> int:
        """Of one operation: a multiply-add counts two."""

    @property
    def bytes(self) -> int:
        """That one operation reads and writes."""

    @property
    def count(self) -> int:
        """How many operations of this size there are."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What one operation takes, besides what every operation takes."""

    kind: str
    dtype: str
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Rate:
    """What a device takes for a trace's operations."""

    device: str
    """As people know it, such as "RTX 3060 12GB" or "cpu, 8 threads"."""
    timed: tuple[Timed, ...]
    """At least one of each kind; others of a kind and format go as fast as the most similar of these."""
    bandwidth: float
    """Bytes a second that no operation exceeds."""
    launch: float
    """Seconds of the device that each operation takes however small it is."""
    host: float
    """Seconds that the CPU takes to hand an operation to the device; 0 where the CPU itself computes."""
    disk: float = 500e6
    """Bytes a second when a base is read and placed: a SATA SSD, unless measured."""
