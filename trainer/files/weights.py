"""Which safetensors files hold the weights of a model in a diffusers folder."""

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
_VARIANTS = ("", ".fp16", ".bf16")  # the plain file first: it keeps the most digits
_BLOCK = 4 << 20
_FIELDS = 4  # size, time of change, SHA-256, checksum
_REMEMBERED = 2000  # entries; the oldest are forgotten first


def weight_files(folder: Path, part: str) -> tuple[Path, ...]:
    """Return a part's safetensors files, all of them where it is split; `part` may be empty for a folder of one model.

    Raises BaseModelError when there are none, when only pickles are there, or when a piece is missing.
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
        sentence = f'"{home}" holds its weights as a pickle ({pickles[0]}), which can run any program hidden in it.'
        raise BaseModelError("base.pickle", sentence, "Get the model in .safetensors form.")
    sentence = f'"{home}" holds no weights (no .safetensors file).'
    raise BaseModelError("base.incomplete", sentence, "Download the whole model folder again.")


def _pieces(index: Path) -> tuple[Path, ...]:
    """Return the files that an index names; only names within its own folder are followed."""
    table = read_json(index).get("weight_map", {})
    names = sorted({str(name) for name in table.values()} if isinstance(table, dict) else ())
    pieces = tuple(index.parent / Path(name).name for name in names)
    missing = [piece.name for piece in pieces if not piece.is_file()]
    if missing or not pieces:
        sentence = f'"{index.parent}" lacks {", ".join(missing) or "all pieces"} of its weights.'
        raise BaseModelError("base.incomplete", sentence, "Download the whole model folder again.")
    return pieces


Counter = Callable[[int, int], None]  # bytes done, bytes in all


def sha256_file(path: Path, progress: Counter | None = None) -> str:
    """Return the SHA-256 of a file's bytes as 64 hex digits; raises OSError when it cannot be read.

    A file whose path, size and modification time are those of the last reading is not read again. A file changed
    while it is being hashed is not remembered.
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
    """Return the SHA-256 of a file that was read before and has not changed since; None for any other.

    Raises OSError when there is no such file.
    """
    path = path.absolute()
    known = _remembered().get(str(path))
    return str(known[2]) if known and known[:2] == _state(path) else None


def digest_file(path: Path, progress: Counter | None = None) -> str:
    """Return the SHA-256 of a file's bytes as 64 hex digits, reading all of it; raises OSError."""
    digest, done, size = hashlib.sha256(), 0, _state(path)[0]
    with open_file(path, "stream") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            if progress:
                progress(done, size)
    return digest.hexdigest()


def remember_sha256(path: Path, digest: str) -> None:
    """Remember the SHA-256 of a file that was computed while it was written."""
    path = path.absolute()
    known = _remembered()
    known.pop(str(path), None)
    size, changed = _state(path)
    known[str(path)] = [size, changed, digest, checksum(str(path), size, changed, digest)]
    try:
        places.home().mkdir(parents=True, exist_ok=True)
        files.write_json(_memory(), dict(list(known.items())[-_REMEMBERED:]), durable=False)
    except OSError:  # a full or read-only disk costs the next start some seconds, no more
        return


def _state(path: Path) -> list[int]:
    facts = files.long_path(path).stat()
    return [facts.st_size, facts.st_mtime_ns]


def _memory() -> Path:
    return places.home() / "hashes.json"


def _remembered() -> dict[str, list[int | str]]:
    try:
        return read_record(_memory(), "list", _sound_entries)
    except (OSError, UnusableFileError):  # absent, or damaged: all that is lost is the time to read the files again
        return {}


def _sound_entries(found: Any) -> dict[str, list[int | str]]:
    """Return the entries whose checksum matches: a wrong hash would make a sound base look like another one."""
    return {
        path: facts
        for path, facts in found.items()
        if isinstance(facts, list) and len(facts) == _FIELDS and facts[-1] == checksum(path, *facts[:-1])
    }
