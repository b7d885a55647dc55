"""Makes a thumbnail of a picture: small, upright, sRGB, transparency on a checkerboard. For worker threads."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image, ImageFile

from app.core.disk.reading import MOST_MEGAPIXELS
from app.core.pixels import Pixels
from app.core.tasks import stand_back
from trainer.dataset.pixels import decode, open_picture

_QUALITY = 88
_SQUARE = 8
_LIGHT, _DARK = (255, 255, 255), (205, 205, 205)


def make_thumbnail(path: Path, pixels: int) -> tuple[Pixels, bytes]:
    """Return a picture scaled to fit a square of `pixels`, raw and as JPEG; smaller pictures stay as they are.

    Raises DatasetError when it is missing, damaged, no picture, or larger than is allowed.
    """
    with open_picture(path, MOST_MEGAPIXELS) as image:
        stand_back()
        small = _upright(image, pixels)
        stand_back()
        packed = BytesIO()
        small.save(packed, "JPEG", quality=_QUALITY)
        return _raw(small), packed.getvalue()


def unpack(data: bytes) -> Pixels | None:
    """Return the pixels of a kept thumbnail, None when it is damaged."""
    try:
        with Image.open(BytesIO(data), formats=["JPEG"]) as image:
            return _raw(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError):
        return None


def load_whole(path: Path, longest: int) -> tuple[Pixels, Pixels]:
    """Return all pixels of a picture as it is meant to be seen, and the same no longer than `longest` either way.

    Raises DatasetError as `make_thumbnail` does.
    """
    with open_picture(path, MOST_MEGAPIXELS) as image:
        whole = _on_checkerboard(image)
        small = whole.copy()
        small.thumbnail((longest, longest), Image.Resampling.BICUBIC, reducing_gap=2.0)
        return _raw(whole), _raw(small)


def _upright(image: ImageFile.ImageFile, pixels: int) -> Image.Image:
    # A JPEG is decoded at an eighth, quarter or half of its size, twice what is needed so that scaling stays smooth.
    image.draft(None, (2 * pixels, 2 * pixels))
    whole = _on_checkerboard(image)
    stand_back()
    whole.thumbnail((pixels, pixels), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return whole


def _on_checkerboard(image: ImageFile.ImageFile) -> Image.Image:
    layers = decode(image)
    if layers.alpha is None:
        return layers.colours
    # Squares of one size on screen, whatever the picture's: about 32 of them across.
    side = max(_SQUARE, max(layers.colours.size) // 32)
    return Image.composite(layers.colours, _checkerboard(layers.colours.size, side), layers.alpha)


def _checkerboard(size: tuple[int, int], side: int) -> Image.Image:
    """Return squares of two light greys."""
    columns, rows = -(-size[0] // side), -(-size[1] // side)
    cells = Image.new("RGB", (columns, rows), _LIGHT)
    cells.putdata([(_DARK, _LIGHT)[(x + y) % 2] for y in range(rows) for x in range(columns)])
    return cells.resize((columns * side, rows * side), Image.Resampling.NEAREST).crop((0, 0, *size))


def _raw(image: Image.Image) -> Pixels:
    return Pixels(image.width, image.height, image.tobytes())
