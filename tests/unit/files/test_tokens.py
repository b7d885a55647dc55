"""Token counts and rows without torch; the rows' rules for long texts are tested beside the text encoders."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.files.tokens import END, START, ClipTokens, _tokenizer, padded_length, vocabulary, weighted_parts


def test_known_ids() -> None:
    tokens = ClipTokens()
    assert tokens.encode("a photo of a cat") == [START, 320, 1125, 539, 320, 2368, *[END] * 71]
    assert ClipTokens(pad=0).encode("a photo of a cat") == [START, 320, 1125, 539, 320, 2368, END, *[0] * 70]
    assert tokens.count("a photo of a cat") == 5
    assert tokens.count("") == 0


@pytest.mark.parametrize(
    ("first", "second"), [("A  PHOTO\n of", "a photo of"), ("cafe\u0301", "caf\u00e9"), ("it's", "IT'S")]
)
def test_case_spaces_and_composition_do_not_count(first: str, second: str) -> None:
    tokens = ClipTokens()
    assert tokens.encode(first) == tokens.encode(second)


def test_the_vocabulary_is_clips() -> None:
    words, merges = vocabulary()
    assert (len(words), len(merges)) == (49408, 48894)
    assert (words["<|startoftext|>"], words["<|endoftext|>"], words["!"], words["cat</w>"]) == (START, END, 0, 2368)


@pytest.mark.parametrize("chunks", [75, 150, 225])
def test_long_texts_are_cut_at_the_last_row(chunks: int) -> None:
    ids = ClipTokens().encode("cat " * 500, chunks)
    assert len(ids) == chunks // 75 * 77
    assert ids.count(2368) == chunks
    assert ids[0] == START
    assert ids[-1] == END


def parsed_by_sd_scripts(text: str) -> list[list[Any]]:
    """Return what `parse_prompt_attention` of sd-scripts (library/strategy_base.py at 48d368fa, Apache 2.0) does."""
    marks = re.compile(r"""\\\(|\\\)|\\\[|\\]|\\\\|\\|\(|\[|:([+-]?[.\d]+)\)|\)|]|[^\\()\[\]:]+|:""")
    res: list[list[Any]] = []
    rounds: list[int] = []
    squares: list[int] = []

    def multiply_range(start: int, multiplier: float) -> None:
        for place in range(start, len(res)):
            res[place][1] *= multiplier

    for m in marks.finditer(text):
        piece, weight = m.group(0), m.group(1)
        if piece.startswith("\\"):
            res.append([piece[1:], 1.0])
        elif piece == "(":
            rounds.append(len(res))
        elif piece == "[":
            squares.append(len(res))
        elif weight is not None and len(rounds) > 0:
            multiply_range(rounds.pop(), float(weight))
        elif piece == ")" and len(rounds) > 0:
            multiply_range(rounds.pop(), 1.1)
        elif piece == "]" and len(squares) > 0:
            multiply_range(squares.pop(), 1 / 1.1)
        else:
            res.append([piece, 1.0])
    for place in rounds:
        multiply_range(place, 1.1)
    for place in squares:
        multiply_range(place, 1 / 1.1)
    merged: list[list[Any]] = []
    for piece, weight in res or [["", 1.0]]:
        if merged and merged[-1][1] == weight:
            merged[-1][0] += piece
        else:
            merged.append([piece, weight])
    return merged


@given(st.lists(st.sampled_from([*"()[]:\\ ", "cat", ":1.5)", ":.5)", ":2)", ":-1)", "1"]), max_size=14).map("".join))
def test_weights_are_parsed_as_by_sd_scripts(text: str) -> None:
    assert [list(part) for part in weighted_parts(text)] == parsed_by_sd_scripts(text)


def test_weights_that_are_no_numbers_are_text() -> None:
    """sd-scripts stops at them with an error."""
    parts = weighted_parts("(a:1.2.3) b")
    assert parts == [("a:1.2.3", 1.1), (" b", 1.0)]


@pytest.mark.parametrize("chunks", [75, 150])
def test_weights_belong_to_tokens_and_their_syntax_is_none(chunks: int) -> None:
    tokens, text = ClipTokens(pad=0), "cat " * 74 + "(dog cat:1.5), [dog]"
    ids, weights = tokens.encode_weighted(text, chunks)
    assert ids == tokens.encode("cat " * 74 + "dog cat, dog", chunks)
    expected = [1.0] * 75 + [1.5]
    if chunks == 150:
        expected += [1.0, 1.0, 1.5, 1.0, 1 / 1.1]
    assert weights == expected + [1.0] * (len(ids) - len(expected))
    assert tokens.count(text, weighted=True) == 78
    assert (padded_length("(cat:1.5) " * 70, 225), padded_length("(cat:1.5) " * 70, 225, weighted=True)) == (225, 75)


def test_counting_needs_no_torch() -> None:
    code = "import sys, trainer.files.tokens as t; t.ClipTokens().count('a'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


BLANKS = " \t\r\n\u00a0\u2003\u3000\x1c\x85"
PARTS = st.sampled_from(
    ["cat", "a", "CAFE\u0301", "it's", "'s", "猫", "\U0001f408", "\u0301", "ﬃ", "Σ", ", ", "((", "1234", "|"]
)


@settings(max_examples=200)  # the first loads the vocabulary
@given(st.lists(PARTS | st.sampled_from(BLANKS) | st.text(max_size=4), max_size=12).map("".join))
def test_tokens_found_word_by_word_end_where_those_of_the_whole_text_do(text: str) -> None:
    whole = _tokenizer().encode(text, add_special_tokens=False).offsets
    assert ClipTokens().ends(text) == [end for _, end in whole]
