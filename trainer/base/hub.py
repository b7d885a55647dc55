"""Brings a base from the Hugging Face Hub: only the files that are needed, at one commit, and never twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import httpx2
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from trainer.errors import BaseModelError
from trainer.files.configs import PARTS
from trainer.protocol import files as atomic
from trainer.protocol import places
from trainer.protocol.events import OnPhase
from trainer.protocol.reading import UnusableFileError, read_record

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|model)(?P<variant>\.[a-z0-9]+)?(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?"
)
_LOG_IN = 401  # what the Hub answers strangers who ask for what is not there, or not public
_GO_ONLINE = "Connect to the internet and start again, or give the path of a base that is on this machine."


def fetch_from_hub(
    model: str, revision: str | None = None, progress: OnPhase | None = None, endpoint: str | None = None
) -> tuple[Path, str]:
    """Return where a Hub base lies on this machine, and its commit, downloading what is not here yet.

    A commit that is here needs no network; a branch or tag is looked up, and taken as last seen when the Hub cannot be
    reached. Raises BaseModelError when it does not exist, is closed, holds no usable files, or there is no room,
    and OSError when writing fails.
    """
    key = f"{model}@{revision or 'main'}"
    known = _known(key)
    if known and _COMMIT.fullmatch(revision or ""):
        return known
    try:
        info = HfApi(endpoint=endpoint).model_info(model, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        commit, names = str(info.sha), needed_files(model, list(sizes))
        _check_room(model, sum(sizes[name] for name in names if not _is_cached(model, commit, name)))
        path = _download(model, commit, names, sizes, progress, endpoint)
    except (httpx2.TransportError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        if known:
            return known
        sentence = f'"{model}" is not whole on this machine and the Hugging Face Hub cannot be reached: {error}.'
        raise BaseModelError("base.offline", sentence, _GO_ONLINE) from error
    except (HfHubHTTPError, HFValidationError) as error:
        _refuse(model, revision, error)
    for name in (key, f"{model}@{commit}"):
        _remember(name, path, commit, names)
    return path, commit


def needed_files(model: str, names: Sequence[str]) -> list[str]:
    """Choose what to download of a repository's files: configs and safetensors weights, each model once.

    Where full and half precision lie side by side the full one is taken. Raises BaseModelError when there is nothing to
    take, or several single files between which only the user can choose.
    """
    if "model_index.json" not in names:
        return [_only_single(model, names)]
    chosen = ["model_index.json", *(name for name in names if name == "scheduler/scheduler_config.json")]
    for part in PARTS["sdxl"]:
        inside = [name.removeprefix(f"{part}/") for name in names if name.startswith(f"{part}/")]
        if "config.json" in inside:
            chosen += [f"{part}/{name}" for name in ("config.json", *_weights(model, part, inside))]
    return chosen


def _weights(model: str, part: str, names: Sequence[str]) -> list[str]:
    variants: dict[str, list[str]] = {}
    for name in names:
        if found := _WEIGHTS.fullmatch(name):
            variants.setdefault(found["variant"] or "", []).append(name)
    for variant in ("", ".fp16", ".bf16"):
        if variant in variants:
            return variants[variant]
    sentence = f'"{model}" on the Hub has no .safetensors weights for its {part}.'
    raise BaseModelError("base.pickle", sentence, "Choose a base that comes as .safetensors.")


def _only_single(model: str, names: Sequence[str]) -> str:
    singles = [name for name in names if name.endswith(".safetensors")]
    if len(singles) == 1:
        return singles[0]
    if not singles:
        sentence = f'"{model}" on the Hub holds neither a diffusers model nor a .safetensors file.'
        raise BaseModelError("base.unknown", sentence, "Choose a base that comes as .safetensors.")
    listed = ", ".join(singles[:5]) + (" ..." if len(singles) > 5 else "")
    sentence = f'"{model}" on the Hub holds {len(singles)} models: {listed}.'
    remedy = f"Name one by its link: https://huggingface.co/{model}/resolve/main/{singles[0]}"
    raise BaseModelError("base.several", sentence, remedy)


def _download(
    model: str,
    commit: str,
    names: Sequence[str],
    sizes: dict[str, int],
    progress: OnPhase | None,
    endpoint: str | None,
) -> Path:
    """Fetch the files one after the other; those that are here, whole or in part, are not fetched again."""
    done, total = 0, sum(sizes[name] for name in names)
    paths = []
    for name in names:
        bar = _bar(progress, done, total)
        paths.append(
            hf_hub_download(model, name, revision=commit, cache_dir=_cache(), endpoint=endpoint, tqdm_class=bar)
        )
        done += sizes[name]
        if progress:
            progress("download", done, total)
    return Path(paths[0]).parent if names[0] == "model_index.json" else Path(paths[0])


def _bar(progress: OnPhase | None, before: int, total: int) -> type[tqdm]:
    """Make a class that takes the place of the library's progress bar, writes nothing, and tells `progress`."""

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if progress:
                progress("download", min(total, before + int(self.n)), total)
            return None

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            pass

    return Bar


def _check_room(model: str, needed: int) -> None:
    free = places.free_bytes(_cache())
    if needed > free:
        sentence = (
            f'"{model}" needs {needed / 1e9:.1f} GB more on the disk of "{_cache()}", which has {free / 1e9:.1f} GB.'
        )
        raise BaseModelError("base.disk_full", sentence, "Make room, or set IMPASTO_HOME to a folder on another disk.")


def _refuse(model: str, revision: str | None, error: HfHubHTTPError | HFValidationError) -> NoReturn:
    """Say why the Hub gave nothing."""
    if isinstance(error, GatedRepoError):
        sentence = f'"{model}" is only given to those who accepted its terms.'
        remedy = f"Accept them on https://huggingface.co/{model}, then run `hf auth login` and start again."
    elif isinstance(error, RevisionNotFoundError):
        sentence, remedy = f'"{model}" has no revision "{revision}".', "Correct base.revision, or remove it."
    elif isinstance(error, RepositoryNotFoundError | HFValidationError) or error.response.status_code == _LOG_IN:
        sentence = f'There is no "{model}" on this machine, nor a public model of that name on the Hugging Face Hub.'
        remedy = "Check the name; for a private model run `hf auth login` first."
    else:
        sentence, remedy = f'The Hugging Face Hub refused "{model}": {error}.', "Try again later."
    raise BaseModelError("base.hub", sentence, remedy) from error


def _cache() -> Path:
    return places.models_folder() / "hub"


def _is_cached(model: str, commit: str, name: str) -> bool:
    return (_cache() / f"models--{model.replace('/', '--')}" / "snapshots" / commit / name).exists()


def _record() -> Path:
    return _cache() / "bases.json"


def _known(key: str) -> tuple[Path, str] | None:
    """Return a base that was downloaded whole before, and is still whole."""
    entry = _entries().get(key)
    if entry is None:
        return None
    path, commit = _cache() / entry["path"], str(entry["commit"])
    whole = all(_is_cached(key.partition("@")[0], commit, name) for name in entry["files"])
    return (path, commit) if whole else None


def _entries() -> dict[str, Any]:
    try:
        return read_record(_record(), "list", _sound_entries)
    except (OSError, UnusableFileError):  # nothing was downloaded yet, or the record is damaged: ask the Hub again
        return {}


def _sound_entries(found: Any) -> dict[str, Any]:
    return {key: entry for key, entry in found.items() if _is_sound(entry)}


def _is_sound(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("path"), str)
        and isinstance(entry.get("commit"), str)
        and isinstance(entry.get("files"), list)
        and all(isinstance(name, str) for name in entry["files"])
    )


def _remember(key: str, path: Path, commit: str, files: Sequence[str]) -> None:
    entry = {"path": path.relative_to(_cache()).as_posix(), "commit": commit, "files": list(files)}
    atomic.write_json(_record(), {**_entries(), key: entry})
