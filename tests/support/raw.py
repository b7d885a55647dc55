"""Write safetensors files byte by byte: small ones of any kind of model, and broken ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from trainer.files.architecture import Family

UNET = "model.diffusion_model."


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
    """Write a header followed by ``payload`` zero bytes, by default as many as its tensors take."""
    text = json.dumps(header).encode()
    if payload is None:
        payload = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(payload))
    return path


def write_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str] | None = None) -> Path:
    """Write a whole, valid file of fp16 zeros in these shapes."""
    return write_raw(path, header_of(shapes, metadata))


def base_shapes(family: Family) -> dict[str, tuple[int, ...]]:
    """Return the tensors that identify a base, with the real lengths where those matter and 1 elsewhere."""
    width = {"sd15": 768, "sdxl": 2048}[family]
    blocks = {
        "sd15": [(f"input_blocks.{i}", 1) for i in (1, 2, 4, 5, 7, 8)]
        + [("middle_block", 1)]
        + [(f"output_blocks.{i}", 1) for i in range(3, 12)],
        "sdxl": [("input_blocks.4", 2), ("input_blocks.5", 2), ("input_blocks.7", 10), ("input_blocks.8", 10)]
        + [("middle_block", 10)]
        + [(f"output_blocks.{i}", 10) for i in range(3)],
    }[family]
    shapes: dict[str, tuple[int, ...]] = {
        f"{UNET}input_blocks.0.0.weight": (1, 4, 1, 1),
        "first_stage_model.encoder.conv_in.weight": (1,),
    }
    for block, depth in blocks:
        for layer in range(depth):
            shapes[f"{UNET}{block}.1.transformer_blocks.{layer}.attn2.to_k.weight"] = (1, width)
    if family == "sd15":
        shapes["cond_stage_model.transformer.text_model.embeddings.token_embedding.weight"] = (1, 1)
    else:
        shapes["conditioner.embedders.0.transformer.text_model.embeddings.token_embedding.weight"] = (1, 1)
        shapes["conditioner.embedders.1.model.ln_final.bias"] = (1,)
    return shapes
