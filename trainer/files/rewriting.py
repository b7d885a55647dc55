"""Rewrite a LoRA file's metadata without changing its tensor data. Does not require torch."""

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

from trainer.config.base import BASE_VERSIONS, Family
from trainer.errors import LoraFileError
from trainer.files.header import read_header
from trainer.protocol import files
from trainer.protocol.reading import open_file, parse_json

FORMATS = ("PNG", "JPEG", "WEBP")
# Exceptions that Pillow's readers are known to raise for broken and hostile files.
PILLOW_ERRORS = (
    OSError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, EOFError, RuntimeError,
    MemoryError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip
_LARGEST_SOURCE = 64_000_000  # pixels
_QUALITIES = (88, 75, 60, 40)
# ModelSpec recommends 256 pixels. ComfyUI reads headers up to 1 MiB, of which a thumbnail takes a small part.
_THUMBNAIL_SIDE = 256
_THUMBNAIL_BYTES = 32 * 1024
_THUMBNAIL = "data:image/jpeg;base64,"
MINIMAL_KEYS = (
    *("ss_base_model_version", "ss_v2", "ss_network_module", "ss_network_dim", "ss_network_alpha", "ss_network_args"),
    *("modelspec.sai_model_spec", "modelspec.architecture", "modelspec.implementation", "modelspec.prediction_type"),
    *("ss_zero_terminal_snr", "lora_adapter_metadata"),
)
"""Metadata that programs need to load a LoRA as what it is; all other keys describe it or its training.

As in sd-scripts with --no_metadata, ModelSpec's own, what the base predicts, and where diffusers keeps alpha.
"""


def minimal_metadata(metadata: Mapping[str, str], family: Family | None) -> dict[str, str]:
    """Return the entries of `MINIMAL_KEYS`, with the family's version.

    A1111 takes an SDXL file that has metadata without a version for SD 1.5, and hides it.
    """
    version = {"ss_base_model_version": BASE_VERSIONS[family]} if family else {}
    return version | {key: metadata[key] for key in MINIMAL_KEYS if key in metadata}


class UnusableImageError(Exception):
    """An image file cannot be used as a preview; the message says why."""


def small_jpeg(path: Path, side: int, largest: int) -> bytes:
    """Return an image file as a JPEG without metadata, at most `side` pixels per side and about `largest` bytes.

    Raises UnusableImageError if the file is not a readable image or has too many pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata and large sizes, which don't matter here
            with open_file(path, "image") as file, Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > _LARGEST_SOURCE:
                    raise UnusableImageError("it has too many pixels")
                return _compressed(image, side, largest)
    except FileNotFoundError:
        raise UnusableImageError("there is no such file") from None
    except Image.DecompressionBombError:
        raise UnusableImageError("it has too many pixels") from None
    except PILLOW_ERRORS:
        raise UnusableImageError("it is not a readable image") from None


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
    """Return a header, preceded by its length, as safetensors writes it, but with the metadata sorted by key.

    `entries` are the header's tensor entries, which are written unchanged.
    """
    head = {"__metadata__": dict(sorted(metadata.items())), **entries}
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def lora_hashes(entries: Mapping[str, Any], payload: bytes | memoryview, metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the hashes by which programs identify a LoRA.

    They are computed as in sd-scripts (precalculate_safetensors_hashes). Of the metadata, only the `ss_*` keys affect
    them: the legacy hash covers part of the file as if it contained no other metadata.
    """
    digest = hashlib.sha256(payload).hexdigest()
    lead = len(header_bytes(entries, {key: value for key, value in metadata.items() if key.startswith("ss_")}))
    legacy = hashlib.sha256(memoryview(payload)[max(0x100000 - lead, 0) : max(0x110000 - lead, 0)]).hexdigest()
    return {"sshs_model_hash": digest, "sshs_legacy_hash": legacy[:8], "modelspec.hash_sha256": f"0x{digest}"}


def rewrite_metadata(source: Path, target: Path, changes: Mapping[str, str | None]) -> str:
    """Write a copy of a LoRA file with changed metadata atomically; return the SHA-256 of its tensor data.

    `changes` maps metadata keys to new values, or to None to remove the key; identifying hashes are updated.
    `target` may be `source`. Raises LoraFileError if the source is not a valid LoRA file or the copy differs when
    read back, and OSError if it cannot be written; in these cases, an existing target is unchanged.
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
                updated = {**kept, **lora_hashes(entries, payload, kept)}
            with temporary.open("wb") as copy:
                copy.write(header_bytes(entries, updated))
                file.seek(start)
                shutil.copyfileobj(file, copy, 1 << 20)
        _verify(temporary, target, updated)
    return str(updated["sshs_model_hash"])


def thumbnail(image: Path) -> str:
    """Return an image file as a value for `modelspec.thumbnail`; raises UnusableImageError."""
    data = small_jpeg(image, _THUMBNAIL_SIDE, _THUMBNAIL_BYTES)
    return _THUMBNAIL + base64.b64encode(data).decode("ascii")


def _verify(written: Path, target: Path, metadata: Mapping[str, str]) -> None:
    """Raise LoraFileError unless the written file has this metadata and its tensor data has the recorded hash."""
    header = read_header(written, "lora")
    digest = hashlib.sha256()
    with open_file(written, "stream") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while block := file.read(1 << 20):
            digest.update(block)
    if header.metadata != metadata or digest.hexdigest() != metadata["sshs_model_hash"]:
        raise LoraFileError(
            "lora.damaged",
            f"Could not write {target}: the written data differs when read back.",
            "Check the disk and try again; the original LoRA is unchanged.",
        )
