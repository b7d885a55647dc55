"""Parsed queries: terms joined by and, or and not; `str` converts them back to the query language."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, nextafter

Span = tuple[int, int]
"""Start and end offset in the query text."""

WILD = re.compile(r"(?<!\\)[*?]")
"""Pattern that matches an unescaped wildcard, which makes a tag a pattern."""
_BARE = re.compile(r"[\w.*?][\w.*?-]*")
_WORDS = {"and", "or", "not"}


@dataclass(frozen=True, slots=True)
class Range:
    """Range of numbers from `low` to `high`, both included unless `open`."""

    low: float = -inf
    high: float = inf
    open: bool = False

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest number in the range."""
        return (nextafter(self.low, inf), nextafter(self.high, -inf)) if self.open else (self.low, self.high)

    def __str__(self) -> str:
        if self.low == self.high:
            return _number(self.low)
        if self.high == inf:
            return f">{'' if self.open else '='}{_number(self.low)}"
        if self.low == -inf:
            return f"<{'' if self.open else '='}{_number(self.high)}"
        return f"{_number(self.low)}..{_number(self.high)}"


@dataclass(frozen=True, slots=True)
class Term:
    """One condition: `key` is "" for a bare word; `value` is a string, a range or a flag."""

    key: str
    value: str | Range | bool
    span: Span = field(default=(0, 0), compare=False)

    def __str__(self) -> str:
        if isinstance(self.value, bool):
            return f"{self.key}:" if self.value else f"{self.key}:no"
        value = str(self.value) if isinstance(self.value, Range) else _quoted(self.value, bool(self.key))
        return f"{self.key}:{value}" if self.key else value


@dataclass(frozen=True, slots=True)
class Not:
    """Negation of one part."""

    part: Node

    def __str__(self) -> str:
        return f"-{_inner(self.part)}"


@dataclass(frozen=True, slots=True)
class And:
    """Conjunction of at least two parts."""

    parts: tuple[Node, ...]

    def __str__(self) -> str:
        return " ".join(map(_inner, self.parts))


@dataclass(frozen=True, slots=True)
class Or:
    """Disjunction of at least two parts."""

    parts: tuple[Node, ...]

    def __str__(self) -> str:
        return " or ".join(map(_inner, self.parts))


Node = Term | Not | And | Or


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed query; it matches all images if `root` is None."""

    root: Node | None = None

    def __str__(self) -> str:
        return "" if self.root is None else str(self.root)

    def terms(self) -> Iterator[Term]:
        """Yield all terms from left to right."""
        if self.root is not None:
            yield from _terms(self.root)


def literal(text: str) -> str:
    """Return a tag as a pattern that matches only this tag: `*` and `?` are escaped."""
    return re.sub(r"([*?])", r"\\\1", text)


def _terms(node: Node) -> Iterator[Term]:
    if isinstance(node, Term):
        yield node
    else:
        for part in (node.part,) if isinstance(node, Not) else node.parts:
            yield from _terms(part)


def _inner(node: Node) -> str:
    return f"({node})" if isinstance(node, And | Or) else str(node)


def _quoted(text: str, keyed: bool) -> str:
    if _BARE.fullmatch(text) and (keyed or text.casefold() not in _WORDS):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
