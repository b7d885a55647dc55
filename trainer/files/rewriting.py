"""Rewrites what a LoRA file says of itself: its header alone, the tensors' bytes stay as they are. Needs no torch."""

from __future__ import annotations

import base64
import hashlib
import json
import mmap
import shutil
import struct
import warnings
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from trainer.errors import LoraFileError
from trainer.files.header import read_header
from trainer.protocol import files
from trainer.protocol.reading import open_file, parse_json

FORMATS = ("PNG", "JPEG", "WEBP")
# What Pillow's readers are known to raise on broken and hostile files.
FAULTS = (
    OSError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, EOFError, RuntimeError,
    MemoryError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip
_LARGEST_SOURCE = 64_000_000  # pixels
_QUALITIES = (88, 75, 60, 40)
# ModelSpec recommends 256 pixels; ComfyUI reads headers up to 1 MiB, of which this takes a small part.
_THUMBNAIL_SIDE = 256
_THUMBNAIL_BYTES = 32 * 1024
_THUMBNAIL = "data:image/jpeg;base64,"


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


def header_bytes(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Lay out length and header as safetensors does, but with sorted metadata: its own order differs at each start.

    `entries` are the header's tensors as it has them.
    """
    head = {"__metadata__": dict(sorted(metadata.items())), **entries}
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def lora_hashes(entries: Mapping[str, Any], payload: bytes | memoryview, metadata: Mapping[str, str]) -> dict[str, str]:
    """Compute the hashes by which programs know a LoRA, as sd-scripts does (precalculate_safetensors_hashes).

    None depends on the other metadata: the legacy one is over bytes of the file as it would be with `ss_*` keys alone.
    """
    digest = hashlib.sha256(payload).hexdigest()
    lead = len(header_bytes(entries, {key: value for key, value in metadata.items() if key.startswith("ss_")}))
    legacy = hashlib.sha256(memoryview(payload)[max(0x100000 - lead, 0) : max(0x110000 - lead, 0)]).hexdigest()
    return {"sshs_model_hash": digest, "sshs_legacy_hash": legacy[:8], "modelspec.hash_sha256": f"0x{digest}"}


def rewrite_metadata(source: Path, target: Path, changes: Mapping[str, str | None]) -> str:
    """Write a copy of a LoRA file with other metadata, in one step, and return the SHA-256 of its tensors' bytes.

    `changes` are keys with their new texts, None for those to be taken out; the hashes by which programs know the file
    are computed anew. `target` may be `source`. Raises LoraFileError when the source is no good LoRA file or the copy
    reads back wrong, OSError when it cannot be written; a file that was there before is then left as it was.
    """
    read_header(source, "lora")
    with files.staged(target) as temporary:
        with (
            open_file(source, "stream") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            start = 8 + int.from_bytes(mapped[:8], "little")
            entries = parse_json(mapped[8:start])
            metadata = {**entries.pop("__metadata__", {}), **changes}
            kept = {key: text for key, text in metadata.items() if text is not None}
            with memoryview(mapped) as whole, whole[start:] as payload:
                told = {**kept, **lora_hashes(entries, payload, kept)}
            with temporary.open("wb") as copy:
                copy.write(header_bytes(entries, told))
                file.seek(start)
                shutil.copyfileobj(file, copy, 1 << 20)
        _check(temporary, target, told)
    return str(told["sshs_model_hash"])


def thumbnail(picture: Path) -> str:
    """Return a picture file as the text of `modelspec.thumbnail`; raises jpeg.UnusablePictureError."""
    data = small_jpeg(picture, _THUMBNAIL_SIDE, _THUMBNAIL_BYTES)
    return _THUMBNAIL + base64.b64encode(data).decode("ascii")


def _check(written: Path, target: Path, told: Mapping[str, str]) -> None:
    """Read back what was written: the header as it was meant, and the tensors' bytes by their hash."""
    header = read_header(written, "lora")
    digest = hashlib.sha256()
    with open_file(written, "stream") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while block := file.read(1 << 20):
            digest.update(block)
    if header.metadata != told or digest.hexdigest() != told["sshs_model_hash"]:
        raise LoraFileError(
            "lora.damaged",
            f"The file that was just written for {target} reads back wrong.",
            "Check the disk and try again; the LoRA that it was made from is as it was.",
        )
