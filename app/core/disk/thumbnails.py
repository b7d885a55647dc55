"""Thumbnails for what is on screen: made by workers, the newest wish first, kept in bounded memory and on disk."""

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
from app.core.library import Picture
from app.core.tasks import Post, stand_back, step_back
from trainer.errors import DatasetError
from trainer.host import usable_cores
from trainer.protocol.row_store import RowStore, key_of

if TYPE_CHECKING:  # brings numpy and Pillow, for which the window does not wait
    from app.core.pixels import Pixels

Edge = Literal[256, 512]
"""Sides in pixels of the squares that thumbnails are made for."""
EDGES: tuple[Edge, Edge] = (256, 512)
FILE_NAME = "thumbnails.sqlite"
_LONG = 10.0
"""Seconds after which a thumbnail is taken to be stuck at a disk that does not answer; enormous pictures take five."""
_MORE = 8
"""Threads more than are wanted, at most."""
_PATIENCE = 2.0
"""Seconds that the end waits for what is being made."""


class _Wish(NamedTuple):
    """A picture's file as it was when somebody wished for it."""

    picture: int
    pixels: int
    changed_ns: int
    size: int


class _ThumbnailJob(NamedTuple):
    """What a thread is to make."""

    wish: _Wish
    path: Path
    shown: bool = True
    """Whether somebody waits for it."""
    reachable: bool = True
    """Whether its file may be asked for; else there is what the disk's cache has, or nothing."""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A small picture, three bytes a pixel, or the reason why there is none."""

    picture: int
    pixels: int
    width: int
    height: int
    rgb: bytes
    problem: str | None = None


class Thumbnails:
    """Belongs to the library's thread; its own threads make what it is asked for.

    `ready` tells of each thumbnail that was wished for. Of wishes that wait the newest comes first; `show` replaces
    all that wait, so that what was scrolled past costs nothing. `prepare` fills the disk's cache in idle time: when the
    user has done nothing for `quiet` seconds, as workers take turns with the window's thread.
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
        self.reachable: Callable[[Picture], bool] = lambda picture: True
        """Tells whether a picture's disk can be reached; whoever watches it says it here."""
        self._post = post
        self._store = RowStore(file, disk)
        self._kept: OrderedDict[_Wish, Thumbnail] = OrderedDict()
        self._failed: dict[int, _Wish] = {}
        self._weight, self._memory = 0, memory
        self._change = threading.Condition()
        self._wishes: dict[_Wish, _ThumbnailJob] = {}
        self._later: tuple[deque[Picture], int] = (deque(), EDGES[0])
        self._quiet, self._idle_from = quiet, 0.0
        self._done: deque[tuple[_Wish, Thumbnail]] = deque()
        self._running: set[_Wish] = set()
        self._ends = False
        count = threads or max(1, min(4, usable_cores() - 1))
        self._count, self._threads = count, 0
        self._hired: list[threading.Thread] = []
        self._busy: dict[threading.Thread, float] = {}
        """Who makes something and since when, by the monotonic clock."""

    def get(self, picture: Picture, pixels: int) -> Thumbnail | None:
        """Return a thumbnail of the file as it is now, if memory has it."""
        wish = _wish(picture, pixels)
        thumbnail = self._kept.get(wish)
        if thumbnail:
            self._kept.move_to_end(wish)
        return thumbnail

    def request(self, picture: Picture, pixels: int) -> None:
        """Wish for a thumbnail, before all others that wait."""
        self._wait_for([picture], pixels, keep=True)

    def show(self, pictures: Iterable[Picture], pixels: int) -> None:
        """Wish for these thumbnails, the first of them first, and for no others."""
        self._wait_for(pictures, pixels, keep=False)

    def forget(self, ids: Iterable[int]) -> None:
        """Drop the wishes for these pictures."""
        gone = set(ids)
        with self._change:
            self._wishes = {wish: job for wish, job in self._wishes.items() if wish.picture not in gone}

    def prepare(self, pictures: Iterable[Picture], pixels: int) -> None:
        """Make these thumbnails for the disk's cache in idle time; they replace those asked for so before."""
        with self._change:
            self._later = deque(pictures), pixels
            self._start()
            self._change.notify()

    def give_way(self) -> None:
        """Leave idle work for later: the user does something."""
        self._idle_from = time.monotonic() + self._quiet

    def retry(self, ids: Iterable[int]) -> None:
        """Forget that these pictures could not be shown: their disk may be there again."""
        for number in self._failed.keys() & set(ids):
            self._kept.pop(self._failed.pop(number), None)
        self.look()

    def look(self) -> None:
        """Go on with what waits though all threads are stuck; called every few seconds by whoever has a clock."""
        with self._change:
            if self._wishes:
                self._start()

    def close(self) -> None:
        """End the threads after what they make now, and write what waits for the disk."""
        with self._change:
            self._ends = True
            self._change.notify_all()
            self._change.wait_for(lambda: not self._threads, _PATIENCE)
            ending = [thread for thread in self._hired if thread not in self._busy]
        for thread in ending:
            thread.join()
        self._store.close()

    def _wait_for(self, pictures: Iterable[Picture], pixels: int, keep: bool) -> None:
        self.give_way()
        jobs = [_ThumbnailJob(_wish(one, pixels), one.path, reachable=self.reachable(one)) for one in pictures]
        missing = [job for job in reversed(jobs) if job.wish not in self._kept]
        with self._change:
            waiting = self._wishes if keep else {}
            for job in missing:
                waiting.pop(job.wish, None)
                if job.wish not in self._running:
                    waiting[job.wish] = job
            self._wishes = waiting
            if missing:
                self._start()
                self._change.notify_all()

    def _start(self) -> None:
        """See to it that there are threads, others for those that are stuck at a disk that does not answer."""
        while self._threads < min(self._count + self._stuck(), self._count + _MORE):
            thread = threading.Thread(target=self._work, name=f"thumbnails-{self._threads}", daemon=True)
            self._hired = [*filter(threading.Thread.is_alive, self._hired), thread]
            self._threads += 1
            thread.start()

    def _stuck(self) -> int:
        return sum(begun + _LONG <= time.monotonic() for begun in self._busy.values())

    # On the threads

    def _work(self) -> None:
        step_back()
        while (job := self._next()) is not None:
            stand_back()
            try:
                if job.shown:
                    self._hand(job, self._make(job))
                elif not self._store.has(_key(job)):
                    self._draw(job)
            except Exception as fault:  # a thread that died would leave the window without thumbnails
                if not isinstance(fault, DatasetError):
                    logging.getLogger(__name__).exception("No thumbnail of %s", job.path)
                if job.shown:
                    self._hand(job, Thumbnail(job.wish.picture, job.wish.pixels, 0, 0, b"", str(fault)))

    def _next(self) -> _ThumbnailJob | None:
        """Return the newest of what somebody waits for, or something for later; None at the end."""
        me = threading.current_thread()
        with self._change:
            self._busy.pop(me, None)
            while not self._ends and self._threads <= self._count + self._stuck():
                self._busy[me] = time.monotonic()
                if self._wishes:
                    wish, job = self._wishes.popitem()
                    if job.reachable:  # else it may be wished for once more when its disk is back
                        self._running.add(wish)
                    return job
                later, pixels = self._later
                patience = self._idle_from - time.monotonic()
                rests = later and len(self._running) <= self._stuck()
                if rests and patience <= 0:
                    # Only here, as it would take the window's thread half a second for 100,000 pictures. What is read
                    # of a picture may be about to change: then its thumbnail is made under a name nobody asks for.
                    picture = later.popleft()
                    return _ThumbnailJob(_wish(picture, pixels), picture.path, shown=False)
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
        return Thumbnail(job.wish.picture, job.wish.pixels, pixels.width, pixels.height, pixels.rgb)

    def _draw(self, job: _ThumbnailJob) -> Pixels:
        from app.core.disk.images import make_thumbnail

        pixels, packed = make_thumbnail(job.path, job.wish.pixels)
        stand_back()
        self._store.put(_key(job), packed)
        return pixels

    def _hand(self, job: _ThumbnailJob, thumbnail: Thumbnail | None) -> None:
        if thumbnail is None:
            return
        with self._change:
            if job.reachable:
                self._running.discard(job.wish)
            first = not self._done
            self._done.append((job.wish, thumbnail))
            self._change.notify()
        if first:  # one call for all that are done by then
            self._post(self._deliver)

    # At home again

    def _deliver(self) -> None:
        with self._change:
            done, self._done = self._done, deque()
        for wish, thumbnail in done:
            self._keep(wish, thumbnail)
            self.ready.emit(thumbnail)

    def _keep(self, wish: _Wish, thumbnail: Thumbnail) -> None:
        former = self._kept.pop(wish, None)
        self._kept[wish] = thumbnail
        self._weight += len(thumbnail.rgb) - (len(former.rgb) if former else 0)
        if thumbnail.problem is not None:
            self._failed[wish.picture] = wish
        while self._weight > self._memory and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._weight -= len(oldest.rgb)


def edge_for(side: float) -> Edge:
    """Return the smaller edge that is sharp at `side` device pixels."""
    return 256 if side <= 256 else 512


def _wish(picture: Picture, pixels: int) -> _Wish:
    return _Wish(picture.id, pixels, picture.changed_ns, picture.bytes)


def _key(job: _ThumbnailJob) -> bytes:
    return key_of(job.path, job.wish.changed_ns, job.wish.size, job.wish.pixels)
