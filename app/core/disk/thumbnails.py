"""Thumbnails, made by worker threads (newest request first) and cached in memory and on disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from app.core.events import Emitter
from app.core.library import LibraryImage
from app.core.tasks import Post, lower_priority, yield_to_window
from trainer.errors import DatasetError
from trainer.host import usable_cores
from trainer.protocol.row_store import RowStore, key_of

if TYPE_CHECKING:  # imports numpy and Pillow, which would delay the window
    from app.core.pixels import Pixels

Edge = Literal[256, 512]
"""Side in pixels of the square into which a thumbnail fits."""
EDGES: tuple[Edge, Edge] = (256, 512)
FILE_NAME = "thumbnails.sqlite"
_STUCK_SECONDS = 10.0
"""Seconds after which a thread counts as stuck on an unresponsive disk; an enormous image takes five."""
_MAX_EXTRA = 8
"""Maximum number of extra threads that replace stuck ones."""
_CLOSE_TIMEOUT = 2.0
"""Seconds that `close` waits for running threads."""


class _Request(NamedTuple):
    """A requested thumbnail: image id, side, and the file's state at the time of the request."""

    image: int
    pixels: int
    changed_ns: int
    size: int


class _ThumbnailJob(NamedTuple):
    """A thumbnail to be made by a worker thread."""

    request: _Request
    path: Path
    shown: bool = True
    """Whether it is for the screen; otherwise only for the disk cache."""
    reachable: bool = True
    """Whether the file may be read; otherwise only the disk cache is used."""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A small image with three bytes per pixel, or the reason why it could not be made."""

    image: int
    pixels: int
    width: int
    height: int
    rgb: bytes
    problem: str | None = None


class Thumbnails:
    """Thumbnail service; belongs to the library's thread and makes thumbnails on its own threads.

    `ready` is emitted for each requested thumbnail. The newest request is served first, and `show` replaces all waiting
    ones, so images that the user scrolled past cost nothing. `prepare` fills the disk cache only when the user has been
    idle for `quiet` seconds, because the threads share the GIL with the window's thread.
    """

    def __init__(
        self,
        post: Post,
        file: Path,
        threads: int | None = None,
        memory: int = 64 << 20,
        disk: int = 2 << 30,
        quiet: float = 1.0,
    ) -> None:
        self.ready: Emitter[Thumbnail] = Emitter()
        self.reachable: Callable[[LibraryImage], bool] = lambda image: True
        """Returns whether an image's disk can be reached. Set by the owner."""
        self._post = post
        self._store = RowStore(file, disk)
        self._kept: OrderedDict[_Request, Thumbnail] = OrderedDict()
        self._failed: dict[int, _Request] = {}
        self._memory_used, self._memory_limit = 0, memory
        self._change = threading.Condition()
        self._requests: dict[_Request, _ThumbnailJob] = {}
        self._idle_queue: tuple[deque[LibraryImage], int] = (deque(), EDGES[0])
        self._quiet, self._idle_from = quiet, 0.0
        self._done: deque[tuple[_Request, Thumbnail]] = deque()
        self._running: set[_Request] = set()
        self._closing = False
        count = threads or max(1, min(4, usable_cores() - 1))
        self._count, self._threads = count, 0
        self._all_threads: list[threading.Thread] = []
        self._busy: dict[threading.Thread, float] = {}
        """Busy threads with the monotonic time at which their current job began."""

    def get(self, image: LibraryImage, pixels: int) -> Thumbnail | None:
        """Return the thumbnail if memory contains one for the file's current state, else None."""
        request = _request_for(image, pixels)
        thumbnail = self._kept.get(request)
        if thumbnail:
            self._kept.move_to_end(request)
        return thumbnail

    def request(self, image: LibraryImage, pixels: int) -> None:
        """Request a thumbnail ahead of all waiting requests."""
        self._enqueue([image], pixels, keep=True)

    def show(self, images: Iterable[LibraryImage], pixels: int) -> None:
        """Request thumbnails in this order, replacing all waiting requests."""
        self._enqueue(images, pixels, keep=False)

    def forget(self, ids: Iterable[int]) -> None:
        """Drop the waiting requests for these images."""
        gone = set(ids)
        with self._change:
            self._requests = {request: job for request, job in self._requests.items() if request.image not in gone}

    def prepare(self, images: Iterable[LibraryImage], pixels: int) -> None:
        """Make thumbnails for the disk cache in idle time; a new call replaces the previous one."""
        with self._change:
            self._idle_queue = deque(images), pixels
            self._start()
            self._change.notify()

    def give_way(self) -> None:
        """Postpone idle work because the user is active."""
        self._idle_from = time.monotonic() + self._quiet

    def retry(self, ids: Iterable[int]) -> None:
        """Allow failed thumbnails of these images to be requested again, because their disk may be back."""
        for number in self._failed.keys() & set(ids):
            self._kept.pop(self._failed.pop(number), None)
        self.look()

    def look(self) -> None:
        """Start extra threads if requests are waiting and threads are stuck; call it every few seconds."""
        with self._change:
            if self._requests:
                self._start()

    def close(self) -> None:
        """End the threads after their current job, and flush the disk cache."""
        with self._change:
            self._closing = True
            self._change.notify_all()
            self._change.wait_for(lambda: not self._threads, _CLOSE_TIMEOUT)
            ending = [thread for thread in self._all_threads if thread not in self._busy]
        for thread in ending:
            thread.join()
        self._store.close()

    def _enqueue(self, images: Iterable[LibraryImage], pixels: int, keep: bool) -> None:
        self.give_way()
        jobs = [_ThumbnailJob(_request_for(one, pixels), one.path, reachable=self.reachable(one)) for one in images]
        missing = [job for job in reversed(jobs) if job.request not in self._kept]
        with self._change:
            waiting = self._requests if keep else {}
            for job in missing:
                waiting.pop(job.request, None)
                if job.request not in self._running:
                    waiting[job.request] = job
            self._requests = waiting
            if missing:
                self._start()
                self._change.notify_all()

    def _start(self) -> None:
        """Start threads until the configured number is running, not counting those stuck on an unresponsive disk."""
        while self._threads < min(self._count + self._stuck(), self._count + _MAX_EXTRA):
            thread = threading.Thread(target=self._work, name=f"thumbnails-{self._threads}", daemon=True)
            self._all_threads = [*filter(threading.Thread.is_alive, self._all_threads), thread]
            self._threads += 1
            thread.start()

    def _stuck(self) -> int:
        return sum(begun + _STUCK_SECONDS <= time.monotonic() for begun in self._busy.values())

    # On the worker threads

    def _work(self) -> None:
        lower_priority()
        while (job := self._next()) is not None:
            yield_to_window()
            try:
                if job.shown:
                    self._finish(job, self._make(job))
                elif not self._store.has(_key(job)):
                    self._draw(job)
            except Exception as fault:  # a dead thread would leave the window without thumbnails
                if not isinstance(fault, DatasetError):
                    logging.getLogger(__name__).exception("Could not make a thumbnail of %s", job.path)
                if job.shown:
                    self._finish(job, Thumbnail(job.request.image, job.request.pixels, 0, 0, b"", str(fault)))

    def _next(self) -> _ThumbnailJob | None:
        """Wait for the newest request or idle work and return it; return None when the thread should end."""
        me = threading.current_thread()
        with self._change:
            self._busy.pop(me, None)
            while not self._closing and self._threads <= self._count + self._stuck():
                self._busy[me] = time.monotonic()
                if self._requests:
                    request, job = self._requests.popitem()
                    if job.reachable:  # otherwise it can be requested again when its disk is back
                        self._running.add(request)
                    return job
                idle, pixels = self._idle_queue
                patience = self._idle_from - time.monotonic()
                rests = idle and len(self._running) <= self._stuck()
                if rests and patience <= 0:
                    # The request is built here because building 100,000 takes the window's thread half a second. If
                    # the image changes meanwhile, its thumbnail is stored under a key that is never requested.
                    image = idle.popleft()
                    return _ThumbnailJob(_request_for(image, pixels), image.path, shown=False)
                del self._busy[me]
                self._change.wait(max(0.0, patience) if rests else None)
            self._threads -= 1
            self._change.notify_all()
            return None

    def _make(self, job: _ThumbnailJob) -> Thumbnail | None:
        from app.core.disk.images import unpack

        data = self._store.get(_key(job))
        pixels = unpack(data) if data else None
        if pixels is None and not job.reachable:
            return None
        pixels = pixels or self._draw(job)
        return Thumbnail(job.request.image, job.request.pixels, pixels.width, pixels.height, pixels.rgb)

    def _draw(self, job: _ThumbnailJob) -> Pixels:
        from app.core.disk.images import make_thumbnail

        pixels, packed = make_thumbnail(job.path, job.request.pixels)
        yield_to_window()
        self._store.put(_key(job), packed)
        return pixels

    def _finish(self, job: _ThumbnailJob, thumbnail: Thumbnail | None) -> None:
        if thumbnail is None:
            return
        with self._change:
            if job.reachable:
                self._running.discard(job.request)
            first = not self._done
            self._done.append((job.request, thumbnail))
            self._change.notify()
        if first:  # one call delivers all thumbnails that are done by then
            self._post(self._deliver)

    # On the library's thread

    def _deliver(self) -> None:
        with self._change:
            done, self._done = self._done, deque()
        for request, thumbnail in done:
            self._store_in_memory(request, thumbnail)
            self.ready.emit(thumbnail)

    def _store_in_memory(self, request: _Request, thumbnail: Thumbnail) -> None:
        former = self._kept.pop(request, None)
        self._kept[request] = thumbnail
        self._memory_used += len(thumbnail.rgb) - (len(former.rgb) if former else 0)
        if thumbnail.problem is not None:
            self._failed[request.image] = request
        while self._memory_used > self._memory_limit and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._memory_used -= len(oldest.rgb)


def edge_for(side: float) -> Edge:
    """Return the smallest thumbnail size that is sharp at `side` device pixels."""
    return 256 if side <= 256 else 512


def _request_for(image: LibraryImage, pixels: int) -> _Request:
    return _Request(image.id, pixels, image.changed_ns, image.bytes)


def _key(job: _ThumbnailJob) -> bytes:
    return key_of(job.path, job.request.changed_ns, job.request.size, job.request.pixels)
