"""How what is known of a LoRA is worded."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PySide6.QtCore import QCoreApplication, QLocale

from app.core.loras.file import LoraFile
from app.core.loras.strength import OTHER, Block
from app.qt.tables import Row
from app.qt.words import QT_TRANSLATE_NOOP
from trainer.files.architecture import NAMES

_SIDES = {
    "TE1": QT_TRANSLATE_NOOP("Lora", "Text encoder 1 (CLIP-L)"),
    "TE2": QT_TRANSLATE_NOOP("Lora", "Text encoder 2 (CLIP-G)"),
    "IN": QT_TRANSLATE_NOOP("Lora", "UNet, on the way in"),
    "MID": QT_TRANSLATE_NOOP("Lora", "UNet, middle"),
    "OUT": QT_TRANSLATE_NOOP("Lora", "UNet, on the way out"),
    OTHER: QT_TRANSLATE_NOOP("Lora", "Somewhere else"),
}


def facts(found: LoraFile) -> str:
    """Return what it is on one line: kind, family, rank, size."""
    family = NAMES[found.family] if found.family else QCoreApplication.translate("Lora", "for an unknown base")
    size = QLocale().formattedDataSize(found.bytes, 1, QLocale.DataSizeFormat.DataSizeTraditionalFormat)
    rank = (
        QCoreApplication.translate("Lora", "rank {rank}").format(rank=span(found.ranks))
        if found.ranks
        else QCoreApplication.translate("Lora", "no rank")
    )
    return f"{found.kind} · {family} · {rank} · {size}"


def rows_of(blocks: Sequence[Block]) -> list[Row]:
    """Return a line for each block, with its strength as a bar; the strongest has the longest."""
    known = [block.strength for block in blocks if block.strength is not None and math.isfinite(block.strength)]
    most = max(known, default=0.0)
    return [_row(block, most) for block in blocks]


def span(numbers: Sequence[float]) -> str:
    """Return numbers in ascending order as people say them: "16", or "8 to 32"."""
    ends = [f"{number:g}" for number in (numbers[0], numbers[-1])]
    return (
        ends[0]
        if ends[0] == ends[1]
        else QCoreApplication.translate("Lora", "{low} to {high}").format(low=ends[0], high=ends[1])
    )


def _row(block: Block, most: float) -> Row:
    side = next(words for start, words in _SIDES.items() if block.name.startswith(start))
    texts = (
        "–" if block.name == OTHER else block.name,
        QCoreApplication.translate("Lora", side),
        str(block.layers),
        span(block.ranks) if block.ranks else "–",
        span(block.alphas) if block.alphas else QCoreApplication.translate("Lora", "as rank"),
        _strength(block.strength),
    )
    tip = ""
    if block.unknown:
        words = QCoreApplication.translate("Lora", "Layers of it that could not be counted in: {count}.")
        tip = words.format(count=block.unknown)
    finite = block.strength is not None and math.isfinite(block.strength)
    return Row(texts, (block.strength or 0.0) / most if finite and most else 0.0 if finite else None, tip)


def _strength(strength: float | None) -> str:
    if strength is None:
        return QCoreApplication.translate("Lora", "not known")
    if not math.isfinite(strength):
        return QCoreApplication.translate("Lora", "broken: holds what is no number")
    return f"{strength:.3g}"
