"""Index the images by tag, and update the index caption by caption as the library changes."""

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
from app.core.library import Library, LibraryChange
from app.core.tags.splitting import Haystack, Lines, fold, split_tags
from app.core.tasks import ExclusiveTask, Tasks, iterate_yielding

Row = tuple[str, ...]
"""The distinct tags of one image, in caption order."""

# Images indexed in one go: 500 captions of 20 tags take about 5 ms. More are split by a worker, slice by slice.
_SLICE = 500
_CAPTION_FIELDS = frozenset({"caption", "file"})


class TagCount(NamedTuple):
    """A tag and the number of images that have it."""

    tag: str
    images: int


class TagIndex:
    """Index of the tags of all images in the library, for the thread that owns the library.

    With `tasks`, more than a few hundred changed images are read in slices, and `pending` counts the rest. Without
    `tasks`, everything is read at once. It stores a set of ids per tag and a tuple of shared strings per image.
    """

    def __init__(self, library: Library, tasks: Tasks | None = None, lines: Lines = "caption") -> None:
        self.changed: Emitter[None] = Emitter()
        """Emitted when tags or their counts have changed."""
        self._library, self._lines = library, lines
        self._rows: dict[int, Row] = {}
        self._images_by_tag: dict[str, set[int]] = {}
        """Image ids by tag."""
        self._texts = Haystack()
        """Folded tags, for searches."""
        self._number_by_tag: dict[str, int] = {}
        """Number of each tag's folded form in `_texts`; `_tag_by_number` is the inverse."""
        self._tag_by_number: dict[int, str] = {}
        self._variants: dict[str, set[str]] = {}
        """Tags that differ from their folded form, by folded form."""
        self._sorted: list[tuple[str, str]] | None = None
        """Sorted pairs (folded form, tag), for searches by prefix; None until needed."""
        self._pending: dict[int, None] = {}
        """Ids of the images still to be read, in order."""
        self._reading = ExclusiveTask(tasks) if tasks is not None else None
        """Task that splits captions; None if everything is read at once."""
        library.altered.connect(self._on_altered)
        self._on_altered(LibraryChange(added=frozenset(library.images)))

    @property
    def pending(self) -> int:
        """Return the number of images still to be read."""
        return len(self._pending)

    def settle(self) -> None:
        """Read all pending images now."""
        waiting, self._pending = list(self._pending), {}
        if waiting:
            self._read(waiting)

    def read_lines(self, lines: Lines) -> None:
        """Change how captions with several lines are read, and read these captions again."""
        if lines != self._lines:
            self._lines = lines
            images = self._library.images.items()
            several = frozenset(number for number, image in images if image.caption and "\n" in image.caption.strip())
            self._on_altered(LibraryChange(altered=several, what=frozenset({"caption"})))

    def __len__(self) -> int:
        return len(self._images_by_tag)

    def __iter__(self) -> Iterator[str]:
        return iter(self._images_by_tag)

    def __contains__(self, tag: object) -> bool:
        return tag in self._images_by_tag

    def count(self, tag: str) -> int:
        """Return the number of images with exactly this tag."""
        return len(self._images_by_tag.get(tag, ()))

    def counts(self) -> dict[str, int]:
        """Return the number of images with each tag."""
        return {tag: len(ids) for tag, ids in self._images_by_tag.items()}

    def images_with(self, tag: str) -> Set[int]:
        """Return the ids of the images with this tag in any spelling; callers must not change the set."""
        tags = self.spellings(tag)
        return self._images_by_tag[tags[0]] if len(tags) == 1 else self._union(tags)

    def spellings(self, tag: str) -> list[str]:
        r"""Return the tags that equal this one except for case or escaped parentheses."""
        key = fold(tag)
        plain = [key] if key in self._images_by_tag and fold(key) == key else []
        return plain + sorted(self._variants.get(key, ()))

    def images_matching(self, pattern: str) -> set[int]:
        """Return the ids of the images with a tag whose folded form fully matches a regular expression."""
        return self._union(self._tag_by_number[number] for number in self._texts.matching(pattern))

    def images_containing(self, part: str) -> set[int]:
        """Return the ids of the images with a tag that contains this text, ignoring case."""
        return self._union(self._tag_by_number[number] for number in self._texts.containing(fold(part)))

    @property
    def tagged(self) -> Set[int]:
        """Return the ids of all images that have a tag; callers must not change the set."""
        return self._rows.keys()

    def images_with_count(self, low: float, high: float) -> set[int]:
        """Return the ids of the images that have between `low` and `high` distinct tags, ignoring untagged images."""
        return {number for number, row in self._rows.items() if low <= len(row) <= high}

    def search(self, part: str) -> list[str]:
        """Return the tags that contain this text, ignoring case; all tags for an empty text."""
        part = fold(part)
        if not part:
            return list(self._images_by_tag)
        return [self._tag_by_number[number] for number in self._texts.containing(part)]

    def row(self, image: int) -> Row:
        """Return the distinct tags of one image."""
        return self._rows.get(image, ())

    def rows(self, ids: Iterable[int]) -> list[Row]:
        """Return the rows of these images, skipping untagged ones; rows are immutable, so a worker may count them."""
        rows = self._rows
        return [rows[number] for number in ids if number in rows]

    def co_occurring(self, tag: str, top: int = 20) -> list[TagCount]:
        """Return the tags that most often occur with this one; takes about 1 ms per 1,000 images with the tag."""
        return co_occurring(self.rows(self.images_with(tag)), tag, top)

    def complete(self, typed: str, limit: int = 20) -> list[TagCount]:
        """Return tags that start with the typed text, the most frequent first, then tags that contain it."""
        part = fold(typed)
        if not part:
            return [self._counted(tag) for tag in self._most_frequent(self._images_by_tag, limit)]
        starting = self._with_prefix(part)
        found = self._most_frequent(starting, limit)
        if len(found) < limit and len(part) > 1:
            seen = set(starting)
            containing = (self._tag_by_number[number] for number in self._texts.containing(part))
            found += self._most_frequent([tag for tag in containing if tag not in seen], limit - len(found))
        return [self._counted(tag) for tag in found]

    def _counted(self, tag: str) -> TagCount:
        return TagCount(tag, len(self._images_by_tag[tag]))

    def _most_frequent(self, tags: Iterable[str], limit: int) -> list[str]:
        return nsmallest(limit, tags, key=lambda tag: (-len(self._images_by_tag[tag]), tag))

    def _with_prefix(self, part: str) -> list[str]:
        if self._sorted is None:
            self._sorted = sorted((self._texts[number], tag) for tag, number in self._number_by_tag.items())
        start = bisect_left(self._sorted, (part,))
        end = bisect_left(self._sorted, (part + chr(sys.maxunicode),))  # after all texts that start with `part`
        return [tag for _, tag in islice(self._sorted, start, end)]

    def _union(self, tags: Iterable[str]) -> set[int]:
        return set().union(*(self._images_by_tag[tag] for tag in tags))

    def _on_altered(self, altered: LibraryChange) -> None:
        """Update the index after a change to the library."""
        for number in altered.removed:
            self._pending.pop(number, None)
        self._set_rows((number, ()) for number in altered.removed)
        ids = altered.added
        if not _CAPTION_FIELDS.isdisjoint(altered.what):
            ids = ids | altered.altered
        # A few captions, as after a keystroke, are read at once, which keeps the tag panel in step with typing.
        if self._reading is None or (len(ids) <= _SLICE and not self._pending):
            self._read(ids)
        else:
            self._pending.update(dict.fromkeys(ids))
            self._read_next_slice()
        if altered.removed and not ids:
            self.changed.emit(None)

    def _read(self, ids: Iterable[int]) -> None:
        images = self._library.images
        if self._set_rows((number, row_of(images[number].caption, self._lines)) for number in ids if number in images):
            self.changed.emit(None)

    def _read_next_slice(self) -> None:
        """Split the next slice of captions on a worker, then index them."""
        if self._reading is None or self._reading.busy or not self._pending:
            return
        images = self._library.images
        ids = list(islice(self._pending, _SLICE))
        texts = [(number, images[number].caption) for number in ids if number in images]
        lines = self._lines
        self._reading.run(
            lambda: [(number, text, row_of(text, lines)) for number, text in iterate_yielding(texts)],
            lambda split: self._on_split(split, lines),
        )

    def _on_split(self, split: Sequence[tuple[int, str | None, Row]], lines: Lines) -> None:
        images = self._library.images
        # Captions that changed while they were split stay pending, unless `settle` has read them.
        current = [
            (number, row)
            for number, text, row in split
            if number in self._pending and number in images and images[number].caption == text and lines == self._lines
        ]
        for number, _ in current:
            del self._pending[number]
        self._set_rows(current)
        self._read_next_slice()
        self.changed.emit(None)

    def _set_rows(self, rows: Iterable[tuple[int, Row]]) -> bool:
        """Replace the tags of images and return whether any row changed."""
        changed = False
        for number, row in rows:
            before = self._rows.get(number, ())
            if row == before:
                continue
            changed = True
            for tag in set(before).difference(row):
                self._discard(tag, number)
            for tag in row if not before else set(row).difference(before):
                ids = self._images_by_tag.get(tag)
                if ids is None:
                    ids = self._add_tag(tag)
                ids.add(number)
            if row:
                self._rows[number] = row
            else:
                del self._rows[number]
        return changed

    def _add_tag(self, tag: str) -> set[int]:
        """Add a tag that no image had, and return its empty set of ids."""
        key = fold(tag)
        self._number_by_tag[tag] = number = self._texts.add(key)
        self._tag_by_number[number] = tag
        if key != tag:
            self._variants.setdefault(key, set()).add(tag)
        if self._sorted is not None:
            if self._pending:  # many more tags may follow: sorting once costs less than inserting each
                self._sorted = None
            else:
                insort(self._sorted, (key, tag))
        return self._images_by_tag.setdefault(tag, set())

    def _discard(self, tag: str, number: int) -> None:
        """Remove an image from a tag; remove the tag too if this was its last image."""
        ids = self._images_by_tag[tag]
        ids.discard(number)
        if ids:
            return
        del self._images_by_tag[tag]
        place = self._number_by_tag.pop(tag)
        key = self._texts[place]
        self._texts.remove(place)
        del self._tag_by_number[place]
        if key != tag:
            self._variants[key].discard(tag)
            if not self._variants[key]:
                del self._variants[key]
        if self._sorted is not None:
            del self._sorted[bisect_left(self._sorted, (key, tag))]


def row_of(caption: str | None, lines: Lines = "caption") -> Row:
    """Return the distinct tags of a caption as interned strings."""
    return tuple(dict.fromkeys(map(sys.intern, split_tags(caption, lines))))


def count_tags(rows: Iterable[Row]) -> Counter[str]:
    """Return the number of these rows that contain each tag.

    Rows are counted in slices: counting the 2,000,000 tags of 100,000 images at once would block all other threads for
    0.1 s.
    """
    counts, rest = Counter[str](), iter(rows)
    for part in iterate_yielding(iter(lambda: list(islice(rest, _SLICE)), [])):
        counts.update(chain.from_iterable(part))
    return counts


def co_occurring(rows: Iterable[Row], tag: str, top: int) -> list[TagCount]:
    """Return the most frequent tags in these rows, which all contain `tag`; spellings of `tag` are left out."""
    counts = count_tags(rows)
    key = fold(tag)
    others = ((other, count) for other, count in counts.items() if fold(other) != key)
    return [TagCount(*pair) for pair in nsmallest(top, others, key=lambda pair: (-pair[1], pair[0]))]


@dataclass(frozen=True, slots=True)
class Summary:
    """Tags of several captions.

    `common` tags, which all captions have, are in the order of the first caption; `mixed` tags are sorted by frequency.
    """

    captions: int
    common: tuple[str, ...]
    mixed: tuple[TagCount, ...]
    missing: int
    """Number of images without a caption file."""
    empty: int
    """Number of images with an empty caption file."""


def summarize(captions: Iterable[str | None], lines: Lines = "caption") -> Summary:
    """Summarize the tags of captions; each tag counts once per caption. Takes about 10 us per caption."""
    counts: Counter[str] = Counter()
    number = missing = empty = 0
    for number, caption in enumerate(captions, start=1):  # noqa: B007 - its last value is the number of captions
        missing += caption is None
        empty += caption is not None and not caption.strip()
        counts.update(list(dict.fromkeys(split_tags(caption, lines))))
    common = tuple(tag for tag, count in counts.items() if count == number)
    mixed = tuple(TagCount(tag, count) for tag, count in counts.most_common() if count < number)
    return Summary(number, common, mixed, missing, empty)
