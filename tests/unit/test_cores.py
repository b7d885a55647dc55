"""A process counts the cores that it may use, not those that are there."""

from __future__ import annotations

import os

import pytest

from trainer.host import usable_cores


def test_cores_that_the_process_may_not_use_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6}, raising=False)
    assert usable_cores() == 3


@pytest.mark.parametrize(("told", "cores"), [(8, 8), (None, 1)])
def test_where_the_system_does_not_tell_which_all_count(
    monkeypatch: pytest.MonkeyPatch, told: int | None, cores: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: told)
    assert usable_cores() == cores
