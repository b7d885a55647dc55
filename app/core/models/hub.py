"""Bases in caches of the Hugging Face Hub, and those that Impasto downloaded itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.protocol import places
from trainer.protocol.reading import read_text


def bases_of_hub(cache: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, Hub id) of each base of a Hub cache: a diffusers folder, else single files that are large."""
    for repository in _glob(cache, "models--*--*"):
        snapshot = _snapshot(repository)
        if snapshot is None:
            continue
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        if (snapshot / "model_index.json").is_file():
            if (snapshot / "unet").is_dir():
                yield snapshot, name
        else:
            yield from ((path, name) for path in _glob(snapshot, "*.safetensors"))


def own_bases() -> Iterator[tuple[Path, str]]:
    """Yield what Impasto downloaded: from the Hub with its id, and files of links."""
    folder = places.models_folder()
    yield from bases_of_hub(folder / "hub")
    yield from ((path, "") for path in _glob(folder / "links", "*/*.safetensors"))


def _snapshot(repository: Path) -> Path | None:
    """Return the files of the branch `main` where the cache knows it, else of the commit that came last."""
    try:
        commit = read_text(repository / "refs" / "main", "record").strip()
    except (OSError, ValueError):
        commit = ""
    named = repository / "snapshots" / commit
    if commit and named.is_dir():
        return named
    snapshots = [path for path in _glob(repository / "snapshots", "*") if path.is_dir()]
    return max(snapshots, key=lambda path: path.stat().st_mtime_ns, default=None)


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []
