"""What queries compare of all pictures: numbers as arrays by id, 8 bytes a picture, and who has what, as sets."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from math import nan

from app.core.library import Library
from app.core.pictures import Altered, Picture
from app.core.query.keys import KEYS

# More pictures than these at once would hold up the window: the column is made anew when it is asked for.
_SLICE = 2000


class Columns:
    """Numbers by key and id, NaN where there is none; kept up to date with the library, on the thread that owns it."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._columns: dict[str, array[float]] = {}
        self._having: dict[str, set[int]] = {}
        library.altered.connect(self._take)
        if not library.pictures:
            self._columns = {key: array("d") for key in _VALUES}
            self._having = {key: set() for key in _FLAGS}

    def between(self, key: str, low: float, high: float, ids: Set[int] | None) -> set[int]:
        """Return the pictures, of these or of all, whose number lies between both or is one of them."""
        return between(self._columns.get(key) or self._made(key), low, high, ids)

    def having(self, key: str) -> Set[int]:
        """Return the pictures that have a caption, a mask or a crop, or are excluded; not to be changed."""
        if key not in self._having:
            has = _FLAGS[key]
            self._having[key] = {number for number, picture in self._library.pictures.items() if has(picture)}
        return self._having[key]

    def _take(self, altered: Altered) -> None:
        """Hear of what became different in the library."""
        ids, moved = altered.added | altered.altered, altered.added or altered.removed
        for key in [*self._columns, *self._having]:
            if not moved and KEYS[key].depends.isdisjoint(altered.what):
                continue
            if len(ids) > _SLICE:
                self._columns.pop(key, None)
                self._having.pop(key, None)
            elif key in self._having:
                self._sort(key, ids | altered.removed)
            else:
                self._fill(self._columns[key], key, ids)
                for number in altered.removed:
                    self._columns[key][number] = nan

    def _sort(self, key: str, ids: Iterable[int]) -> None:
        pictures, having, has = self._library.pictures, self._having[key], _FLAGS[key]
        for number in ids:
            if number in pictures and has(pictures[number]):
                having.add(number)
            else:
                having.discard(number)

    def _made(self, key: str) -> array[float]:
        column = self._columns[key] = array("d")
        self._fill(column, key, self._library.pictures)
        return column

    def _fill(self, column: array[float], key: str, ids: Iterable[int]) -> None:
        pictures, value_of = self._library.pictures, _VALUES[key]
        room = max(ids, default=0) + 1 - len(column)
        if room > 0:
            column.extend([nan] * room)
        for number in ids:
            picture = pictures.get(number)
            if picture is not None:
                value = value_of(picture)
                column[number] = nan if value is None else value


def between(column: Sequence[float], low: float, high: float, ids: Set[int] | None) -> set[int]:
    """Return the pictures, of these or of all, whose number in a column by id lies between both or is one of them."""
    if ids is None:
        return {number for number, value in enumerate(column) if low <= value <= high}
    return {number for number in ids if low <= column[number] <= high}


def _short_side(picture: Picture) -> int | None:
    width, height = picture.width, picture.height
    return None if width is None or height is None else min(width, height)


def _ratio(picture: Picture) -> float | None:
    return picture.width / picture.height if picture.width and picture.height else None


_VALUES: dict[str, Callable[[Picture], float | None]] = {
    "size": _short_side,
    "width": lambda picture: picture.width,
    "height": lambda picture: picture.height,
    "ratio": _ratio,
    "chars": lambda picture: len(picture.caption or ""),
    "rating": lambda picture: picture.rating,
}
_FLAGS: dict[str, Callable[[Picture], bool]] = {
    "caption": lambda picture: bool(picture.caption) and not str(picture.caption).isspace(),
    "mask": lambda picture: picture.mask,
    "crop": lambda picture: picture.crop is not None,
    "excluded": lambda picture: picture.excluded,
}
