"""Work away from the owner's thread, and its way home."""

import os
import queue
import sys
import threading
import time

import pytest

from app.core import tasks as priority
from app.core import tasks as tasks_module
from app.core.tasks import ExclusiveTask, Tasks


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
    single, answers = ExclusiveTask(tasks), []
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
    monkeypatch.setattr(priority, "_WORK_SECONDS", -1.0)  # each takes longer than a turn
    assert list(priority.iterate_yielding("abc")) == ["a", "b", "c"]
    assert rests == [priority._REST_SECONDS] * 3
    monkeypatch.setattr(priority, "_WORK_SECONDS", 60.0)
    assert list(priority.iterate_yielding("abc")) == ["a", "b", "c"] and len(rests) == 3


@pytest.fixture
def stuck(monkeypatch):
    """Workers, all of them stuck at something for longer than is usual, and the event that lets them go on."""
    monkeypatch.setattr(tasks_module, "_STUCK_AFTER", 0.0)
    calls, answers, begun = queue.Queue(), [], queue.Queue()
    tasks, answer = Tasks(calls.put), threading.Event()

    def hang():
        begun.put(None)
        answer.wait()

    for _ in range(2):
        tasks.run(hang, answers.append, answers.append, kept=False)
        begun.get(timeout=60)  # nothing waits: none is hired yet besides the two
    yield tasks, calls, answer
    answer.set()
    tasks.close()


def test_what_waits_for_workers_that_are_stuck_gets_others(stuck):
    tasks, calls, answer = stuck
    told = []
    for number in range(5):
        tasks.run(lambda number=number: number, told.append, told.append)
    for _ in range(5):
        calls.get(timeout=60)()
    assert sorted(told) == [0, 1, 2, 3, 4]
    answer.set()
    tasks.close()
    with tasks._change:
        assert tasks._change.wait_for(lambda: tasks._thread_count == 0, 60)


def test_workers_are_not_more_than_wanted_once_none_is_stuck(stuck, monkeypatch):
    tasks, calls, answer = stuck
    told = []
    tasks.run(lambda: 7, told.append, told.append)
    calls.get(timeout=60)()
    assert tasks._thread_count == 3
    monkeypatch.setattr(tasks_module, "_STUCK_AFTER", 60.0)
    answer.set()
    for _ in range(2):
        calls.get(timeout=60)()
    with tasks._change:
        tasks._change.notify_all()
        assert tasks._change.wait_for(lambda: tasks._thread_count == 2, 60)


def test_who_comes_back_takes_what_waits_though_others_are_enough(stuck, monkeypatch):
    tasks, calls, answer = stuck
    tasks.run(lambda: 7, lambda _: None, lambda _: None)
    calls.get(timeout=60)()
    monkeypatch.setattr(tasks_module, "_STUCK_AFTER", 60.0)  # none is stuck any more, nor will be soon
    held, begun = threading.Event(), threading.Event()
    tasks.run(lambda: begun.set() or held.wait(120), lambda _: None, lambda _: None)  # the third has this
    assert begun.wait(60)
    told = [tasks.run(lambda number=number: number, lambda _: None, lambda _: None) for number in range(3)]
    answer.set()
    assert [one.result(timeout=120) for one in told] == [0, 1, 2]
    held.set()


def test_what_is_to_be_done_in_order_waits_for_what_is_before_it(monkeypatch):
    monkeypatch.setattr(tasks_module, "_STUCK_AFTER", 0.0)
    calls, done, answer = queue.Queue(), [], threading.Event()
    tasks = Tasks(calls.put, in_order=True)
    tasks.run(lambda: answer.wait(60) and done.append("first"), lambda _: None, lambda _: None)
    for number in range(3):
        tasks.run(lambda number=number: done.append(number), lambda _: None, lambda _: None)
    assert tasks._thread_count == 1 and not done
    answer.set()
    for _ in range(4):
        calls.get(timeout=60)()
    tasks.close()
    assert done == ["first", 0, 1, 2]


def test_the_end_waits_for_what_is_kept_and_not_for_a_disk(stuck, monkeypatch):
    monkeypatch.setattr(tasks_module, "_CLOSE_SECONDS", 0.0)
    tasks, *_ = stuck
    begun, done = threading.Event(), []

    def keep():
        begun.set()
        done.append(sum(range(1_000_000)))

    tasks.run(keep, done.append, done.append)
    assert begun.wait(60)
    tasks.close()
    assert len(done) == 1  # and its answer is dropped with the window


@pytest.fixture
def interval():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.skipif(sys.platform == "win32", reason="its clock may have larger steps than both intervals")
def test_a_busy_worker_soon_hands_the_lock_to_who_wakes_up(interval):
    awake, answers, used = threading.Semaphore(0), [], []

    def work():
        for number in range(40):
            begin = time.thread_time()
            awake.release()
            while len(answers) == number:
                sum(range(100))
            used.append(time.thread_time() - begin)

    priority.shorten_switch_interval()
    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(40):
        awake.acquire()
        answers.append(True)
    worker.join()
    # Seconds; by Python's own interval none is below it. A busy machine lets the waiting thread come late often.
    assert min(used) < 0.001


class Watched(threading.Event):
    """Tells when somebody waits for it, and for how long at most."""

    def __init__(self):
        super().__init__()
        self.waited = threading.Event()
        self.patience = []
        self.set()

    def wait(self, timeout=None):
        self.patience.append(timeout)
        self.waited.set()
        return super().wait(timeout)


@pytest.fixture
def rests(monkeypatch):
    """Whether the window's thread rests, of this test alone."""
    event = Watched()
    monkeypatch.setattr(priority, "_window_idle", event)
    for name in ("_yield_start", "_busy_since", "_idle_since"):
        monkeypatch.setattr(priority, name, 0.0)
    return event


def test_a_worker_stands_back_while_the_windows_thread_works_and_then_goes_on(monkeypatch, rests):
    for name in ("_MAX_YIELD", "_YIELD_TIMEOUT"):
        monkeypatch.setattr(priority, name, 600.0)
    done = []
    worker = threading.Thread(target=lambda: done.extend(priority.iterate_yielding("abc")), daemon=True)
    priority.set_window_busy()
    worker.start()
    assert rests.waited.wait(120)  # it never does where it goes on
    assert worker.is_alive()
    priority.set_window_idle()
    worker.join(120)
    assert done == ["a", "b", "c"]


def test_a_worker_works_in_bursts_beside_a_windows_thread_that_hardly_rests(monkeypatch, rests):
    """It works for 20 ms at a time and rests for one; in each millisecond a worker asks whether it is to stand back."""
    now = 100.0
    monkeypatch.setattr(priority, "perf_counter", lambda: now)
    monkeypatch.setattr(rests, "wait", rests.patience.append)
    went_on = []
    for turn in range(40):
        priority.set_window_busy()
        for step in range(20):
            now = 100.0 + 0.021 * turn + 0.001 * step
            asked = len(rests.patience)
            priority.yield_to_window()
            went_on.append(len(rests.patience) == asked)
        now += 0.001
        priority.set_window_idle()
        now += 0.001
    assert sum(went_on) / len(went_on) == pytest.approx(0.25, abs=0.05)
    assert max(rests.patience) <= 0.03


def test_a_worker_stands_back_anew_after_a_rest_in_which_it_got_on(monkeypatch, rests):
    now = 100.0
    monkeypatch.setattr(priority, "perf_counter", lambda: now)
    monkeypatch.setattr(rests, "wait", rests.patience.append)
    for _ in range(40):
        priority.set_window_busy()
        priority.yield_to_window()
        now += 0.012
        priority.yield_to_window()
        priority.set_window_idle()
        now += 0.004
    assert len(rests.patience) == 80


def test_nobody_stands_back_for_a_windows_thread_that_may_wait_for_a_worker(monkeypatch, rests):
    clock = iter([100.0, 100.101, 100.121, 100.5, 160.0])
    monkeypatch.setattr(priority, "perf_counter", lambda: next(clock))
    priority.set_window_busy()
    for _ in range(4):
        priority.yield_to_window()
    assert not rests.patience


def test_a_worker_does_not_wait_for_a_windows_thread_that_rests(monkeypatch, rests):
    monkeypatch.setattr(priority, "_MAX_YIELD", 600.0)
    priority.set_window_busy()
    priority.set_window_idle()
    assert list(priority.iterate_yielding("abc")) == ["a", "b", "c"]
    assert not rests.waited.is_set()
