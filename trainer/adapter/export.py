"""Writes LoRA files: names from the fixed table, deterministic bytes, checked before they take the file's place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from trainer.adapter.attach import Adapter
from trainer.adapter.names import TEXT_ATTENTION, Slot
from trainer.errors import LoraFileError
from trainer.files.header import read_header
from trainer.files.rewriting import header_bytes, lora_hashes
from trainer.protocol import files
from trainer.protocol.reading import open_file, parse_json

Naming = Literal["kohya", "diffusers"]


def export_lora(
    path: Path,
    weights: Mapping[str, Tensor],
    adapter: Adapter,
    metadata: Mapping[str, str],
    *,
    dtype: torch.dtype = torch.float16,
    naming: Naming = "kohya",
) -> str:
    """Write a LoRA file in one step and return the SHA-256 of its bytes; the hashes of its tensors join the metadata.

    `weights` are the masters (fp32 or wider) by the adapter's keys. "kohya" is the file that loads everywhere, with
    alpha as fp32 scalars; "diffusers" is PEFT's naming, which has no place for alpha, so it is folded into lora_B.
    Equal input gives equal bytes. Raises LoraFileError when a value is not finite in `dtype`, or the bytes on the disk
    are not what was meant; then, as on OSError, a file that was there before is left as it was.
    """
    serialised = safetensors.torch.save(_tensors(weights, adapter, dtype, naming))
    start = 8 + int.from_bytes(serialised[:8], "little")
    entries = parse_json(serialised[8:start])
    payload = memoryview(serialised)[start:]
    header = header_bytes(entries, {**metadata, **lora_hashes(entries, payload, metadata)})
    whole = hashlib.sha256(header)
    whole.update(payload)
    with files.staged(path) as temporary:
        with temporary.open("wb") as file:
            file.write(header)
            file.write(payload)
        _check_written(temporary, adapter.table, naming, whole.hexdigest())
    return whole.hexdigest()


def _keys(slot: Slot, naming: Naming) -> tuple[str, ...]:
    """Name the tensors of one layer: down, up, and alpha where the naming has one."""
    if naming == "kohya":
        return slot.down, slot.up, f"{slot.kohya}.alpha"
    return f"{slot.part}.{slot.module}.lora_A.weight", f"{slot.part}.{slot.module}.lora_B.weight"


def _tensors(weights: Mapping[str, Tensor], adapter: Adapter, dtype: torch.dtype, naming: Naming) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for slot in adapter.slots:
        alpha = adapter.alpha[slot.kohya]
        scale = 1.0 if naming == "kohya" else alpha / adapter.rank[slot.kohya]
        layer = (
            _cast(slot, weights[slot.down], 1.0, dtype),
            _cast(slot, weights[slot.up], scale, dtype),
            torch.tensor(alpha, dtype=torch.float32),
        )
        tensors.update(zip(_keys(slot, naming), layer, strict=False))  # alpha has no key in diffusers' naming
    for slot, trained in _missing_projections(adapter):
        # q, k, v and out of a CLIP layer have one shape.
        for key, other in zip(_keys(slot, naming), _keys(trained, naming), strict=True):
            tensors[key] = tensors[other].clone() if key.endswith(".alpha") else torch.zeros_like(tensors[other])
    return tensors


def _missing_projections(adapter: Adapter) -> Iterator[tuple[Slot, Slot]]:
    """Find the untrained projections of partly trained text layers, each with a trained one of that layer.

    A1111 and diffusers drop or refuse text layers in which q, k, v and out are not all there.
    """
    trained = {_layer_of(slot): slot for slot in adapter.slots if slot.module.endswith(TEXT_ATTENTION)}
    for slot in adapter.table:
        if slot.module.endswith(TEXT_ATTENTION) and slot.kohya not in adapter.rank and _layer_of(slot) in trained:
            yield slot, trained[_layer_of(slot)]


def _layer_of(slot: Slot) -> tuple[str, str]:
    return slot.part, slot.module.rpartition(".")[0]


def _cast(slot: Slot, tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Scale and round on the CPU: saving asks the card for no memory, which it may be short of."""
    result = (tensor.detach().to("cpu") * scale).to(dtype).contiguous()
    if result.isfinite().all():
        return result
    diverged = not tensor.isfinite().all()
    raise LoraFileError(
        "lora.not_finite",
        f"The LoRA cannot be written: at {slot.kohya} it holds values that are "
        + ("not numbers (NaN or infinity)." if diverged else f"too large for {str(dtype).removeprefix('torch.')}."),
        "Go back to an earlier save and use a lower learning rate." if diverged else 'Set output.dtype = "bf16".',
    )


def _check_written(written: Path, table: Sequence[Slot], naming: Naming, digest: str) -> None:
    """Re-open what was written: names all in the table, pairs complete, values finite, bytes as `digest` says."""
    header = read_header(written, "lora")
    expected = {key: keys for slot in table if (keys := _keys(slot, naming)) for key in keys}
    unknown = [key for key in header.tensors if key not in expected]
    halved = [key for key in header.tensors if key in expected and not header.tensors.keys() >= set(expected[key])]
    with safe_open(written, framework="pt") as file:
        broken = [key for key in header.tensors if not file.get_tensor(key).isfinite().all()]
    if unknown or halved or broken or _digest(written) != digest:
        first = next(iter(unknown + halved + broken), "its bytes")
        raise LoraFileError(
            "lora.damaged",
            f"The LoRA file that was just written reads back wrong: {first} is not as it was meant.",
            "Check the disk; the last good checkpoint is kept, and saving can be tried again.",
        )


def _digest(written: Path) -> str:
    with open_file(written, "stream") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
