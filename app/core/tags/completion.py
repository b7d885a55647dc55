"""Complete tags: first from the dataset, then from the user's tag lists.

A tag list is a file in `lists_folder()`. It is either CSV, as taggers ship it for danbooru and e621, or plain text with
one tag per line. The CSV columns are name, category, count and quoted aliases; the header line and all columns but the
name are optional. Impasto ships no lists, since the licenses of the well-known ones do not allow it.
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
from app.core.tags.splitting import Haystack, fold, is_emoticon
from app.core.tasks import Tasks, reraise
from app.core.words import full_message
from trainer.errors import ImpastoError
from trainer.protocol.places import home
from trainer.protocol.reading import UnusableFileError, open_file, reason_of

_SUFFIXES = (".csv", ".txt")
# The largest known list has 8 MB, so a file above this limit is no tag list.
_MAX_BYTES = 64 * 2**20
_MAX_TAG_LENGTH = 300  # characters
_HEADER_NAMES = {"name", "tag", "tags"}
_STYLE_SAMPLE = 5000  # tags that decide how the dataset writes tags


@dataclass(frozen=True, slots=True)
class Word:
    """A tag in a list, its use count on the site that the list comes from (0 if unknown), and its aliases."""

    name: str
    count: int = 0
    category: int | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TagList:
    """Content of a tag list file, with the number of unusable lines and the line number of the first one."""

    path: Path
    words: tuple[Word, ...]
    bad_lines: int = 0
    first_bad: int | None = None

    def fault(self) -> str | None:
        """Return a message about the unusable lines, or None if there are none."""
        if not self.bad_lines:
            return None
        name, first = self.path.name, self.first_bad
        if self.bad_lines == 1:
            return f"Skipped line {first} of {name}: it has no usable tag."
        return f"Skipped {self.bad_lines:,} lines of {name} without a usable tag; the first is line {first}."


@dataclass(frozen=True, slots=True)
class Match:
    """A list entry that matches the typed text; `alias` is the alias that matched, or None if the name did."""

    word: Word
    alias: str | None = None


def lists_folder() -> Path:
    """Return the per-user folder of the user's tag lists."""
    return home() / "tags"


def read_lists(folder: Path) -> tuple[list[TagList], list[ImpastoError]]:
    """Return all lists in a folder in name order, and the errors of unreadable ones; both empty if it is missing."""
    lists, errors = [], []
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix.casefold() in _SUFFIXES)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [_unreadable(folder, str(error.strerror or error))]
    for path in paths:
        try:
            lists.append(read_list(path))
        except ImpastoError as error:
            errors.append(error)
    return lists, errors


def read_list(path: Path) -> TagList:
    """Read one list; takes about half a second for 140,000 lines.

    Raises:
        ImpastoError: The file cannot be read, is not text, or is too large.
    """
    text = _text(path)
    words, bad, first = [], 0, None
    as_csv = path.suffix.casefold() == ".csv"
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or (number == 1 and line.split(",")[0].strip().casefold() in _HEADER_NAMES):
            continue
        word = _csv_word(line) if as_csv else _plain_word(line)
        if word:
            words.append(word)
        else:
            bad, first = bad + 1, first or number
    return TagList(path, tuple(words), bad, first)


class Vocabulary:
    """Merged words from several lists, searchable by name and alias; built by a worker and immutable."""

    def __init__(self, lists: Iterable[TagList] = ()) -> None:
        self.words = sorted(
            _merged(word for tag_list in lists for word in tag_list.words), key=lambda word: -word.count
        )
        # Each name and alias with the index of its word, in the order of popularity.
        self._names = [(text, rank) for rank, word in enumerate(self.words) for text in (word.name, *word.aliases)]
        self._keys = Haystack(key_of(text) for text, _ in self._names)
        # Indices into `_names` in alphabetical order, for a binary search by prefix.
        self._alphabet = array("I", sorted(range(len(self._names)), key=self._keys.__getitem__))

    def __len__(self) -> int:
        return len(self.words)

    def complete(self, typed: str, limit: int = 20) -> list[Match]:
        """Return words that start with the typed text, the most popular first, then words that contain it."""
        part = key_of(typed)
        if not part:
            return []
        places = self._with_prefix(part)
        found: dict[int, Match] = {}
        # Several names of one word may match, so read more places until there are enough different words.
        seen = 0
        while len(found) < limit and seen < len(places):
            seen = 4 * max(seen, limit)
            for place in nsmallest(seen, places):
                self._add_match(place, found)
        if len(found) < limit and len(part) > 1:
            for place in self._keys.containing(part):
                self._add_match(place, found)
                if len(found) >= limit:
                    break
        return list(found.values())[:limit]

    def _add_match(self, place: int, found: dict[int, Match]) -> None:
        text, rank = self._names[place]
        word = self.words[rank]
        found.setdefault(rank, Match(word, None if text == word.name else text))

    def _with_prefix(self, part: str) -> array[int]:
        start = bisect_left(self._alphabet, part, key=self._keys.__getitem__)
        end = bisect_left(self._alphabet, part + "\U0010ffff", lo=start, key=self._keys.__getitem__)
        return self._alphabet[start:end]


def key_of(text: str) -> str:
    """Return the key by which a string is compared: folded, with underscores replaced by spaces."""
    return fold(text).replace("_", " ")


def _merged(words: Iterable[Word]) -> Iterator[Word]:
    """Yield each word once, with its largest count and all its aliases."""
    known: dict[str, Word] = {}
    for word in words:
        former = known.get(word.name)
        if former:
            first, second = sorted((former, word), key=lambda entry: -entry.count)
            aliases = tuple(dict.fromkeys(first.aliases + second.aliases))
            word = Word(word.name, first.count, first.category, aliases)
        known[word.name] = word
    return iter(known.values())


def _csv_word(line: str) -> Word | None:
    """Return the word in a line, or None if the line is not valid.

    Lines are parsed one at a time: a stray quote then affects only its own line.
    """
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
    return 0 < len(name.strip()) <= _MAX_TAG_LENGTH and name.isprintable() and "," not in name


def _text(path: Path) -> str:
    """Return a list's text, decoded as UTF-16 if it has a byte order mark, else as UTF-8 or Windows cp1252."""
    try:
        with open_file(path, "stream") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, UnusableFileError) as error:
        raise _unreadable(path, reason_of(error)) from error
    if len(data) > _MAX_BYTES:
        raise _unreadable(path, f"it is larger than {_MAX_BYTES // 2**20} MiB")
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
        f"Could not read the tag list {path}: {reason}.",
        "Replace it with a CSV or plain text list of tags, or remove it from the folder.",
    )


@dataclass(frozen=True, slots=True)
class Style:
    """How a dataset writes tags: underscores or spaces, escaped or plain parentheses."""

    underscores: bool = False
    escapes: bool = False

    def write(self, name: str) -> str:
        """Return a tag from a list in this style."""
        if not is_emoticon(name):
            name = name.replace(" ", "_") if self.underscores else name.replace("_", " ")
        if not self.escapes:
            return name
        return re.sub(r"(?<!\\)([()])", r"\\\1", name)


@dataclass(frozen=True, slots=True)
class Completion:
    """A suggestion: the tag as it would be written, and where it comes from."""

    tag: str
    images: int
    """Number of images in the dataset with this tag; 0 if only a list has it."""
    popularity: int | None = None
    """Use count on the site that the list comes from; None if the tag comes from the dataset."""
    category: int | None = None
    alias: str | None = None
    """Alias that matched the typed text; None if the tag itself did."""


class Completer:
    """Tag completion for the thread that owns the library; takes less than 5 ms with lists of 140,000 tags."""

    def __init__(self, index: TagIndex, vocabulary: Vocabulary | None = None) -> None:
        self.loaded: Emitter[tuple[str, ...]] = Emitter()
        """Emitted when the lists have been read, with messages about files and lines that could not be used."""
        self.vocabulary = vocabulary or Vocabulary()
        """Words in the lists; replaced as a whole after a worker has read them."""
        self._index = index
        self._style: Style | None = None
        self._load: Callable[[], None] | None = None
        index.changed.connect(self._forget_style)

    def load_when_requested(self, tasks: Tasks, folder: Path) -> None:
        """Load the lists in a folder at the first completion, which keeps the app's start fast."""
        self._load = lambda: self.load(tasks, folder)

    def load(self, tasks: Tasks, folder: Path) -> None:
        """Read the tag lists in a folder on a worker; emit `loaded` when done."""

        def read() -> tuple[Vocabulary, list[str]]:
            lists, errors = read_lists(folder)
            messages = [*map(full_message, errors)]
            return Vocabulary(lists), messages + [fault for tag_list in lists if (fault := tag_list.fault())]

        def on_read(result: tuple[Vocabulary, list[str]]) -> None:
            self.vocabulary, messages = result
            self.loaded.emit(tuple(messages))

        tasks.run(read, on_read, reraise)

    @property
    def style(self) -> Style:
        """Return how the dataset writes its tags, judged by the first few thousand tags."""
        if self._style is None:
            self._style = style_of(list(islice(self._index, _STYLE_SAMPLE)))
        return self._style

    def complete(self, typed: str, limit: int = 12, exclude: Collection[str] = ()) -> list[Completion]:
        """Return suggestions for the typed text, without the tags in `exclude`."""
        typed = typed.strip()
        if not typed:
            return []
        if self._load:
            load, self._load = self._load, None
            load()
        present = {fold(tag) for tag in exclude}
        # Ask for more than `limit`, because the tags that are already present drop out at the end.
        wanted = limit + len(present)
        own = self._index.complete(typed, wanted) or self._index.complete(_with_other_spaces(typed), wanted)
        found = {fold(tag): Completion(tag, images) for tag, images in own}
        for match in self.vocabulary.complete(typed, wanted) if len(found) < wanted else ():
            word = match.word
            tag = self.style.write(word.name)
            images = len(self._index.images_with(tag))
            found.setdefault(fold(tag), Completion(tag, images, word.count, word.category, match.alias))
        return [completion for key, completion in found.items() if key not in present][:limit]

    def _forget_style(self, _: None) -> None:
        self._style = None


def style_of(tags: Collection[str]) -> Style:
    """Return the style of these tags; it uses underscores if more tags contain underscores than spaces."""
    words = [tag for tag in tags if not is_emoticon(tag)]
    spaced, joined = sum(" " in tag for tag in words), sum("_" in tag for tag in words)
    return Style(joined > spaced, any("\\(" in tag for tag in tags))


def _with_other_spaces(typed: str) -> str:
    """Return the text with its underscores replaced by spaces; if it has no underscores, do the reverse."""
    return typed.replace("_", " ") if "_" in typed else typed.replace(" ", "_")
