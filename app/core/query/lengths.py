"""How many tokens the caption of each picture has, counted behind once a query asks for it."""

from __future__ import annotations

from array import array
from collections.abc import Set
from itertools import islice
from math import nan

from app.core.events import Event
from app.core.library import Library
from app.core.pictures import Altered
from app.core.query.columns import between
from app.core.query.tokens import TokenCounts
from app.core.tasks import Tasks

_AT_ONCE = 20_000
"""Pictures looked at in one go, some 10 ms; a query of 100,000 held up the window for 60."""
_ASKED = 2000
"""Captions that wait to be counted, at most: what is edited meanwhile is then not counted in vain."""
_CAPTION = frozenset({"caption", "file"})


class Lengths:
    """Counts by id, NaN while one is not known; kept up to date with the library, on the thread that owns it."""

    def __init__(self, library: Library, tasks: Tasks) -> None:
        self.more: Event[int] = Event()
        """More is known; of so many pictures it is still to be found out."""
        self._library, self._post = library, tasks.post
        self._counts = TokenCounts(tasks)
        self._column = array("d")
        self._unseen: dict[int, None] = {}
        """Pictures whose captions have not been looked at since they changed."""
        self._asked: dict[int, None] = {}
        """Those whose captions are being counted, in the order in which they were asked for."""
        self._soon = self._failed = False
        self._counts.counted.connect(lambda left: self._have(left))
        library.altered.connect(self._take)
        self._take(Altered(added=frozenset(library.pictures)))

    @property
    def pending(self) -> int:
        """Of how many pictures it is being found out; of none while no query asks for it."""
        return len(self._unseen) + len(self._asked) if self._asked or self._soon else 0

    def between(self, low: float, high: float, ids: Set[int] | None) -> set[int]:
        """Return the pictures, of these or of all, that are known to have so many; others are looked at behind."""
        self._look()
        return between(self._column, low, high, ids)

    def _look(self) -> None:
        """Take over what is known of some pictures' captions, and have the others counted."""
        pictures, count = self._library.pictures, self._counts.of
        while self._asked and (known := count(pictures[first := next(iter(self._asked))].caption)) is not None:
            self._column[first] = known
            del self._asked[first]
        for number in list(islice(self._unseen, _AT_ONCE)):
            known = count(pictures[number].caption)
            if known is not None:
                self._column[number] = known
            elif len(self._asked) < _ASKED:
                self._asked[number] = None
            else:
                break
            del self._unseen[number]
        self._counts.want(pictures[number].caption for number in self._asked)
        if self._unseen and not self._asked and not self._soon:
            self._soon = True
            self._post(self._go_on)

    def _go_on(self) -> None:
        self._soon = False
        self._look()
        self.more.emit(self.pending)

    def _have(self, left: int) -> None:
        """Hear that some were counted; where the first is still unknown, that failed: once more, then no more."""
        first = next(iter(self._asked), None)
        again, self._failed = self._failed, not left and first is not None and self._unknown(first)
        if not self._failed:
            self._look()
        else:
            self._unseen.update(self._asked)  # behind the others, of which none may be at fault
            self._asked.clear()
            if again:
                self._unseen.clear()
        self.more.emit(self.pending)

    def _unknown(self, number: int) -> bool:
        return self._counts.of(self._library.pictures[number].caption) is None

    def _take(self, altered: Altered) -> None:
        """Hear of what became different in the library."""
        changed = altered.added if _CAPTION.isdisjoint(altered.what) else altered.added | altered.altered
        room = max(altered.added, default=0) + 1 - len(self._column)
        if room > 0:
            self._column.extend([nan] * room)
        for number in changed | altered.removed:
            self._column[number] = nan
            self._asked.pop(number, None)
        self._unseen.update(dict.fromkeys(changed))
        for number in altered.removed:
            self._unseen.pop(number, None)
