"""Work away from the owner's thread, and its way home."""

import os
import queue
import sys
import threading

import pytest

from app.core import priority
from app.core.tasks import Single, Tasks


def test_what_is_asked_for_after_the_close_is_dropped():
    calls = queue.Queue()
    tasks = Tasks(calls.put)
    answers = []
    tasks.run(lambda: 7, answers.append, answers.append)
    calls.get(timeout=120)()
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
        calls.get(timeout=120)()
    assert not single.busy
    single.run(lambda: 8, lambda answer: answers.append((answer, single.busy)))
    calls.get(timeout=120)()
    tasks.close()
    assert answers == [(8, False)]
    assert calls.empty()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads keep their places")
def test_threads_behind_get_a_core_after_the_others_and_those_that_start_engines_do_not():
    calls = queue.Queue()
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    for behind in (True, False):
        tasks, told = Tasks(calls.put, threads=1, behind=behind), []
        tasks.run(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), told.append, told.append)
        calls.get(timeout=60)()
        tasks.close()
        assert told == [max(10, mine) if behind else mine]
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_where_a_sandbox_forbids_to_step_back_threads_behind_work_all_the_same(monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden, raising=False)
    calls, told = queue.Queue(), []
    tasks = Tasks(calls.put, threads=1, behind=True)
    tasks.run(lambda: 7, told.append, told.append)
    calls.get(timeout=120)()
    tasks.close()
    assert told == [7]


def test_work_in_turns_is_all_done_and_rests_after_each_turn(monkeypatch):
    rests = []
    monkeypatch.setattr(priority, "sleep", rests.append)
    monkeypatch.setattr(priority, "_TURN", -1.0)  # each takes longer than a turn
    assert list(priority.in_turns("abc")) == ["a", "b", "c"]
    assert rests == [priority._REST] * 3
    monkeypatch.setattr(priority, "_TURN", 60.0)
    assert list(priority.in_turns("abc")) == ["a", "b", "c"] and len(rests) == 3
