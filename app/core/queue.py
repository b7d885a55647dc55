"""The queue as the window knows it: what stands in it, what is asked of it, and that a worker is at it."""

from __future__ import annotations

from pathlib import Path

from app.core.events import Event
from app.core.tasks import Post, Tasks
from trainer.errors import ImpastoError
from trainer.protocol.queue import Entry, Queue, Reading, new_entry


class QueueKeeper:
    """Belongs to the thread that makes it; the disk is read and written on a thread of its own, in order."""

    def __init__(self, post: Post, queue: Queue | None = None) -> None:
        self.queue = queue or Queue()
        self.reading = Reading()
        """The queue as it was last read."""
        self.changed: Event[None] = Event()
        """`reading` is another now."""
        self.failed: Event[ImpastoError] = Event()
        """Something that was asked could not be done."""
        self._tasks = Tasks(post, threads=1)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What stands in the queue, in order."""
        return self.reading.entries

    def start(self, job: Path) -> Entry:
        """Put a job at the end and see that a worker runs; the entry is on disk soon."""
        return new_entry(job)

    def resume(self, run: Path, steps: int | None = None) -> None:
        """Go on with a run when its turn comes, to `steps` in all where they are given."""

    def look(self) -> None:
        """Read again."""

    def close(self) -> None:
        """Finish what was asked."""
        self._tasks.close()
