"""Finds what is different between two versions of a caption, word by word, for showing them beside each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from itertools import takewhile
from typing import NamedTuple

_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
# Comparing takes time by the product of both lengths: past this, all between what both begin and end with differs.
_MOST_WORDS = 1500


class Span(NamedTuple):
    """A part of a text: `text[start:end]`."""

    start: int
    end: int


class Differences(NamedTuple):
    """The parts that only the first text has, and those that only the second has."""

    gone: tuple[Span, ...]
    new: tuple[Span, ...]


def differences(before: str, after: str) -> Differences:
    """Compare by words; each difference is as short as whole words allow."""
    first, second = _WORDS.findall(before), _WORDS.findall(after)
    front = _alike(zip(first, second, strict=False))
    longest = min(len(first), len(second)) - front
    back = min(longest, _alike(zip(reversed(first), reversed(second), strict=False)))
    gone, new = _compare(first[front : len(first) - back], second[front : len(second) - back])
    return Differences(_spans(first, front, gone), _spans(second, front, new))


def _alike(pairs: Iterable[tuple[str, str]]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _compare(first: list[str], second: list[str]) -> tuple[list[Span], list[Span]]:
    """Return the runs of words that only one of both has, by their places among the words."""
    if len(first) > _MOST_WORDS or len(second) > _MOST_WORDS:
        return [Span(0, len(first))], [Span(0, len(second))]
    codes = SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    changed = [code for code in codes if code[0] != "equal"]
    return [Span(code[1], code[2]) for code in changed], [Span(code[3], code[4]) for code in changed]


def _spans(words: list[str], front: int, runs: list[Span]) -> tuple[Span, ...]:
    """Return runs of words as parts of the text."""
    return tuple(_places(words, front, [run for run in runs if run.end > run.start]))


def _places(words: list[str], front: int, runs: list[Span]) -> Iterator[Span]:
    place = number = 0
    for run in runs:
        place += sum(map(len, words[number : front + run.start]))
        number = front + run.end
        length = sum(map(len, words[front + run.start : number]))
        yield Span(place, place + length)
        place += length
