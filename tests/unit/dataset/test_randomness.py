"""Random streams: equal for equal arguments, unlike for any other, on every machine."""

import hashlib

import numpy as np
import pytest

from trainer.dataset.sampling import generator

USUAL = {"seed": 7, "purpose": "noise", "epoch": 1, "sample": "ab", "repeat": 2}


def draw(**facts: object) -> list[float]:
    return generator(**{**USUAL, **facts}).random(8).tolist()  # type: ignore[arg-type]


def test_equal_arguments_give_equal_streams() -> None:
    assert draw() == draw()


@pytest.mark.parametrize(
    "other", [{"seed": 8}, {"purpose": "crop"}, {"epoch": 2}, {"sample": "ba"}, {"repeat": 3}, {"sample": ""}]
)
def test_any_other_argument_gives_another_stream(other: dict[str, object]) -> None:
    assert not set(draw()) & set(draw(**other))


def test_arguments_cannot_run_into_each_other() -> None:
    assert draw(sample='1", 2, "', repeat=0) != draw(sample="1", repeat=2)
    assert draw(epoch=11, repeat=1) != draw(epoch=1, repeat=11)


def test_the_key_is_the_hash_of_the_arguments() -> None:
    """Written out by hand, so that no change of the code changes the numbers of runs that are to be resumed."""
    key = hashlib.sha256(b'[7, "noise", 1, "ab", 2]').digest()
    expected = np.random.Philox(key=np.frombuffer(key[:16], "<u8").astype(np.uint64))
    assert draw() == np.random.Generator(expected).random(8).tolist()
    assert generator(0, "order").integers(1000, size=4).tolist() == [882, 558, 889, 26]
