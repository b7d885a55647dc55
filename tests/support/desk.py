"""A library with its workers but no window; what workers post runs when the test says so."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.core.library import Library
from app.core.tasks import Tasks


class Desk:
    """The owner of the library: the thread of the test."""

    def __init__(self) -> None:
        self._posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.library = Library()
        self.tasks = Tasks(self._posted.put)

    def until(self, reached: Callable[[], object], seconds: float = 60.0) -> None:
        """Run what workers post until the condition holds; raise queue.Empty if nothing arrives in time."""
        while not reached():
            self._posted.get(timeout=seconds)()

    def post(self, work: Callable[[], None]) -> None:
        """Post work as a worker does."""
        self._posted.put(work)


@contextmanager
def a_desk() -> Iterator[Desk]:
    """Yield a desk whose workers end with the test; what they wait for must be stopped first."""
    desk = Desk()
    yield desk
    desk.tasks.close()
