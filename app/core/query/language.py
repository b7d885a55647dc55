r"""Parser of the query language. The text below is the help shown next to the filter box.

Words find images whose caption or file name contains them:
    hat                     the caption or file name contains the word
    "red hat"               both words in this order

A key limits the search to one property:
{keys}

Numbers: size:512 finds exactly 512, and size:<512 finds smaller numbers; size:<=512, size:>512 and
size:>=512 work too, and size:512..768 finds a range. Ratios can be written as ratio:3:2.
The keys dup:, mask:, crop: and excluded: need no value; mask:no finds images without a mask.

All conditions must match. Use "or" for alternatives, a minus or "not" to exclude, and parentheses
to group:
    tag:cat -tag:dog
    (tag:cat or tag:dog) and not missing:caption

Put text that contains spaces in quotes: tag:"red hat". Within quotes, \" is a quote and \\ a backslash; in
tags, \* and \? are the characters themselves. Case is ignored, and escaped
parentheses match plain ones: tag:"miku (vocaloid)" finds miku \(vocaloid\). To search for a word
such as "or", put it in quotes.
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
_ALL_CHANGES = "caption rating crop mask size file problem inspection"
MISSING = ("caption", "rating", "crop", "mask", "size")
OPTIONAL = frozenset({"problem"})
"""Text keys whose value may be empty."""
_KEYED = re.compile(r"([A-Za-z]+):")
_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})|(?P<sign>[<>]=?|=)?(?P<value>{_NUMBER})")
_RATIO = re.compile(rf"({_NUMBER}):({_NUMBER})")
_ESCAPE = re.compile(r'\\(["\\])')
_BARE_ESCAPE = re.compile(r'\\(["\\ ])')
_MAX_DEPTH = 50
_LONE_MINUS = 'Write one right after it, or put "-" in quotes to search for the character.'
_YES = {"": True, "yes": True, "no": False}


@dataclass(frozen=True, slots=True)
class QueryKey:
    """Query key with its kind of value, description, example, and the kinds of changes that can alter its result."""

    name: str
    kind: Kind
    sentence: str
    example: str
    depends: frozenset[str] = frozenset()
    choices: tuple[str, ...] = ()
    is_integer: bool = True
    """Whether its values must be integers."""
    maximum: float = inf
    """Largest possible value."""


def _key(name: str, kind: Kind, sentence: str, example: str, depends: str = "", **more: object) -> QueryKey:
    return QueryKey(name, kind, sentence, example, frozenset(depends.split()), **more)  # type: ignore[arg-type]


KEYS: dict[str, QueryKey] = {
    key.name: key
    for key in (
        _key("tag", "text", "has this tag; * matches any text, ? any single character", "tag:red*", "caption file"),
        _key("caption", "text", "the caption contains this text", 'caption:"red hat"', "caption file"),
        _key("name", "text", "the file name contains this text", "name:portrait"),
        _key("folder", "text", "the folder path contains this text", "folder:closeups"),
        _key("path", "text", "the path including the file name contains this text", "path:cats/img"),
        _key("size", "number", "shorter side in pixels", "size:<512", "size file"),
        _key("width", "number", "width in pixels", "width:>=1024", "size file"),
        _key("height", "number", "height in pixels", "height:>=1024", "size file"),
        _key("ratio", "number", "width divided by height; 1 is square", "ratio:>1.5", "size file", is_integer=False),
        _key("tags", "number", "number of different tags", "tags:>30", "caption file"),
        _key("chars", "number", "number of characters in the caption", "chars:>200", "caption file"),
        _key("tokens", "number", "number of CLIP tokens in the caption", "tokens:>75", "caption file"),
        _key("rating", "number", "number of stars", "rating:>=3", "rating", maximum=5),
        _key(
            "missing",
            "choice",
            "has no caption, rating, crop, mask or size",
            "missing:caption",
            _ALL_CHANGES,
            choices=MISSING,
        ),
        _key(
            "problem",
            "text",
            "has a problem; with text, one whose description contains it",
            "problem:",
            _ALL_CHANGES,
        ),
        _key("dup", "flag", "has a duplicate or near duplicate", "dup:", "inspection file"),
        _key("mask", "flag", "has a mask", "mask:", "mask file"),
        _key("crop", "flag", "has its own crop", "crop:", "crop"),
        _key("excluded", "flag", "is excluded from training", "excluded:", "excluded"),
    )
}


class QueryProblem(NamedTuple):
    """One error in a query: its position, a sentence that explains it, and what to write instead."""

    sentence: str
    remedy: str
    start: int
    end: int


class QueryError(ImpastoError):
    """Error raised for an invalid query; `faults` contains all its errors from left to right."""

    def __init__(self, faults: list[QueryProblem]) -> None:
        super().__init__("query.wrong", faults[0].sentence, faults[0].remedy)
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (list(self.faults),)


@dataclass(frozen=True, slots=True)
class Token:
    """Token of a query; a word may have a key before its value, which starts at `value_start`."""

    kind: Literal["(", ")", "-", "word"]
    start: int
    end: int
    key: str | None = None
    value: str = ""
    value_start: int = 0
    quoted: bool = False


def help_text() -> str:
    """Return the help text of the query language, including all keys."""
    keys = "\n".join(f"    {key.example:<24}{key.sentence}" for key in KEYS.values())
    _, _, text = str(__doc__).partition("\n\n")
    return text.format(keys=keys)


def parse(text: str) -> Query:
    """Return the parsed query. Raises QueryError with all errors in the text."""
    tokens, faults = tokenize(text)
    parser = _Parser(tokens, faults)
    root = parser.parse()
    if faults:
        raise QueryError(sorted(faults, key=lambda fault: (fault.start, fault.end)))
    return Query(root)


def tokenize(text: str) -> tuple[list[Token], list[QueryProblem]]:
    """Split a query into words, parentheses and minus signs; return the tokens and any errors."""
    tokens: list[Token] = []
    faults: list[QueryProblem] = []
    position = 0
    while position < len(text):
        character = text[position]
        if character.isspace():
            position += 1
        elif character in "()" or (character == "-" and text[position + 1 : position + 2].strip()):
            tokens.append(Token(character, position, position + 1))  # type: ignore[arg-type]
            position += 1
        else:
            tokens.append(_word(text, position, faults))
            position = tokens[-1].end
            if text[tokens[-1].start : position] == "-":
                faults.append(
                    QueryProblem("There is no condition after this minus sign.", _LONE_MINUS, position - 1, position)
                )
    return tokens, faults


def _word(text: str, start: int, faults: list[QueryProblem]) -> Token:
    """Read the word at `start`: its optional key and its value, quoted or bare."""
    keyed = _KEYED.match(text, start)
    key = keyed[1].casefold() if keyed else None
    first = keyed.end() if keyed else start
    if text[first : first + 1] != '"':
        end = _bare_end(text, first)
        return Token("word", start, end, key, _BARE_ESCAPE.sub(r"\1", text[first:end]), first)
    close = _closing_quote(text, first)
    if close is None:
        faults.append(QueryProblem("The quote is not closed.", 'Add a " where the text ends.', first, len(text)))
        close = len(text)
    end = min(close + 1, len(text))
    rest = _bare_end(text, end)
    if rest > end:
        faults.append(QueryProblem("There is text right after the quote.", "Add a space after the quote.", end, rest))
    value = _ESCAPE.sub(r"\1", text[first + 1 : close])
    return Token("word", start, max(end, rest), key, value, first, quoted=True)


def _closing_quote(text: str, opening: int) -> int | None:
    position = opening + 1
    while position < len(text):
        if text[position] == '"':
            return position
        position += 2 if text[position] == "\\" else 1
    return None


def _bare_end(text: str, position: int) -> int:
    """Return the end of an unquoted word: a space, or a closing parenthesis that the word did not open."""
    depth = 0  # tags may contain parentheses, as in tag:miku_(vocaloid)
    while position < len(text) and not text[position].isspace():
        if text[position] == "\\" and position + 1 < len(text):
            position += 1
        elif text[position] == "(":
            depth += 1
        elif text[position] == ")":
            if not depth:
                break
            depth -= 1
        position += 1
    return position


class _Parser:
    """Recursive descent parser; precedence: or < and < not. It continues after errors to report all of them."""

    def __init__(self, tokens: list[Token], faults: list[QueryProblem]) -> None:
        self._tokens = tokens
        self._errors = faults
        self._next = 0
        self._depth = 0
        self._too_deep = False

    def parse(self) -> Node | None:
        parts = []
        while self._next < len(self._tokens):
            part = self._parse_or()
            if part is not None:
                parts.append(part)
            if unmatched := self._take(")"):
                self._add_error(
                    "This parenthesis has no match.", "Remove it, or add ( where the group starts.", unmatched
                )
        return parts[0] if len(parts) == 1 else None

    def _parse_or(self) -> Node | None:
        parts: list[Node | None] = []
        operator: Token | None = None
        while True:
            start = self._next
            parts.append(self._parse_and())
            empty = start == self._next
            following = self._word("or")
            if empty and (operand_of := operator or following):
                self._report_missing_operand(operand_of, "after" if operator else "before")
            if following is None:
                return _combine(Or, parts)
            operator = following

    def _parse_and(self) -> Node | None:
        parts: list[Node | None] = []
        while True:
            if operator := self._word("and"):
                if not parts:
                    self._report_missing_operand(operator, "before")
                if self._is_at_end() or self._is_at_word("and"):
                    self._report_missing_operand(operator, "after")
                continue
            if self._is_at_end():
                return _combine(And, parts)
            parts.append(self._parse_factor())

    def _parse_factor(self) -> Node | None:
        """Read a condition or a group, possibly negated."""
        negation = self._take("-") or self._word("not")
        if negation:
            if self._is_at_end() or self._is_at_word("and"):
                self._report_missing_operand(negation, "after")
                return None
            part = self._read_nested(negation, self._parse_factor)
            return None if part is None else Not(part)
        if opening := self._take("("):
            return self._parse_group(opening)
        token = self._tokens[self._next]
        self._next += 1
        return self._parse_term(token)

    def _parse_group(self, opening: Token) -> Node | None:
        part = self._read_nested(opening, self._parse_or)
        closing = self._take(")")
        if closing is None:
            self._add_error("This parenthesis is not closed.", "Add ) where the group ends.", opening)
        elif part is None and self._tokens[self._next - 2] is opening:
            end = Token(")", opening.start, closing.end)
            self._add_error("These parentheses are empty.", "Remove them, or write a condition between them.", end)
        return part

    def _read_nested(self, token: Token, read: Callable[[], Node | None]) -> Node | None:
        """Read a nested part; report an error beyond `_MAX_DEPTH` levels, since each level recurses."""
        if self._depth == _MAX_DEPTH:
            self._add_error("Too many nested groups.", "Use fewer parentheses.", token)
            # Skip the rest: it would only produce follow-up errors, which `_add_error` drops from here on.
            self._next = len(self._tokens)
            self._too_deep = True
            return None
        self._depth += 1
        part = read()
        self._depth -= 1
        return part

    def _parse_term(self, token: Token) -> Node | None:
        span = (token.start, token.end)
        if token.key is None:
            value = token.value.strip()
            if not value:
                self._add_error("These quotes are empty.", "Enter text between them, or remove them.", token)
            return Term("", value, span) if value else None
        key = KEYS.get(token.key)
        if key is None:
            self._report_unknown_key(token)
            return None
        value_of = {"text": self._text, "number": self._range, "flag": self._flag, "choice": self._choice}
        found = value_of[key.kind](key, token)
        return None if found is None else Term(key.name, found, span)

    def _text(self, key: QueryKey, token: Token) -> str | None:
        value = token.value.strip()
        if not value and key.name not in OPTIONAL:
            self._add_error(f'"{key.name}:" needs text after it.', f"Example: {key.example}.", token)
            return None
        return value

    def _range(self, key: QueryKey, token: Token) -> Range | None:
        value = token.value.strip()
        ratio = None if key.is_integer else _RATIO.fullmatch(value.lstrip("<>="))
        if ratio and float(ratio[2]):
            sign = value[: len(value) - len(ratio[0])]
            value = f"{sign}{float(ratio[1]) / float(ratio[2]):.9f}"
        found = _RANGE.fullmatch(value)
        if not found:
            message = f'"{token.value}" is not a number.' if value else f'"{key.name}:" needs a number.'
            self._add_error(message, f"Example: {key.example}, or {key.name}:1..5 for a range.", token)
            return None
        wanted = _range_of(found)
        if wanted.low > key.maximum:
            message = f'{wanted.low:g} is too large: "{key.name}:" goes up to {key.maximum:g}.'
            self._add_error(message, f"Example: {key.example}.", token)
            return None
        return wanted

    def _flag(self, key: QueryKey, token: Token) -> bool | None:
        value = _YES.get(token.value.strip().casefold())
        if value is None:
            message = f'"{key.name}:" takes yes or no, not "{token.value}".'
            self._add_error(message, f"Write {key.name}: or {key.name}:no.", token)
        return value

    def _choice(self, key: QueryKey, token: Token) -> str | None:
        value = token.value.strip().casefold()
        if value in key.choices:
            return value
        meant = get_close_matches(value, key.choices, 1)
        message = f'"{key.name}:" has no value "{token.value}".' if value else f'"{key.name}:" needs a value.'
        remedy = f"Use one of: {', '.join(key.choices)}."
        self._add_error(message, f"Did you mean {key.name}:{meant[0]}? {remedy}" if meant else remedy, token)
        return None

    def _report_unknown_key(self, token: Token) -> None:
        meant = get_close_matches(str(token.key), KEYS, 1)
        remedy = f'To search for this text, put "{token.key}:{token.value}" in quotes.'
        if meant:
            remedy = f"Did you mean {meant[0]}:? {remedy}"
        start = token.start
        self._errors.append(
            QueryProblem(f'There is no key "{token.key}".', remedy, start, start + len(str(token.key)) + 1)
        )

    def _report_missing_operand(self, operator: Token, side: Literal["before", "after"]) -> None:
        word = operator.value.casefold() or "minus"
        self._add_error(f'A condition is missing {side} "{word}".', f'Add one, or remove "{word}".', operator)

    def _add_error(self, sentence: str, remedy: str, token: Token) -> None:
        if not self._too_deep:
            self._errors.append(QueryProblem(sentence, remedy, token.start, token.end))

    def _take(self, kind: str) -> Token | None:
        if self._next < len(self._tokens) and self._tokens[self._next].kind == kind:
            self._next += 1
            return self._tokens[self._next - 1]
        return None

    def _word(self, word: str) -> Token | None:
        return self._take("word") if self._is_at_word(word) else None

    def _is_at_word(self, word: str) -> bool:
        token = self._tokens[self._next] if self._next < len(self._tokens) else None
        return token is not None and token.key is None and not token.quoted and token.value.casefold() == word

    def _is_at_end(self) -> bool:
        """Return whether the current conjunction ends here."""
        return self._next == len(self._tokens) or self._tokens[self._next].kind == ")" or self._is_at_word("or")


def _range_of(found: re.Match[str]) -> Range:
    if found["low"]:
        low, high = sorted((float(found["low"]), float(found["high"])))
        return Range(low, high)
    number, sign = float(found["value"]), found["sign"] or "="
    if sign == "=":
        return Range(number, number)
    low, high = (number, inf) if sign[0] == ">" else (-inf, number)
    return Range(low, high, open=len(sign) == 1)


def _combine(kind: type[And] | type[Or], parts: list[Node | None]) -> Node | None:
    kept = tuple(part for part in parts if part is not None)
    return kind(kept) if len(kept) > 1 else kept[0] if kept else None
