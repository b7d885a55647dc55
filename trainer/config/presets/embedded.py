"""Detection of images that contain a preset, from their first bytes, so that the window need not load them."""

from __future__ import annotations

from pathlib import Path

from trainer.protocol.reading import open_file

PICTURE_KEY = "impasto_preset"
"""Key of the PNG text (iTXt) that contains a preset file; it comes before the pixels."""
_HEAD = 4096


def contains_preset(path: Path) -> bool:
    """Return whether a file is an image that contains a preset; False when it cannot be read."""
    try:
        with open_file(path, "stream") as file:
            return PICTURE_KEY.encode("ascii") in file.read(_HEAD)
    except (OSError, ValueError):
        return False
