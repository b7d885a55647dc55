"""Lengths of time as people read them."""

from __future__ import annotations

from typing import NamedTuple

_SECONDS_TELL = 90
"""Below so many seconds a minute more or less would say too little."""


class Parts(NamedTuple):
    """A length of time no finer than it tells something: in seconds alone, or in minutes and what is longer."""

    days: int
    hours: int
    minutes: int
    seconds: int


def parts(seconds: float) -> Parts:
    """Divide a length of time in seconds; below 90 of them it is told in seconds, at least one."""
    whole = max(1, round(seconds))
    if whole < _SECONDS_TELL:
        return Parts(0, 0, 0, whole)
    hours, minutes = divmod(round(whole / 60), 60)
    days, hours = divmod(hours, 24)
    return Parts(days, hours, minutes, 0)


def about(seconds: float) -> str:
    """Return a length of time in English: "42 s", "12 min", "3 h 05 min" or "3 d 4 h"."""
    match parts(seconds):
        case (0, 0, 0, left):
            return f"{left} s"
        case (0, 0, minutes, _):
            return f"{minutes} min"
        case (0, hours, minutes, _):
            return f"{hours} h {minutes:02d} min"
        case (days, hours, *_):
            return f"{days} d {hours} h"


def size(number: float) -> str:
    """Return bytes as "512 B", "3.4 MiB", "593 MiB" or "7.1 GiB": a decimal up to where it no longer tells much."""
    for unit in ("B", "KiB", "MiB"):
        text = f"{number:.0f}" if unit == "B" or number >= 99.95 else f"{number:.1f}"
        if float(text) < 1024:
            return f"{text} {unit}"
        number /= 1024
    return f"{number:.0f} GiB" if number >= 99.95 else f"{number:.1f} GiB"


def share(part: float, whole: float) -> str:
    """Return "5.3 of 6.6 GiB", or "26.0 MiB of 6.6 GiB" where one unit would not do for both."""
    of, unit = size(whole).split()
    told, own = size(part).split()
    return f"{told} of {of} {unit}" if own == unit else f"{told} {own} of {of} {unit}"
