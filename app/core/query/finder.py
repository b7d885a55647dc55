"""Evaluate image queries with the library and the tag index."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from itertools import islice
from math import inf, nan
from typing import NamedTuple

from app.core.events import Emitter
from app.core.library import Folder, Library, LibraryChange, LibraryImage
from app.core.query.language import KEYS, parse
from app.core.query.terms import WILD, Node, Not, Or, Query, Range, Term
from app.core.query.tokens import TokenCounts
from app.core.tags.index import TagIndex
from app.core.tags.splitting import SEPARATOR, fold, normalize, one_line
from app.core.tasks import Tasks

# When more images than this change at once, updating a column would block the window: it is rebuilt on demand.
_MAX_UPDATE = 2000
_MAX_EXAMINED = 20_000
"""Maximum number of images examined at once, in about 10 ms; examining all 100,000 would block the window for 60 ms."""
_MAX_REQUESTED = 2000
"""Maximum number of captions requested at once; with a low limit, edits waste less work."""
_CAPTION = frozenset({"caption", "file"})
# Keys answered by a lookup instead of a search. They are evaluated first, so the others search fewer images.
_LOOKED_UP = frozenset({"tag", "caption", "dup"})
_CONTENT = frozenset({"inspection", "file"})


class NumberColumns:
    """Columns of numbers by key, indexed by image id; NaN if missing.

    They are updated with the library; use them only on its thread.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._columns: dict[str, array[float]] = {}
        self._flags: dict[str, set[int]] = {}
        library.altered.connect(self._on_altered)
        if not library.images:
            self._columns = {key: array("d") for key in _VALUES}
            self._flags = {key: set() for key in _FLAGS}

    def between(self, key: str, low: float, high: float, ids: Set[int] | None) -> set[int]:
        """Return the images among `ids` (None: all) whose number is within [low, high]."""
        return between(self._columns.get(key) or self._build_column(key), low, high, ids)

    def having(self, key: str) -> Set[int]:
        """Return the images for which a flag is set (caption, mask, crop, excluded); do not modify the set."""
        if key not in self._flags:
            has = _FLAGS[key]
            self._flags[key] = {number for number, image in self._library.images.items() if has(image)}
        return self._flags[key]

    def _on_altered(self, altered: LibraryChange) -> None:
        """Update or drop the columns that a change to the library affects."""
        ids, has_moved = altered.added | altered.altered, altered.added or altered.removed
        for key in [*self._columns, *self._flags]:
            if not has_moved and KEYS[key].depends.isdisjoint(altered.what):
                continue
            if len(ids) > _MAX_UPDATE:
                self._columns.pop(key, None)
                self._flags.pop(key, None)
            elif key in self._flags:
                self._update_flags(key, ids | altered.removed)
            else:
                self._fill(self._columns[key], key, ids)
                for number in altered.removed:
                    self._columns[key][number] = nan

    def _update_flags(self, key: str, ids: Iterable[int]) -> None:
        images, having, has = self._library.images, self._flags[key], _FLAGS[key]
        for number in ids:
            if number in images and has(images[number]):
                having.add(number)
            else:
                having.discard(number)

    def _build_column(self, key: str) -> array[float]:
        column = self._columns[key] = array("d")
        self._fill(column, key, self._library.images)
        return column

    def _fill(self, column: array[float], key: str, ids: Iterable[int]) -> None:
        images, value_of = self._library.images, _VALUES[key]
        missing = max(ids, default=0) + 1 - len(column)
        if missing > 0:
            column.extend([nan] * missing)
        for number in ids:
            image = images.get(number)
            if image is not None:
                value = value_of(image)
                column[number] = nan if value is None else value


def between(column: Sequence[float], low: float, high: float, ids: Set[int] | None) -> set[int]:
    """Return the images among `ids` (None: all) whose number in a column is within [low, high]."""
    if ids is None:
        return {number for number, value in enumerate(column) if low <= value <= high}
    return {number for number in ids if low <= column[number] <= high}


def _short_side(image: LibraryImage) -> int | None:
    width, height = image.width, image.height
    return None if width is None or height is None else min(width, height)


def _ratio(image: LibraryImage) -> float | None:
    return image.width / image.height if image.width and image.height else None


_VALUES: dict[str, Callable[[LibraryImage], float | None]] = {
    "size": _short_side,
    "width": lambda image: image.width,
    "height": lambda image: image.height,
    "ratio": _ratio,
    "chars": lambda image: len(image.caption or ""),
    "rating": lambda image: image.rating,
}
_FLAGS: dict[str, Callable[[LibraryImage], bool]] = {
    "caption": lambda image: bool(image.caption) and not str(image.caption).isspace(),
    "mask": lambda image: image.mask,
    "crop": lambda image: image.crop is not None,
    "excluded": lambda image: image.excluded,
}


class TokenColumn:
    """Column of token counts by image id; NaN while unknown.

    It is updated with the library; use it only on its thread.
    """

    def __init__(self, library: Library, tasks: Tasks) -> None:
        self.more: Emitter[int] = Emitter()
        """Emitted when more counts are known, with the number of images still pending."""
        self._library, self._post = library, tasks.post
        self._counts = TokenCounts(tasks)
        self._column = array("d")
        self._unexamined: dict[int, None] = {}
        """Images whose captions have not been examined since the last change, in order."""
        self._requested: dict[int, None] = {}
        """Images whose captions are being counted, in request order."""
        self._scheduled = self._failed = False
        self._counts.counted.connect(lambda left: self._on_counted(left))
        library.altered.connect(self._on_altered)
        self._on_altered(LibraryChange(added=frozenset(library.images)))

    @property
    def pending(self) -> int:
        """Return the number of images whose tokens have yet to be counted; 0 while no query needs counts."""
        return len(self._unexamined) + len(self._requested) if self._requested or self._scheduled else 0

    def between(self, low: float, high: float, ids: Set[int] | None) -> set[int]:
        """Return the images among `ids` (None: all) with a known count within [low, high].

        Unknown counts are requested in the background.
        """
        self._request_unknown()
        return between(self._column, low, high, ids)

    def _request_unknown(self) -> None:
        """Store the counts that have become available, and request the next missing ones."""
        images, count = self._library.images, self._counts.count
        while self._requested and (known := count(images[first := next(iter(self._requested))].caption)) is not None:
            self._column[first] = known
            del self._requested[first]
        for number in list(islice(self._unexamined, _MAX_EXAMINED)):
            known = count(images[number].caption)
            if known is not None:
                self._column[number] = known
            elif len(self._requested) < _MAX_REQUESTED:
                self._requested[number] = None
            else:
                break
            del self._unexamined[number]
        self._counts.request(images[number].caption for number in self._requested)
        if self._unexamined and not self._requested and not self._scheduled:
            self._scheduled = True
            self._post(self._on_continue)

    def _on_continue(self) -> None:
        self._scheduled = False
        self._request_unknown()
        self.more.emit(self.pending)

    def _on_counted(self, left: int) -> None:
        """Store new counts. If the first requested one is still missing, counting failed: retry once, then give up."""
        first = next(iter(self._requested), None)
        again, self._failed = self._failed, not left and first is not None and self._unknown(first)
        if not self._failed:
            self._request_unknown()
        else:
            self._unexamined.update(self._requested)  # after the others: the failure may be due to these only
            self._requested.clear()
            if again:
                self._unexamined.clear()
        self.more.emit(self.pending)

    def _unknown(self, number: int) -> bool:
        return self._counts.count(self._library.images[number].caption) is None

    def _on_altered(self, altered: LibraryChange) -> None:
        """Mark the images whose captions changed as not examined."""
        changed = altered.added if _CAPTION.isdisjoint(altered.what) else altered.added | altered.altered
        missing = max(altered.added, default=0) + 1 - len(self._column)
        if missing > 0:
            self._column.extend([nan] * missing)
        for number in changed | altered.removed:
            self._column[number] = nan
            self._requested.pop(number, None)
        self._unexamined.update(dict.fromkeys(changed))
        for number in altered.removed:
            self._unexamined.pop(number, None)


Findings = Callable[[], Mapping[str, Collection[int]]]
"""Function that returns the image ids of each current health finding, by finding code."""


Ids = Set[int] | None
"""Images to search; None means all."""


class Matches(NamedTuple):
    """Images that match part of a query: `ids`, or all except `ids` if `others`, which makes negation free."""

    ids: Set[int]
    others: bool = False

    def among(self, ids: Set[int]) -> Set[int]:
        """Return the matches among `ids`."""
        return ids - self.ids if self.others else ids & self.ids


class PendingCount(NamedTuple):
    """Query key whose values are still being computed, and the number of images left."""

    key: str
    pending: int


class Finder:
    """Evaluator of queries, for the library's thread; a query takes a few milliseconds with 100,000 images."""

    def __init__(self, library: Library, index: TagIndex, tasks: Tasks, findings: Findings = dict) -> None:
        self.result_changed: Emitter[PendingCount] = Emitter()
        """Emitted when the last query may return a more complete result and should be run again."""
        self.findings = findings
        self._library = library
        self._index = index
        self._columns = NumberColumns(library)
        self._lengths = TokenColumn(library, tasks)
        self._lengths.more.connect(lambda pending: self.result_changed.emit(PendingCount("tokens", pending)))
        self._names: dict[int, str] = {}
        self._all: set[int] = set()
        self._copies: set[int] | None = None
        library.altered.connect(self._on_altered)
        self._on_altered(LibraryChange(added=frozenset(library.images)))
        self._terms: dict[str, Callable[[Term, Ids], Set[int] | Matches]] = {
            "": self._words,
            "tag": lambda term, _: self._tag(str(term.value)),
            "caption": lambda term, _: self._caption(str(term.value)),
            "name": lambda term, ids: self._by_name(str(term.value), ids),
            "folder": self._folder,
            "path": self._path,
            "tags": self._tag_counts,
            "tokens": lambda term, ids: self._lengths.between(*_bounds(term), ids),
            "missing": self._missing,
            "problem": lambda term, ids: self._problem(str(term.value), ids),
            "dup": lambda term, _: Matches(self._duplicates(), not term.value),
        }

    def find(self, query: Query | str) -> list[int]:
        """Return the ids of the matching images in library order. Raises QueryError if the text is invalid."""
        query = parse(query) if isinstance(query, str) else query
        images = self._library.images
        if query.root is None:
            return list(images)
        ids, others = self._evaluate(query.root, None)
        # With `others`, `ids` are the images to leave out, so the membership test is inverted.
        return [number for number in images if (number in ids) is not others]

    @property
    def pending(self) -> int:
        """Return the number of images whose token count the last query still waits for."""
        return self._lengths.pending

    @staticmethod
    def depends(query: Query) -> frozenset[str]:
        """Return which kinds of changes (as in `LibraryChange.what`) can alter the result of a query."""
        return frozenset().union(*(KEYS[term.key or "caption"].depends for term in query.terms()))

    def _evaluate(self, node: Node, ids: Ids) -> Matches:
        """Return the images that match part of a query; the result is only valid for images in `ids`."""
        if isinstance(node, Term):
            found = self._terms.get(node.key, self._by_value)(node, ids)
            return found if isinstance(found, Matches) else Matches(found)
        if isinstance(node, Not):
            found = self._evaluate(node.part, ids)
            return Matches(found.ids, not found.others)
        if isinstance(node, Or):
            return _union([self._evaluate(part, ids) for part in node.parts])
        left_out: set[int] = set()  # used until the first part that names its matches; before it, parts only exclude
        for part in sorted(node.parts, key=_cost):
            found = self._evaluate(part, None if ids is None else self._worth_searching(ids))
            if ids is not None:
                ids = found.among(ids)
            elif found.others:
                left_out |= found.ids
            else:
                ids = found.ids - left_out if left_out else found.ids
        return Matches(left_out, others=True) if ids is None else Matches(ids)

    def _worth_searching(self, ids: Set[int]) -> Ids:
        """Return the images to search, or None if iterating over all is faster than looking up each."""
        return ids if 2 * len(ids) < len(self._all) else None

    def _images(self, ids: Ids) -> Iterable[LibraryImage]:
        images = self._library.images
        return images.values() if ids is None else [images[number] for number in ids]

    def _words(self, term: Term, ids: Ids) -> Set[int]:
        text = str(term.value)
        return self._caption(text) | self._by_name(text, ids)

    def _tag(self, pattern: str) -> Set[int]:
        if WILD.search(pattern):
            return self._index.images_matching(_regex(fold(pattern)))
        return self._index.images_with(pattern.replace("\\*", "*").replace("\\?", "?"))

    def _caption(self, text: str) -> Set[int]:
        """Return the images whose caption contains this text.

        The index finds images with tags that contain each comma-separated part of the text. If there are several parts,
        the captions of these images are then searched for the whole text.
        """
        parts = [part.strip() for part in text.split(SEPARATOR)]
        found = [self._index.images_containing(part) for part in parts if part]
        if len(parts) == 1:
            return found[0]
        among: Ids = set.intersection(*found) if found else None
        text = fold(text)
        return {p.id for p in self._images(among) if p.caption and text in fold(one_line(p.caption))}

    def _by_name(self, text: str, ids: Ids) -> Set[int]:
        text = normalize(text)
        if ids is None:
            return {number for number, name in self._names.items() if text in name}
        return {number for number in ids if text in self._names[number]}

    def _folder(self, term: Term, ids: Ids) -> Set[int]:
        text = _with_slashes(str(term.value))
        inside = {folder for folder, path in self._folder_paths().items() if text in path}
        return {p.id for p in self._images(ids) if p.folder in inside}

    def _path(self, term: Term, ids: Ids) -> Set[int]:
        text = _with_slashes(str(term.value))
        folder_end, slash, name_start = text.rpartition("/")
        if not slash:
            return self._by_name(text, ids) | self._folder(term, ids)
        paths = self._folder_paths().items()
        inside = {folder for folder, path in paths if text in f"{path}/"}
        parents = {folder for folder, path in paths if path.endswith(folder_end)}
        images = self._library.images
        named = [number for number, name in self._names.items() if name.startswith(name_start)] if parents else []
        found = {number for number in named if images[number].folder in parents}
        return found | {p.id for p in self._images(ids) if p.folder in inside} if inside else found

    def _folder_paths(self) -> dict[Folder, str]:
        """Return the normalized path of each folder, starting with the name of the opened folder."""
        folders = {image.folder for image in self._library.images.values()}
        return {folder: normalize(folder_path(folder)) for folder in folders}

    def _by_value(self, term: Term, ids: Ids) -> Set[int] | Matches:
        """Return the images that match a term about a number or flag of the image itself."""
        if isinstance(term.value, Range):
            return self._columns.between(term.key, *_bounds(term), ids)
        return Matches(self._columns.having(term.key), not term.value)

    def _tag_counts(self, term: Term, _: Ids) -> Set[int]:
        low, high = _bounds(term)
        found = self._index.images_with_count(low, high)
        return found if low > 0 else found | (self._library.images.keys() - self._index.tagged)

    def _missing(self, term: Term, ids: Ids) -> Set[int] | Matches:
        what = str(term.value)
        if what in ("caption", "mask", "crop"):
            return Matches(self._columns.having(what), others=True)
        return Matches(self._columns.between(what, -inf, inf, ids), others=True)

    def _problem(self, text: str, ids: Ids) -> Set[int]:
        text = text.casefold()
        found = {p.id for p in self._images(ids) if p.problem and text in p.problem.casefold()}
        # An empty text skips informational findings; these are found only by name.
        return found | self._findings(lambda code: text in code.casefold() if text else not code.startswith("info."))

    def _findings(self, fits: Callable[[str], bool]) -> set[int]:
        """Return the images of all findings whose code passes `fits`, without images that no longer exist."""
        named = [ids for code, ids in self.findings().items() if fits(code)]
        return set().union(*named) & self._library.images.keys()

    def _duplicates(self) -> Set[int]:
        """Return the images that have an exact copy or, according to the health findings, a near duplicate."""
        if self._copies is None:
            images = self._library.images.values()
            copies = Counter(p.content for p in images if p.content)
            self._copies = {p.id for p in images if p.content and copies[p.content] > 1}
        return self._copies | self._findings(lambda code: "duplicate" in code)

    def _on_altered(self, altered: LibraryChange) -> None:
        """Update the image names and ids; discard the cached duplicates if images were added, removed or modified."""
        images, names = self._library.images, self._names
        for number in altered.removed:
            names.pop(number, None)
        self._all -= altered.removed
        self._all |= altered.added
        for number in altered.added:
            names[number] = normalize(images[number].name)
        if altered.added or altered.removed or not _CONTENT.isdisjoint(altered.what):
            self._copies = None


def _union(answers: list[Matches]) -> Matches:
    """Return the union of several matches.

    If any of them are complements, so is the union: it excludes the ids that all complements exclude and no other match
    contains.
    """
    excluded = [found.ids for found in answers if found.others]
    named = sorted((found.ids for found in answers if not found.others), key=len)
    if excluded:
        return Matches(set.intersection(*map(set, excluded)).difference(*named), others=True)
    return Matches(set(named.pop()).union(*named))  # copy the largest set at once and add the smaller ones


def folder_path(folder: Folder) -> str:
    """Return a folder's path, starting with the name of the opened folder, with "/" on all systems."""
    return "/".join((folder.root.name, *folder.path.relative_to(folder.root).parts))


def _bounds(term: Term) -> tuple[float, float]:
    """Return the inclusive bounds of a range term; an exact ratio matches within 0.005."""
    assert isinstance(term.value, Range)
    low, high = term.value.bounds()
    return (low - 0.005, high + 0.005) if term.key == "ratio" and low == high else (low, high)


def _regex(pattern: str) -> str:
    """Return the regular expression of a tag pattern with * and ?."""
    parts = re.split(r"(\\[*?]|[*?])", pattern)
    return "".join(
        {"*": ".*", "?": "."}.get(part) or re.escape(part.removeprefix("\\") if part in ("\\*", "\\?") else part)
        for part in parts
    )


def _with_slashes(text: str) -> str:
    return normalize(text).replace("\\", "/")


def _cost(node: Node) -> int:
    """Return the sort key by which the parts of a conjunction are evaluated, the cheapest first.

    Lookups come first, then searches, groups, and token counts.
    """
    if isinstance(node, Not):
        return _cost(node.part) + 1
    if isinstance(node, Term):
        return 0 if node.key in _LOOKED_UP else 4 if node.key == "tokens" else 2
    return 3
