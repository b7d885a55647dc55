"""Proposes how a query may go on at the cursor: keys, and the values that a key can take here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from app.core.library import Library
from app.core.query.finder import way_of
from app.core.query.language import KEYS, OPTIONAL, QueryKey, Token, tokenize
from app.core.query.terms import WILD, Query, Term, literal
from app.core.tags.index import TagIndex
from app.core.tags.splitting import fold

# After these a value is still to be typed.
_OPEN_KEYS = tuple(f"{key.name}:" for key in KEYS.values() if key.kind != "flag" and key.name not in OPTIONAL)
_SIGNS = ("<", "<=", ">", ">=")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 _-"


@dataclass(frozen=True, slots=True)
class Proposal:
    """What `text[start:end]` of the query could be replaced by, and why; `pictures` that have the tag proposed."""

    text: str
    start: int
    end: int
    sentence: str = ""
    images: int | None = None

    def put_into(self, text: str) -> tuple[str, int]:
        """Return the query with the proposal in it, and where the cursor then stands: ready to type on."""
        rest = text[self.end :]
        gap = "" if self.text.endswith((*_OPEN_KEYS, *_SIGNS)) or rest.startswith(" ") else " "
        return text[: self.start] + self.text + gap + rest, self.start + len(self.text) + len(gap)


class QueryCompleter:
    """Completes queries over a library; belongs to the thread that owns it."""

    def __init__(self, library: Library, index: TagIndex) -> None:
        self._library = library
        self._index = index

    def propose(self, text: str, cursor: int, limit: int = 12) -> list[Proposal]:
        """Return what the word that ends at the cursor could become; keys and tags for a word without a key."""
        word = _word_at(text, cursor)
        if word is None:
            return [_of_key(key, cursor, cursor) for key in KEYS.values()] if _is_free(text, cursor) else []
        typed = word.value if cursor == word.end else text[word.value_start : cursor].strip('"')
        if word.key is not None:
            return list(islice(self._values(KEYS[word.key], typed, word), limit)) if word.key in KEYS else []
        keys = [_of_key(key, word.start, word.end) for key in KEYS.values() if key.name.startswith(typed.casefold())]
        return (keys + list(self._tags(typed, word, limit)))[:limit]

    def _values(self, key: QueryKey, typed: str, word: Token) -> Iterator[Proposal]:
        if key.name == "tag":
            return self._tags(typed, word)
        if key.name == "folder":
            return _fitting(key, typed, word, self._folders())
        if key.kind == "choice":
            return _fitting(key, typed, word, key.choices)
        if key.kind == "flag":
            return (Proposal(str(Term(key.name, value)), word.start, word.end, key.sentence) for value in (True, False))
        if key.kind == "number" and not typed:
            return (Proposal(f"{key.name}:{sign}", word.start, word.end, key.sentence) for sign in _SIGNS)
        return iter(())

    def _tags(self, typed: str, word: Token, limit: int = 12) -> Iterator[Proposal]:
        for tag, images in self._index.complete(typed, limit):
            yield Proposal(str(Term("tag", literal(tag))), word.start, word.end, images=images)

    def _folders(self) -> list[str]:
        folders = {image.folder for image in self._library.images.values()}
        return sorted(way_of(folder) for folder in folders)


def _fitting(key: QueryKey, typed: str, word: Token, values: Iterable[str]) -> Iterator[Proposal]:
    for value in values:
        if typed.casefold() in value.casefold():
            yield Proposal(str(Term(key.name, value)), word.start, word.end, key.sentence)


def _of_key(key: QueryKey, start: int, end: int) -> Proposal:
    return Proposal(f"{key.name}:", start, end, key.sentence)


def _word_at(text: str, cursor: int) -> Token | None:
    """Return the word that the cursor stands in or right behind."""
    for token in tokenize(text)[0]:
        if token.kind == "word" and token.start < cursor <= token.end:
            return token
    return None


def _is_free(text: str, cursor: int) -> bool:
    """Tell whether a new word can begin here."""
    return not text[:cursor].strip() or text[cursor - 1] in " (-"


class UnknownTag(NamedTuple):
    """A tag that no picture has, where it stands in the query, and the most frequent tag that is nearly the same."""

    tag: str
    meant: str | None
    start: int
    end: int


def unknown_tags(query: Query, index: TagIndex) -> list[UnknownTag]:
    """Return the tags of a query that no picture has; patterns with * or ? are none. About 1 ms each."""
    found = []
    for term in query.terms():
        tag = str(term.value)
        if term.key != "tag" or WILD.search(tag):
            continue
        tag = tag.replace("\\*", "*").replace("\\?", "?")
        if not index.spellings(tag):
            found.append(UnknownTag(tag, nearest(index, tag), *term.span))
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
