"""Formatting of durations, sizes and untrusted text for users."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

_MOST_SECONDS = 90
"""Durations below this many seconds are shown in seconds, because minutes would be too coarse."""
# Cc: escape sequences and other control characters. Cf: marks that reorder text or have no width. Cs: undecodable bytes
# of a file name. Zl, Zp: line breaks that only some programs honor. Spaces of all widths, combining marks and
# private-use characters (icons of some fonts) stay, because they do not affect other text.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Letters without a glyph, such as Hangul fillers, which can make two names look alike.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
INDENT = "  "
# Longer lines and messages come from broken or hostile files and would push everything else off the screen.
LONGEST_LINE = 10_000
MOST_LINES = 60


class DurationParts(NamedTuple):
    """Duration rounded for display, either to seconds or to days, hours and minutes."""

    days: int
    hours: int
    minutes: int
    seconds: int


def parts(seconds: float) -> DurationParts:
    """Split a duration in seconds into parts; below 90 s only `seconds` is set, to at least 1."""
    whole = max(1, round(seconds))
    if whole < _MOST_SECONDS:
        return DurationParts(0, 0, 0, whole)
    hours, minutes = divmod(round(whole / 60), 60)
    days, hours = divmod(hours, 24)
    return DurationParts(days, hours, minutes, 0)


def duration_text(seconds: float) -> str:
    """Return a duration in English: "42 s", "12 min", "3 h 05 min" or "3 d 4 h"."""
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
    """Return a size in bytes as text, with a decimal below 100: "512 B", "3.4 MiB", "593 MiB", "7.1 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        text = f"{number:.0f}" if unit == "B" or number >= 99.95 else f"{number:.1f}"
        if float(text) < 1024:
            return f"{text} {unit}"
        number /= 1024
    return f"{number:.0f} GiB" if number >= 99.95 else f"{number:.1f} GiB"


def share(part: float, whole: float) -> str:
    """Return two sizes, given in bytes, as "5.3 of 6.6 GiB", or "26.0 MiB of 6.6 GiB" if their units differ."""
    of, unit = size(whole).split()
    number, own = size(part).split()
    return f"{number} of {of} {unit}" if own == unit else f"{number} {own} of {of} {unit}"


def printable(text: str, longest: int | None = None) -> str:
    r"""Return `text` as one line with non-printable characters replaced by escapes such as ``\u202e``.

    Names that differ only in such characters still look different. Text over `longest` characters is cut.
    """
    cut = text if longest is None or len(text) <= longest else text[: longest - 3] + "..."
    if cut.isascii() and cut.isprintable():
        return cut
    return "".join(_escaped(letter) if _is_unprintable(letter) else letter for letter in cut)


def in_json(value: object) -> str:
    """Return a parsed value as JSON for an error message, cut to 80 characters."""
    return printable(json.dumps(value, ensure_ascii=False, default=str), 80)


def printable_lines(text: str, most: int = MOST_LINES) -> list[str]:
    """Return a message as at most `most` printable lines of at most `LONGEST_LINE` characters.

    Lines after the first are indented, so that a line break in a file name cannot fake a separate message.
    """
    lines = text.split("\n")
    if len(lines) > most:
        lines = [*lines[:most], f"and {len(lines) - most:,} more lines"]
    first, *others = (printable(line, LONGEST_LINE) for line in lines)
    return [first, *(line if line.startswith(INDENT) or not line else INDENT + line for line in others)]


def _is_unprintable(letter: str) -> bool:
    return unicodedata.category(letter) in _UNPRINTABLE or letter in _BLANK


def _escaped(letter: str) -> str:
    code = ord(letter)
    if code < 0x100:
        return _NAMED.get(letter) or f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def caption_lengths_text(counts: Sequence[tuple[int, int]]) -> str:
    """Format (tokens, captions) pairs: "42 of 50 up to 75 tokens, 8 up to 150 tokens"."""
    (tokens, first), *others = counts
    total = sum(count for _, count in counts)
    return ", ".join(
        (f"{first:,} of {total:,} up to {tokens} tokens", *(f"{count:,} up to {more} tokens" for more, count in others))
    )
