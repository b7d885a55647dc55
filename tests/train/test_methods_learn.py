"""The methods of the current date learn: a sample of `python -m tests.benchmarks.methods_learn`, which trains all."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.benchmarks.methods_learn import METHODS, PER_DAY, learn, methods_of
from tests.support.sample import DAY


@pytest.mark.of_the_day
@pytest.mark.parametrize("name", methods_of(DAY))
def test_a_method_of_the_day_learns(name: str) -> None:
    found = learn(name, steps=30, threads=1)
    repeat = f"IMPASTO_SAMPLE_DATE={DAY} repeats this test"
    assert found.learned, f"the validation loss went from {found.first:.4f} to {found.last:.4f}; {repeat}"


def test_every_method_has_its_day() -> None:
    days = [methods_of(DAY + timedelta(number)) for number in range(-(-len(METHODS) // PER_DAY))]
    assert set().union(*days) == METHODS.keys()
    assert all(1 <= len(set(names)) <= PER_DAY for names in days)
