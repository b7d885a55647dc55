"""Captions as they are at one moment, for workers: it does not change under them, and can be called off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

from app.core.pictures import Picture


class Words(NamedTuple):
    """A picture's caption at that moment."""

    id: int
    caption: str | None


class CalledOffError(Exception):
    """Nobody wants the result any more."""


class Snapshot(Sequence[Words]):
    """Taken on the library's thread, some 5 ms for 100,000 pictures; then any thread may read it.

    After `call_off` whoever goes through it is thrown out by CalledOffError, so that a worker is soon free again.
    """

    def __init__(self, pictures: Iterable[Picture]) -> None:
        # Two lists, as a pair for each picture takes four times as long.
        self._pictures = list(pictures)
        self._captions = [picture.caption for picture in self._pictures]
        self._off = False

    def call_off(self) -> None:
        """End whatever is made of it; from any thread."""
        self._off = True

    def __len__(self) -> int:
        return len(self._pictures)

    def __iter__(self) -> Iterator[Words]:
        for picture, caption in zip(self._pictures, self._captions, strict=True):
            if self._off:
                raise CalledOffError
            yield Words(picture.id, caption)

    @overload
    def __getitem__(self, place: int) -> Words: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Words]: ...
    def __getitem__(self, place: int | slice) -> Words | Sequence[Words]:
        if isinstance(place, slice):
            chosen = zip(self._pictures[place], self._captions[place], strict=True)
            return [Words(picture.id, caption) for picture, caption in chosen]
        return Words(self._pictures[place].id, self._captions[place])
