"""Which tags a query asks for that no picture has, and which tag may have been meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from app.core.query.terms import WILD, Query
from app.core.tags.haystack import fold
from app.core.tags.index import TagIndex

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 _-"


class Unknown(NamedTuple):
    """A tag that no picture has, where it stands in the query, and the most frequent tag that is nearly the same."""

    tag: str
    meant: str | None
    start: int
    end: int


def unknown_tags(query: Query, index: TagIndex) -> list[Unknown]:
    """Return the tags of a query that no picture has; patterns with * or ? are none. About 1 ms each."""
    found = []
    for term in query.terms():
        tag = str(term.value)
        if term.key != "tag" or WILD.search(tag):
            continue
        tag = tag.replace("\\*", "*").replace("\\?", "?")
        if not index.spellings(tag):
            found.append(Unknown(tag, nearest(index, tag), *term.span))
    return found


def nearest(index: TagIndex, tag: str) -> str | None:
    """Return the most frequent tag that one slip makes of this one: a letter more, less, another, or two swapped.

    Underscores for spaces count as one slip too. The variants are looked up, as in Norvig's spelling corrector, since
    comparing with each of 100,000 tags would take seconds.
    """
    known = {spelling for variant in _variants(fold(tag)) for spelling in index.spellings(variant)}
    return max(known, key=lambda one: (index.count(one), one), default=None)


def _variants(word: str) -> Iterator[str]:
    yield word.replace("_", " ")
    yield word.replace(" ", "_")
    for place in range(len(word) + 1):
        head, tail = word[:place], word[place:]
        yield from (head + letter + tail for letter in _LETTERS)
        if tail:
            yield head + tail[1:]
            yield from (head + letter + tail[1:] for letter in _LETTERS)
            yield head + tail[1:2] + tail[0] + tail[2:]
