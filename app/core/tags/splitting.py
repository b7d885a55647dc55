r"""Takes a caption apart into its tags and puts it together again, leaving every untouched character as it was.

A tag is what stands between two commas, as `trainer.dataset.sampling` reads it: spaces around it do not belong to it,
an empty part is no tag, and a parenthesis escaped for the prompt, as in ``miku \(vocaloid\)``, stays as it is written.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

SEPARATOR = ","
JOINT = ", "
"""What is written between tags, as all taggers do."""

_FACE = r"[^\w\s]{0,2}[^\W_]?[^\w\s]{0,2}"
_EMOTICON = re.compile(f"{_FACE}_{_FACE}")

Lines = Literal["caption", "variants"]
"""How a caption of several lines is read: line breaks as spaces, or each line an alternative."""
# Texts a block: one block is joined anew when one of its texts changes, and is passed over whole where it does not
# hold the part. 256 tags are 4 kB, joined in 5 microseconds.
_BLOCK = 256


class TagSpan(NamedTuple):
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


def pieces(text: str, lines: Lines = "caption") -> list[TagSpan]:
    """Return each tag with its place in the text, so that one can be changed and the rest stays byte for byte."""
    found = []
    broken = len(text.splitlines()) > 1  # asked of each of some thousand tags it would take most of the time
    for start, end in _spans(text, lines):
        part = text[start:end]
        if tag := part.strip():
            start += len(part) - len(part.lstrip())
            found.append(TagSpan(one_line(tag) if broken else tag, start, start + len(tag)))
    return found


def replace_piece(text: str, piece: TagSpan, tag: str) -> str:
    """Return the text with this tag written differently."""
    return text[: piece.start] + tag + text[piece.end :]


def remove_piece(text: str, piece: TagSpan) -> str:
    """Return the text without this tag and the one comma, with its space, that parted it from a neighbour."""
    front, back = text[: piece.start], text[piece.end :]
    rest = back.lstrip(" \t")
    if rest.startswith(SEPARATOR):
        return front + rest[len(SEPARATOR) :].lstrip(" \t")
    bare = front.rstrip(" \t")
    if bare.endswith(SEPARATOR):
        return bare[: -len(SEPARATOR)] + back
    return front + back


def move_piece(text: str, found: Sequence[TagSpan], source: int, target: int) -> str:
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


def even(text: str) -> str:
    """Return the text with small letters, and accents within theirs (NFC), as CLIP reads it; macOS has them apart."""
    return (text if text.isascii() else unicodedata.normalize("NFC", text)).casefold()


def fold(text: str) -> str:
    r"""Return the text as it is compared: `even`, as CLIP reads all that is one then alike, and ``\(`` as ``(``."""
    text = even(text)
    return text.replace("\\(", "(").replace("\\)", ")") if "\\" in text else text


class Haystack:
    """Folded texts by number; a number is given back to the next text when its text is taken out."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts = list(texts)
        self._joined: list[str | None] = [None] * -(-len(self._texts) // _BLOCK)
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._texts) - len(self._free)

    def __getitem__(self, number: int) -> str:
        return self._texts[number]

    def add(self, text: str) -> int:
        """Enter a text without line breaks; return its number."""
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
        """Take a text out."""
        self._texts[number] = ""
        self._joined[number // _BLOCK] = None
        self._free.append(number)

    def containing(self, part: str) -> Iterator[int]:
        """Give the numbers of the texts that hold the part, which must not be empty, in the order of the numbers."""
        for block, joined in enumerate(self._joined):
            if part in (joined or self._join(block)):
                first = block * _BLOCK
                rows = self._texts[first : first + _BLOCK]
                yield from [number for number, text in enumerate(rows, first) if part in text]

    def matching(self, pattern: str) -> Iterator[int]:
        """Give the numbers of the texts that a regular expression describes from end to end; "" matches none."""
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
