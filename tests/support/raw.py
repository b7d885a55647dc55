"""Writes safetensors files byte by byte: small ones of any kind of model, and broken ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any


def header_of(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the header of a file of fp16 tensors of these shapes, one after the other."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, shape in shapes.items():
        end = position + 2 * prod(shape)
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return header


def write_raw(path: Path, header: Any, payload: int | None = None) -> Path:
    """Write a header and as many zero bytes after it, by default as many as its tensors take."""
    text = json.dumps(header).encode()
    if payload is None:
        payload = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(payload))
    return path


def write_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str] | None = None) -> Path:
    """Write a whole, valid file of fp16 zeros in these shapes."""
    return write_raw(path, header_of(shapes, metadata))
