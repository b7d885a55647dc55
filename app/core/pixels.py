"""Pictures as bytes, read on worker threads: from files, or from the text of a preset or a LoRA from strangers."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from trainer.protocol.reading import open_file


class Pixels(NamedTuple):
    """An image: three bytes a pixel, rows without gaps."""

    width: int
    height: int
    rgb: bytes


def pixels_of(text: str, side: int) -> Pixels | None:
    """Decode a picture in base64 to fit a square of `side` pixels; None for what is no sound, modest picture."""
    from PIL import Image  # brings what the window does not wait for

    from trainer.config.presets.preview_image import decode_image, image_fault

    if image_fault(text) is not None:
        return None
    with Image.open(BytesIO(decode_image(text))) as image:
        small = image.convert("RGB")
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    return Pixels(small.width, small.height, small.tobytes())


def read_pixels(file: Path, side: int = 0) -> Pixels | None:
    """Read a picture, made to fit a square of `side` pixels where given; None where it cannot be read."""
    from PIL import Image

    try:
        with open_file(file, "image") as opened, Image.open(opened) as image:
            whole = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    if side:
        whole.thumbnail((side, side), Image.Resampling.LANCZOS)
    return Pixels(whole.width, whole.height, whole.tobytes())
