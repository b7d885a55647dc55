"""Paths in a job: relative to the job file on disk, absolute after loading."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.config.job import OutputConfig

_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_PATH_START = re.compile(r"[./\\~]|[A-Za-z]:[\\/]")
_MODEL_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def is_base_path(model: str, folder: Path) -> bool:
    """Return whether ``base.model`` is a path rather than a link or a Hugging Face id.

    A path starts like one ("./", "~" or a drive letter), ends like a model file, is not of the form owner/name, or
    exists relative to ``folder``.
    """
    known = base_path_by_form(model)
    return (folder / model).exists() if known is None else known


def base_path_by_form(model: str) -> bool | None:
    """Return the result of `is_base_path` without disk access; None for owner/name, which may be a path or an id."""
    if "://" in model:
        return False
    if _PATH_START.match(model) or model.lower().endswith(_MODEL_FILES) or not _HUB_ID.fullmatch(model):
        return True
    return None


def absolute(path: str, folder: Path) -> str:
    """Return ``path``, which is absolute or relative to ``folder``, as absolute; expands ~ and keeps symbolic links."""
    # Not Path.resolve: a link to a model drive must stay a link, and ~name of an unknown user a plain name.
    return os.path.abspath(folder / os.path.expanduser(path))  # noqa: PTH100, PTH111


def make_absolute(data: dict[str, Any], folder: Path, is_base: Callable[[str, Path], bool] = is_base_path) -> list[str]:
    """Make every path in a job's ``data`` absolute in place; return a message for each invalid path.

    Values that are not strings are skipped; validation reports them later. Callers that must not access the disk pass
    their own ``is_base``.
    """
    faults = []
    for key, table, name in _places(data):
        value = table.get(name)
        if not isinstance(value, str) or not value:
            continue
        if _CONTROL.search(value):
            # In TOML "C:\new" is C:, a line break and ew, which is valid but a mistake.
            faults.append(
                f"{key}: contains a line break or another control character; write Windows paths in 'single quotes'"
            )
        elif key != "base.model" or is_base(value, folder):
            table[name] = absolute(value, folder)
    dataset = data.get("dataset")
    linked = dataset.get("linked_folders") if isinstance(dataset, dict) else None
    if isinstance(linked, list):
        linked[:] = [absolute(path, folder) if isinstance(path, str) and path else path for path in linked]
    return faults


def _places(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (dotted key, table, key in the table) for every path in ``data``; output.runs is added if it is missing."""
    base, dataset = data.get("base"), data.get("dataset")
    if isinstance(base, dict):
        yield from ((f"base.{name}", base, name) for name in ("model", "vae", "continue_from"))
    folders = dataset.get("folders") if isinstance(dataset, dict) else None
    for number, item in enumerate(folders if isinstance(folders, list) else ()):
        if isinstance(item, dict):
            yield from ((f"dataset.folders.{number}.{name}", item, name) for name in ("path", "mask_folder"))
    output = data.setdefault("output", {})
    if isinstance(output, dict):
        output.setdefault("runs", OutputConfig.model_fields["runs"].default)
        yield "output.runs", output, "runs"
