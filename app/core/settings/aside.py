"""Sets a file of the user's choices aside that cannot be read, so that the next one does not overwrite it."""

from __future__ import annotations

from pathlib import Path

from trainer.protocol import atomic
from trainer.protocol.naming import numbered


def set_aside(path: Path, sentence: str) -> str:
    """Rename the file under a name that is free; return `sentence`, which begins after its name, with what was done."""
    names = (path.with_suffix(f"{ending}{path.suffix}") for ending in numbered(".broken"))
    aside = next(name for name in names if not name.exists())
    try:
        atomic.replace(path, aside)
    except OSError as error:
        return f"{path.name} {sentence}. It could not be set aside: {error}."
    return f"{path.name} {sentence}. The old file is now {aside}."
