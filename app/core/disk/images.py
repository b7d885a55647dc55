"""Make thumbnails: small, upright, sRGB, with transparency on a checkerboard. For worker threads."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image, ImageFile

from app.core.disk.reading import MAX_MEGAPIXELS
from app.core.pixels import Pixels
from app.core.tasks import yield_to_window
from trainer.dataset.pixels import decode, open_image

_QUALITY = 88
_SQUARE = 8
_LIGHT, _DARK = (255, 255, 255), (205, 205, 205)


def make_thumbnail(path: Path, pixels: int) -> tuple[Pixels, bytes]:
    """Return a thumbnail with sides of at most `pixels`, both raw and as JPEG; small images are not enlarged.

    Raises DatasetError if the file is missing, damaged, not an image, or over the size limit.
    """
    with open_image(path, MAX_MEGAPIXELS) as image:
        yield_to_window()
        small = _upright(image, pixels)
        yield_to_window()
        packed = BytesIO()
        small.save(packed, "JPEG", quality=_QUALITY)
        return _raw(small), packed.getvalue()


def unpack(data: bytes) -> Pixels | None:
    """Decode a cached thumbnail; return None if it is damaged."""
    try:
        with Image.open(BytesIO(data), formats=["JPEG"]) as image:
            return _raw(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError):
        return None


def load_whole(path: Path, longest: int) -> tuple[Pixels, Pixels]:
    """Return the upright image at full size, and a copy whose longer side is at most `longest` pixels.

    Raises DatasetError for the same reasons as `make_thumbnail`.
    """
    with open_image(path, MAX_MEGAPIXELS) as image:
        whole = _on_checkerboard(image)
        small = whole.copy()
        small.thumbnail((longest, longest), Image.Resampling.BICUBIC, reducing_gap=2.0)
        return _raw(whole), _raw(small)


def _upright(image: ImageFile.ImageFile, pixels: int) -> Image.Image:
    # Decode a JPEG at 1/8, 1/4 or 1/2 of its size; asking for twice the target keeps the final scaling smooth.
    image.draft(None, (2 * pixels, 2 * pixels))
    whole = _on_checkerboard(image)
    yield_to_window()
    whole.thumbnail((pixels, pixels), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return whole


def _on_checkerboard(image: ImageFile.ImageFile) -> Image.Image:
    layers = decode(image)
    if layers.alpha is None:
        return layers.colors
    # About 32 squares across, so that they look the same size on screen for every image.
    side = max(_SQUARE, max(layers.colors.size) // 32)
    return Image.composite(layers.colors, _checkerboard(layers.colors.size, side), layers.alpha)


def _checkerboard(size: tuple[int, int], side: int) -> Image.Image:
    """Return a checkerboard of two light grays."""
    columns, rows = -(-size[0] // side), -(-size[1] // side)
    cells = Image.new("RGB", (columns, rows), _LIGHT)
    cells.putdata([(_DARK, _LIGHT)[(x + y) % 2] for y in range(rows) for x in range(columns)])
    return cells.resize((columns * side, rows * side), Image.Resampling.NEAREST).crop((0, 0, *size))


def _raw(image: Image.Image) -> Pixels:
    return Pixels(image.width, image.height, image.tobytes())
