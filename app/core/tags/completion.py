"""Proposes the tag that somebody is about to type: the dataset's own first, then those of the tag lists.

Lists of tags that people use elsewhere, with how popular each is and its other names: the user's own files.

A list is a file in the folder `lists_folder()`. Either it is CSV as taggers ship it for danbooru and e621, without or
with a line of titles: name, category, count and, in quotes, aliases, of which all but the name may be missing; or it
is plain text, one tag a line. Impasto ships none: the well-known ones come under no license that lets it.
"""

from __future__ import annotations

import codecs
import csv
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from pathlib import Path

from app.core.events import Emitter
from app.core.tags.index import TagIndex
from app.core.tags.splitting import Haystack, fold, is_face
from app.core.tasks import Tasks, raise_again
from app.core.words import in_words
from trainer.errors import ImpastoError
from trainer.protocol.places import home
from trainer.protocol.reading import UnusableFileError, open_file, reason_of

_SUFFIXES = (".csv", ".txt")
# The largest list known has 8 MB. What is far larger is something else.
_LARGEST = 64 * 2**20
_LONGEST = 300  # characters of one tag
_TITLES = {"name", "tag", "tags"}
_SAMPLE = 5000


@dataclass(frozen=True, slots=True)
class Word:
    """A tag of a list, how often it is used where the list comes from (0: not said), and its other names."""

    name: str
    count: int = 0
    category: int | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TagList:
    """What one file holds, and how many of its lines could not be used, the first of them by its number."""

    path: Path
    words: tuple[Word, ...]
    bad_lines: int = 0
    first_bad: int | None = None

    def fault(self) -> str | None:
        """Return a sentence about the lines that could not be used."""
        if not self.bad_lines:
            return None
        lines = "1 line" if self.bad_lines == 1 else f"{self.bad_lines:,} lines"
        return f"{lines} of {self.path.name} hold no tag and were passed over, the first is line {self.first_bad}."


@dataclass(frozen=True, slots=True)
class Match:
    """A word of the lists that fits what was typed; `alias` is the other name that did, None for its own name."""

    word: Word
    alias: str | None = None


def lists_folder() -> Path:
    """Return the per-user folder in which the user's tag lists lie."""
    return home() / "tags"


def read_lists(folder: Path) -> tuple[list[TagList], list[ImpastoError]]:
    """Read every list of a folder, by name, and say which cannot be read; a folder that is not there has none."""
    lists, faults = [], []
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix.casefold() in _SUFFIXES)
    except FileNotFoundError:
        return [], []
    except OSError as fault:
        return [], [_unreadable(folder, str(fault.strerror or fault))]
    for path in paths:
        try:
            lists.append(read_list(path))
        except ImpastoError as error:
            faults.append(error)
    return lists, faults


def read_list(path: Path) -> TagList:
    """Read one list: 140,000 lines in about half a second; raises ImpastoError where it is no text or too large."""
    text = _text(path)
    words, bad, first = [], 0, None
    as_csv = path.suffix.casefold() == ".csv"
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or (number == 1 and line.split(",")[0].strip().casefold() in _TITLES):
            continue
        word = _csv_word(line) if as_csv else _plain_word(line)
        if word:
            words.append(word)
        else:
            bad, first = bad + 1, first or number
    return TagList(path, tuple(words), bad, first)


class Vocabulary:
    """The words of several lists together, searched by any of their names; made by a worker, then never changed."""

    def __init__(self, lists: Iterable[TagList] = ()) -> None:
        self.words = sorted(_merged(word for one in lists for word in one.words), key=lambda word: -word.count)
        # Every name and alias, the most popular word's first, and the number of its word.
        self._names = [(text, rank) for rank, word in enumerate(self.words) for text in (word.name, *word.aliases)]
        self._keys = Haystack(key_of(text) for text, _ in self._names)
        # The same in alphabetical order, to find by beginnings.
        self._alphabet = array("I", sorted(range(len(self._names)), key=self._keys.__getitem__))

    def __len__(self) -> int:
        return len(self.words)

    def complete(self, typed: str, limit: int = 20) -> list[Match]:
        """Return the words that begin with the text, the most popular first, then those that hold it further on."""
        part = key_of(typed)
        if not part:
            return []
        places = self._beginning_with(part)
        found: dict[int, Match] = {}
        # A word may be met by many of its names: look at more places until there are words enough.
        looked = 0
        while len(found) < limit and looked < len(places):
            looked = 4 * max(looked, limit)
            for place in nsmallest(looked, places):
                self._match(place, found)
        if len(found) < limit and len(part) > 1:
            for place in self._keys.containing(part):
                self._match(place, found)
                if len(found) >= limit:
                    break
        return list(found.values())[:limit]

    def _match(self, place: int, found: dict[int, Match]) -> None:
        text, rank = self._names[place]
        word = self.words[rank]
        found.setdefault(rank, Match(word, None if text == word.name else text))

    def _beginning_with(self, part: str) -> array[int]:
        start = bisect_left(self._alphabet, part, key=self._keys.__getitem__)
        end = bisect_left(self._alphabet, part + "\U0010ffff", lo=start, key=self._keys.__getitem__)
        return self._alphabet[start:end]


def key_of(text: str) -> str:
    """Return the text as completion compares it: folded, underscores as spaces."""
    return fold(text).replace("_", " ")


def _merged(words: Iterable[Word]) -> Iterator[Word]:
    """Give each name once, with its largest count and all aliases."""
    known: dict[str, Word] = {}
    for word in words:
        former = known.get(word.name)
        if former:
            first, second = sorted((former, word), key=lambda one: -one.count)
            aliases = tuple(dict.fromkeys(first.aliases + second.aliases))
            word = Word(word.name, first.count, first.category, aliases)
        known[word.name] = word
    return iter(known.values())


def _csv_word(line: str) -> Word | None:
    """Read name, category, count and aliases; a line is read by itself, so that a stray quote spoils only its own."""
    try:
        name, *rest = next(csv.reader([line], skipinitialspace=True, strict=True))
    except csv.Error:
        return None
    category, count, aliases = [*(part.strip() for part in rest), "", "", ""][:3]
    if not _usable(name) or not all(number.isascii() and number.isdigit() for number in (category, count) if number):
        return None
    if len(category) > 3 or len(count) > 12:
        return None
    others = tuple(alias for part in aliases.split(",") if (alias := part.strip().removeprefix("/")))
    return Word(name.strip(), int(count or 0), int(category) if category else None, others)


def _plain_word(line: str) -> Word | None:
    return Word(line.strip()) if _usable(line) else None


def _usable(name: str) -> bool:
    return 0 < len(name.strip()) <= _LONGEST and name.isprintable() and "," not in name


def _text(path: Path) -> str:
    """Return a list's text: UTF-8, UTF-16 with its mark, else Windows' cp1252."""
    try:
        with open_file(path, "stream") as file:
            data = file.read(_LARGEST + 1)
    except (OSError, UnusableFileError) as fault:
        raise _unreadable(path, reason_of(fault)) from fault
    if len(data) > _LARGEST:
        raise _unreadable(path, f"it is larger than {_LARGEST // 2**20} MB")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace")
    if b"\0" in data:
        raise _unreadable(path, "it is not a text file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def _unreadable(path: Path, reason: str) -> ImpastoError:
    return ImpastoError(
        "tags.list_unreadable",
        f"The tag list {path} cannot be used: {reason}.",
        "Replace it by a CSV or a plain text list of tags, or remove it from the folder.",
    )


@dataclass(frozen=True, slots=True)
class Style:
    """How a dataset writes tags of several words, and whether it escapes parentheses for the prompt."""

    underscores: bool = False
    escapes: bool = False

    def write(self, name: str) -> str:
        """Return a list's tag as this dataset would write it."""
        if not is_face(name):
            name = name.replace(" ", "_") if self.underscores else name.replace("_", " ")
        if not self.escapes:
            return name
        return re.sub(r"(?<!\\)([()])", r"\\\1", name)


@dataclass(frozen=True, slots=True)
class Completion:
    """One proposal: the tag as it would be written, and why it is proposed."""

    tag: str
    images: int
    """How many pictures of the dataset have it; 0: it comes from a list."""
    popularity: int | None = None
    """How often it is used where the list comes from; None: no list has it."""
    category: int | None = None
    alias: str | None = None
    """The other name that was typed: the tag stands for it."""


class Completer:
    """Completes tags; belongs to the thread that owns the library. Under 5 ms with lists of 140,000 tags."""

    def __init__(self, index: TagIndex, vocabulary: Vocabulary | None = None) -> None:
        self.loaded: Emitter[tuple[str, ...]] = Emitter()
        """The lists are here; with sentences about what of them could not be used."""
        self.vocabulary = vocabulary or Vocabulary()
        """Replaced as a whole when a worker has read the lists."""
        self._index = index
        self._style: Style | None = None
        self._load: Callable[[], None] | None = None
        index.changed.connect(self._forget_style)

    def load_when_requested(self, tasks: Tasks, folder: Path) -> None:
        """Load the lists of a folder as soon as anybody completes a tag: the start of the app need not wait for it."""
        self._load = lambda: self.load(tasks, folder)

    def load(self, tasks: Tasks, folder: Path) -> None:
        """Have a worker read the tag lists of a folder; `loaded` tells when, and what is wrong with them."""

        def read() -> tuple[Vocabulary, list[str]]:
            lists, faults = read_lists(folder)
            said = [*map(in_words, faults)]
            return Vocabulary(lists), said + [fault for one in lists if (fault := one.fault())]

        def have(result: tuple[Vocabulary, list[str]]) -> None:
            self.vocabulary, faults = result
            self.loaded.emit(tuple(faults))

        tasks.run(read, have, raise_again)

    @property
    def style(self) -> Style:
        """How the dataset writes its tags: by the majority of the first few thousand."""
        if self._style is None:
            self._style = style_of(list(islice(self._index, _SAMPLE)))
        return self._style

    def complete(self, typed: str, limit: int = 12, besides: Collection[str] = ()) -> list[Completion]:
        """Return proposals for what was typed; `besides`: tags that are there already and need none."""
        typed = typed.strip()
        if not typed:
            return []
        if self._load:
            load, self._load = self._load, None
            load()
        kept = {fold(tag) for tag in besides}
        own = self._index.complete(typed, limit + len(kept)) or self._index.complete(_other(typed), limit + len(kept))
        found = {fold(tag): Completion(tag, images) for tag, images in own}
        for match in self.vocabulary.complete(typed, limit + len(kept)) if len(found) < limit + len(kept) else ():
            word = match.word
            tag = self.style.write(word.name)
            images = len(self._index.images_with(tag))
            proposal = Completion(tag, images, word.count, word.category, match.alias)
            found.setdefault(fold(tag), proposal)
        return [proposal for key, proposal in found.items() if key not in kept][:limit]

    def _forget_style(self, _: None) -> None:
        self._style = None


def style_of(tags: Collection[str]) -> Style:
    """Return the style of these tags: spaces unless more of them have underscores."""
    wordy = [tag for tag in tags if not is_face(tag)]
    spaced, joined = sum(" " in tag for tag in wordy), sum("_" in tag for tag in wordy)
    return Style(joined > spaced, any("\\(" in tag for tag in tags))


def _other(typed: str) -> str:
    """Return the text with spaces for underscores, or the other way round."""
    return typed.replace("_", " ") if "_" in typed else typed.replace(" ", "_")
