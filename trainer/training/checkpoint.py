"""Resumable checkpoints: written to a staging folder, hashed, verified, then renamed; without pickle."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from trainer.errors import ResumableError
from trainer.protocol import files as atomic
from trainer.protocol.places import free_bytes, is_disk_full
from trainer.protocol.reading import parse_json, read_bytes, table
from trainer.protocol.run_directory import MANIFEST, folder_name, read_manifest, sizes_match, steps_on_disk
from trainer.protocol.text import size as size_text

# Free bytes required beyond the checkpoint itself, so that events and logs can still be written.
SPARE_BYTES = 64 << 20
EMA_FILE = "ema.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything a run needs to continue from ``step`` with the same result as without an interruption."""

    step: int
    adapter: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, object]
    ema: dict[str, Tensor] = field(default_factory=dict)
    """Moving average of the adapter's master weights; empty, and then not written, if the run has none."""


def save_checkpoint(parent: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically and return its folder.

    Raises ResumableError if that fails, with code "disk.full" if the disk is full; older checkpoints stay.
    """
    # The optimizer's state is usually the largest and comes last, so that fewer copies exist at the same time.
    averages = {EMA_FILE: checkpoint.ema} if checkpoint.ema else {}
    tensors = {"adapter.safetensors": checkpoint.adapter, **averages, "optimizer.safetensors": checkpoint.optimizer}
    files = {name: safetensors.torch.save(to_cpu(values)) for name, values in tensors.items()}
    files["state.json"] = json.dumps(checkpoint.state, indent=1).encode("utf-8")
    parent.mkdir(parents=True, exist_ok=True)
    require_space(parent, sum(map(len, files.values())))
    final = parent / folder_name(checkpoint.step)
    staging = parent / f".{final.name}.{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        write_staged(staging, files)
        # A folder cannot be renamed over an existing one. If the process is killed between these two calls, the run
        # continues from the checkpoint before.
        shutil.rmtree(final, ignore_errors=True)
        atomic.replace(staging, final)
        atomic.sync_directory(parent)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise as_resumable(error, parent) from error
    return final


def to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in a form that can be written: detached, on the CPU and contiguous."""
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}


def write_staged(staging: Path, files: Mapping[str, bytes]) -> None:
    """Write files, sync them and read them back, then write the manifest with their sizes and hashes."""
    manifest = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    for name, data in files.items():
        atomic.write_bytes(staging / name, data)
    if not holds(staging, manifest):
        raise OSError(errno.EIO, "the written data does not read back the same", str(staging))
    atomic.write_json(staging / MANIFEST, {"files": manifest})
    atomic.sync_directory(staging)


def holds(folder: Path, manifest: Mapping[str, Mapping[str, object]]) -> bool:
    """Return whether every file in the manifest exists with the size and hash given there."""
    if not sizes_match(folder, manifest):
        return False
    hashes = {name: hashlib.sha256(read_bytes(folder / name, "part")).hexdigest() for name in manifest}
    return all(facts["sha256"] == hashes[name] for name, facts in manifest.items())


def require_space(folder: Path, size: int) -> None:
    """Raise ResumableError if the disk does not have enough space for ``size`` more bytes and a reserve."""
    free = free_bytes(folder)
    if free < size + SPARE_BYTES:
        raise disk_full(folder, f"{size_text(size + SPARE_BYTES - free)} more is needed")


def as_resumable(error: OSError, folder: Path) -> ResumableError:
    """Return the error to raise after a failed write; it pauses the run and has a message for users."""
    if is_disk_full(error):
        return disk_full(folder, "it filled up while writing")
    return ResumableError(
        "checkpoint.unwritable",
        f"Could not write the checkpoint to {folder}: {error.strerror or error}.",
        "Make the folder writable, then resume the run; it continues from the last checkpoint.",
    )


def disk_full(folder: Path, detail: str) -> ResumableError:
    """Return the error that pauses the run because the disk with ``folder`` is full."""
    return ResumableError(
        "disk.full",
        f"Could not write to {folder}: the disk is full ({detail}). The run was paused.",
        "Free up disk space, then resume the run; it continues from the last checkpoint.",
    )


def load_latest(
    parent: Path, is_usable: Callable[[Checkpoint], bool] = lambda _: True
) -> tuple[Checkpoint | None, list[Path]]:
    """Return the newest usable checkpoint, or None, and the folders of the damaged ones that were skipped.

    ``is_usable`` checks the content, because intact files can contain a state that no run can continue from.
    """
    damaged: list[Path] = []
    for step in reversed(steps_on_disk(parent)):
        folder = parent / folder_name(step)
        if (checkpoint := load_checkpoint(folder)) is not None and is_usable(checkpoint):
            return checkpoint, damaged
        damaged.append(folder)
    return None, damaged


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in ``folder``, or None if anything in it is missing or damaged."""
    try:
        manifest = read_manifest(folder)
        if not holds(folder, manifest):
            return None
        return Checkpoint(
            step=int(folder.name.removeprefix("step-")),
            adapter=safetensors.torch.load(read_bytes(folder / "adapter.safetensors", "part")),
            optimizer=safetensors.torch.load(read_bytes(folder / "optimizer.safetensors", "part")),
            state=table(parse_json(read_bytes(folder / "state.json", "list"), finite=False)),
            ema=safetensors.torch.load(read_bytes(folder / EMA_FILE, "part")) if EMA_FILE in manifest else {},
        )
    except MemoryError:  # the checkpoint is fine, and falling back to an older one would lose its steps
        raise
    except Exception:  # noqa: BLE001 - damage can raise anything, and an older checkpoint may still be good
        return None


def prune(parent: Path, keep: int, protect: set[int]) -> None:
    """Delete old staging folders, and all checkpoints except the newest ``keep`` and those at steps in ``protect``."""
    steps = steps_on_disk(parent)
    for step in steps[:-keep]:
        if step not in protect:
            shutil.rmtree(parent / folder_name(step), ignore_errors=True)
    for leftover in parent.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
