"""Read the small files that the app stores; a damaged one is set aside, and the app starts without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trainer.protocol import files
from trainer.protocol.files import numbered
from trainer.protocol.reading import UnusableFileError, decoded, read_json, reason_of

T = TypeVar("T")

Decode = Callable[[Any, list[str]], T]
"""Makes a value of parsed content. It appends the name of each member that it has to leave out to the list."""


def load(
    path: Path, decode: Decode[T], default: T, lost: str, read: Callable[[Path], Any] | None = None
) -> tuple[T, str]:
    """Return what a stored file holds, and a sentence about what was wrong with it, empty for a sound or missing file.

    A file that cannot be used, as a whole or in part, is renamed to NAME.damaged.json so that the next write does not
    destroy it. `lost` ends the sentence for a file that is of no use at all. `read` parses the file, by default JSON.
    """
    left_out: list[str] = []
    try:
        content = read(path) if read else read_json(path, "settings")
        found = decoded(content, lambda value: decode(value, left_out), path)
    except FileNotFoundError:
        return default, ""
    except (OSError, UnusableFileError) as error:
        return default, f"Could not read {path.name}: {reason_of(error)}, so {lost}. {_set_aside(path)}"
    if not left_out:
        return found, ""
    names = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
    return found, f"{path.name} has entries that cannot be used ({names}); all others are kept. {_set_aside(path)}"


def _set_aside(path: Path) -> str:
    """Rename a file to a name that is free and return a sentence about it."""
    names = (path.with_suffix(f"{ending}{path.suffix}") for ending in numbered(".damaged"))
    aside = next(name for name in names if not name.exists())
    try:
        files.replace(path, aside)
    except OSError as error:
        return f"It could not be set aside: {reason_of(error)}."
    return f"The old file is now {aside}."
