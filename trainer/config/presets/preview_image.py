"""Preview images of presets, which are checked as untrusted input and written small, without metadata."""

from __future__ import annotations

import base64
import binascii
import warnings
from io import BytesIO
from pathlib import Path

from PIL import Image

from trainer.errors import JobError
from trainer.files.rewriting import FORMATS, PILLOW_ERRORS, UnusableImageError, small_jpeg

LARGEST_IMAGE = 256 * 1024
"""Maximum size of the image file in bytes."""
LONGEST_SIDE = 1024
"""Maximum width and height in pixels of an image that is read."""
_SHARED_SIDE = 512  # pixels of an image that is written, about 50 KiB
# Pillow's info keys that reveal nothing about who made an image, or how.
_HARMLESS = {
    "dpi", "gamma", "srgb", "chromaticity", "transparency", "interlace", "aspect", "icc_profile", "adobe",
    "adobe_transform", "jfif", "jfif_version", "jfif_unit", "jfif_density", "progressive", "progression", "background",
    "loop", "timestamp", "duration", "bbox", "default_image",
}  # fmt: skip


def image_fault(text: str) -> str | None:
    """Return why the base64 ``text`` is not a valid preview image, or None if it is.

    Sizes are checked before memory is allocated; then the whole image is decoded.
    """
    compact = "".join(text.split())
    if len(compact) > (LARGEST_IMAGE + 2) // 3 * 4:
        return f"is larger than {LARGEST_IMAGE // 1024} KiB"
    try:
        data = base64.b64decode(compact, validate=True)
    except (binascii.Error, ValueError):
        return "is not base64 text"
    if _webp_side(data) > LONGEST_SIDE:  # before Pillow opens it, which allocates memory for two full images
        return _too_wide()
    try:
        with warnings.catch_warnings():
            # Pillow warns about odd metadata and large sizes; both are rejected below with a message.
            warnings.simplefilter("ignore")
            return _opened_fault(data)
    except Image.DecompressionBombError:
        return _too_wide()
    except PILLOW_ERRORS:
        return "is not a readable image (PNG, JPEG or WebP); it may be damaged"


def decode_image(text: str) -> bytes:
    """Return the bytes of an image that ``image_fault`` has accepted."""
    return base64.b64decode("".join(text.split()), validate=True)


def make_preview(path: Path) -> str:
    """Return a small JPEG of an image file, without metadata, as base64 in lines of 100 characters.

    Raises JobError if the file is not a readable image or is too large.
    """
    try:
        data = small_jpeg(path, _SHARED_SIDE, LARGEST_IMAGE // 2)
    except UnusableImageError as fault:
        raise JobError(
            "preset.image",
            f"Could not use {path} as the preview image: {fault}.",
            "Use a PNG, JPEG or WebP image, or omit --preview.",
        ) from None
    text = base64.b64encode(data).decode("ascii")
    return "\n".join(text[start : start + 100] for start in range(0, len(text), 100))


def _opened_fault(data: bytes) -> str | None:
    with Image.open(BytesIO(data), formats=FORMATS) as image:
        if max(image.size) > LONGEST_SIDE:
            return _too_wide()
        if getattr(image, "n_frames", 1) > 1:
            return "is animated; use a still image"
        image.load()
        hidden = sorted(str(key) for key in image.info if key not in _HARMLESS)
        if hidden:
            return "contains EXIF data or text, which may reveal who made it and where; save it without metadata"
    return None


def _webp_side(data: bytes) -> int:
    """Return the longer side in pixels according to a WebP header; 0 for other formats.

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
    return f"is wider or taller than {LONGEST_SIDE} pixels"
