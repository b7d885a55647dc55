"""Small pictures that came as text with a preset or a LoRA, from strangers. For worker threads."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO


@dataclass(frozen=True, slots=True)
class Pixels:
    """A small picture, three bytes a pixel."""

    width: int
    height: int
    rgb: bytes


def pixels_of(text: str, side: int) -> Pixels | None:
    """Decode a picture in base64 to fit a square of `side` pixels; None for what is no sound, modest picture."""
    from PIL import Image  # brings what the window does not wait for

    from trainer.config.presets.picture import decode_picture, picture_fault

    if picture_fault(text) is not None:
        return None
    with Image.open(BytesIO(decode_picture(text))) as image:
        small = image.convert("RGB")
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    return Pixels(small.width, small.height, small.tobytes())
