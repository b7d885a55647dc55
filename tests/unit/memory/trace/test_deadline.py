from __future__ import annotations

from trainer.memory.trace.deadline import Deadline


def test_only_what_comes_after_the_time_is_over_is_left_out() -> None:
    now = [100.0]
    deadline = Deadline(5.0, clock=lambda: now[0])
    assert not deadline.leaves_out("first")
    now[0] = 104.9
    assert not deadline.is_over
    now[0] = 105.0
    assert deadline.is_over and not deadline.left_out
    assert deadline.leaves_out("second")
    assert deadline.left_out == ["second"]


def test_without_a_limit_there_is_always_time() -> None:
    assert not Deadline(clock=lambda: 1e12).is_over
