"""What training shows of a picture, and another part of it that the artist chooses, in the shape of its bucket.

Imports what the trainer computes by, so the app loads it when crops are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.core.edits.edit import Edit
from app.core.pictures import Change, Crop, Picture
from trainer.config.recipe import RecipeConfig
from trainer.dataset.picture import choose_bucket, enlargement, region_of
from trainer.dataset.sampling import window_in

LEAST = 64
"""Pixels: no side of a crop is made smaller."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a centred showing of a picture holds."""

    bucket: tuple[int, int]
    """Width and height in pixels of what the model sees."""
    frame: Crop
    """The part of the upright picture that is left, as fractions."""
    lost: float
    """Share of the picture's area that lies outside."""
    enlarged: float
    """By which factor its sides grow; below 1 they shrink."""


def shown_of(width: int, height: int, crop: Crop | None, recipe: RecipeConfig) -> Shown | None:
    """Return what training shows of an upright picture of this many pixels; None: too small for any bucket."""
    region = region_of(width, height, crop)
    bucket = choose_bucket(region[2], region[3], recipe)
    if bucket is None:
        return None
    left, top, wide, high = window_in(region, bucket, 0.5, 0.5)
    frame = (left / width, top / height, (left + wide) / width, (top + high) / height)
    return Shown(bucket, frame, 1.0 - wide * high / (width * height), enlargement(wide, high, bucket))


def largest(width: int, height: int, shape: tuple[int, int]) -> Crop:
    """Return the largest frame of a shape in the middle of a picture, as fractions."""
    left, top, wide, high = window_in((0, 0, width, height), shape, 0.5, 0.5)
    return left / width, top / height, (left + wide) / width, (top + high) / height


def moved(frame: Crop, across: float, down: float) -> Crop:
    """Return a frame moved by fractions of the picture, kept inside it."""
    across = min(max(across, -frame[0]), 1.0 - frame[2])
    down = min(max(down, -frame[1]), 1.0 - frame[3])
    return frame[0] + across, frame[1] + down, frame[2] + across, frame[3] + down


def scaled(frame: Crop, factor: float, size: tuple[int, int], anchor: tuple[float, float] = (0.5, 0.5)) -> Crop:
    """Return a frame of the same shape, its sides times a factor; what is at `anchor` (0 to 1 within it) stays there.

    It stays inside the picture of `size` pixels, and its sides above LEAST pixels.
    """
    wide, high = frame[2] - frame[0], frame[3] - frame[1]
    least = max(min(LEAST / (wide * size[0]), 1.0), min(LEAST / (high * size[1]), 1.0))
    factor = min(max(factor, least), 1.0 / wide, 1.0 / high)
    left = frame[0] + anchor[0] * wide * (1.0 - factor)
    top = frame[1] + anchor[1] * high * (1.0 - factor)
    left = min(max(left, 0.0), 1.0 - wide * factor)
    top = min(max(top, 0.0), 1.0 - high * factor)
    return left, top, left + wide * factor, top + high * factor


def crop_to(picture: Picture, frame: Crop | None) -> Edit:
    """Train on this part of a picture; None: on all of it, as its bucket allows."""
    crop = None
    if frame is not None:
        left, top, right, bottom = (round(min(max(side, 0.0), 1.0), 6) for side in frame)
        crop = left, top, right, bottom
    name = f"Crop {picture.name}" if crop else f"Remove the crop of {picture.name}"
    return Edit(name, (Change(picture.id, "crop", picture.crop, crop),) if crop != picture.crop else ())
