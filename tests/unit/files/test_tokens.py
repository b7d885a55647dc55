"""Token counts and rows without torch; the rows' rules for long texts are tested beside the text encoders."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.files.tokens import END, START, ClipTokens, _tokenizer, vocabulary


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
