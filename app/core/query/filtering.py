"""The active filter, which follows changes in the library, and saved filters."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from app.core.events import Emitter
from app.core.library import Library, LibraryChange
from app.core.query.finder import Finder
from app.core.query.language import parse
from app.core.query.terms import And, Node, Not, Query, Term
from app.core.settings.deferred_writer import DurableWriter
from app.core.tags.index import TagIndex
from app.core.tasks import Post
from trainer.protocol.places import home

# Minimum seconds between two updates while tags or tokens are still being counted.
_MIN_INTERVAL = 0.5
_MAX_RECENT = 30


class FilterTarget(Protocol):
    """The part of `app.core.session.View` that the filter uses.

    Importing `View` itself would be circular, since `session` imports this module.
    """

    ids: list[int]
    selected: frozenset[int]
    current: int | None

    def show(self, ids: Iterable[int]) -> None:
        """Show these images in this order."""


class ActiveFilter:
    """The active filter. Use it only on the thread that owns the library.

    Visible images that the user is working on (the selected ones, or else the current one) stay visible if an edit
    makes them fail the filter; they disappear when the filter is applied again.
    """

    def __init__(self, library: Library, view: FilterTarget, index: TagIndex, finder: Finder, post: Post) -> None:
        self.changed: Emitter[None] = Emitter()
        """Emitted when the query, the number of matches or the pending count has changed."""
        self.query = Query()
        self.text = ""
        """The query as the user typed it."""
        self._library = library
        self._view = view
        self._index = index
        self._finder = finder
        self._post = post
        self._refresh_scheduled = False
        self._refreshed_at = 0.0
        library.altered.connect(self._on_altered)
        index.changed.connect(lambda _: self._on_tags_changed())
        finder.result_changed.connect(lambda counting: self._on_counted(counting.pending))

    @property
    def total(self) -> int:
        """Return the number of all images, shown or not."""
        return len(self._library.images)

    @property
    def pending(self) -> int:
        """Return the number of captions still to be read or counted before the result is complete."""
        return self._finder.pending + (self._index.pending if self._depends_on_captions() else 0)

    def apply(self, text: str) -> None:
        """Apply a query. Raises QueryError and keeps the previous filter if it is invalid."""
        self.query = parse(text)
        self.text = text
        self._view.show(self._find())
        self.changed.emit(None)

    def narrow(self, term: Term, *, exclude: bool = False) -> None:
        """Add a term, or its negation if `exclude`, to the query and apply it."""
        self.apply(str(with_term(self.query, term, exclude=exclude)))

    def refresh(self) -> None:
        """Run the query again; visible images that the user is working on stay visible."""
        found = self._find()
        active = self._view.selected or {self._view.current}
        kept = active.intersection(self._view.ids).difference(found)
        if kept:
            wanted = kept.union(found)
            found = [number for number in self._library.images if number in wanted]
        if found != self._view.ids:
            self._view.show(found)
        self.changed.emit(None)

    def _find(self) -> list[int]:
        self._refresh_scheduled = False
        self._refreshed_at = time.monotonic()
        return self._finder.find(self.query)

    def _on_altered(self, altered: LibraryChange) -> None:
        depends = Finder.depends(self.query)
        if altered.added or altered.removed or not depends.isdisjoint(altered.what):
            self._schedule_refresh()

    def _on_tags_changed(self) -> None:
        if self._depends_on_captions():
            self._on_counted(self._index.pending)

    def _on_counted(self, pending: int) -> None:
        if not pending or time.monotonic() - self._refreshed_at > _MIN_INTERVAL:
            self._schedule_refresh()
        else:
            self.changed.emit(None)

    def _depends_on_captions(self) -> bool:
        return "caption" in Finder.depends(self.query)

    def _schedule_refresh(self) -> None:
        """Schedule a refresh, unless one is already scheduled."""
        if not self._refresh_scheduled:
            self._refresh_scheduled = True
            self._post(lambda: self.refresh() if self._refresh_scheduled else None)


def with_term(query: Query, term: Term, *, exclude: bool = False) -> Query:
    """Return the query with a term (its negation if `exclude`) added and the opposite term removed."""
    wanted: Node = Not(term) if exclude else term
    opposite: Node = term if exclude else Not(term)
    parts = query.root.parts if isinstance(query.root, And) else () if query.root is None else (query.root,)
    kept = tuple(part for part in parts if part not in (wanted, opposite))
    return Query(And((*kept, wanted)) if kept else wanted)


@dataclass(frozen=True, slots=True)
class SavedFilter:
    """A named query, for all datasets or for the one whose opened folder is `root`."""

    name: str
    query: str
    root: Path | None = None


class SavedFilters:
    """The user's saved filters and recent queries. Use it only on the thread that `post` runs on.

    They are written to `filters.json` in the per-user folder in the background. `file.notice` reports a damaged file,
    which is kept as a copy.
    """

    def __init__(self, post: Post, path: Path | None = None) -> None:
        self.changed: Emitter[None] = Emitter()
        self.file = DurableWriter(path or home() / "filters.json", "saved filters", "filters.unwritable", post)
        nothing: tuple[list[SavedFilter], list[str]] = ([], [])
        hint = "Save your filters again, or repair the file and rename it back."
        self._filters, self._recent = self.file.load(_decode, nothing, hint, _encode)

    @property
    def recent(self) -> tuple[str, ...]:
        """Return the recent queries, newest first."""
        return tuple(self._recent)

    def of(self, *roots: Path) -> list[SavedFilter]:
        """Return the filters that apply to all datasets or to one of these roots, sorted by name."""
        return sorted((f for f in self._filters if f.root in (None, *roots)), key=lambda f: f.name.casefold())

    def save(self, saved: SavedFilter) -> None:
        """Save a filter, replacing any filter with the same name and dataset."""
        others = [f for f in self._filters if (f.name, f.root) != (saved.name, saved.root)]
        self._replace([*others, saved], self._recent)

    def remove(self, saved: SavedFilter) -> None:
        """Delete a filter."""
        self._replace([f for f in self._filters if f != saved], self._recent)

    def remember(self, query: str) -> None:
        """Move or add a query to the front of the recent queries."""
        if query.strip() and query not in self._recent[:1]:
            self._replace(self._filters, [query, *(recent for recent in self._recent if recent != query)][:_MAX_RECENT])

    def _replace(self, filters: list[SavedFilter], recent: list[str]) -> None:
        self._filters, self._recent = filters, recent
        self.file.write(_encode((filters, recent)))
        self.changed.emit(None)


def _decode(data: Any, skipped: list[str]) -> tuple[list[SavedFilter], list[str]]:
    filters, recent = [], []
    for number, row in enumerate(data["filters"], 1):
        try:
            filters.append(_filter(row))
        except (TypeError, KeyError, ValueError):
            skipped.append(f"filter {number}")
    for number, query in enumerate(data["recent"], 1):
        if isinstance(query, str):
            recent.append(_current_query(query))
        else:
            skipped.append(f"recent query {number}")
    return filters, recent[:_MAX_RECENT]


def _encode(stored: tuple[list[SavedFilter], list[str]]) -> str:
    filters, recent = stored
    rows = [{"name": f.name, "query": f.query} | ({"root": str(f.root)} if f.root else {}) for f in filters]
    # ASCII, since file names on Linux may hold bytes that are not valid UTF-8.
    return json.dumps({"filters": rows, "recent": recent}, indent=1) + "\n"


def _filter(row: dict[str, object]) -> SavedFilter:
    root = row.get("root")
    query = _current_query(_string(row["query"]))
    return SavedFilter(_string(row["name"]), query, None if root is None else Path(_string(root)))


def _current_query(query: str) -> str:
    """Return a stored query with the finding codes of 0.1.0, such as "picture.tiny", replaced by the current ones."""
    return re.sub(r'(\bproblem:"?(?:info\.)?)picture\b', r"\1image", query)


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
