"""Whether a picture holds a preset, told by its first bytes, so that windows may ask before they load anything."""

from __future__ import annotations

from pathlib import Path

from trainer.protocol.reading import open_file

PICTURE_KEY = "impasto_preset"
"""The key of the text (PNG's iTXt) under which a picture holds a preset's file; it stands before the pixels."""
_HEAD = 4096


def holds_preset(path: Path) -> bool:
    """Tell whether a file is a picture that holds a preset; one that cannot be read does not."""
    try:
        with open_file(path, "stream") as file:
            return PICTURE_KEY.encode("ascii") in file.read(_HEAD)
    except (OSError, ValueError):
        return False
