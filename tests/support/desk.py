"""A library with its workers and no window: what workers post runs when the test says so."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.core.library import Library
from app.core.tasks import Tasks


class Desk:
    """The thread of the test is the one that owns the library."""

    def __init__(self) -> None:
        self._posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.library = Library()
        self.tasks = Tasks(self._posted.put)

    def until(self, reached: Callable[[], object], seconds: float = 60.0) -> None:
        """Run what workers post until the condition holds; queue.Empty when nothing comes for so long."""
        while not reached():
            self._posted.get(timeout=seconds)()

    def post(self, work: Callable[[], None]) -> None:
        """Post as a worker does."""
        self._posted.put(work)


@contextmanager
def a_desk() -> Iterator[Desk]:
    """A desk whose workers end with the test; what they wait for must be stopped before."""
    desk = Desk()
    yield desk
    desk.tasks.close()
