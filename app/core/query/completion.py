"""Completion of queries at the cursor (keys, tags and other values), and spelling suggestions for tags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from app.core.library import Library
from app.core.query.finder import folder_path
from app.core.query.language import KEYS, OPTIONAL, QueryKey, Token, tokenize
from app.core.query.terms import WILD, Query, Term, literal
from app.core.tags.index import TagIndex
from app.core.tags.splitting import fold

# Texts after which the user still types a value, so completing one adds no space.
_OPEN_KEYS = tuple(f"{key.name}:" for key in KEYS.values() if key.kind != "flag" and key.name not in OPTIONAL)
_SIGNS = ("<", "<=", ">", ">=")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 _-"


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposed replacement for `text[start:end]` of a query; for a tag, `images` is how many images have it."""

    text: str
    start: int
    end: int
    sentence: str = ""
    images: int | None = None

    def apply_to(self, text: str) -> tuple[str, int]:
        """Return the query with the proposal inserted, and the new cursor position."""
        rest = text[self.end :]
        gap = "" if self.text.endswith((*_OPEN_KEYS, *_SIGNS)) or rest.startswith(" ") else " "
        return text[: self.start] + self.text + gap + rest, self.start + len(self.text) + len(gap)


class QueryCompleter:
    """Completer of queries over a library. Use it only on the thread that owns the library."""

    def __init__(self, library: Library, index: TagIndex) -> None:
        self._library = library
        self._index = index

    def propose(self, text: str, cursor: int, limit: int = 12) -> list[Proposal]:
        """Return completions for the word at the cursor: values of its key, or keys and tags if it has no key."""
        word = _word_at(text, cursor)
        if word is None:
            return (
                [_key_proposal(key, cursor, cursor) for key in KEYS.values()] if _can_start_word(text, cursor) else []
            )
        typed = word.value if cursor == word.end else text[word.value_start : cursor].strip('"')
        if word.key is not None:
            return list(islice(self._values(KEYS[word.key], typed, word), limit)) if word.key in KEYS else []
        keys = [
            _key_proposal(key, word.start, word.end) for key in KEYS.values() if key.name.startswith(typed.casefold())
        ]
        return (keys + list(self._tags(typed, word, limit)))[:limit]

    def _values(self, key: QueryKey, typed: str, word: Token) -> Iterator[Proposal]:
        if key.name == "tag":
            return self._tags(typed, word)
        if key.name == "folder":
            return _matching_values(key, typed, word, self._folders())
        if key.kind == "choice":
            return _matching_values(key, typed, word, key.choices)
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
        return sorted(folder_path(folder) for folder in folders)


def _matching_values(key: QueryKey, typed: str, word: Token, values: Iterable[str]) -> Iterator[Proposal]:
    for value in values:
        if typed.casefold() in value.casefold():
            yield Proposal(str(Term(key.name, value)), word.start, word.end, key.sentence)


def _key_proposal(key: QueryKey, start: int, end: int) -> Proposal:
    return Proposal(f"{key.name}:", start, end, key.sentence)


def _word_at(text: str, cursor: int) -> Token | None:
    """Return the word that contains the cursor or ends at it."""
    for token in tokenize(text)[0]:
        if token.kind == "word" and token.start < cursor <= token.end:
            return token
    return None


def _can_start_word(text: str, cursor: int) -> bool:
    """Return whether a new word can start at the cursor."""
    return not text[:cursor].strip() or text[cursor - 1] in " (-"


class UnknownTag(NamedTuple):
    """A queried tag that no image has, its position in the query, and the most frequent tag one typo away."""

    tag: str
    suggestion: str | None
    start: int
    end: int


def unknown_tags(query: Query, index: TagIndex) -> list[UnknownTag]:
    """Return the queried tags that no image has, ignoring patterns with * or ?. Takes about 1 ms per tag."""
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
    """Return the most frequent tag one edit away (a letter added, removed or replaced, or two swapped), or None.

    Replacing all spaces with underscores, or the reverse, counts as one edit. Every variant is generated and looked up,
    as in Norvig's spelling corrector: comparing the tag with each of 100,000 tags would take seconds.
    """
    known = {spelling for variant in _variants(fold(tag)) for spelling in index.spellings(variant)}
    return max(known, key=lambda spelling: (index.count(spelling), spelling), default=None)


def _variants(word: str) -> Iterator[str]:
    yield word.replace("_", " ")
    yield word.replace(" ", "_")
    for position in range(len(word) + 1):
        head, tail = word[:position], word[position:]
        yield from (head + letter + tail for letter in _LETTERS)
        if tail:
            yield head + tail[1:]
            yield from (head + letter + tail[1:] for letter in _LETTERS)
            yield head + tail[1:2] + tail[0] + tail[2:]
