"""Finds the pictures that a query asks for, in the library and the tag index."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from itertools import islice
from math import inf, nan
from typing import NamedTuple

from app.core.events import Emitter
from app.core.library import Altered, Folder, Library, LibraryImage
from app.core.query.language import KEYS, parse
from app.core.query.terms import WILD, Node, Not, Or, Query, Range, Term
from app.core.query.tokens import TokenCounts
from app.core.tags.index import TagIndex
from app.core.tags.splitting import SEPARATOR, fold, normalize, one_line
from app.core.tasks import Tasks

# More pictures than these at once would hold up the window: the column is made anew when it is asked for.
_SLICE = 2000
_AT_ONCE = 20_000
"""Pictures looked at in one go, some 10 ms; a query of 100,000 held up the window for 60."""
_ASKED = 2000
"""Captions that wait to be counted, at most: what is edited meanwhile is then not counted in vain."""
_CAPTION = frozenset({"caption", "file"})
# The answers of these keys are looked up, not searched for: they go first, and the others look only at what is left.
_LOOKED_UP = frozenset({"tag", "caption", "dup"})
_CONTENT = frozenset({"inspection", "file"})


class NumberColumns:
    """Numbers by key and id, NaN where there is none; kept up to date with the library, on the thread that owns it."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._columns: dict[str, array[float]] = {}
        self._having: dict[str, set[int]] = {}
        library.altered.connect(self._take)
        if not library.images:
            self._columns = {key: array("d") for key in _VALUES}
            self._having = {key: set() for key in _FLAGS}

    def between(self, key: str, low: float, high: float, ids: Set[int] | None) -> set[int]:
        """Return the pictures, of these or of all, whose number lies between both or is one of them."""
        return between(self._columns.get(key) or self._made(key), low, high, ids)

    def having(self, key: str) -> Set[int]:
        """Return the pictures that have a caption, a mask or a crop, or are excluded; not to be changed."""
        if key not in self._having:
            has = _FLAGS[key]
            self._having[key] = {number for number, image in self._library.images.items() if has(image)}
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
        images, having, has = self._library.images, self._having[key], _FLAGS[key]
        for number in ids:
            if number in images and has(images[number]):
                having.add(number)
            else:
                having.discard(number)

    def _made(self, key: str) -> array[float]:
        column = self._columns[key] = array("d")
        self._fill(column, key, self._library.images)
        return column

    def _fill(self, column: array[float], key: str, ids: Iterable[int]) -> None:
        images, value_of = self._library.images, _VALUES[key]
        room = max(ids, default=0) + 1 - len(column)
        if room > 0:
            column.extend([nan] * room)
        for number in ids:
            image = images.get(number)
            if image is not None:
                value = value_of(image)
                column[number] = nan if value is None else value


def between(column: Sequence[float], low: float, high: float, ids: Set[int] | None) -> set[int]:
    """Return the pictures, of these or of all, whose number in a column by id lies between both or is one of them."""
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
    "width": lambda picture: picture.width,
    "height": lambda picture: picture.height,
    "ratio": _ratio,
    "chars": lambda picture: len(picture.caption or ""),
    "rating": lambda picture: picture.rating,
}
_FLAGS: dict[str, Callable[[LibraryImage], bool]] = {
    "caption": lambda picture: bool(picture.caption) and not str(picture.caption).isspace(),
    "mask": lambda picture: picture.mask,
    "crop": lambda picture: picture.crop is not None,
    "excluded": lambda picture: picture.excluded,
}


class Lengths:
    """Counts by id, NaN while one is not known; kept up to date with the library, on the thread that owns it."""

    def __init__(self, library: Library, tasks: Tasks) -> None:
        self.more: Emitter[int] = Emitter()
        """More is known; of so many pictures it is still to be found out."""
        self._library, self._post = library, tasks.post
        self._counts = TokenCounts(tasks)
        self._column = array("d")
        self._unseen: dict[int, None] = {}
        """Pictures whose captions have not been looked at since they changed."""
        self._requested: dict[int, None] = {}
        """Those whose captions are being counted, in the order in which they were asked for."""
        self._soon = self._failed = False
        self._counts.counted.connect(lambda left: self._have(left))
        library.altered.connect(self._take)
        self._take(Altered(added=frozenset(library.images)))

    @property
    def pending(self) -> int:
        """Of how many pictures it is being found out; of none while no query asks for it."""
        return len(self._unseen) + len(self._requested) if self._requested or self._soon else 0

    def between(self, low: float, high: float, ids: Set[int] | None) -> set[int]:
        """Return the pictures, of these or of all, that are known to have so many; others are looked at behind."""
        self._look()
        return between(self._column, low, high, ids)

    def _look(self) -> None:
        """Take over what is known of some pictures' captions, and have the others counted."""
        images, count = self._library.images, self._counts.of
        while self._requested and (known := count(images[first := next(iter(self._requested))].caption)) is not None:
            self._column[first] = known
            del self._requested[first]
        for number in list(islice(self._unseen, _AT_ONCE)):
            known = count(images[number].caption)
            if known is not None:
                self._column[number] = known
            elif len(self._requested) < _ASKED:
                self._requested[number] = None
            else:
                break
            del self._unseen[number]
        self._counts.want(images[number].caption for number in self._requested)
        if self._unseen and not self._requested and not self._soon:
            self._soon = True
            self._post(self._go_on)

    def _go_on(self) -> None:
        self._soon = False
        self._look()
        self.more.emit(self.pending)

    def _have(self, left: int) -> None:
        """Hear that some were counted; where the first is still unknown, that failed: once more, then no more."""
        first = next(iter(self._requested), None)
        again, self._failed = self._failed, not left and first is not None and self._unknown(first)
        if not self._failed:
            self._look()
        else:
            self._unseen.update(self._requested)  # behind the others, of which none may be at fault
            self._requested.clear()
            if again:
                self._unseen.clear()
        self.more.emit(self.pending)

    def _unknown(self, number: int) -> bool:
        return self._counts.of(self._library.images[number].caption) is None

    def _take(self, altered: Altered) -> None:
        """Hear of what became different in the library."""
        changed = altered.added if _CAPTION.isdisjoint(altered.what) else altered.added | altered.altered
        room = max(altered.added, default=0) + 1 - len(self._column)
        if room > 0:
            self._column.extend([nan] * room)
        for number in changed | altered.removed:
            self._column[number] = nan
            self._requested.pop(number, None)
        self._unseen.update(dict.fromkeys(changed))
        for number in altered.removed:
            self._unseen.pop(number, None)


Findings = Callable[[], Mapping[str, Collection[int]]]
"""The pictures that health's findings name now, by the finding's code."""


Ids = Set[int] | None
"""Pictures among which to search; None: all."""


class Matches(NamedTuple):
    """The pictures that a part of a query finds; with `others` all but these, so that "not" turns nothing round."""

    ids: Set[int]
    others: bool = False

    def among(self, ids: Set[int]) -> Set[int]:
        """Return those of these pictures that it finds."""
        return ids - self.ids if self.others else ids & self.ids


class Counting(NamedTuple):
    """The term that cannot be answered fully yet, and how many captions or pictures it still waits for."""

    key: str
    pending: int


class Finder:
    """Answers queries on the thread that owns the library, in a few milliseconds at 100,000 pictures."""

    def __init__(self, library: Library, index: TagIndex, tasks: Tasks, findings: Findings = dict) -> None:
        self.more: Emitter[Counting] = Emitter()
        """More is known than when the last query was answered: ask again."""
        self.findings = findings
        self._library = library
        self._index = index
        self._columns = NumberColumns(library)
        self._lengths = Lengths(library, tasks)
        self._lengths.more.connect(lambda pending: self.more.emit(Counting("tokens", pending)))
        self._names: dict[int, str] = {}
        self._all: set[int] = set()
        self._copies: set[int] | None = None
        library.altered.connect(self._take)
        self._take(Altered(added=frozenset(library.images)))
        self._terms: dict[str, Callable[[Term, Ids], Set[int] | Matches]] = {
            "": self._words,
            "tag": lambda term, _: self._tag(str(term.value)),
            "caption": lambda term, _: self._caption(str(term.value)),
            "name": lambda term, ids: self._named(str(term.value), ids),
            "folder": self._folder,
            "path": self._path,
            "tags": self._tag_counts,
            "tokens": lambda term, ids: self._lengths.between(*_bounds(term), ids),
            "missing": self._missing,
            "problem": lambda term, ids: self._problem(str(term.value), ids),
            "dup": lambda term, _: Matches(self._duplicates(), not term.value),
        }

    def find(self, query: Query | str) -> list[int]:
        """Return the ids of the pictures that a query finds, in the library's order; a text may raise QueryError."""
        query = parse(query) if isinstance(query, str) else query
        images = self._library.images
        if query.root is None:
            return list(images)
        ids, others = self._answer(query.root, None)
        return [number for number in images if (number in ids) is not others]

    @property
    def pending(self) -> int:
        """How many captions the last query still waits for, to know their tokens."""
        return self._lengths.pending

    @staticmethod
    def depends(query: Query) -> frozenset[str]:
        """Return which changes of pictures can alter the query's answer, in the words of `Altered.what`."""
        return frozenset().union(*(KEYS[term.key or "caption"].depends for term in query.terms()))

    def _answer(self, node: Node, ids: Ids) -> Matches:
        """Return which pictures a part of a query finds; of others than `ids` it may say anything."""
        if isinstance(node, Term):
            found = self._terms.get(node.key, self._simple)(node, ids)
            return found if isinstance(found, Matches) else Matches(found)
        if isinstance(node, Not):
            found = self._answer(node.part, ids)
            return Matches(found.ids, not found.others)
        if isinstance(node, Or):
            return _any_of([self._answer(part, ids) for part in node.parts])
        left_out: set[int] = set()  # as long as no part has said which pictures it could be at all
        for part in sorted(node.parts, key=_effort):
            found = self._answer(part, None if ids is None else self._few(ids))
            if ids is not None:
                ids = found.among(ids)
            elif found.others:
                left_out |= found.ids
            else:
                ids = found.ids - left_out if left_out else found.ids
        return Matches(left_out, others=True) if ids is None else Matches(ids)

    def _few(self, ids: Set[int]) -> Ids:
        """Return the pictures among which to search, or None where a walk over all is shorter than looking each up."""
        return ids if 2 * len(ids) < len(self._all) else None

    def _images(self, ids: Ids) -> Iterable[LibraryImage]:
        images = self._library.images
        return images.values() if ids is None else [images[number] for number in ids]

    def _words(self, term: Term, ids: Ids) -> Set[int]:
        text = str(term.value)
        return self._caption(text) | self._named(text, ids)

    def _tag(self, pattern: str) -> Set[int]:
        if WILD.search(pattern):
            return self._index.images_matching(_regex(fold(pattern)))
        return self._index.images_with(pattern.replace("\\*", "*").replace("\\?", "?"))

    def _caption(self, text: str) -> Set[int]:
        """Find captions by the tags that hold each part between commas; across a comma, look at the captions too."""
        parts = [part.strip() for part in text.split(SEPARATOR)]
        found = [self._index.images_containing(part) for part in parts if part]
        if len(parts) == 1:
            return found[0]
        among: Ids = set.intersection(*found) if found else None
        text = fold(text)
        return {p.id for p in self._images(among) if p.caption and text in fold(one_line(p.caption))}

    def _named(self, text: str, ids: Ids) -> Set[int]:
        text = normalize(text)
        if ids is None:
            return {number for number, name in self._names.items() if text in name}
        return {number for number in ids if text in self._names[number]}

    def _folder(self, term: Term, ids: Ids) -> Set[int]:
        text = _slashed(str(term.value))
        inside = {folder for folder, way in self._ways().items() if text in way}
        return {p.id for p in self._images(ids) if p.folder in inside}

    def _path(self, term: Term, ids: Ids) -> Set[int]:
        text = _slashed(str(term.value))
        way_end, slash, name_start = text.rpartition("/")
        if not slash:
            return self._named(text, ids) | self._folder(term, ids)
        ways = self._ways().items()
        inside = {folder for folder, way in ways if text in f"{way}/"}
        before = {folder for folder, way in ways if way.endswith(way_end)}
        images = self._library.images
        named = [number for number, name in self._names.items() if name.startswith(name_start)] if before else []
        found = {number for number in named if images[number].folder in before}
        return found | {p.id for p in self._images(ids) if p.folder in inside} if inside else found

    def _ways(self) -> dict[Folder, str]:
        """Return the way of each folder, from the opened folder's name down."""
        folders = {image.folder for image in self._library.images.values()}
        return {folder: normalize(way_of(folder)) for folder in folders}

    def _simple(self, term: Term, ids: Ids) -> Set[int] | Matches:
        """Find by a number or a yes that the picture itself holds."""
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
        # What is only good to know is found by its name alone.
        return found | self._findings(lambda code: text in code.casefold() if text else not code.startswith("info."))

    def _findings(self, fits: Callable[[str], bool]) -> set[int]:
        """Return the pictures that findings of some kind name, less those that are gone by now."""
        named = [ids for code, ids in self.findings().items() if fits(code)]
        return set().union(*named) & self._library.images.keys()

    def _duplicates(self) -> Set[int]:
        """Return the pictures with the same bytes as another, and those that health found nearly the same."""
        if self._copies is None:
            images = self._library.images.values()
            copies = Counter(p.content for p in images if p.content)
            self._copies = {p.id for p in images if p.content and copies[p.content] > 1}
        return self._copies | self._findings(lambda code: "duplicate" in code)

    def _take(self, altered: Altered) -> None:
        """Hear of what became different in the library."""
        images, names = self._library.images, self._names
        for number in altered.removed:
            names.pop(number, None)
        self._all -= altered.removed
        self._all |= altered.added
        for number in altered.added:
            names[number] = normalize(images[number].name)
        if altered.added or altered.removed or not _CONTENT.isdisjoint(altered.what):
            self._copies = None


def _any_of(answers: list[Matches]) -> Matches:
    """Return what one of these finds: where some find all but a few, only those few are compared with the rest."""
    few = [found.ids for found in answers if found.others]
    named = sorted((found.ids for found in answers if not found.others), key=len)
    if few:
        return Matches(set.intersection(*map(set, few)).difference(*named), others=True)
    return Matches(set(named.pop()).union(*named))  # the largest is copied as a whole, the others one by one


def way_of(folder: Folder) -> str:
    """Return the folder's way from the name of the opened folder down, with "/" on every system."""
    return "/".join((folder.root.name, *folder.path.relative_to(folder.root).parts))


def _bounds(term: Term) -> tuple[float, float]:
    """Return the least and greatest number that a term asks for; a ratio is equal to two decimals."""
    assert isinstance(term.value, Range)
    low, high = term.value.bounds()
    return (low - 0.005, high + 0.005) if term.key == "ratio" and low == high else (low, high)


def _regex(pattern: str) -> str:
    """Return a tag's pattern with * and ? as a regular expression."""
    parts = re.split(r"(\\[*?]|[*?])", pattern)
    return "".join(
        {"*": ".*", "?": "."}.get(part) or re.escape(part.removeprefix("\\") if part in ("\\*", "\\?") else part)
        for part in parts
    )


def _slashed(text: str) -> str:
    return normalize(text).replace("\\", "/")


def _effort(node: Node) -> int:
    """Tell which part of an and to answer first: what is looked up, then what is searched for, then the rest."""
    if isinstance(node, Not):
        return _effort(node.part) + 1
    if isinstance(node, Term):
        return 0 if node.key in _LOOKED_UP else 4 if node.key == "tokens" else 2
    return 3
