r"""Split captions into tags and edit single tags, preserving all other characters.

As in `trainer.dataset.sampling`, a tag is the text between two commas, without surrounding spaces, and never empty.
Parentheses that are escaped for prompts, as in ``miku \(vocaloid\)``, stay escaped.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

SEPARATOR = ","
JOINT = ", "
"""Separator to write between two tags; all taggers write it this way."""

_FACE = r"[^\w\s]{0,2}[^\W_]?[^\w\s]{0,2}"
_EMOTICON = re.compile(f"{_FACE}_{_FACE}")

Lines = Literal["caption", "variants"]
"""How captions with several lines are read: as one text, or each line as an alternative caption."""
# Texts per block. A block is joined again when one of its texts changes, and skipped as a whole when it does not
# contain the searched part. 256 tags are 4 kB, joined in 5 microseconds.
_BLOCK = 256


class TagSpan(NamedTuple):
    """A tag and its position: `text[start:end]` is the tag as written, including line breaks."""

    tag: str
    start: int
    end: int


def split_tags(text: str | None, lines: Lines = "caption") -> list[str]:
    """Return the tags in order, including repeated ones; a line break inside a tag counts as a space."""
    if not text:
        return []
    rows = text.splitlines()
    if lines == "caption" and len(rows) > 1:
        rows = [one_line(text)]
    return [tag for row in rows for part in row.split(SEPARATOR) if (tag := part.strip())]


def join_tags(tags: Iterable[str]) -> str:
    """Return a one-line caption with these tags."""
    return JOINT.join(tags)


def find_tags(text: str, lines: Lines = "caption") -> list[TagSpan]:
    """Return each tag with its position in the text, which lets edits preserve the rest byte for byte."""
    found = []
    # Checked once: per tag, it would take most of the time for a text of several thousand tags.
    is_multiline = len(text.splitlines()) > 1
    for start, end in _spans(text, lines):
        part = text[start:end]
        if tag := part.strip():
            start += len(part) - len(part.lstrip())
            found.append(TagSpan(one_line(tag) if is_multiline else tag, start, start + len(tag)))
    return found


def replace_tag(text: str, piece: TagSpan, tag: str) -> str:
    """Return the text with this tag replaced."""
    return text[: piece.start] + tag + text[piece.end :]


def remove_tag(text: str, piece: TagSpan) -> str:
    """Return the text without this tag and one of the separators next to it."""
    before, after = text[: piece.start], text[piece.end :]
    following = after.lstrip(" \t")
    if following.startswith(SEPARATOR):
        return before + following[len(SEPARATOR) :].lstrip(" \t")
    preceding = before.rstrip(" \t")
    if preceding.endswith(SEPARATOR):
        return preceding[: -len(SEPARATOR)] + after
    return before + after


def move_tag(text: str, found: Sequence[TagSpan], source: int, target: int) -> str:
    """Return the text with the tag at index `source` moved to `target`; separators and line breaks stay in place."""
    written = [text[piece.start : piece.end] for piece in found]
    written.insert(target, written.pop(source))
    # From the end, which keeps the positions of earlier tags valid.
    for piece, tag in zip(reversed(found), reversed(written), strict=True):
        text = replace_tag(text, piece, tag)
    return text


def one_line(text: str) -> str:
    """Return the text on one line: line breaks become spaces and empty lines are removed."""
    return " ".join(row.strip() for row in text.splitlines() if row.strip())


def is_emoticon(tag: str) -> bool:
    """Return whether a tag is an emoticon such as ^_^, o_o or (o)_(o), whose underscore does not mean a space.

    As in the lists of all taggers, an emoticon has at most one letter or digit on each side of the underscore.
    """
    return bool(_EMOTICON.fullmatch(tag))


def _spans(text: str, lines: Lines) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each part between commas and, if `lines` is "variants", between line breaks."""
    start = 0
    for row in text.splitlines(keepends=True) if lines == "variants" else [text]:
        for part in row.split(SEPARATOR):
            yield start, start + len(part)
            start += len(part) + len(SEPARATOR)
        start -= len(SEPARATOR)


def normalize(text: str) -> str:
    """Return the text in lowercase and with composed accents (NFC), as CLIP reads it; macOS decomposes accents."""
    return (text if text.isascii() else unicodedata.normalize("NFC", text)).casefold()


def fold(text: str) -> str:
    r"""Return the form in which a string is compared: normalized, as CLIP reads it, and with ``(`` for ``\(``."""
    text = normalize(text)
    return text.replace("\\(", "(").replace("\\)", ")") if "\\" in text else text


class Haystack:
    """Searchable collection of folded texts by number; numbers of removed texts are reused."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts = list(texts)
        self._joined: list[str | None] = [None] * -(-len(self._texts) // _BLOCK)
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._texts) - len(self._free)

    def __getitem__(self, number: int) -> str:
        return self._texts[number]

    def add(self, text: str) -> int:
        """Add a text without line breaks and return its number."""
        if self._free:
            number = self._free.pop()
            self._texts[number] = text
        else:
            number = len(self._texts)
            self._texts.append(text)
            if number % _BLOCK == 0:
                self._joined.append(None)
        self._joined[number // _BLOCK] = None
        return number

    def remove(self, number: int) -> None:
        """Remove a text."""
        self._texts[number] = ""
        self._joined[number // _BLOCK] = None
        self._free.append(number)

    def containing(self, part: str) -> Iterator[int]:
        """Yield the numbers of the texts that contain `part`, which must not be empty, in ascending order."""
        for block, joined in enumerate(self._joined):
            if part in (joined or self._join(block)):
                first = block * _BLOCK
                rows = self._texts[first : first + _BLOCK]
                yield from [number for number, text in enumerate(rows, first) if part in text]

    def matching(self, pattern: str) -> Iterator[int]:
        """Yield the numbers of the texts that fully match a regular expression; empty texts never match."""
        whole = re.compile(f"^(?=.)(?:{pattern})$", re.MULTILINE)
        for block, joined in enumerate(self._joined):
            if whole.search(joined or self._join(block)):
                first = block * _BLOCK
                rows = self._texts[first : first + _BLOCK]
                yield from [number for number, text in enumerate(rows, first) if whole.match(text)]

    def _join(self, block: int) -> str:
        first = block * _BLOCK
        joined = self._joined[block] = "\n".join(self._texts[first : first + _BLOCK])
        return joined
