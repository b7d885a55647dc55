"""Makes small pictures of large ones, to be carried inside of other files: nothing but pixels, and few of them."""

from __future__ import annotations

import struct
import warnings
import zlib
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps

from trainer.protocol.reading import open_file

FORMATS = ("PNG", "JPEG", "WEBP")
# What Pillow's readers are known to raise on broken and hostile files.
FAULTS = (
    OSError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, EOFError, RuntimeError,
    MemoryError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip
_LARGEST_SOURCE = 64_000_000  # pixels
_QUALITIES = (88, 75, 60, 40)


class UnusablePictureError(Exception):
    """A picture file that none can be made of; its text says why."""


def small_jpeg(path: Path, side: int, largest: int) -> bytes:
    """Return a picture file as a JPEG of at most `side` pixels a side and about `largest` bytes, its metadata gone.

    Raises UnusablePictureError when the file is no picture that can be read, or has too many pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata and large sizes; both are left behind
            with open_file(path, "image") as file, Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > _LARGEST_SOURCE:
                    raise UnusablePictureError("it has too many pixels")
                return _compressed(image, side, largest)
    except FileNotFoundError:
        raise UnusablePictureError("there is no such file") from None
    except Image.DecompressionBombError:
        raise UnusablePictureError("it has too many pixels") from None
    except FAULTS:
        raise UnusablePictureError("it is no picture") from None


def _compressed(image: Image.Image, side: int, largest: int) -> bytes:
    image.draft("RGB", (side * 2, side * 2))
    small = ImageOps.exif_transpose(image).convert("RGB")
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    small.info.clear()
    data = b""
    for quality in _QUALITIES:
        buffer = BytesIO()
        small.save(buffer, "JPEG", quality=quality, optimize=True)
        data = buffer.getvalue()
        if len(data) <= largest:
            break
    return data
