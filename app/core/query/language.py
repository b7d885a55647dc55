r"""Reads queries. What follows is the help that is shown beside the filter box.

Words find pictures whose caption or file name contains them:
    hat                     the word stands in the caption or the name
    "red hat"               both words in this order

A key asks for something particular:
{keys}

Numbers: size:512 is exactly that, size:<512 below it, size:<=512, size:>512, size:>=512, and
size:512..768 from one to the other. Ratios can be written as ratio:3:2.
dup: mask: crop: excluded: need no value; mask:no turns them round.

Several conditions must all hold. "or" lets one suffice, a minus or "not" turns one round,
parentheses group:
    tag:cat -tag:dog
    (tag:cat or tag:dog) and not missing:caption

Quotes hold texts with spaces: tag:"red hat". Within them \" is a quote and \\ a backslash; in tags
\* and \? are the characters themselves. Capitals make no difference, and neither do escaped
parentheses: tag:"miku (vocaloid)" finds miku \(vocaloid\). To search for a word such as "or", put it
in quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from typing import Literal, NamedTuple

from app.core.query.terms import And, Node, Not, Or, Query, Range, Term
from trainer.errors import ImpastoError

Kind = Literal["text", "number", "flag", "choice"]
_OF_ALL = "caption rating crop mask size file problem inspection"
MISSING = ("caption", "rating", "crop", "mask", "size")
OPTIONAL = frozenset({"problem"})
"""Keys of texts that also ask something without one."""
_KEYED = re.compile(r"([A-Za-z]+):")
_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})|(?P<sign>[<>]=?|=)?(?P<value>{_NUMBER})")
_RATIO = re.compile(rf"({_NUMBER}):({_NUMBER})")
_ESCAPE = re.compile(r'\\(["\\])')
_BARE_ESCAPE = re.compile(r'\\(["\\ ])')
_DEEPEST = 50
_LONE_MINUS = 'Write a condition right after it, or "-" in quotes to search for the character.'
_YES = {"": True, "yes": True, "no": False}


@dataclass(frozen=True, slots=True)
class QueryKey:
    """One key: the kind of value it takes, what it asks for, an example, and which changes can alter its answer."""

    name: str
    kind: Kind
    sentence: str
    example: str
    depends: frozenset[str] = frozenset()
    choices: tuple[str, ...] = ()
    whole: bool = True
    """Whether its numbers are whole ones."""
    most: float = inf
    """The greatest number that there can be."""


def _key(name: str, kind: Kind, sentence: str, example: str, depends: str = "", **more: object) -> QueryKey:
    return QueryKey(name, kind, sentence, example, frozenset(depends.split()), **more)  # type: ignore[arg-type]


KEYS: dict[str, QueryKey] = {
    key.name: key
    for key in (
        _key("tag", "text", "has this tag; * stands for any text, ? for one character", "tag:red*", "caption file"),
        _key("caption", "text", "the caption contains this text", 'caption:"red hat"', "caption file"),
        _key("name", "text", "the file name contains this text", "name:portrait"),
        _key("folder", "text", "a folder on its way contains this text", "folder:closeups"),
        _key("path", "text", "folder and file name together contain this text", "path:cats/img"),
        _key("size", "number", "pixels of the shorter side", "size:<512", "size file"),
        _key("width", "number", "pixels from left to right", "width:>=1024", "size file"),
        _key("height", "number", "pixels from top to bottom", "height:>=1024", "size file"),
        _key("ratio", "number", "width by height; 1 is square", "ratio:>1.5", "size file", whole=False),
        _key("tags", "number", "number of different tags", "tags:>30", "caption file"),
        _key("chars", "number", "characters of the caption", "chars:>200", "caption file"),
        _key("tokens", "number", "CLIP tokens of the caption", "tokens:>75", "caption file"),
        _key("rating", "number", "number of stars", "rating:>=3", "rating", most=5),
        _key(
            "missing",
            "choice",
            "has no caption, rating, crop, mask or size",
            "missing:caption",
            _OF_ALL,
            choices=MISSING,
        ),
        _key(
            "problem",
            "text",
            "has a problem, or one whose text contains this",
            "problem:",
            _OF_ALL,
        ),
        _key("dup", "flag", "has a duplicate or near duplicate", "dup:", "inspection file"),
        _key("mask", "flag", "has a mask", "mask:", "mask file"),
        _key("crop", "flag", "has its own crop", "crop:", "crop"),
        _key("excluded", "flag", "is excluded from training", "excluded:", "excluded"),
    )
}


class QueryProblem(NamedTuple):
    """What is wrong between two places of a query, and what to write instead."""

    sentence: str
    remedy: str
    start: int
    end: int


class QueryError(ImpastoError):
    """A query that cannot be understood; `faults` holds everything that is wrong with it, from left to right."""

    def __init__(self, faults: list[QueryProblem]) -> None:
        super().__init__("query.wrong", faults[0].sentence, faults[0].remedy)
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (list(self.faults),)


@dataclass(frozen=True, slots=True)
class Token:
    """One piece of a query; a word may have a key before its value, which begins at `value_start`."""

    kind: Literal["(", ")", "-", "word"]
    start: int
    end: int
    key: str | None = None
    value: str = ""
    value_start: int = 0
    quoted: bool = False


def help_text() -> str:
    """Return the description of the language, with its keys."""
    keys = "\n".join(f"    {key.example:<24}{key.sentence}" for key in KEYS.values())
    _, _, text = str(__doc__).partition("\n\n")
    return text.format(keys=keys)


def parse(text: str) -> Query:
    """Return what a query asks for; raises QueryError with everything that is wrong with it."""
    tokens, faults = tokenize(text)
    parser = _Parser(tokens, faults)
    root = parser.whole()
    if faults:
        raise QueryError(sorted(faults, key=lambda fault: (fault.start, fault.end)))
    return Query(root)


def tokenize(text: str) -> tuple[list[Token], list[QueryProblem]]:
    """Take a text apart into words, parentheses and minus signs."""
    tokens: list[Token] = []
    faults: list[QueryProblem] = []
    place = 0
    while place < len(text):
        character = text[place]
        if character.isspace():
            place += 1
        elif character in "()" or (character == "-" and text[place + 1 : place + 2].strip()):
            tokens.append(Token(character, place, place + 1))  # type: ignore[arg-type]
            place += 1
        else:
            tokens.append(_word(text, place, faults))
            place = tokens[-1].end
            if text[tokens[-1].start : place] == "-":
                faults.append(QueryProblem("This minus turns nothing round.", _LONE_MINUS, place - 1, place))
    return tokens, faults


def _word(text: str, start: int, faults: list[QueryProblem]) -> Token:
    """Read the word that begins here: its key, if it has one, and its value, quoted or bare."""
    keyed = _KEYED.match(text, start)
    key = keyed[1].casefold() if keyed else None
    first = keyed.end() if keyed else start
    if text[first : first + 1] != '"':
        end = _bare_end(text, first)
        return Token("word", start, end, key, _BARE_ESCAPE.sub(r"\1", text[first:end]), first)
    close = _closing_quote(text, first)
    if close is None:
        faults.append(QueryProblem("The quote is not closed.", 'Write a " where the text ends.', first, len(text)))
        close = len(text)
    end = min(close + 1, len(text))
    rest = _bare_end(text, end)
    if rest > end:
        faults.append(
            QueryProblem("Something follows right after the quote.", "Put a space after the quote.", end, rest)
        )
    value = _ESCAPE.sub(r"\1", text[first + 1 : close])
    return Token("word", start, max(end, rest), key, value, first, quoted=True)


def _closing_quote(text: str, opening: int) -> int | None:
    place = opening + 1
    while place < len(text):
        if text[place] == '"':
            return place
        place += 2 if text[place] == "\\" else 1
    return None


def _bare_end(text: str, place: int) -> int:
    """Return where a word without quotes ends: at a space, or at a parenthesis that it did not open itself."""
    depth = 0
    while place < len(text) and not text[place].isspace():
        if text[place] == "\\" and place + 1 < len(text):
            place += 1
        elif text[place] == "(":
            depth += 1
        elif text[place] == ")":
            if not depth:
                break
            depth -= 1
        place += 1
    return place


class _Parser:
    """Reads tokens from left to right: or binds least, then and, then not; goes on after each fault."""

    def __init__(self, tokens: list[Token], faults: list[QueryProblem]) -> None:
        self._tokens = tokens
        self._faults = faults
        self._next = 0
        self._depth = 0
        self._given_up = False

    def whole(self) -> Node | None:
        parts = []
        while self._next < len(self._tokens):
            part = self._either()
            if part is not None:
                parts.append(part)
            if stray := self._take(")"):
                self._fault("This parenthesis closes nothing.", "Remove it, or write ( where the group begins.", stray)
        return parts[0] if len(parts) == 1 else None

    def _either(self) -> Node | None:
        parts: list[Node | None] = []
        joint: Token | None = None
        while True:
            start = self._next
            parts.append(self._all())
            empty = start == self._next
            following = self._word("or")
            if empty and (lonely := joint or following):
                self._lonely(lonely, "after" if joint else "before")
            if following is None:
                return _joined(Or, parts)
            joint = following

    def _all(self) -> Node | None:
        parts: list[Node | None] = []
        while True:
            if joint := self._word("and"):
                if not parts:
                    self._lonely(joint, "before")
                if self._ended() or self._at_word("and"):
                    self._lonely(joint, "after")
                continue
            if self._ended():
                return _joined(And, parts)
            parts.append(self._one())

    def _one(self) -> Node | None:
        """Read a condition, a group, or either turned round."""
        turned = self._take("-") or self._word("not")
        if turned:
            if self._ended() or self._at_word("and"):
                self._lonely(turned, "after")
                return None
            part = self._deeper(turned, self._one)
            return None if part is None else Not(part)
        if opening := self._take("("):
            return self._group(opening)
        token = self._tokens[self._next]
        self._next += 1
        return self._term(token)

    def _group(self, opening: Token) -> Node | None:
        inside = self._deeper(opening, self._either)
        closing = self._take(")")
        if closing is None:
            self._fault("This parenthesis is not closed.", "Write ) where the group ends.", opening)
        elif inside is None and self._tokens[self._next - 2] is opening:
            end = Token(")", opening.start, closing.end)
            self._fault("There is nothing in these parentheses.", "Remove them, or write a condition in them.", end)
        return inside

    def _deeper(self, token: Token, read: Callable[[], Node | None]) -> Node | None:
        """Read what stands within, unless so much stands within each other that no person wrote it."""
        if self._depth == _DEEPEST:
            self._fault("Too many groups stand within each other.", "Write it with fewer parentheses.", token)
            self._next = len(self._tokens)
            self._given_up = True
            return None
        self._depth += 1
        part = read()
        self._depth -= 1
        return part

    def _term(self, token: Token) -> Node | None:
        span = (token.start, token.end)
        if token.key is None:
            value = token.value.strip()
            if not value:
                self._fault("There is no text between these quotes.", "Write the text, or remove the quotes.", token)
            return Term("", value, span) if value else None
        key = KEYS.get(token.key)
        if key is None:
            self._unknown_key(token)
            return None
        value_of = {"text": self._text, "number": self._range, "flag": self._flag, "choice": self._choice}
        found = value_of[key.kind](key, token)
        return None if found is None else Term(key.name, found, span)

    def _text(self, key: QueryKey, token: Token) -> str | None:
        value = token.value.strip()
        if not value and key.name not in OPTIONAL:
            self._fault(f'"{key.name}:" needs a text after it.', f"Write it like {key.example}.", token)
            return None
        return value

    def _range(self, key: QueryKey, token: Token) -> Range | None:
        value = token.value.strip()
        ratio = None if key.whole else _RATIO.fullmatch(value.lstrip("<>="))
        if ratio and float(ratio[2]):
            sign = value[: len(value) - len(ratio[0])]
            value = f"{sign}{float(ratio[1]) / float(ratio[2]):.9f}"
        found = _RANGE.fullmatch(value)
        if not found:
            said = f'"{token.value}" is no number.' if value else f'"{key.name}:" needs a number after it.'
            self._fault(said, f"Write it like {key.example}, or {key.name}:1..5 for a range.", token)
            return None
        wanted = _range_of(found)
        if wanted.low > key.most:
            said = f'"{key.name}:" goes up to {key.most:g}, not to {wanted.low:g}.'
            self._fault(said, f"Write it like {key.example}.", token)
            return None
        return wanted

    def _flag(self, key: QueryKey, token: Token) -> bool | None:
        value = _YES.get(token.value.strip().casefold())
        if value is None:
            said = f'"{key.name}:" is a question of yes or no, not "{token.value}".'
            self._fault(said, f"Write {key.name}: or {key.name}:no.", token)
        return value

    def _choice(self, key: QueryKey, token: Token) -> str | None:
        value = token.value.strip().casefold()
        if value in key.choices:
            return value
        meant = get_close_matches(value, key.choices, 1)
        said = f'"{key.name}:" does not know "{token.value}".' if value else f'"{key.name}:" needs a word after it.'
        remedy = f"Write one of {', '.join(key.choices)}."
        self._fault(said, f"Did you mean {key.name}:{meant[0]}? {remedy}" if meant else remedy, token)
        return None

    def _unknown_key(self, token: Token) -> None:
        meant = get_close_matches(str(token.key), KEYS, 1)
        remedy = f'To search for it as a text, write "{token.key}:{token.value}" in quotes.'
        if meant:
            remedy = f"Did you mean {meant[0]}:? {remedy}"
        start = token.start
        self._faults.append(
            QueryProblem(f'There is no key "{token.key}".', remedy, start, start + len(str(token.key)) + 1)
        )

    def _lonely(self, joint: Token, side: Literal["before", "after"]) -> None:
        word = joint.value.casefold() or "minus"
        self._fault(f'There is nothing {side} "{word}".', f'Write a condition there, or remove "{word}".', joint)

    def _fault(self, sentence: str, remedy: str, token: Token) -> None:
        if not self._given_up:
            self._faults.append(QueryProblem(sentence, remedy, token.start, token.end))

    def _take(self, kind: str) -> Token | None:
        if self._next < len(self._tokens) and self._tokens[self._next].kind == kind:
            self._next += 1
            return self._tokens[self._next - 1]
        return None

    def _word(self, word: str) -> Token | None:
        return self._take("word") if self._at_word(word) else None

    def _at_word(self, word: str) -> bool:
        token = self._tokens[self._next] if self._next < len(self._tokens) else None
        return token is not None and token.key is None and not token.quoted and token.value.casefold() == word

    def _ended(self) -> bool:
        """Tell whether nothing more belongs to this group of conditions."""
        return self._next == len(self._tokens) or self._tokens[self._next].kind == ")" or self._at_word("or")


def _range_of(found: re.Match[str]) -> Range:
    if found["low"]:
        low, high = sorted((float(found["low"]), float(found["high"])))
        return Range(low, high)
    number, sign = float(found["value"]), found["sign"] or "="
    if sign == "=":
        return Range(number, number)
    low, high = (number, inf) if sign[0] == ">" else (-inf, number)
    return Range(low, high, open=len(sign) == 1)


def _joined(kind: type[And] | type[Or], parts: list[Node | None]) -> Node | None:
    kept = tuple(part for part in parts if part is not None)
    return kind(kept) if len(kept) > 1 else kept[0] if kept else None
