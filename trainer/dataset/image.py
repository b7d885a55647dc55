"""The record of one image, and the choice of its bucket. A run trains only from these records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trainer.config.job import RecipeOverlay
from trainer.config.recipe import ImagesConfig, RecipeConfig
from trainer.protocol.records import json_keys

Kind = Literal["train", "regularization", "validation"]
Crop = tuple[float, float, float, float]
MaskSource = Literal["none", "file", "alpha"]


@json_keys(
    "id", "path", "width", "height", "kind", "repeats", "weight", "captions", "trigger", "class_words", "mask",
    "mask_path", "mask_id", "crop", "bucket", "overlay",
)  # fmt: skip
@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One image in the dataset, as frozen in a run's listing."""

    id: str
    """SHA-256 of the file in hex; identifies the image in cache keys and, with its resolution, in random streams."""
    path: Path
    width: int
    """Width of the upright image in pixels."""
    height: int
    kind: Kind
    repeats: int
    """Repeats per epoch or, for regularization images, per cycle (see `sampling.epoch_samples`)."""
    weight: float
    captions: tuple[str, ...]
    """Alternative captions as they are in the file; empty if there is no caption."""
    trigger: str
    class_words: str
    mask: MaskSource
    mask_path: Path | None
    mask_id: str | None
    crop: Crop | None
    """Region to train on: left, top, right and bottom as fractions of the upright image."""
    bucket: tuple[int, int]
    """Width and height of the training image in pixels."""
    overlay: RecipeOverlay | None = None
    """Recipe settings of the image's folder that differ from the job's; None if there are none."""

    @property
    def stream(self) -> str:
        """Return the sample id of the image's random streams, which differs between its resolutions."""
        side = self.overlay and self.overlay.resolution
        return f"{self.id}@{side}" if side else self.id

    def region(self) -> tuple[int, int, int, int]:
        """Return the region to train on as (left, top, width, height) in pixels of the upright image."""
        return region_of(self.width, self.height, self.crop)


def count_files(images: Iterable[ImageRecord]) -> int:
    """Return the number of image files; a file has a record for each of its folder's resolutions."""
    return len({image.path for image in images})


def image_recipe(image: ImageRecord, recipe: RecipeConfig) -> RecipeConfig:
    """Return the recipe of one image: the job's recipe with the settings of the image's folder.

    Whatever reads a setting that a folder can change, such as captions or flips, must read it here.
    """
    return recipe if image.overlay is None else image.overlay.applied_to(recipe)


def region_of(width: int, height: int, crop: Crop | None) -> tuple[int, int, int, int]:
    """Return a crop of an upright image as (left, top, width, height) in pixels, at least 1×1."""
    left, top, right, bottom = crop or (0.0, 0.0, 1.0, 1.0)
    x = min(round(left * width), width - 1)
    y = min(round(top * height), height - 1)
    return x, y, max(round(right * width) - x, 1), max(round(bottom * height) - y, 1)


Size = tuple[int, int]


def choose_bucket(width: int, height: int, recipe: RecipeConfig) -> Size | None:
    """Return the bucket (width, height) for an image or stored crop of this size, or None if it is too small.

    Every side is a multiple of `bucket_step`, the area is at most resolution squared, and the image is enlarged at most
    `max_upscale` times; a small image gets a smaller bucket, whose sides may be below `bucket_min`. Of the largest
    shapes within these limits, the one that crops least is chosen. None means that even a bucket of one step by one
    step would enlarge the image too much. Raises ValueError if the recipe's resolution is not resolved.
    """
    if recipe.resolution is None:
        raise ValueError("the recipe's resolution must be resolved before buckets are chosen")
    return _choose(width, height, recipe.resolution, recipe.images)


@lru_cache(maxsize=4096)
def _choose(width: int, height: int, resolution: int, images: ImagesConfig) -> Size | None:
    step = images.bucket_step
    widest = int(width * images.max_upscale) // step * step
    tallest = int(height * images.max_upscale) // step * step
    if not images.buckets:
        side = min(widest, tallest, resolution // step * step)
        return (side, side) if side else None
    shapes = list(_shapes(widest, tallest, resolution, images))
    # Rounded to 1e-9, so that equal losses tie on every machine and the shape decides.
    return min(shapes, key=lambda shape: (round(crop_loss(width, height, shape), 9), shape), default=None)


def _shapes(widest: int, tallest: int, resolution: int, images: ImagesConfig) -> Iterator[Size]:
    """Yield the tallest shape for each width and the widest for each height, within the area and side limits."""
    step = images.bucket_step
    shortest = -(-images.bucket_min // step) * step if images.bucket_min else resolution // 2 // step * step
    longest = (images.bucket_max or resolution * 2) // step * step
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
    """Return the share (0 to 1) of an image's area that is cropped away to fill the bucket."""
    wide, narrow = width * bucket[1], height * bucket[0]
    return 1.0 - min(wide, narrow) / max(wide, narrow)


def enlargement(width: int, height: int, bucket: Size) -> float:
    """Return the factor by which an image is scaled to cover the bucket; below 1, it shrinks."""
    return max(bucket[0] / width, bucket[1] / height)
