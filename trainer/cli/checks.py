"""What may keep training from using a card well, judged from facts: its memory, other users, driver and system."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainer.cli import words

if TYPE_CHECKING:
    from trainer.gpu import Card, Use
    from trainer.host import MainMemory

GIB = 1 << 30
# Main memory that training itself takes at its peak, reading SDXL: two thirds of its weights in 16 bits and PyTorch.
HOST_BYTES = 6 * GIB
# From here on NVIDIA's Windows driver goes on in main memory when a card is full; from the second it can be told not
# to: https://nvidia.custhelp.com/app/answers/detail/a_id/5490
SPILLS_FROM = (536, 40)
SWITCH_FROM = (546, 1)
HOT_CELSIUS = 85
BUSY_PERCENT = 50


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: whether training works with it, what was found, and what to do if not."""

    verdict: Literal["ok", "doubtful", "broken"]
    sentence: str
    remedy: str = ""


def check_card(card: Card) -> Check:
    """Judge what is free on a card, and how it is."""
    free = f"{words.size(card.free_bytes)} of {words.size(card.total_bytes)} free"
    facts = [
        f"compute capability {card.capability[0]}.{card.capability[1]}",
        "bf16" if card.bf16 else "fp16 only",
        card.generation,
    ]
    if card.temperature is not None:
        facts.append(f"{card.temperature} °C")
    if card.load is not None:
        facts.append(f"{card.load} % busy")
    sentence = f"Card {card.index}: {card.name}, {free}, {', '.join(facts)}"
    if card.temperature is not None and card.temperature >= HOT_CELSIUS:
        return Check("doubtful", sentence, "It is so hot that it slows itself down: clear its fans and vents of dust.")
    return Check("ok", sentence)


def check_uses(card: Card) -> Check:
    """Judge what else uses a card: memory that others hold is memory that training lacks."""
    others = ", ".join(_told(use) for use in card.uses) or "no program that the driver names"
    sentence = f"Card {card.index} is used by: {others}"
    if card.free_bytes < card.total_bytes // 2:
        return Check("doubtful", sentence, f"Close what you do not need on it{_largest(card)}.")
    if card.load is not None and card.load >= BUSY_PERCENT:
        return Check(
            "doubtful", sentence, f"It is {card.load} % busy: training beside that is slow. Close games first."
        )
    return Check("ok", sentence)


def check_context(card: Card, context_bytes: int, desktop_bytes: int) -> Check:
    """Say what CUDA itself will take of a card, and whether that leaves anything."""
    sentence = (
        f"Card {card.index}: CUDA itself takes about {words.size(context_bytes)} of it while training; "
        f"{words.size(max(0, card.free_bytes - context_bytes))} are left for the model"
    )
    if card.free_bytes - context_bytes >= (card.total_bytes - desktop_bytes - context_bytes) // 2:
        return Check("ok", sentence)
    usual = words.size(max(0, card.total_bytes - desktop_bytes - context_bytes))
    return Check("doubtful", f"{sentence}, where {usual} are usual", "Close other programs on it before training.")


def check_commit(memory: MainMemory, cards: list[Card]) -> Check | None:
    """Judge on Windows whether the system may promise as much memory as a full card and training itself need.

    None where the system does not count promises. A card's memory counts as if it were main memory: without room in the
    page file programs run out with most of the card free.
    """
    if memory.commit_free is None or memory.commit_limit is None or not cards:
        return None
    largest = max(card.total_bytes for card in cards)
    needed = largest + HOST_BYTES
    sentence = (
        f"The system may promise programs {words.size(memory.commit_free)} more of main memory and page file; "
        f"filling the card of {words.size(largest)} takes up to {words.size(needed)}"
    )
    if memory.commit_free >= needed:
        return Check("ok", sentence)
    size = -(-(needed - memory.commit_free) // GIB)
    remedy = (
        f"Make the page file at least {size} GiB larger, or leave its size to Windows: Settings, System, About, "
        "Advanced system settings, Performance, Advanced, Virtual memory. Then restart."
    )
    return Check("doubtful", sentence, remedy)


def check_spilling(driver: str, system: str) -> Check | None:
    """Say on Windows what the driver does when the card is full; None elsewhere, where a program is simply told."""
    found = re.match(r"(\d+)\.(\d+)", driver)
    if system != "Windows" or found is None:
        return None
    version = int(found[1]), int(found[2])
    if version < SPILLS_FROM:
        return Check("ok", f"Driver {driver} tells a program when the card is full, and does not go on in main memory")
    sentence = (
        f"Driver {driver} goes on in main memory when the card is full, a hundred times slower; "
        "Impasto takes less than what is free, so that this does not happen to it"
    )
    if version < SWITCH_FROM:
        return Check("ok", sentence, "Nothing need be done. Drivers from 546.01 on can be told not to do so.")
    remedy = (
        "Nothing need be done. For other programs: NVIDIA Control Panel, Manage 3D settings, CUDA - Sysmem Fallback "
        "Policy, Prefer No Sysmem Fallback."
    )
    return Check("ok", sentence, remedy)


def _told(use: Use) -> str:
    return use.name if use.bytes is None else f"{use.name} {words.size(use.bytes)}"


def _largest(card: Card) -> str:
    """What closing the largest would free, where the driver tells."""
    known = [use for use in card.uses if use.bytes]
    return f": {known[0].name} holds {words.size(known[0].bytes or 0)}" if known else ""
