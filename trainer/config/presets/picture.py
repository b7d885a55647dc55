"""The preview picture in a preset: checked without trust when it is read, made small and clean when it is shared."""

from __future__ import annotations

import base64
import binascii
import warnings
from io import BytesIO
from pathlib import Path

from PIL import Image

from trainer.errors import JobError
from trainer.files.rewriting import FAULTS, FORMATS, UnusablePictureError, small_jpeg

LARGEST_PICTURE = 256 * 1024
"""Bytes of the picture file."""
LONGEST_SIDE = 1024
"""Pixels of a picture that is read."""
_SHARED_SIDE = 512  # pixels of a picture that we make, about 50 KiB
# What a reader may find in a picture besides its pixels that does not tell of its maker or making.
_HARMLESS = {
    "dpi", "gamma", "srgb", "chromaticity", "transparency", "interlace", "aspect", "icc_profile", "adobe",
    "adobe_transform", "jfif", "jfif_version", "jfif_unit", "jfif_density", "progressive", "progression", "background",
    "loop", "timestamp", "duration", "bbox", "default_image",
}  # fmt: skip


def picture_fault(text: str) -> str | None:
    """The reason why the base64 ``text`` is no picture for a preset; None when it is one.

    Every size is known before the memory for it is taken; all pixels are decoded once.
    """
    compact = "".join(text.split())
    if len(compact) > (LARGEST_PICTURE + 2) // 3 * 4:
        return f"is larger than {LARGEST_PICTURE // 1024} KiB"
    try:
        data = base64.b64decode(compact, validate=True)
    except (binascii.Error, ValueError):
        return "is not base64 text"
    if _webp_side(data) > LONGEST_SIDE:  # before Pillow opens it: that takes memory for two whole pictures
        return _too_wide()
    try:
        with warnings.catch_warnings():
            # Pillow warns of odd metadata and large sizes; both are refused below, in words.
            warnings.simplefilter("ignore")
            return _opened_fault(data)
    except Image.DecompressionBombError:
        return _too_wide()
    except FAULTS:
        return "is no picture that can be read (PNG, JPEG or WebP); it may be damaged"


def decode_picture(text: str) -> bytes:
    """The bytes of a picture that ``picture_fault`` has passed."""
    return base64.b64decode("".join(text.split()), validate=True)


def make_picture(path: Path) -> str:
    """Make a small JPEG of a picture file, without anything but pixels, as base64 in lines of 100 characters.

    Raises JobError when the file is no picture that can be read, or too large for one.
    """
    try:
        data = small_jpeg(path, _SHARED_SIDE, LARGEST_PICTURE // 2)
    except UnusablePictureError as fault:
        raise JobError(
            "preset.picture",
            f"{path} cannot be used as the preview picture: {fault}.",
            "Name a PNG, JPEG or WebP picture, or leave --preview out.",
        ) from None
    text = base64.b64encode(data).decode("ascii")
    return "\n".join(text[start : start + 100] for start in range(0, len(text), 100))


def _opened_fault(data: bytes) -> str | None:
    with Image.open(BytesIO(data), formats=FORMATS) as image:
        if max(image.size) > LONGEST_SIDE:
            return _too_wide()
        if getattr(image, "n_frames", 1) > 1:
            return "is animated; a still picture is enough"
        image.load()
        hidden = sorted(str(key) for key in image.info if key not in _HARMLESS)
        if hidden:
            return "holds more than a picture (EXIF or text), which may tell who made it and where; save it without"
    return None


def _webp_side(data: bytes) -> int:
    """The longest side that a WebP file states, 0 for other files.

    https://developers.google.com/speed/webp/docs/riff_container; VP8's frame header is RFC 6386, section 9.1.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return 0
    if data[12:16] == b"VP8X":
        return 1 + max(int.from_bytes(data[24:27], "little"), int.from_bytes(data[27:30], "little"))
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + max(bits & 0x3FFF, bits >> 14 & 0x3FFF)
    return max(int.from_bytes(data[place : place + 2], "little") & 0x3FFF for place in (26, 28))


def _too_wide() -> str:
    return f"is wider or higher than {LONGEST_SIDE} pixels"
