"""Names of files: any text as one that Windows, Linux and macOS all take, one that is free, that of a saved step."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator

_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f-\x9f\u2028\u2029]+')
# Marks that reverse the direction of text make "gpj.exe" read as "exe.jpg"; characters without width or glyph make two
# names look alike (joiners stay: emoji and many scripts need them); lone surrogates cannot be written as UTF-8.
_INVISIBLE = re.compile(
    "[\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\u3164\ufeff\uffa0\ud800-\udfff]+"
)
# Windows' devices, whatever extension follows. https://learn.microsoft.com/windows/win32/fileio/naming-a-file
_RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|clock\$|com[0-9¹²³]|lpt[0-9¹²³])(\s*\..*)?", re.IGNORECASE)
LONGEST_NAME = 100
"""The most characters that the name of a job may have."""
_NUMBER_BYTES = 5  # " 9999" after a name that is taken
_MOST_BYTES = 120  # of UTF-8; leaves room for "-step00000500.safetensors" in the 255 that file systems take


def safe_name(text: str, otherwise: str = "unnamed") -> str:
    """Return `text` as one path component, letters of every script kept; `otherwise` when nothing of it is left."""
    name = _INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    name = _trimmed(_FORBIDDEN.sub("-", name))
    name = _trimmed(name.encode("utf-8")[:_MOST_BYTES].decode("utf-8", errors="ignore"))
    if _RESERVED.fullmatch(name):
        name = f"_{name}"
    return name or otherwise


def made_up_name(text: str, otherwise: str = "job") -> str:
    """Return `text` as a name that every job accepts; for names that come from a folder, a file or a title.

    It is short enough that a number still fits behind it, in a job and in the name of a folder.
    """
    name = " ".join(_INVISIBLE.sub("", unicodedata.normalize("NFC", text)).split())
    name = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", "", name)[: LONGEST_NAME - _NUMBER_BYTES]
    name = name.encode("utf-8")[: _MOST_BYTES - _NUMBER_BYTES].decode("utf-8", errors="ignore").strip()
    return name if name.strip(" .") else otherwise


def numbered(name: str, between: str = "-") -> Iterator[str]:
    """Yield a name, then with 2, 3 ... behind it without end: the first that is free is the one to take."""
    yield name
    yield from (f"{name}{between}{number}" for number in itertools.count(2))


def step_ending(step: int) -> str:
    """Return how the name of a LoRA ends that was saved at a step; the run's result has no such ending."""
    return f"-step{step:06d}"


def _trimmed(name: str) -> str:
    # A leading dot hides a file, a leading dash looks like an option; Windows drops trailing dots and spaces.
    return name.strip().lstrip(".- ").rstrip(". ")
