"""Weight files of models in diffusers folders, and remembered file hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import BaseModelError
from trainer.files.assets import read_json
from trainer.protocol import files, places
from trainer.protocol.reading import UnusableFileError, open_file, read_record
from trainer.protocol.row_store import checksum

_STEMS = ("diffusion_pytorch_model", "model")
_VARIANTS = ("", ".fp16", ".bf16")  # full precision first
_BLOCK = 4 << 20
_FIELDS = 4  # size, modification time, SHA-256, checksum
_REMEMBERED = 2000  # entries; the oldest are dropped first


def weight_files(folder: Path, part: str) -> tuple[Path, ...]:
    """Return the safetensors file of a part, or its files if it is split; `part` is "" for a folder with one model.

    Raises BaseModelError if there are no files, only pickles, or if a split part is incomplete.
    """
    home = folder / part if part else folder
    for variant in _VARIANTS:
        for stem in _STEMS:
            whole = home / f"{stem}{variant}.safetensors"
            if whole.is_file():
                return (whole,)
            index = home / f"{stem}.safetensors.index{variant}.json"
            if index.is_file():
                return _pieces(index)
    if pickles := sorted(path.name for suffix in ("*.bin", "*.ckpt") for path in home.glob(suffix)):
        sentence = f'"{home}" stores its weights as a pickle ({pickles[0]}): loading it could run malicious code.'
        raise BaseModelError("base.pickle", sentence, "Get the model as .safetensors.")
    sentence = f'"{home}" contains no weights (no .safetensors file).'
    raise BaseModelError("base.incomplete", sentence, "Download the whole model folder again.")


def _pieces(index: Path) -> tuple[Path, ...]:
    """Return the files listed in an index, from its folder; raises BaseModelError if any is missing there."""
    table = read_json(index).get("weight_map", {})
    names = sorted({str(name) for name in table.values()} if isinstance(table, dict) else ())
    pieces = tuple(index.parent / Path(name).name for name in names)
    missing = [piece.name for piece in pieces if not piece.is_file()]
    if missing or not pieces:
        sentence = f'"{index.parent}" is incomplete: weight files are missing ({", ".join(missing) or "all"}).'
        raise BaseModelError("base.incomplete", sentence, "Download the whole model folder again.")
    return pieces


Counter = Callable[[int, int], None]  # bytes done, total bytes


def sha256_file(path: Path, progress: Counter | None = None) -> str:
    """Return the SHA-256 of a file as 64 hex digits; raises OSError if the file cannot be read.

    A file is not read again if its path, size and modification time have not changed since it was last hashed. The hash
    of a file that changes while it is being hashed is not remembered.
    """
    path = path.absolute()
    if known := remembered_sha256(path):
        return known
    state = _state(path)
    digest = digest_file(path, progress)
    if _state(path) == state:
        remember_sha256(path, digest)
    return digest


def remembered_sha256(path: Path) -> str | None:
    """Return the remembered SHA-256 of a file; None if there is none or the file has changed since.

    Raises OSError if there is no such file.
    """
    path = path.absolute()
    known = _remembered().get(str(path))
    return str(known[2]) if known and known[:2] == _state(path) else None


def digest_file(path: Path, progress: Counter | None = None) -> str:
    """Return the SHA-256 of a file as 64 hex digits, always reading the whole file; raises OSError."""
    digest, done, size = hashlib.sha256(), 0, _state(path)[0]
    with open_file(path, "stream") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            if progress:
                progress(done, size)
    return digest.hexdigest()


def remember_sha256(path: Path, digest: str) -> None:
    """Remember a SHA-256 that the caller has computed, such as while writing the file."""
    path = path.absolute()
    known = _remembered()
    known.pop(str(path), None)
    size, changed = _state(path)
    known[str(path)] = [size, changed, digest, checksum(str(path), size, changed, digest)]
    try:
        places.home().mkdir(parents=True, exist_ok=True)
        files.write_json(_memory(), dict(list(known.items())[-_REMEMBERED:]), durable=False)
    except OSError:  # on a full or read-only disk, only the time to hash again is lost
        return


def _state(path: Path) -> list[int]:
    facts = files.long_path(path).stat()
    return [facts.st_size, facts.st_mtime_ns]


def _memory() -> Path:
    return places.home() / "hashes.json"


def _remembered() -> dict[str, list[int | str]]:
    try:
        return read_record(_memory(), "list", _sound_entries)
    except (OSError, UnusableFileError):  # missing or damaged: only the time to hash again is lost
        return {}


def _sound_entries(found: Any) -> dict[str, list[int | str]]:
    """Return only the entries with a valid checksum: a wrong hash would make one base look like another."""
    return {
        path: facts
        for path, facts in found.items()
        if isinstance(facts, list) and len(facts) == _FIELDS and facts[-1] == checksum(path, *facts[:-1])
    }
