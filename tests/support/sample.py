"""Samples that the current date chooses, for tests with many long cases that resemble each other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import Any

import pytest

# In tests, tests/conftest.py has set it, so that all processes agree at midnight.
DAY = date.fromisoformat(os.environ.get("IMPASTO_SAMPLE_DATE") or f"{datetime.now(UTC):%Y-%m-%d}")


def places_of(day: date, most: int, total: int) -> range:
    """Return the places that a day takes of `total` cases: up to `most`, far apart; all have their day in turn."""
    days = -(-total // most)
    return range(day.toordinal() % days, total, days)


def of_the_day(most: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a test as its parameters, all but `most` of them marked slow; a tuple has several values."""
    listed = list(cases)
    today = places_of(DAY, most, len(listed))
    marks = [pytest.mark.of_the_day if place in today else pytest.mark.slow for place in range(len(listed))]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case, mark in zip(listed, marks, strict=True)
    ]
