"""Decode images to raw pixels, from files or from the untrusted text of a preset or LoRA. For worker threads."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from trainer.protocol.reading import open_file


class Pixels(NamedTuple):
    """An image with three bytes per pixel and no padding between rows."""

    width: int
    height: int
    rgb: bytes


def pixels_of(text: str, side: int) -> Pixels | None:
    """Return a base64 image, scaled to fit a square of `side` pixels; None if it is damaged or too large."""
    from PIL import Image  # late: it would delay the window

    from trainer.config.presets.preview_image import decode_image, image_fault

    if image_fault(text) is not None:
        return None
    with Image.open(BytesIO(decode_image(text))) as image:
        small = image.convert("RGB")
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    return Pixels(small.width, small.height, small.tobytes())


def read_pixels(file: Path, side: int = 0) -> Pixels | None:
    """Read an image, scaled to fit a square of `side` pixels if given; None if it cannot be read."""
    from PIL import Image

    try:
        with open_file(file, "image") as opened, Image.open(opened) as image:
            whole = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    if side:
        whole.thumbnail((side, side), Image.Resampling.LANCZOS)
    return Pixels(whole.width, whole.height, whole.tobytes())
