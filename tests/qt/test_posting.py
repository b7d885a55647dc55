"""What workers send home runs in its order, in turns between which the window lives."""

from __future__ import annotations

import threading

import pytest
from PySide6.QtCore import QEventLoop, QTimer
from pytestqt.qtbot import QtBot

from app.qt import main_thread
from app.qt.main_thread import MainThreadQueue


def test_much_at_once_lets_other_things_come_between(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    poster, order = MainThreadQueue(), list[str]()
    monkeypatch.setattr(main_thread, "_TURN", -1.0)  # each takes longer than a turn
    for _ in range(4):
        poster.post(lambda: order.append("work"))
    QTimer.singleShot(0, lambda: order.append("other"))
    qtbot.waitUntil(lambda: order.count("work") == 4 and "other" in order)
    assert order.index("other") < 4


def test_all_of_many_threads_runs_in_the_order_of_each(qtbot: QtBot) -> None:
    poster, done = MainThreadQueue(), list[tuple[int, int]]()

    def sender(number: int) -> None:
        for step in range(300):
            poster.post(lambda step=step: done.append((number, step)))  # type: ignore[misc]

    threads = [threading.Thread(target=sender, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    qtbot.waitUntil(lambda: len(done) == 900)
    for thread in threads:
        thread.join()
    assert all([step for one, step in done if one == number] == list(range(300)) for number in range(3))


def test_what_one_of_them_waits_for_is_called_meanwhile_and_a_fault_stops_no_other(qtbot: QtBot) -> None:
    poster, order, loop = MainThreadQueue(), list[str](), QEventLoop()

    def dialog() -> None:
        order.append("opened")
        loop.exec()
        order.append("closed")

    def fail() -> None:
        raise RuntimeError("meant")

    with qtbot.capture_exceptions() as faults:
        for work in (dialog, fail, lambda: order.append("next"), loop.quit, lambda: order.append("last")):
            poster.post(work)
        qtbot.waitUntil(lambda: {"closed", "last"} <= set(order))
    assert order.index("opened") < order.index("next") < order.index("closed")
    assert [str(fault[1]) for fault in faults] == ["meant"]
