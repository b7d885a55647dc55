"""Where the window stood and how it was divided: window.json, beside the preferences; losing it costs nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from app.core.settings.stored import load
from trainer.protocol import atomic, places

_log = logging.getLogger(__name__)


def place() -> Path:
    """Return where it is kept."""
    return places.home() / "window.json"


def read() -> dict[str, str]:
    """Return what was kept, text by name; empty where there is nothing, or nothing that can be read."""
    nothing: dict[str, str] = {}
    kept, notice = load(place(), _texts, nothing, "the window is placed as if for the first time")
    if notice:
        _log.info("%s", notice)
    return kept


def _texts(found: Any, _: list[str]) -> dict[str, str]:
    return {str(name): text for name, text in found.items() if isinstance(text, str)}


def write(state: dict[str, str]) -> None:
    """Keep it; a disk that refuses is only noted, since nobody should wait for this when closing."""
    try:
        place().parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(place(), state, durable=False)
    except OSError as error:
        _log.info("the window's place was not kept: %s", error)
