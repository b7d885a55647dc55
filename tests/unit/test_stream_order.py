"""Blocks of a streamed base are fetched before they are needed, and none is fetched for nothing."""

from __future__ import annotations

import pytest

from trainer.base.stream_order import AHEAD, Pass, following


@pytest.mark.parametrize(
    ("index", "now", "expected"),
    [
        (0, "forward", [1, 2]),
        (3, "forward", [4, 2]),
        (4, "forward", [3, 2]),  # backward comes next
        (4, "backward", [3, 2]),
        (1, "backward", [0]),
        (0, "backward", []),  # the next forward begins with nothing on the device
        (3, "inference", [4]),
        (4, "inference", []),
    ],
)
def test_the_blocks_that_run_next_follow(index: int, now: Pass, expected: list[int]) -> None:
    assert AHEAD == 2
    assert following(index, 5, now) == expected


def test_a_single_block_is_followed_by_none() -> None:
    passes: tuple[Pass, ...] = ("forward", "backward", "inference")
    assert not any(following(0, 1, now) for now in passes)
