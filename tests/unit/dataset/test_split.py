"""Held-out pictures: how many, which, and how steady the choice is."""

import hashlib

import pytest

from trainer.dataset.dataset import held_out


def ids(count: int, start: int = 0) -> list[str]:
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in range(start, start + count)]


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 0), (39, 0), (40, 2), (100, 5), (1000, 50)])
def test_auto_holds_out_none_of_few_and_five_per_cent_of_many(count: int, expected: int) -> None:
    assert len(held_out(ids(count), [], "auto")) == expected


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.1, 2), (0.25, 5), (0.5, 10)])
def test_a_stated_share_holds_for_few_pictures_too(share: float, expected: int) -> None:
    assert len(held_out(ids(20), [], share)) == expected


def test_the_choice_depends_on_contents_alone() -> None:
    names = ids(60)
    chosen = {names[place] for place in held_out(names, [], 0.2)}
    assert {names[::-1][place] for place in held_out(names[::-1], [], 0.2)} == chosen


def test_a_new_picture_moves_at_most_two_others() -> None:
    for start in range(20):
        before = ids(60, start)
        after = [*before, ids(1, 1000 + start)[0]]
        one = {before[place] for place in held_out(before, [], 0.2)}
        other = {after[place] for place in held_out(after, [], 0.2)}
        assert len(one ^ other) <= 2


def test_near_duplicates_stay_together() -> None:
    groups = [[0, 1, 2], [10, 11], [20, 21, 22, 23]]
    for start in range(30):
        chosen = held_out(ids(40, start * 100), groups, 0.25)
        assert all(len(chosen & set(group)) in (0, len(group)) for group in groups)
        assert 7 <= len(chosen) <= 10


def test_a_group_larger_than_the_share_is_learned() -> None:
    assert held_out(ids(20), [list(range(15))], 0.2) <= set(range(15, 20))
    assert len(held_out(ids(20), [list(range(15))], 0.2)) == 4
