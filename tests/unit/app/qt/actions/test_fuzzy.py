"""Fuzzy search: against every way to find the letters, tried one by one."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.qt.actions.palette import _FIRST, _RUN, _WORD, score


def by_trying(typed: str, text: str) -> int | None:
    """The definition itself: the best over all places that spell what was typed."""
    found = []
    for places in combinations(range(len(text)), len(typed)):
        if "".join(text[place] for place in places) == typed:
            words = sum(
                _WORD for place in places if place == 0 or (not text[place - 1].isalnum() and text[place].isalnum())
            )
            runs = sum(_RUN for one, other in pairwise(places) if other == one + 1)
            found.append(len(typed) + words + runs + (_FIRST if 0 in places else 0))
    return max(found, default=None)


@given(st.text("ab ", min_size=1, max_size=4).filter(lambda text: " " not in text), st.text("ab ", max_size=9))
def test_it_is_the_best_of_all_ways(typed, text):
    assert score(typed, text) == by_trying(typed, text)


@pytest.mark.parametrize(
    ("typed", "better", "worse"),
    [
        ("sf", "Save filter", "Shuffle"),
        ("cap", "Captions", "Close all pages"),
        ("ren tag", "Rename tag", "Remove extra tag"),
        ("ÜB", "über", "Klub über"),
    ],
)
def test_the_better_answer_comes_first(typed, better, worse):
    assert score(typed, better) > (score(typed, worse) or 0)


def test_letters_that_are_not_there_find_nothing_and_none_find_all():
    assert score("xyz", "Save filter") is None
    assert score("fs", "Save f") is None
    assert score("", "anything") == score("  ", "") == 0
