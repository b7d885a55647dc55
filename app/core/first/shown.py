"""Remembers that the welcome was shown, so that it comes by itself only once."""

from __future__ import annotations

import contextlib
from pathlib import Path

from app.core.settings import window_state
from trainer import __version__
from trainer.protocol import files, places


def is_first_start() -> bool:
    """Tell whether nobody has used this installation, nor one before it, on this account."""
    return not _mark().exists() and not window_state.place().exists()


def remember() -> None:
    """Do not show it by itself again; where the disk refuses, it comes once more."""
    with contextlib.suppress(OSError):
        _mark().parent.mkdir(parents=True, exist_ok=True)
        files.write_json(_mark(), {"version": __version__}, durable=False)


def _mark() -> Path:
    return places.home() / "welcome.json"
