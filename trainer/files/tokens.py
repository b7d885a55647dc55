"""CLIP tokens without torch: counts for captions, and padded rows for the text encoders."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from trainer.files.assets import asset_path

START = 49406
END = 49407
CHUNK = 75
"""Text tokens per row of the text encoder; with the start and end tokens, a row has 77."""

_VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
_MERGES = 48894
# CLIP's own pattern of a word: contractions, runs of letters, single digits, runs of anything else.
_WORDS = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
# Only characters that are blank for both Python and the tokenizer.
_BETWEEN_BLANKS = re.compile(r"[^ \t\r\n]+")
# A backslash with the bracket or backslash it protects; a weight with its bracket; a bracket; plain text.
_ATTENTION = re.compile(r"\\[()\[\]\\]?|:([+-]?(?:\d+\.?\d*|\.\d+))\)|[()\[\]]|[^\\()\[\]:]+|:")
_EMPHASIS = {")": ("(", 1.1), "]": ("[", 1 / 1.1)}


class ClipTokens:
    """CLIP's byte-pair tokenizer; `pad` is the padding token: the end token for CLIP-L, 0 ("!") for OpenCLIP bigG."""

    def __init__(self, pad: int = END) -> None:
        self.pad = pad
        self._tokenizer = _tokenizer()

    def count(self, text: str, *, weighted: bool = False) -> int:
        """Return the number of tokens in the text, not counting start and end tokens nor the syntax of weights."""
        parts = [part for part, _ in weighted_parts(text)] if weighted else [text]
        return sum(len(self._ids(part)) for part in parts)

    def ends(self, text: str) -> list[int]:
        """Return the character position where each token in the text ends, which shows where an encoder row ends.

        Tokens never span whitespace, so the tokens of each word are cached: after a change to one word in a text of
        20,000 characters, this takes a tenth as long as without the cache.
        """
        return [word.start() + end for word in _BETWEEN_BLANKS.finditer(text) for end in _ends(word[0])]

    def encode(self, text: str, chunks: int = CHUNK) -> list[int]:
        """Return the ids of all 77-token rows, concatenated, for `chunks` (75, 150 or 225) text tokens.

        Each row is start, 75 tokens, end. Text beyond `chunks` tokens is cut off. Padding follows sd-scripts: if the
        end token is also the padding, it fills every row; otherwise the end token appears once, right after the text,
        and a row without text is start, end, padding.
        """
        rows = chunks // CHUNK
        ids = self._ids(text)[:chunks]
        row: list[int] = []
        for index in range(rows):
            row += self._row(ids[index * CHUNK : (index + 1) * CHUNK])
        return row

    def encode_weighted(self, text: str, chunks: int = CHUNK) -> tuple[list[int], list[float]]:
        """Return the ids of all rows as `encode` does, and the weight of each, for a text with `weighted_parts`.

        Start, end and padding tokens have weight 1. As in sd-scripts, each part is tokenized by itself.
        """
        ids, weights = [], []
        for part, weight in weighted_parts(text):
            found = self._ids(part)
            ids += found
            weights += [weight] * len(found)
        rows, row_weights = [], []
        for start in range(0, chunks, CHUNK):
            rows += self._row(ids[start : start + CHUNK])
            inner = weights[start : start + CHUNK]
            row_weights += [1.0, *inner, *[1.0] * (CHUNK + 1 - len(inner))]
        return rows, row_weights

    def _row(self, ids: list[int]) -> list[int]:
        return [START, *ids, END, *[self.pad] * (CHUNK - len(ids))]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class PromptText(NamedTuple):
    """Text of a prompt that is read otherwise than the captions of its job."""

    text: str
    weighted: bool
    """Whether it is read in A1111's syntax of weights; see `weighted_parts`."""


def padded_length(text: str, limit: int, *, weighted: bool = False) -> int:
    """Return the shortest of 75, 150 and 225 tokens that holds a text, at most `limit`; longer texts are cut off."""
    return min(limit, max(1, -(-_count(text, weighted) // CHUNK)) * CHUNK)


@lru_cache(maxsize=1 << 14)
def _count(text: str, weighted: bool) -> int:
    # Every token has at least one byte, so a short text needs no tokenizer, which takes about 50 µs.
    return len(text) if text.isascii() and len(text) <= CHUNK else ClipTokens().count(text, weighted=weighted)


def has_weights(text: str) -> bool:
    """Return whether a text has characters that `weighted_parts` may read as syntax; else it has one part."""
    return any(letter in text for letter in "()[]\\")


def weighted_parts(text: str) -> list[tuple[str, float]]:
    """Return the parts of a text in A1111's prompt syntax, each with its weight.

    (a) multiplies the weight of a by 1.1, (a:1.3) by 1.3, and [a] divides it by 1.1. Brackets nest and, if they are not
    closed, reach to the end; a closing one without an opening one is text, as is one after a backslash. Neighbors of
    equal weight are one part. The results are those of sd-scripts' `parse_prompt_attention`.
    """
    parts: list[str] = []
    weights: list[float] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}
    for found in _ATTENTION.finditer(text):
        mark = found[0]
        bracket, factor = ("(", float(found[1])) if found[1] else _EMPHASIS.get(mark, ("", 1.0))
        if mark in opened:
            opened[mark].append(len(parts))
        elif opened.get(bracket):
            _scale(weights, opened[bracket].pop(), factor)
        else:
            parts.append(mark[1:] if mark.startswith("\\") else mark)
            weights.append(1.0)
    for bracket, factor in _EMPHASIS.values():
        for start in opened[bracket]:
            _scale(weights, start, factor)
    runs = groupby(zip(parts, weights, strict=True), key=itemgetter(1))
    return [("".join(part for part, _ in run), weight) for weight, run in runs] or [("", 1.0)]


def _scale(weights: list[float], start: int, factor: float) -> None:
    for place in range(start, len(weights)):
        weights[place] *= factor


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return CLIP's vocabulary (ids of 49,408 tokens by text) and its merges, from the list in `assets/clip`."""
    with gzip.open(asset_path("clip", _VOCABULARY), "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")[1 : _MERGES + 1]
    merges = [(first, second) for first, second in (line.split() for line in lines)]
    symbols = list(_byte_symbols())
    words = [*symbols, *(symbol + "</w>" for symbol in symbols), *(first + second for first, second in merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    return {word: index for index, word in enumerate(words)}, merges


def _byte_symbols() -> Iterator[str]:
    """Yield the character that stands for each byte in CLIP's vocabulary, in the vocabulary's order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    yield from map(chr, printable)
    yield from (chr(256 + index) for index in range(256 - len(printable)))


@lru_cache(maxsize=1 << 16)
def _ends(word: str) -> tuple[int, ...]:
    return tuple(end for _, end in _tokenizer().encode(word, add_special_tokens=False).offsets)


@cache
def _tokenizer() -> Tokenizer:
    words, merges = vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges, end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|startoftext|>", "<|endoftext|>")])
    return tokenizer
