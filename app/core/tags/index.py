"""Which tag stands at which pictures: kept up to date with the library, one changed caption at a time."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain, islice
from typing import NamedTuple

from app.core.events import Emitter
from app.core.library import Altered, Library
from app.core.tags.splitting import Haystack, Lines, fold, split_tags
from app.core.tasks import Single, Tasks, in_turns

Row = tuple[str, ...]
"""The different tags of one picture, in the caption's order."""

# Pictures read at once: 500 captions of 20 tags take about 5 ms. More are read in slices, split by a worker.
_SLICE = 500
_TEXT_OF_CAPTION = frozenset({"caption", "file"})


class TagCount(NamedTuple):
    """A tag and the number of pictures that have it."""

    tag: str
    images: int


class TagIndex:
    """Tags of all pictures of the library; it belongs to the thread that owns the library.

    With `tasks`, more than a few hundred changed pictures are read in slices, and `pending` counts those still to
    come; without, everything is read at once. Each tag costs a set of ids, each picture a tuple of shared strings.
    """

    def __init__(self, library: Library, tasks: Tasks | None = None, lines: Lines = "caption") -> None:
        self.changed: Emitter[None] = Emitter()
        """Tags or their counts are different now."""
        self._library, self._lines = library, lines
        self._rows: dict[int, Row] = {}
        self._with: dict[str, set[int]] = {}
        self._texts = Haystack()
        self._number: dict[str, int] = {}
        self._tag: dict[int, str] = {}
        self._variants: dict[str, set[str]] = {}
        self._sorted: list[tuple[str, str]] | None = None
        self._waiting: dict[int, None] = {}
        self._reading = Single(tasks) if tasks is not None else None
        """None: everything is read at once."""
        library.altered.connect(self._take)
        self._take(Altered(added=frozenset(library.images)))

    @property
    def pending(self) -> int:
        """How many pictures are still to be read."""
        return len(self._waiting)

    def settle(self) -> None:
        """Read now whatever is still to be read."""
        waiting, self._waiting = list(self._waiting), {}
        if waiting:
            self._read(waiting)

    def read_lines(self, lines: Lines) -> None:
        """Read captions of several lines in another way from now on."""
        if lines != self._lines:
            self._lines = lines
            images = self._library.images.items()
            several = frozenset(number for number, one in images if one.caption and "\n" in one.caption.strip())
            self._take(Altered(altered=several, what=frozenset({"caption"})))

    def __len__(self) -> int:
        return len(self._with)

    def __iter__(self) -> Iterator[str]:
        return iter(self._with)

    def __contains__(self, tag: object) -> bool:
        return tag in self._with

    def count(self, tag: str) -> int:
        """Return how many pictures have exactly this tag."""
        return len(self._with.get(tag, ()))

    def counts(self) -> dict[str, int]:
        """Return the number of pictures by tag."""
        return {tag: len(ids) for tag, ids in self._with.items()}

    def images_with(self, tag: str) -> Set[int]:
        """Return the ids of the pictures with this tag, whatever its capitals and escapes; not to be changed."""
        tags = self.spellings(tag)
        return self._with[tags[0]] if len(tags) == 1 else self._union(tags)

    def spellings(self, tag: str) -> list[str]:
        r"""Return the tags that differ from this one in capitals and escaped parentheses only, itself included."""
        key = fold(tag)
        plain = [key] if key in self._with and fold(key) == key else []
        return plain + sorted(self._variants.get(key, ()))

    def images_matching(self, pattern: str) -> set[int]:
        """Return the ids of the pictures with a tag that a regular expression describes, folded, from end to end."""
        return self._union(self._tag[number] for number in self._texts.matching(pattern))

    def images_containing(self, part: str) -> set[int]:
        """Return the ids of the pictures one of whose tags holds this text, capitals or not."""
        return self._union(self._tag[number] for number in self._texts.containing(fold(part)))

    @property
    def tagged(self) -> Set[int]:
        """The ids of all pictures that have a tag; not to be changed."""
        return self._rows.keys()

    def images_with_count(self, low: float, high: float) -> set[int]:
        """Return the ids of the pictures that have from `low` to `high` different tags, of those with any."""
        return {number for number, row in self._rows.items() if low <= len(row) <= high}

    def search(self, part: str) -> list[str]:
        """Return the tags that hold this text, capitals or not; all of them for an empty text."""
        part = fold(part)
        return [self._tag[number] for number in self._texts.containing(part)] if part else list(self._with)

    def row(self, image: int) -> Row:
        """Return one picture's different tags."""
        return self._rows.get(image, ())

    def rows(self, ids: Iterable[int]) -> list[Row]:
        """Return the tags of these pictures, to be counted here or by a worker; nothing of it ever changes."""
        rows = self._rows
        return [rows[number] for number in ids if number in rows]

    def together(self, tag: str, top: int = 20) -> list[TagCount]:
        """Return the tags that stand most often beside this one; about 1 ms for each 1,000 pictures that have it."""
        return beside(self.rows(self.images_with(tag)), tag, top)

    def complete(self, typed: str, limit: int = 20) -> list[TagCount]:
        """Return tags that begin with the text, the most frequent first, then tags that hold it further on."""
        part = fold(typed)
        if not part:
            return [self._counted(tag) for tag in self._most_frequent(self._with, limit)]
        first = self._beginning_with(part)
        found = self._most_frequent(first, limit)
        if len(found) < limit and len(part) > 1:
            begun = set(first)
            further = (self._tag[number] for number in self._texts.containing(part))
            found += self._most_frequent([tag for tag in further if tag not in begun], limit - len(found))
        return [self._counted(tag) for tag in found]

    def _counted(self, tag: str) -> TagCount:
        return TagCount(tag, len(self._with[tag]))

    def _most_frequent(self, tags: Iterable[str], limit: int) -> list[str]:
        return nsmallest(limit, tags, key=lambda tag: (-len(self._with[tag]), tag))

    def _beginning_with(self, part: str) -> list[str]:
        if self._sorted is None:
            self._sorted = sorted((self._texts[number], tag) for tag, number in self._number.items())
        start = bisect_left(self._sorted, (part,))
        end = bisect_left(self._sorted, (part + chr(sys.maxunicode),))
        return [tag for _, tag in islice(self._sorted, start, end)]

    def _union(self, tags: Iterable[str]) -> set[int]:
        return set().union(*(self._with[tag] for tag in tags))

    def _take(self, altered: Altered) -> None:
        """Hear of what became different in the library."""
        for number in altered.removed:
            self._waiting.pop(number, None)
        self._enter((number, ()) for number in altered.removed)
        ids = altered.added
        if not _TEXT_OF_CAPTION.isdisjoint(altered.what):
            ids = ids | altered.altered
        if self._reading is None or (len(ids) <= _SLICE and not self._waiting):
            self._read(ids)
        else:
            self._waiting.update(dict.fromkeys(ids))
            self._go_on()
        if altered.removed and not ids:
            self.changed.emit(None)

    def _read(self, ids: Iterable[int]) -> None:
        images = self._library.images
        if self._enter((number, row_of(images[number].caption, self._lines)) for number in ids if number in images):
            self.changed.emit(None)

    def _go_on(self) -> None:
        """Let a worker split the next slice's captions, and enter what came of it."""
        if self._reading is None or self._reading.busy or not self._waiting:
            return
        images = self._library.images
        ids = list(islice(self._waiting, _SLICE))
        texts = [(number, images[number].caption) for number in ids if number in images]
        lines = self._lines
        self._reading.run(
            lambda: [(number, text, row_of(text, lines)) for number, text in in_turns(texts)],
            lambda split: self._have(split, lines),
        )

    def _have(self, split: Sequence[tuple[int, str | None, Row]], lines: Lines) -> None:
        images = self._library.images
        # Captions that changed meanwhile wait on, or were read with `settle`.
        known = [
            (number, row)
            for number, text, row in split
            if number in self._waiting and number in images and images[number].caption == text and lines == self._lines
        ]
        for number, _ in known:
            del self._waiting[number]
        self._enter(known)
        self._go_on()
        self.changed.emit(None)

    def _enter(self, rows: Iterable[tuple[int, Row]]) -> bool:
        """Replace the tags of pictures; return whether any was different."""
        different = False
        for number, row in rows:
            before = self._rows.get(number, ())
            if row == before:
                continue
            different = True
            for tag in set(before).difference(row):
                self._discard(tag, number)
            for tag in row if not before else set(row).difference(before):
                ids = self._with.get(tag)
                if ids is None:
                    ids = self._begin(tag)
                ids.add(number)
            if row:
                self._rows[number] = row
            else:
                del self._rows[number]
        return different

    def _begin(self, tag: str) -> set[int]:
        """Enter a tag that no picture had."""
        key = fold(tag)
        self._number[tag] = number = self._texts.add(key)
        self._tag[number] = tag
        if key != tag:
            self._variants.setdefault(key, set()).add(tag)
        if self._sorted is not None:
            if self._waiting:
                self._sorted = None
            else:
                insort(self._sorted, (key, tag))
        return self._with.setdefault(tag, set())

    def _discard(self, tag: str, number: int) -> None:
        """Take a picture from a tag, and the tag out when it was the last."""
        ids = self._with[tag]
        ids.discard(number)
        if ids:
            return
        del self._with[tag]
        place = self._number.pop(tag)
        key = self._texts[place]
        self._texts.remove(place)
        del self._tag[place]
        if key != tag:
            self._variants[key].discard(tag)
            if not self._variants[key]:
                del self._variants[key]
        if self._sorted is not None:
            del self._sorted[bisect_left(self._sorted, (key, tag))]


def row_of(caption: str | None, lines: Lines = "caption") -> Row:
    """Return a caption's different tags as shared strings."""
    return tuple(dict.fromkeys(map(sys.intern, split_tags(caption, lines))))


def count_tags(rows: Iterable[Row]) -> Counter[str]:
    """Return the number of pictures by tag among these.

    In portions: to count the 2,000,000 tags of 100,000 pictures at once would hold up all other threads for 0.1 s.
    """
    counts, rest = Counter[str](), iter(rows)
    for some in in_turns(iter(lambda: list(islice(rest, _SLICE)), [])):
        counts.update(chain.from_iterable(some))
    return counts


def beside(rows: Iterable[Row], tag: str, top: int) -> list[TagCount]:
    """Return the tags most frequent in these rows, all of which have `tag`, which is left out."""
    counts = count_tags(rows)
    key = fold(tag)
    others = ((other, count) for other, count in counts.items() if fold(other) != key)
    return [TagCount(*pair) for pair in nsmallest(top, others, key=lambda pair: (-pair[1], pair[0]))]


@dataclass(frozen=True, slots=True)
class Summary:
    """Of captions; `common` in the order of the first one, `mixed` the most frequent first."""

    captions: int
    common: tuple[str, ...]
    mixed: tuple[TagCount, ...]
    missing: int
    """Pictures without caption file."""
    empty: int
    """Caption files in which nothing stands."""


def summarise(captions: Iterable[str | None], lines: Lines = "caption") -> Summary:
    """Count tags over captions, each once a caption; some 10 us a caption."""
    counts: Counter[str] = Counter()
    number = missing = empty = 0
    for number, caption in enumerate(captions, start=1):  # noqa: B007 - the last one is their count
        missing += caption is None
        empty += caption is not None and not caption.strip()
        counts.update(list(dict.fromkeys(split_tags(caption, lines))))
    common = tuple(tag for tag, count in counts.items() if count == number)
    mixed = tuple(TagCount(tag, count) for tag, count in counts.most_common() if count < number)
    return Summary(number, common, mixed, missing, empty)
