"""Which checkpoints a run's folder holds: the engine goes on from them, and whoever watches tells from which."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from trainer.protocol.atomic import long_path
from trainer.protocol.reading import read_record

MANIFEST = "manifest.json"


def folder_name(step: int) -> str:
    """Return the name of the folder of the checkpoint at `step`: step-00000500."""
    return f"step-{step:08d}"


def steps_on_disk(parent: Path) -> list[int]:
    """Return the steps that have a checkpoint folder, lowest first; half-made ones are not counted."""
    names = [path.name.removeprefix("step-") for path in long_path(parent).glob("step-*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def read_manifest(folder: Path) -> Mapping[str, Mapping[str, object]]:
    """Return the size and hash of each file of a checkpoint; raises OSError and UnusableFileError."""
    return read_record(folder / MANIFEST, "record", _manifest)


def _manifest(found: Any) -> dict[str, dict[str, object]]:
    files = {str(name): {"bytes": facts["bytes"], "sha256": facts["sha256"]} for name, facts in found["files"].items()}
    if not all(PurePath(name).name == name for name in files):
        raise ValueError("it names a file outside its folder")
    return files


def sizes_hold(folder: Path, manifest: Mapping[str, Mapping[str, object]]) -> bool:
    """Tell whether every file of the manifest is there with its size; raises OSError."""
    paths = {long_path(folder / name): facts["bytes"] for name, facts in manifest.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def newest_step(parent: Path) -> int | None:
    """Return the step of the newest checkpoint that nothing is missing of, None where there is none.

    The engine reads and compares every byte of it, which takes too long for this.
    """
    return next((step for step in reversed(steps_on_disk(parent)) if _is_whole(parent / folder_name(step))), None)


def _is_whole(folder: Path) -> bool:
    try:
        return sizes_hold(folder, read_manifest(folder))
    except (OSError, ValueError):
        return False
