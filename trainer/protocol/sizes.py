"""Sizes of memory and files as people read them: the one rule for plans, runs and reports."""

from __future__ import annotations


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
