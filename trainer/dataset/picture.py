"""What a run knows about one picture; a run trains from these records alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.protocol.fields import json_keys

Kind = Literal["train", "regularisation", "validation"]
Crop = tuple[float, float, float, float]
MaskSource = Literal["none", "file", "alpha"]


@json_keys(
    "id", "path", "width", "height", "kind", "repeats", "weight", "captions", "trigger", "class_words", "mask",
    "mask_path", "mask_id", "crop", "bucket",
)  # fmt: skip
@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of the dataset as it is frozen in a run's listing."""

    id: str
    """SHA-256 of the file's bytes, in hex: the picture's name in every random stream and cache key."""
    path: Path
    width: int
    """Pixels of the upright picture."""
    height: int
    kind: Kind
    repeats: int
    """Showings an epoch (for regularisation pictures: in each round, see `sampling.epoch_samples`)."""
    weight: float
    captions: tuple[str, ...]
    """Alternatives as they stand in the file; none when there is no caption or it is empty."""
    trigger: str
    class_words: str
    mask: MaskSource
    mask_path: Path | None
    mask_id: str | None
    crop: Crop | None
    """The part to train on: left, top, right and bottom as fractions of the upright picture."""
    bucket: tuple[int, int]
    """Width and height in pixels of what the model is shown."""

    def region(self) -> tuple[int, int, int, int]:
        """Return the part to train on as (left, top, width, height) in upright pixels."""
        return region_of(self.width, self.height, self.crop)


def region_of(width: int, height: int, crop: Crop | None) -> tuple[int, int, int, int]:
    """Return a crop of an upright picture as (left, top, width, height) in pixels, at least one pixel each way."""
    left, top, right, bottom = crop or (0.0, 0.0, 1.0, 1.0)
    x = min(round(left * width), width - 1)
    y = min(round(top * height), height - 1)
    return x, y, max(round(right * width) - x, 1), max(round(bottom * height) - y, 1)
