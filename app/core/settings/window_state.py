"""Where the window stood and how it was divided: window.json, beside the preferences; losing it costs nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from app.core.settings.stored import load
from trainer.protocol import files, places

_log = logging.getLogger(__name__)


def place() -> Path:
    """Return where it is kept."""
    return places.home() / "window.json"


def read() -> tuple[dict[str, str], str]:
    """Return what was kept, text by name, and a sentence about what was wrong with the file, as `stored.load` does."""
    nothing: dict[str, str] = {}
    return load(place(), _texts, nothing, "the window has its default size and layout")


def _texts(found: Any, _: list[str]) -> dict[str, str]:
    return {str(name): text for name, text in found.items() if isinstance(text, str)}


def write(state: dict[str, str]) -> None:
    """Keep it; a disk that refuses is only noted, since nobody should wait for this when closing."""
    try:
        place().parent.mkdir(parents=True, exist_ok=True)
        files.write_json(place(), state, durable=False)
    except OSError as error:
        _log.info("the window's place was not kept: %s", error)
