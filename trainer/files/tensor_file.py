"""Write safetensors files tensor by tensor, in the memory that the largest one takes. Needs no torch."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import BaseModelError, LoraFileError
from trainer.files.header import Kind, TensorInfo, read_header
from trainer.files.rewriting import header_bytes, lora_hashes
from trainer.protocol import files
from trainer.protocol.reading import open_file

Buffer = bytes | bytearray | memoryview
_BLOCK = 4 << 20
# As long as the hashes that replace them once the tensors are written, so that the header keeps its length.
_NO_HASHES = {"sshs_model_hash": "0" * 64, "sshs_legacy_hash": "0" * 8, "modelspec.hash_sha256": f"0x{'0' * 64}"}


def write_tensors(
    target: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Buffer],
    metadata: Mapping[str, str],
    kind: Kind,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a safetensors file atomically.

    `read` returns the data of a tensor, little-endian and row by row; it is called once for each tensor, in the order
    of the file, which is that of the safetensors library. A file of kind "lora" gets the hashes by which programs
    recognize it. The file is read back before it replaces `target`: its header and data must be those that were
    written, and `check` may raise an error. In that case, as on OSError, an existing target is unchanged.
    """
    entries = dict(_entries(tensors))
    lead = header_bytes(entries, {**metadata, **(_NO_HASHES if kind == "lora" else {})})
    with files.staged(target) as temporary:
        with temporary.open("w+b") as file:
            file.write(lead)
            data = _write_data(file, entries, tensors, read)
            if kind == "lora":
                lead = _with_hashes(file, entries, metadata, len(lead))
        if read_header(temporary, kind).tensors != tensors or _digest(temporary, len(lead)) != data:
            error = LoraFileError if kind == "lora" else BaseModelError
            sentence = f"Could not write {target}: the written data differs when read back."
            raise error(f"{kind}.damaged", sentence, "Check the disk and try again.")
        if check:
            check(temporary)


def _entries(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Any]]:
    """Yield each tensor's entry in the header, widest formats first, then by name, as the safetensors library does."""
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (-item[1].bits, item[0])):
        end = position + info.bytes
        yield name, {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [position, end]}
        position = end


def _write_data(
    file: BinaryIO, entries: Mapping[str, Any], tensors: Mapping[str, TensorInfo], read: Callable[[str], Buffer]
) -> str:
    """Write all tensors' data and return its SHA-256."""
    digest = hashlib.sha256()
    for name in entries:
        data = read(name)
        if len(data) != tensors[name].bytes:
            raise AssertionError(f"{name} has {len(data)} bytes instead of {tensors[name].bytes}")
        file.write(data)
        digest.update(data)
    return digest.hexdigest()


def _with_hashes(file: BinaryIO, entries: Mapping[str, Any], metadata: Mapping[str, str], length: int) -> bytes:
    """Replace the header by one with the hashes of the written data, and return it."""
    file.flush()
    with (
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as whole,
        whole[length:] as payload,
    ):
        lead = header_bytes(entries, {**metadata, **lora_hashes(entries, payload, metadata)})
    file.seek(0)
    file.write(lead)
    return lead


def _digest(path: Path, start: int) -> str:
    digest = hashlib.sha256()
    with open_file(path, "stream") as file:
        file.seek(start)
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
