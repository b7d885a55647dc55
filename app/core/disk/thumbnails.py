"""Thumbnails for what is on screen: made by workers, the newest wish first, kept in bounded memory and on disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from app.core.disk.shelf import Shelf, key_of
from app.core.events import Event
from app.core.pictures import Picture
from app.core.priority import step_back
from app.core.tasks import Post
from trainer.cores import usable_cores
from trainer.errors import DatasetError

if TYPE_CHECKING:  # brings numpy and Pillow, for which the window does not wait
    from app.core.disk.drawing import Pixels

Edge = Literal[256, 512]
"""Sides in pixels of the squares that thumbnails are made for."""
EDGES: tuple[Edge, Edge] = (256, 512)
FILE_NAME = "thumbnails.sqlite"


class _Wish(NamedTuple):
    """A picture's file as it was when somebody wished for it."""

    picture: int
    pixels: int
    changed_ns: int
    size: int


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
        self.ready: Event[Thumbnail] = Event()
        self._post = post
        self._shelf = Shelf(file, disk)
        self._kept: OrderedDict[_Wish, Thumbnail] = OrderedDict()
        self._failed: dict[int, _Wish] = {}
        self._weight, self._memory = 0, memory
        self._change = threading.Condition()
        self._wishes: dict[_Wish, Path] = {}
        self._later: tuple[deque[Picture], int] = (deque(), EDGES[0])
        self._quiet, self._idle_from = quiet, 0.0
        self._done: deque[tuple[_Wish, Thumbnail]] = deque()
        self._running: set[_Wish] = set()
        self._ends = False
        count = threads or max(1, min(4, usable_cores() - 1))
        self._threads = [threading.Thread(target=self._work, name=f"thumbnails-{n}", daemon=True) for n in range(count)]
        self._started = False

    def get(self, picture: Picture, pixels: int) -> Thumbnail | None:
        """Return a thumbnail of the file as it is now, if memory has it."""
        wish = _wish(picture, pixels)
        thumbnail = self._kept.get(wish)
        if thumbnail:
            self._kept.move_to_end(wish)
        return thumbnail

    def request(self, picture: Picture, pixels: int) -> None:
        """Wish for a thumbnail, before all others that wait."""
        self._wait_for({_wish(picture, pixels): picture.path}, keep=True)

    def show(self, pictures: Iterable[Picture], pixels: int) -> None:
        """Wish for these thumbnails, the first of them first, and for no others."""
        self._wait_for({_wish(picture, pixels): picture.path for picture in pictures}, keep=False)

    def forget(self, ids: Iterable[int]) -> None:
        """Drop the wishes for these pictures."""
        gone = set(ids)
        with self._change:
            self._wishes = {wish: path for wish, path in self._wishes.items() if wish.picture not in gone}

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

    def close(self) -> None:
        """End the threads after what they make now, and write what waits for the disk."""
        with self._change:
            self._ends = True
            self._change.notify_all()
        if self._started:
            for thread in self._threads:
                thread.join()
        self._shelf.close()

    def _wait_for(self, wishes: Mapping[_Wish, Path], keep: bool) -> None:
        self.give_way()
        missing = [wish for wish in reversed(list(wishes)) if wish not in self._kept]
        with self._change:
            waiting = self._wishes if keep else {}
            for wish in missing:
                waiting.pop(wish, None)
                if wish not in self._running:
                    waiting[wish] = wishes[wish]
            self._wishes = waiting
            if missing:
                self._start()
                self._change.notify_all()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()

    # On the threads

    def _work(self) -> None:
        step_back()
        while (job := self._next()) is not None:
            wish, path, shown = job
            try:
                if shown:
                    self._hand(wish, self._make(wish, path))
                elif not self._shelf.has(_key(wish, path)):
                    self._draw(wish, path)
            except Exception as fault:  # a thread that died would leave the window without thumbnails
                if not isinstance(fault, DatasetError):
                    logging.getLogger(__name__).exception("No thumbnail of %s", path)
                if shown:
                    self._hand(wish, Thumbnail(wish.picture, wish.pixels, 0, 0, b"", str(fault)))

    def _next(self) -> tuple[_Wish, Path, bool] | None:
        """Return the newest wish, where its picture lies, and whether somebody waits for it; None at the end."""
        with self._change:
            while not self._ends:
                if self._wishes:
                    wish, path = self._wishes.popitem()
                    self._running.add(wish)
                    return wish, path, True
                later, pixels = self._later
                patience = self._idle_from - time.monotonic()
                if later and not self._running and patience <= 0:
                    # Only here, as it would take the window's thread half a second for 100,000 pictures. What is read
                    # of a picture may be about to change: then its thumbnail is made under a name nobody asks for.
                    picture = later.popleft()
                    return _wish(picture, pixels), picture.path, False
                self._change.wait(max(0.0, patience) if later and not self._running else None)
            return None

    def _make(self, wish: _Wish, path: Path) -> Thumbnail:
        from app.core.disk.drawing import unpack

        data = self._shelf.get(_key(wish, path))
        pixels = unpack(data) if data else None
        pixels = pixels or self._draw(wish, path)
        return Thumbnail(wish.picture, wish.pixels, pixels.width, pixels.height, pixels.rgb)

    def _draw(self, wish: _Wish, path: Path) -> Pixels:
        from app.core.disk.drawing import make_thumbnail

        pixels, packed = make_thumbnail(path, wish.pixels)
        self._shelf.put(_key(wish, path), packed)
        return pixels

    def _hand(self, wish: _Wish, thumbnail: Thumbnail) -> None:
        with self._change:
            self._running.discard(wish)
            first = not self._done
            self._done.append((wish, thumbnail))
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


def _key(wish: _Wish, path: Path) -> bytes:
    return key_of(path, wish.changed_ns, wish.size, wish.pixels)
