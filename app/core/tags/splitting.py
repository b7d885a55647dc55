r"""Takes a caption apart into its tags and puts it together again, leaving every untouched character as it was.

A tag is what stands between two commas, as `trainer.dataset.sampling` reads it: spaces around it do not belong to it,
an empty part is no tag, and a parenthesis escaped for the prompt, as in ``miku \(vocaloid\)``, stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

SEPARATOR = ","
JOINT = ", "
"""What is written between tags, as all taggers do."""

_FACE = r"[^\w\s]{0,2}[^\W_]?[^\w\s]{0,2}"
_EMOTICON = re.compile(f"{_FACE}_{_FACE}")

Lines = Literal["caption", "variants"]
"""How a caption of several lines is read: line breaks as spaces, or each line an alternative."""


class Piece(NamedTuple):
    """One tag and where it stands: `text[start:end]` is the tag as written, line breaks and all."""

    tag: str
    start: int
    end: int


def split_tags(text: str | None, lines: Lines = "caption") -> list[str]:
    """Return the tags in their order, repeated ones too; line breaks inside a tag are read as a space."""
    if not text:
        return []
    rows = text.splitlines()
    if lines == "caption" and len(rows) > 1:
        rows = [one_line(text)]
    return [tag for row in rows for part in row.split(SEPARATOR) if (tag := part.strip())]


def join_tags(tags: Iterable[str]) -> str:
    """Return a caption of one line that holds these tags."""
    return JOINT.join(tags)


def pieces(text: str, lines: Lines = "caption") -> list[Piece]:
    """Return each tag with its place in the text, so that one can be changed and the rest stays byte for byte."""
    found = []
    broken = len(text.splitlines()) > 1  # asked of each of some thousand tags it would take most of the time
    for start, end in _spans(text, lines):
        part = text[start:end]
        if tag := part.strip():
            start += len(part) - len(part.lstrip())
            found.append(Piece(one_line(tag) if broken else tag, start, start + len(tag)))
    return found


def replace_piece(text: str, piece: Piece, tag: str) -> str:
    """Return the text with this tag written differently."""
    return text[: piece.start] + tag + text[piece.end :]


def remove_piece(text: str, piece: Piece) -> str:
    """Return the text without this tag and the one comma, with its space, that parted it from a neighbour."""
    front, back = text[: piece.start], text[piece.end :]
    rest = back.lstrip(" \t")
    if rest.startswith(SEPARATOR):
        return front + rest[len(SEPARATOR) :].lstrip(" \t")
    bare = front.rstrip(" \t")
    if bare.endswith(SEPARATOR):
        return bare[: -len(SEPARATOR)] + back
    return front + back


def move_piece(text: str, found: Sequence[Piece], source: int, target: int) -> str:
    """Return the text with the tag at place `source` at place `target`; commas, spaces and line breaks stay put."""
    written = [text[piece.start : piece.end] for piece in found]
    written.insert(target, written.pop(source))
    for piece, tag in zip(reversed(found), reversed(written), strict=True):
        text = replace_piece(text, piece, tag)
    return text


def one_line(text: str) -> str:
    """Return the text with its line breaks as spaces, empty lines left out."""
    return " ".join(row.strip() for row in text.splitlines() if row.strip())


def is_face(tag: str) -> bool:
    """Tell whether a tag is an emoticon such as ^_^, o_o or (o)_(o): its underscore stands for no space.

    As in all taggers' lists, on either side of it stands at most one letter or digit.
    """
    return bool(_EMOTICON.fullmatch(tag))


def _spans(text: str, lines: Lines) -> Iterator[tuple[int, int]]:
    """Give the bounds of the parts between commas, and between lines where each line is an alternative."""
    start = 0
    for row in text.splitlines(keepends=True) if lines == "variants" else [text]:
        for part in row.split(SEPARATOR):
            yield start, start + len(part)
            start += len(part) + len(SEPARATOR)
        start -= len(SEPARATOR)
