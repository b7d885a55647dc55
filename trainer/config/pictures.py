"""How pictures become training crops: buckets, cropping, flipping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.config.model import Section


class PictureConfig(Section):
    """How pictures are cropped, flipped and put into buckets of like shape."""

    buckets: bool = True
    """Whether pictures keep about their own shape (aspect-ratio buckets); off: all are cropped to a square."""
    bucket_step: int = Field(default=64, ge=8, le=512, multiple_of=8)
    """Bucket sides are multiples of this many pixels."""
    bucket_min: int | None = Field(default=None, ge=8, le=8192, multiple_of=8)
    """Shortest bucket side in pixels; absent: half the resolution."""
    bucket_max: int | None = Field(default=None, ge=8, le=8192, multiple_of=8)
    """Longest bucket side in pixels; absent: twice the resolution."""
    max_upscale: float = Field(default=1.25, ge=1.0, le=16.0)
    """Pictures are not enlarged more than this; smaller ones get a smaller bucket."""
    crop: Literal["center", "random"] = "center"
    """Which part is kept when a picture is not shaped like its bucket; a crop in impasto.jsonl is cut out first."""
    flip: bool = False
    """Whether half of the showings are mirrored; leave off for anything with a left and a right."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Bucket limits in their order."""
        if self.bucket_min is not None and self.bucket_max is not None and self.bucket_min > self.bucket_max:
            yield "bucket_min", f"is {self.bucket_min}, which is above bucket_max = {self.bucket_max}"
