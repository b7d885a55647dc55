"""What a run knows about one picture; a run trains from these records alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trainer.config.recipe import PictureConfig, RecipeConfig
from trainer.protocol.records import json_keys

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


Size = tuple[int, int]


def choose_bucket(width: int, height: int, recipe: RecipeConfig) -> Size | None:
    """Return the (width, height) in which a picture (or stored crop) of this many pixels is trained.

    Every side is a multiple of `bucket_step`, the area at most resolution squared, and the picture is enlarged
    at most `max_upscale` times, so a small picture gets a smaller bucket, whose sides may fall below `bucket_min`.
    Of all shapes that allow this and cannot grow, the one that crops away least is taken. None: even one step by
    one step would enlarge the picture too much. Raises ValueError when the recipe's resolution is not resolved.
    """
    if recipe.resolution is None:
        raise ValueError("the recipe's resolution has to be resolved before buckets are chosen")
    return _choose(width, height, recipe.resolution, recipe.pictures)


@lru_cache(maxsize=4096)
def _choose(width: int, height: int, resolution: int, pictures: PictureConfig) -> Size | None:
    step = pictures.bucket_step
    widest = int(width * pictures.max_upscale) // step * step
    tallest = int(height * pictures.max_upscale) // step * step
    if not pictures.buckets:
        side = min(widest, tallest, resolution // step * step)
        return (side, side) if side else None
    shapes = list(_shapes(widest, tallest, resolution, pictures))
    # Compared to 1e-9, so that equal losses tie on every machine and the shape itself decides.
    return min(shapes, key=lambda shape: (round(crop_loss(width, height, shape), 9), shape), default=None)


def _shapes(widest: int, tallest: int, resolution: int, pictures: PictureConfig) -> Iterator[Size]:
    """Yield for each width the tallest shape within area and limits, and for each height the widest."""
    step = pictures.bucket_step
    shortest = -(-pictures.bucket_min // step) * step if pictures.bucket_min else resolution // 2 // step * step
    longest = (pictures.bucket_max or resolution * 2) // step * step
    widest, tallest = min(widest, longest), min(tallest, longest)
    lowest_width, lowest_height = (max(min(shortest, limit), step) for limit in (widest, tallest))
    for width in range(lowest_width, widest + 1, step):
        height = min(resolution**2 // width // step * step, tallest)
        if height >= lowest_height:
            yield width, height
    for height in range(lowest_height, tallest + 1, step):
        width = min(resolution**2 // height // step * step, widest)
        if width >= lowest_width:
            yield width, height


def crop_loss(width: int, height: int, bucket: Size) -> float:
    """Return the share (0 to 1) of a picture's area that is cut away when it fills the bucket."""
    wide, narrow = width * bucket[1], height * bucket[0]
    return 1.0 - min(wide, narrow) / max(wide, narrow)


def enlargement(width: int, height: int, bucket: Size) -> float:
    """Return by which factor the picture's sides grow (below 1: shrink) until it covers the bucket."""
    return max(bucket[0] / width, bucket[1] / height)
