"""Says of a file or folder whether it can be a base, in words."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from app.core.models.found import Told
from trainer.errors import ImpastoError
from trainer.protocol import files as atomic

_ENDINGS = (".safetensors", ".ckpt")
_DEEPEST = 4
_MOST = 5_000
"""Levels and models of one folder that are listed."""


def tell(path: Path) -> Told:
    """Read the header or the configs of a base; what is wrong with it comes back in words that name it shortly."""
    from trainer.files.identify import identify_base  # after the window is there

    try:
        identity = identify_base(path)
    except ImpastoError as error:
        return Told(None, None, error.sentence.replace(str(path), path.name), error.remedy)
    except OSError as error:
        return Told(None, None, f"It cannot be read: {error.strerror}.", "Check the disk and your rights to the file.")
    velocity = None if identity.prediction is None else identity.prediction == "v"
    return Told(identity.family, velocity)


def state_of(path: Path) -> tuple[int, int]:
    """Return size and time of change, by which a base is known again; of a folder, those of all that tells it apart.

    Raises OSError when it is gone.
    """
    if not atomic.long_path(path).is_dir():
        state = atomic.long_path(path).stat()
        return state.st_size, state.st_mtime_ns
    inside = [one.stat() for one in _weights(atomic.long_path(path))]
    if not inside:
        raise FileNotFoundError(path)
    return sum(one.st_size for one in inside), max(one.st_mtime_ns for one in inside)


def models_in(place: Path, stopped: Callable[[], bool]) -> Iterator[Path]:
    """Yield the model files and diffusers folders in a folder and some levels below, or `place` itself if it is one."""
    if not place.is_dir() or (place / "model_index.json").is_file():
        yield place
        return
    waiting, found = [(place, 0)], 0
    while waiting and found < _MOST and not stopped():
        folder, depth = waiting.pop()
        files, below = _listed(folder)
        for path in files:
            found += 1
            yield path
        if depth < _DEEPEST:
            waiting.extend((one, depth + 1) for one in reversed(below))


def _listed(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the models of one folder, and the folders to go on with."""
    try:
        with os.scandir(atomic.long_path(folder)) as entries:
            listed = sorted(((entry.name, entry.is_dir()) for entry in entries), key=lambda pair: pair[0].casefold())
    except OSError:
        return [], []
    models = [folder / name for name, is_dir in listed if not is_dir and name.lower().endswith(_ENDINGS)]
    below = [folder / name for name, is_dir in listed if is_dir and not name.startswith(".")]
    whole = [one for one in below if (one / "model_index.json").is_file()]
    return models + whole, [one for one in below if one not in whole]


def _weights(folder: Path) -> list[Path]:
    return [path for pattern in ("*.json", "*/*.json", "*/*.safetensors") for path in folder.glob(pattern)]
