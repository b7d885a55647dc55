"""Work away from the owner's thread, and its way home."""

import queue

from app.core.tasks import Tasks


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
