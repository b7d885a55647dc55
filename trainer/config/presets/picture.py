"""The preview picture in a preset: checked without trust when it is read, made small and clean when it is shared."""

from __future__ import annotations

import base64
import binascii
import struct
import warnings
import zlib
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps

from trainer.errors import JobError
from trainer.protocol.atomic import long_path

LARGEST_PICTURE = 256 * 1024
"""Bytes of the picture file."""
LONGEST_SIDE = 1024
"""Pixels of a picture that is read."""
_SHARED_SIDE = 512  # pixels of a picture that we make, about 50 KiB
_LARGEST_SOURCE = 64_000_000  # pixels of a picture that one is made of
_QUALITIES = (88, 75, 60, 40)
_FORMATS = ("PNG", "JPEG", "WEBP")
# What a reader may find in a picture besides its pixels that does not tell of its maker or making.
_HARMLESS = {
    "dpi", "gamma", "srgb", "chromaticity", "transparency", "interlace", "aspect", "icc_profile", "adobe",
    "adobe_transform", "jfif", "jfif_version", "jfif_unit", "jfif_density", "progressive", "progression", "background",
    "loop", "timestamp", "duration", "bbox", "default_image",
}  # fmt: skip
# What Pillow's readers are known to raise on broken and hostile files.
_FAULTS = (
    OSError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, EOFError, RuntimeError,
    MemoryError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip


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
    except _FAULTS:
        return "is no picture that can be read (PNG, JPEG or WebP); it may be damaged"


def decode_picture(text: str) -> bytes:
    """The bytes of a picture that ``picture_fault`` has passed."""
    return base64.b64decode("".join(text.split()), validate=True)


def make_picture(path: Path) -> str:
    """Make a small JPEG of a picture file, without anything but pixels, as base64 in lines of 100 characters.

    Raises JobError when the file is no picture that can be read, or too large for one.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(long_path(path), formats=_FORMATS) as image:
                if image.width * image.height > _LARGEST_SOURCE:
                    raise ValueError(f"it has {image.width}×{image.height} pixels")
                data = _small_jpeg(image)
    except _FAULTS as fault:
        raise JobError(
            "preset.picture",
            f"{path} cannot be used as the preview picture: {_reason(fault)}.",
            "Name a PNG, JPEG or WebP picture, or leave --preview out.",
        ) from None
    text = base64.b64encode(data).decode("ascii")
    return "\n".join(text[start : start + 100] for start in range(0, len(text), 100))


def _opened_fault(data: bytes) -> str | None:
    with Image.open(BytesIO(data), formats=_FORMATS) as image:
        if max(image.size) > LONGEST_SIDE:
            return _too_wide()
        if getattr(image, "n_frames", 1) > 1:
            return "is animated; a still picture is enough"
        image.load()
        hidden = sorted(str(key) for key in image.info if key not in _HARMLESS)
        if hidden:
            return "holds more than a picture (EXIF or text), which may tell who made it and where; save it without"
    return None


def _small_jpeg(image: Image.Image) -> bytes:
    image.draft("RGB", (_SHARED_SIDE * 2, _SHARED_SIDE * 2))
    small = ImageOps.exif_transpose(image).convert("RGB")
    small.thumbnail((_SHARED_SIDE, _SHARED_SIDE), Image.Resampling.LANCZOS)
    small.info.clear()
    data = b""
    for quality in _QUALITIES:
        buffer = BytesIO()
        small.save(buffer, "JPEG", quality=quality, optimize=True)
        data = buffer.getvalue()
        if len(data) <= LARGEST_PICTURE // 2:
            break
    return data


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


def _reason(fault: Exception) -> str:
    if isinstance(fault, FileNotFoundError):
        return "there is no such file"
    too_large = isinstance(fault, Image.DecompressionBombError) or "×" in str(fault)
    return "it has too many pixels" if too_large else "it is no picture"
