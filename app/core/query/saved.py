"""Filters that the user keeps, for all datasets or for one, and the queries asked last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from app.core.events import Event
from app.core.settings.behind import Kept
from app.core.tasks import Post
from trainer.errors import ImpastoError
from trainer.protocol import atomic
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

    They are written behind. A file that cannot be understood is renamed aside and `notice` says so; nothing is lost.
    """

    def __init__(self, post: Post, path: Path | None = None) -> None:
        self.changed: Event[None] = Event()
        self.notice: ImpastoError | None = None
        """What went wrong at reading the file."""
        self.file = Kept(path or home() / "filters.json", "saved filters", "filters.unwritable", post)
        self._filters: list[SavedFilter] = []
        self._recent: list[str] = []
        self._read()

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
        rows = [{"name": f.name, "query": f.query} | ({"root": str(f.root)} if f.root else {}) for f in filters]
        self._filters, self._recent = filters, recent
        # ASCII, since names on Linux need not be text.
        self.file.write(json.dumps({"filters": rows, "recent": recent}, indent=1) + "\n")
        self.changed.emit(None)

    def _read(self) -> None:
        try:
            text = atomic.read_text(self.file.path)
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as fault:
            self._set_aside(str(fault))
            return
        try:
            kept = json.loads(text)
            filters = [_filter(row) for row in kept["filters"]]
            recent = [_words(query) for query in kept["recent"]]
        except (ValueError, TypeError, KeyError) as fault:
            self._set_aside(f"it holds something else than filters ({fault})")
            return
        self._filters, self._recent = filters, recent[:_RECENT]

    def _set_aside(self, reason: str) -> None:
        """Rename the file, under a name that is free, so that the next save does not overwrite it."""
        number = 1
        while (aside := self.file.path.with_name(f"{self.file.path.stem}-damaged-{number}.json")).exists():
            number += 1
        try:
            atomic.replace(self.file.path, aside)
            where = f"It was renamed to {aside.name}"
        except OSError as fault:
            where = f"It could not be renamed either ({fault.strerror or fault})"
        self.notice = ImpastoError(
            "filters.damaged",
            f"The saved filters in {self.file.path} cannot be read: {reason}.",
            f"{where}; mend it there and rename it back, or save your filters anew.",
        )


def _filter(row: dict[str, object]) -> SavedFilter:
    root = row.get("root")
    return SavedFilter(_words(row["name"]), _words(row["query"]), None if root is None else Path(_words(root)))


def _words(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
