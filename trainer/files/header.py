"""Read safetensors headers, and reject damaged or hostile files before much memory is allocated."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, NoReturn

from trainer.errors import BaseModelError, LoraFileError
from trainer.protocol.reading import UnusableFileError, noting_file, open_file, parse_json, reason_of
from trainer.protocol.text import printable

Kind = Literal["base", "lora"]

# safetensors itself allows headers up to 100 MB, whose parsing takes nearly 1 GB; real ones are far below these limits.
_LARGEST_HEADER: Mapping[Kind, int] = {"base": 32 << 20, "lora": 8 << 20}
# The largest LoRAs have 6,000 tensors. Parsing many more would block the window of the same process.
_MOST_TENSORS: Mapping[Kind, int] = {"base": 50_000, "lora": 10_000}
_QUOTES = 10  # quote characters per tensor, at most
_MOST_METADATA = 10_000
_LONGEST_SHAPE = 8
PRESET_KEY = "impasto_preset"
"""Key of the PNG text chunk (iTXt) that contains a preset file and comes before the pixels."""
_PRESET_HEAD = 4096  # bytes of an image in which the key of an embedded preset appears
_WIDTHS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}
_BITS = {name: bits for bits, names in _WIDTHS.items() for name in names.split()}
_NAMED = {"base": "model", "lora": "LoRA"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Tensor in a file: its dtype as spelled by safetensors ("F16"), and its shape."""

    dtype: str
    shape: tuple[int, ...]
    start: int = field(default=0, compare=False)
    """Offset of the tensor's data in the file, in bytes."""

    @property
    def bits(self) -> int:
        """Return the size of one number in bits."""
        return _BITS[self.dtype]

    @property
    def bytes(self) -> int:
        """Return the size of the tensor's data in the file, in bytes."""
        return prod(self.shape) * self.bits // 8


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a safetensors file: its tensors by name, and its metadata (untrusted text)."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def read_header(path: Path, kind: Kind = "base") -> Header:
    """Return the validated header of a safetensors file without reading tensor data.

    Raises BaseModelError or, for kind "lora", LoraFileError if the file is missing, truncated, not safetensors (a web
    page, a Git LFS pointer, a renamed pickle), or violates the format.
    """
    try:
        with open_file(path, "stream") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(512)
            length = int.from_bytes(start[:8], "little")
            _check_start(path, kind, start, length, size)
            file.seek(8)
            text = file.read(length)
    except FileNotFoundError:
        _refuse(kind, "missing", f'"{path}" does not exist.', "Check the path for typos.")
    except UnusableFileError as error:
        _refuse(kind, "unreadable", f'Could not read "{path}": {error.reason}.', f"Choose a {_NAMED[kind]} file.")
    except OSError as error:
        _refuse(
            kind,
            "unreadable",
            f'Could not read "{path}": {error.strerror}.',
            "Check the disk and your permissions for the file.",
        )
    with noting_file(path):
        return _parse(path, kind, text, size - 8 - length)


def _check_start(path: Path, kind: Kind, start: bytes, length: int, size: int) -> None:
    """Raise an error if the file does not start like a safetensors file or claims an implausibly large header."""
    again = f"Download the {_NAMED[kind]} again, and compare its size with the one on the website."
    if size == 0:
        _refuse(kind, "empty", f'"{path}" is empty (0 bytes): its download or copy failed.', again)
    # A valid file starts with a length, and some lengths look like the start of a pickle or a text.
    other = None if start[8:9] == b"{" and length <= size - 8 else _what_else(start)
    if other:
        _refuse(kind, "not_safetensors", f'"{path}" is {other}, not a safetensors file.', again)
    if len(start) < 9 or start[8:9] != b"{":
        _refuse(kind, "not_safetensors", f'"{path}" is not a safetensors file: it does not start with a header.', again)
    if length > _LARGEST_HEADER[kind]:
        limit = _LARGEST_HEADER[kind] >> 20
        sentence = f'"{path}" claims a header of {length:,} bytes; no real {_NAMED[kind]} has one over {limit} MiB.'
        _refuse(kind, "hostile", sentence, "Do not use this file; get it from a source you trust.")
    if length > size - 8:
        _refuse(kind, "truncated", f'"{path}" is cut off: it ends at {size:,} bytes, inside its header.', again)


def _what_else(start: bytes) -> str | None:
    """Return a description of a well-known format other than safetensors that starts with these bytes, or None."""
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")) or b"<html" in text:
        return "a web page saved under this name (the site required a login, or the link led to a page)"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer: a placeholder for the file until `git lfs pull` is run"
    if start.startswith(b"PK\x03\x04") or start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return "a PyTorch pickle (.ckpt, .pt) or zip archive with the wrong extension"
    if start.startswith(b"GGUF"):
        return "a GGUF file"
    if text.startswith((b'{"', b"{\n", b"[")):
        return "a JSON text"
    return None


def _parse(path: Path, kind: Kind, text: bytes, payload: int) -> Header:
    """Parse and validate a header's JSON text; `payload` is the number of bytes after the header."""
    most = _MOST_TENSORS[kind]
    quotes = text.count(b'"') - text.count(b'\\"')
    if text.count(b'"data_offsets"') > most or quotes > most * _QUOTES + _MOST_METADATA * 4:
        listed = f"more than {most:,} tensors or {_MOST_METADATA:,} metadata keys, more than any real {_NAMED[kind]}"
        sentence = f'"{path}" lists {listed}.'
        _refuse(kind, "hostile", sentence, "Do not use this file; get it from a source you trust.")
    try:
        entries = parse_json(text)
        metadata = _metadata(entries.pop("__metadata__", {}))
        ranges = sorted((*_range(entry), name) for name, entry in entries.items())
        tensors = {name: _tensor(entry, 8 + len(text)) for name, entry in entries.items()}
        end = _check_layout(ranges, tensors)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        sentence = f'Could not read the header of "{path}": {reason_of(error)}.'
        _refuse(kind, "broken", sentence, f"Download the {_NAMED[kind]} again or get it from another source.")
    if end != payload:
        state = "cut off" if end > payload else "too long"
        sentence = f'"{path}" is {state}: its tensors take {end:,} bytes, but it has {payload:,}.'
        _refuse(kind, "truncated", sentence, f"Download the {_NAMED[kind]} again: the file is not a complete copy.")
    return Header(tensors, metadata)


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("its metadata is not a table of strings")
    return value


def _range(entry: Any) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError("the data_offsets of a tensor are not a byte range")
    return begin, end


def _tensor(entry: Any, data: int) -> TensorInfo:
    dtype, shape = entry["dtype"], entry["shape"]
    if dtype not in _BITS:
        raise ValueError(f"{printable(json.dumps(dtype), 40)} is not a known dtype")
    if not isinstance(shape, list) or len(shape) > _LONGEST_SHAPE:
        raise ValueError("a tensor's shape is not a short list")
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError("a tensor's shape contains something other than sizes")
    return TensorInfo(dtype, tuple(shape), data + entry["data_offsets"][0])


def _check_layout(ranges: list[tuple[int, int, str]], tensors: Mapping[str, TensorInfo]) -> int:
    """Return the offset where the last tensor ends; raises ValueError for gaps, overlaps and wrong sizes."""
    position = 0
    for begin, end, name in ranges:
        if begin != position:
            raise ValueError(f'"{name[:80]}" does not start where the previous tensor ends')
        if end - begin != tensors[name].bytes:
            raise ValueError(f'"{name[:80]}" has {end - begin:,} bytes, but its shape needs {tensors[name].bytes:,}')
        position = end
    return position


def _refuse(kind: Kind, code: str, sentence: str, remedy: str) -> NoReturn:
    error = BaseModelError if kind == "base" else LoraFileError
    raise error(f"{kind}.{code}", sentence, remedy) from None


def contains_preset(path: Path) -> bool:
    """Return whether a file is an image that contains a preset; False if it cannot be read."""
    try:
        with open_file(path, "stream") as file:
            return PRESET_KEY.encode("ascii") in file.read(_PRESET_HEAD)
    except (OSError, ValueError):
        return False
