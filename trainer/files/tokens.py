"""CLIP tokens without torch: counts for captions, and padded rows for the text encoders."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from functools import cache, lru_cache

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


class ClipTokens:
    """CLIP's byte-pair tokenizer; `pad` is the padding token: the end token for CLIP-L, 0 ("!") for OpenCLIP bigG."""

    def __init__(self, pad: int = END) -> None:
        self.pad = pad
        self._tokenizer = _tokenizer()

    def count(self, text: str) -> int:
        """Return the number of tokens in the text, not counting start and end tokens."""
        return len(self._ids(text))

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

    def _row(self, ids: list[int]) -> list[int]:
        return [START, *ids, END, *[self.pad] * (CHUNK - len(ids))]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def padded_length(text: str, limit: int) -> int:
    """Return the shortest of 75, 150 and 225 tokens that holds a text, at most `limit`; longer texts are cut off."""
    return min(limit, max(1, -(-_count(text) // CHUNK)) * CHUNK)


@lru_cache(maxsize=1 << 14)
def _count(text: str) -> int:
    # Every token has at least one byte, so a short text needs no tokenizer, which takes about 50 µs.
    return len(text) if text.isascii() and len(text) <= CHUNK else ClipTokens().count(text)


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
