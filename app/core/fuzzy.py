"""Finds what somebody means who types a few letters of it."""

from __future__ import annotations

_WORD, _RUN, _FIRST = 8, 10, 3
"""What a letter that begins a word, follows the one before, or begins the text adds to its 1."""


def score(typed: str, text: str) -> int | None:
    """Return how well a text answers what was typed: None where its letters are not all in it, in their order.

    The highest score over all ways to find the letters, so that "sf" finds "Save filter" by its words and not by the
    first f. Spaces in what was typed are passed over. Takes len(typed) * len(text) steps.
    """
    letters = [letter for letter in typed.casefold() if not letter.isspace()]
    folded = text.casefold()
    # best[i]: the best score with the letters so far, the last of them at place i; None: not possible.
    best: list[int | None] = [0] * (len(folded) + 1)
    for number, letter in enumerate(letters):
        following: list[int | None] = [None] * (len(folded) + 1)
        reach: int | None = 0 if number == 0 else None  # the best that ends anywhere before the place
        for place, found in enumerate(folded):
            before = best[place - 1] if place and number else None
            if found == letter and (reach is not None or before is not None):
                chain = -1 if before is None else before + _RUN
                following[place] = max(chain, -1 if reach is None else reach) + 1 + _bonus(folded, place)
            if number:
                reach = max((value for value in (reach, best[place]) if value is not None), default=None)
        best = following
    return max((value for value in best if value is not None), default=None) if letters else 0


def _bonus(text: str, place: int) -> int:
    if place == 0:
        return _WORD + _FIRST
    return _WORD if not text[place - 1].isalnum() and text[place].isalnum() else 0
