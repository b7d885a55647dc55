"""Filters that the user keeps, for all datasets or for one, and the queries asked last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.events import Event
from app.core.settings.behind import Kept
from app.core.tasks import Post
from trainer.protocol.places import home

_RECENT = 30


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
        self.changed: Event[None] = Event()
        self.file = Kept(path or home() / "filters.json", "saved filters", "filters.unwritable", post)
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
