"""Refuses texts of a preset that no honest preset holds: control characters, paths, secrets, names of paths."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.protocol.files import safe_name
from trainer.protocol.printable import printable

_LONGEST = 4000  # characters of any text; shorter limits stand beside their fields
_PICTURE = "preview.picture"
_SEVERAL_LINES = {"notes"}
# Marks that reorder text make it read as something else than it is (CVE-2021-42574), and tags spell letters that
# nobody sees; Zl and Zp are line breaks.
_DECEIVING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
# The flags of England, Scotland and Wales are such letters behind a black flag (UTS #51): the code of a region and of
# a part of it, with an end. As short as that they hide nothing worth it.
_FLAG = re.compile("\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,7}\U000e007f")
# Of no width: two names, trigger words or prompts look alike by them; what is pasted into notes may hold some.
_UNSEEN = re.compile("[\u115f\u1160\u180e\u200b\u2060-\u2064\u3164\ufeff\uffa0]")
_REFUSED_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}

_PATH = re.compile(
    r"""(?<![A-Za-z])[A-Za-z]:[\\/]          # C:\ or C:/
      | \\\\[\w.?]+\\                         # \\server\share
      | (?<![\w:/])//[\w-]+(?:\.[\w-]+)+/[\w.$-]  # //nas.local/share, //192.168.0.2/share
      | (?<![\w:/])//[\w-]+/[\w.-]+[$/]       # //nas/share$ and //nas/share/folder; //a/b may be tags
      | (?<![\w/:.<])/[\w.-]+/[\w.-]+         # /home/somebody
      | (?<!\w)~[\w.-]*[\\/]                  # ~/pictures
      | (?<![\w.])\.\.[\\/]                   # ../
      | %\w+%[\\/] | \$\{?\w+\}?[\\/]         # %APPDATA%\ and $HOME/
      | \bfile:/""",
    re.VERBOSE,
)
_SECRET = re.compile(
    r"""\bhf_[A-Za-z0-9]{20} | \bgh[pousr]_[A-Za-z0-9]{20} | \bgithub_pat_\w{20} | \bsk-[\w-]{20} | \bAKIA[0-9A-Z]{16}
      | \bxox[abprs]-[\w-]{10} | \beyJ[\w-]{10,500}\.eyJ[\w-]{10} | -----BEGIN\s[A-Z\s]{0,30}PRIVATE\sKEY""",
    re.VERBOSE,
)
_HUB_ID_OR_FILE = re.compile(r"[^\\/]+(/[^\\/]+)?")


def text_faults(data: Mapping[str, Any]) -> list[str]:
    """Name each text in a preset's data that may not stand there: "key: reason"."""
    faults = []
    for key, text in _texts(data):
        if key == _PICTURE:
            continue
        reason = text_fault(text, several_lines=key in _SEVERAL_LINES) or _name_fault(key, text)
        if reason:
            faults.append(f"{printable(key, 80)}: {reason}")
    return faults


def text_fault(text: str, *, several_lines: bool = False) -> str | None:
    """The reason why no preset may hold this text, if there is one; `several_lines` allows line breaks and tabs."""
    if len(text) > _LONGEST:
        return f"is a text of {len(text):,} characters; at most {_LONGEST:,} are read"
    odd = next((letter for letter in _FLAG.sub("", text) if _steers(letter, several_lines)), None)
    if odd is not None:
        return f"holds the control character U+{ord(odd):04X}, which no text needs"
    if found := _PATH.search(text):
        return f"holds what looks like a path ({_around(text, found)}); presets go to other people and machines"
    if found := _SECRET.search(text):
        return f"holds what looks like a key or an access token ({found[0][:6]}...); never share one"
    return None


def _texts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every text in the data with its dotted key; what is deeper than a preset goes was refused before."""
    waiting: list[tuple[str, Any]] = [("", data)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting.extend((f"{key}.{name}" if key else str(name), inner) for name, inner in reversed(list(items)))


def _steers(letter: str, several_lines: bool) -> bool:
    if several_lines and letter in "\n\t":
        return False
    if not several_lines and _UNSEEN.match(letter):
        return True
    return unicodedata.category(letter) in _REFUSED_CATEGORIES or _DECEIVING.match(letter) is not None


def _name_fault(key: str, text: str) -> str | None:
    if key == "name" and text and safe_name(text) != unicodedata.normalize("NFC", text):
        return f'cannot be the name of a file; "{safe_name(text)}" could'
    if key == "base.name" and text and not _HUB_ID_OR_FILE.fullmatch(text):
        return "must be a file name or a Hub id owner/name, without folders"
    return None


def _around(text: str, found: re.Match[str]) -> str:
    return printable(text[found.start() : found.start() + 24], 24)
