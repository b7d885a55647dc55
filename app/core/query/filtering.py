"""Keeps what is shown equal to what the filter finds, whatever changes in the library."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from app.core.events import Emitter
from app.core.library import Altered, Library
from app.core.query.finder import Finder
from app.core.query.language import parse
from app.core.query.terms import And, Node, Not, Query, Term
from app.core.settings.deferred_writer import DurableWriter
from app.core.tags.index import TagIndex
from app.core.tasks import Post
from trainer.protocol.places import home

# While tags or tokens are still being counted, the filter is asked again no more often than this, in seconds.
_PAUSE = 0.5
_RECENT = 30


class FilterTarget(Protocol):
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

    def __init__(self, library: Library, view: FilterTarget, index: TagIndex, finder: Finder, post: Post) -> None:
        self.changed: Emitter[None] = Emitter()
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
        self._requested = 0.0
        library.altered.connect(self._take)
        index.changed.connect(lambda _: self._tags_changed())
        finder.more.connect(lambda counting: self._counted(counting.pending))

    @property
    def total(self) -> int:
        """How many pictures there are, shown or not."""
        return len(self._library.images)

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
            found = [number for number in self._library.images if number in wanted]
        if found != self._view.ids:
            self._view.show(found)
        self.changed.emit(None)

    def _found(self) -> list[int]:
        self._soon = False
        self._requested = time.monotonic()
        return self._finder.find(self.query)

    def _take(self, altered: Altered) -> None:
        depends = Finder.depends(self.query)
        if altered.added or altered.removed or not depends.isdisjoint(altered.what):
            self._ask_soon()

    def _tags_changed(self) -> None:
        if self._asks_captions():
            self._counted(self._index.pending)

    def _counted(self, pending: int) -> None:
        if not pending or time.monotonic() - self._requested > _PAUSE:
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


@dataclass(frozen=True, slots=True)
class SavedFilter:
    """A query with a name; of one dataset when `root`, the folder opened, is given."""

    name: str
    query: str
    root: Path | None = None


class SavedFilters:
    """The user's filters in `filters.json` of the per-user folder; belongs to one thread, to which `post` leads.

    They are written in the background. `file.notice` says what was wrong with a damaged file, which is kept.
    """

    def __init__(self, post: Post, path: Path | None = None) -> None:
        self.changed: Emitter[None] = Emitter()
        self.file = DurableWriter(path or home() / "filters.json", "saved filters", "filters.unwritable", post)
        nothing: tuple[list[SavedFilter], list[str]] = ([], [])
        lost = "save your filters again or repair the file and rename it back"
        self._filters, self._recent = self.file.load(_kept, nothing, lost, _text)

    @property
    def recent(self) -> tuple[str, ...]:
        """The queries asked last, the newest first."""
        return tuple(self._recent)

    def of(self, *roots: Path) -> list[SavedFilter]:
        """Return the filters for all datasets and those of these ones, by name."""
        return sorted((one for one in self._filters if one.root in (None, *roots)), key=lambda one: one.name.casefold())

    def save(self, saved: SavedFilter) -> None:
        """Keep a filter, instead of one of the same name and dataset."""
        others = [one for one in self._filters if (one.name, one.root) != (saved.name, saved.root)]
        self._replace([*others, saved], self._recent)

    def remove(self, saved: SavedFilter) -> None:
        """Forget a filter."""
        self._replace([one for one in self._filters if one != saved], self._recent)

    def remember(self, query: str) -> None:
        """Put a query at the head of those asked last."""
        if query.strip() and query not in self._recent[:1]:
            self._replace(self._filters, [query, *(one for one in self._recent if one != query)][:_RECENT])

    def _replace(self, filters: list[SavedFilter], recent: list[str]) -> None:
        self._filters, self._recent = filters, recent
        self.file.write(_text((filters, recent)))
        self.changed.emit(None)


def _kept(found: Any, left_out: list[str]) -> tuple[list[SavedFilter], list[str]]:
    filters, recent = [], []
    for place, row in enumerate(found["filters"], 1):
        try:
            filters.append(_filter(row))
        except (TypeError, KeyError, ValueError):
            left_out.append(f"filter {place}")
    for place, query in enumerate(found["recent"], 1):
        if isinstance(query, str):
            recent.append(query)
        else:
            left_out.append(f"recent query {place}")
    return filters, recent[:_RECENT]


def _text(kept: tuple[list[SavedFilter], list[str]]) -> str:
    filters, recent = kept
    rows = [{"name": f.name, "query": f.query} | ({"root": str(f.root)} if f.root else {}) for f in filters]
    # ASCII, since names on Linux need not be text.
    return json.dumps({"filters": rows, "recent": recent}, indent=1) + "\n"


def _filter(row: dict[str, object]) -> SavedFilter:
    root = row.get("root")
    return SavedFilter(_words(row["name"]), _words(row["query"]), None if root is None else Path(_words(root)))


def _words(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
