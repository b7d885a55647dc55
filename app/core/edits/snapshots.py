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
    """Taken on the library's thread, some 10 ms for 100,000 pictures; then any thread may read it.

    After `call_off` whoever goes through it is thrown out by CalledOffError, so that a worker is soon free again.
    """

    def __init__(self, pictures: Iterable[Picture]) -> None:
        self._rows = [(picture.id, picture.caption) for picture in pictures]
        self._off = False

    def call_off(self) -> None:
        """End whatever is made of it; from any thread."""
        self._off = True

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Words]:
        for number, caption in self._rows:
            if self._off:
                raise CalledOffError
            yield Words(number, caption)

    @overload
    def __getitem__(self, place: int) -> Words: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Words]: ...
    def __getitem__(self, place: int | slice) -> Words | Sequence[Words]:
        if isinstance(place, slice):
            return [Words(*row) for row in self._rows[place]]
        return Words(*self._rows[place])
