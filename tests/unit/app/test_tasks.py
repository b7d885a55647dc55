"""Work away from the owner's thread, and its way home."""

import queue

import pytest

from app.core.tasks import Single, Tasks


def test_what_is_asked_for_after_the_close_is_dropped():
    calls = queue.Queue()
    tasks = Tasks(calls.put)
    answers = []
    tasks.run(lambda: 7, answers.append, answers.append)
    calls.get(timeout=10)()
    tasks.close()
    late = tasks.run(lambda: 8, answers.append, answers.append)
    assert late.cancelled()
    assert calls.empty()
    assert answers == [7]


def test_work_that_goes_on_is_not_begun_again_and_a_fault_ends_one_time_only():
    calls = queue.Queue()
    tasks = Tasks(calls.put)
    single, answers = Single(tasks), []
    single.run(lambda: 1 // 0, answers.append)
    single.run(lambda: 7, answers.append)
    with pytest.raises(ZeroDivisionError):
        calls.get(timeout=10)()
    assert not single.busy
    single.run(lambda: 8, lambda answer: answers.append((answer, single.busy)))
    calls.get(timeout=10)()
    tasks.close()
    assert answers == [(8, False)]
    assert calls.empty()
