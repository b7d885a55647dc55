"""What several tests of the app's core start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.core.tasks import Tasks
from tests.support.desk import Desk, a_desk
from tests.support.opened import Open


@pytest.fixture
def opened() -> Iterator[Open]:
    """Datasets, of which none is open."""
    with a_desk() as desk:
        opened = Open(desk)
        yield opened
        opened.datasets.stop()


@pytest.fixture
def desk() -> Iterator[Desk]:
    """A library with its workers."""
    with a_desk() as desk:
        yield desk


@pytest.fixture
def tasks(desk: Desk) -> Iterator[Tasks]:
    """Workers that post to the desk."""
    tasks = Tasks(desk.post)
    yield tasks
    tasks.close()
