"""Work in processes of its own: what it yields is kept, however it ends."""

import os
import threading
from collections.abc import Iterator

import pytest

from tests.support.apart import Apart

LONG = 120.0


def counted(count: int) -> Iterator[tuple[int, int]]:
    yield from ((number, os.getpid()) for number in range(count))


def failing() -> Iterator[int]:
    yield 1
    raise ValueError("no\nmore")


def dying() -> Iterator[int]:
    yield 1
    os._exit(7)


def endless() -> Iterator[int]:
    yield 1
    threading.Event().wait()


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    with Apart(__name__) as made:
        yield made


def test_each_work_has_a_process_of_its_own(apart: Apart) -> None:
    first, second = (apart.run(LONG, counted, 3) for _ in range(2))
    assert [number for number, _ in first.items] == [number for number, _ in second.items] == [0, 1, 2]
    assert first.failure == second.failure == ""
    assert len({os.getpid(), *(pid for _, pid in (*first.items, *second.items))}) == 3


def test_what_was_yielded_before_a_failure_is_kept(apart: Apart) -> None:
    failed, died = apart.run(LONG, failing), apart.run(LONG, dying)
    assert (failed.items, failed.failure) == ([1], "ValueError: no")
    assert (died.items, died.failure) == ([1], "its process ended with 7")


def test_work_that_takes_too_long_is_ended(apart: Apart) -> None:
    told = apart.run(1.0, endless)
    assert told.failure == "took longer than 1 s"
    assert apart.run(LONG, counted, 1).failure == ""
