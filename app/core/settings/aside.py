"""Sets a file of the user's choices aside that cannot be read, so that the next one does not overwrite it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.protocol import atomic


def set_aside(path: Path, sentence: str) -> str:
    """Rename the file under a name that is free; return `sentence`, which begins after its name, with what was done."""
    aside = next(name for name in _names(path) if not name.exists())
    try:
        atomic.replace(path, aside)
    except OSError as error:
        return f"{path.name} {sentence}. It could not be set aside: {error}."
    return f"{path.name} {sentence}. The old file is now {aside}."


def _names(path: Path) -> Iterator[Path]:
    yield path.with_suffix(f".broken{path.suffix}")
    number = 2
    while True:
        yield path.with_suffix(f".broken-{number}{path.suffix}")
        number += 1
