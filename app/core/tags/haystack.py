"""Many short texts that are searched for a part of them at once, and may come and go one by one."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

# Texts a block: one block is joined anew when one of its texts changes, and is passed over whole where it does not
# hold the part. 256 tags are 4 kB, joined in 5 microseconds.
_BLOCK = 256


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
