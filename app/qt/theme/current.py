"""Which colours are in force."""

from __future__ import annotations

from app.qt.theme.palettes import LIGHT, Colours

_in_force = LIGHT


def colours() -> Colours:
    """Return the colours in force now."""
    return _in_force


def put_in_force(chosen: Colours) -> None:
    """Remember the colours that `Theme` has given to Qt."""
    global _in_force
    _in_force = chosen
