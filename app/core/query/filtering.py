"""Keeps what is shown equal to what the filter finds, whatever changes in the library."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from app.core.events import Event
from app.core.library import Library
from app.core.pictures import Altered
from app.core.query.finder import Finder
from app.core.query.language import parse
from app.core.query.terms import And, Node, Not, Query, Term
from app.core.tags.index import TagIndex
from app.core.tasks import Post

# While tags or tokens are still being counted, the filter is asked again no more often than this, in seconds.
_PAUSE = 0.5


class Shown(Protocol):
    """What the filter fills: `app.core.session.View`."""

    ids: list[int]
    selected: frozenset[int]
    current: int | None

    def show(self, ids: Iterable[int]) -> None:
        """Show these pictures in this order."""


class Filtering:
    """The filter in force. It belongs to the thread that owns the library.

    A picture that the user works on, that is, one shown and selected (the current one where none is selected), stays
    when an edit makes the filter pass it over; it goes when the filter is applied anew.
    """

    def __init__(self, library: Library, view: Shown, index: TagIndex, finder: Finder, post: Post) -> None:
        self.changed: Event[None] = Event()
        """The query, the number found, or what is still to be counted is another now."""
        self.query = Query()
        self.text = ""
        """The query as it was written."""
        self._library = library
        self._view = view
        self._index = index
        self._finder = finder
        self._post = post
        self._soon = False
        self._asked = 0.0
        library.altered.connect(self._take)
        index.changed.connect(lambda _: self._tags_changed())
        finder.more.connect(lambda counting: self._counted(counting.pending))

    @property
    def total(self) -> int:
        """How many pictures there are, shown or not."""
        return len(self._library.pictures)

    @property
    def pending(self) -> int:
        """How many captions are still to be read or counted before the answer is complete."""
        return self._finder.pending + (self._index.pending if self._asks_captions() else 0)

    def apply(self, text: str) -> None:
        """Show what a query finds; raises QueryError, and the former filter stays in force."""
        self.query = parse(text)
        self.text = text
        self._view.show(self._found())
        self.changed.emit(None)

    def narrow(self, term: Term, *, exclude: bool = False) -> None:
        """Ask for this too, or for anything but this."""
        self.apply(str(narrowed(self.query, term, exclude=exclude)))

    def refresh(self) -> None:
        """Ask again, and keep the pictures that are shown and worked on."""
        found = self._found()
        worked_on = self._view.selected or {self._view.current}
        kept = worked_on.intersection(self._view.ids).difference(found)
        if kept:
            wanted = kept.union(found)
            found = [number for number in self._library.pictures if number in wanted]
        if found != self._view.ids:
            self._view.show(found)
        self.changed.emit(None)

    def _found(self) -> list[int]:
        self._soon = False
        self._asked = time.monotonic()
        return self._finder.find(self.query)

    def _take(self, altered: Altered) -> None:
        depends = Finder.depends(self.query)
        if altered.added or altered.removed or not depends.isdisjoint(altered.what):
            self._ask_soon()

    def _tags_changed(self) -> None:
        if self._asks_captions():
            self._counted(self._index.pending)

    def _counted(self, pending: int) -> None:
        if not pending or time.monotonic() - self._asked > _PAUSE:
            self._ask_soon()
        else:
            self.changed.emit(None)

    def _asks_captions(self) -> bool:
        return "caption" in Finder.depends(self.query)

    def _ask_soon(self) -> None:
        """Ask once for all that changes in one go."""
        if not self._soon:
            self._soon = True
            self._post(lambda: self.refresh() if self._soon else None)


def narrowed(query: Query, term: Term, *, exclude: bool = False) -> Query:
    """Return a query that also asks for a term or against it; the opposite, where it asked for that, is dropped."""
    wanted: Node = Not(term) if exclude else term
    opposite: Node = term if exclude else Not(term)
    parts = query.root.parts if isinstance(query.root, And) else () if query.root is None else (query.root,)
    kept = tuple(part for part in parts if part not in (wanted, opposite))
    return Query(And((*kept, wanted)) if kept else wanted)
