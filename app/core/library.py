"""Every picture of the open datasets, and the one place where what is known of them changes."""

from __future__ import annotations

import re
from bisect import bisect, bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from app.core.events import Emitter

_NUMBER = re.compile("[0-9]+")
_PORTION = 512
"""So many names are sorted at once on average, some thousand at most: Python's lock is held for it, 2 ms."""


def natural_key(name: str) -> str:
    """Return a text that sorts as people expect the name to: runs of digits by their value, letters without case.

    Names that differ in leading zeros or capitals alone still have keys of their own.
    """
    return f"{_NUMBER.sub(_sortable, name.casefold())}\0{name}"


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Return names in natural order; for workers: `sorted` would hold Python's lock for 40 ms at 100,000 names.

    A few of the names, in order, are the borders between portions that are sorted each on its own.
    """
    by_key = {natural_key(name): name for name in names}
    borders = sorted(islice(by_key, 0, None, _PORTION))
    portions: list[list[str]] = [[] for _ in range(len(borders) + 1)]
    for key in by_key:
        portions[bisect(borders, key)].append(key)
    return [by_key[key] for shard in portions for key in sorted(shard)]


def _sortable(number: re.Match[str]) -> str:
    """Put the count of digits in front of them, itself as digits, so that numbers keep their place before letters."""
    digits = number[0].lstrip("0")
    nines, rest = divmod(len(digits), 9)
    return "9" * nines + str(rest) + digits


Crop = tuple[float, float, float, float]
"""Left, top, right and bottom as fractions of the upright picture, as impasto.jsonl keeps them."""
Field = Literal["caption", "rating", "excluded", "crop"]
"""What the user can change of a picture."""
Value = str | int | bool | Crop | None
FolderField = Literal["repeats", "regularization", "trigger"]
"""What the user can change of a folder."""
Fact = Literal["size", "file", "problem", "mask", "inspection", "folder"]
"""What a look at the disk can show of a picture."""


@dataclass(slots=True, eq=False)
class Folder:
    """One directory of a dataset: `root` is the folder that the user opened, this one or one above it."""

    path: Path
    root: Path
    repeats: int | None = None
    regularization: bool = False
    trigger: str | None = None


@dataclass(slots=True, eq=False)
class LibraryImage:
    """One picture; only `Library.apply` and `Library.learn` change it, on the thread that owns the library."""

    id: int
    """Its number in this session, never used again."""
    folder: Folder
    name: str
    bytes: int = 0
    changed_ns: int = 0
    """When the file was last written."""
    width: int | None = None
    """Upright pixels; None until somebody has looked."""
    height: int | None = None
    caption: str | None = None
    """The caption file's text as it stands, None where there is none."""
    rating: int | None = None
    excluded: bool = False
    crop: Crop | None = None
    clash: bool = False
    """Whether it has several captions that differ, of which only the first counts."""
    mask: bool = False
    """Whether NAME-masklabel.png lies beside it."""
    mask_changed_ns: int = 0
    """When that was last written."""
    problem: str | None = None
    """Why it cannot be used: a sentence."""
    content: str | None = None
    """SHA-256 of its bytes in hex; None until it was inspected."""
    fingerprint: str | None = None
    """Perceptual hash in hex, with the sizes of an inspection."""

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self.folder.path / self.name

    def value(self, field: Field) -> Value:
        """Return what the user can change."""
        value: Value = getattr(self, field)
        return value


class ValueChange(NamedTuple):
    """One value of one picture before and after."""

    image: int
    field: Field
    before: Value
    after: Value

    def inverse(self) -> ValueChange:
        """Return the change that takes this one back."""
        return ValueChange(self.image, self.field, self.after, self.before)


class FolderChange(NamedTuple):
    """One fact of one folder before and after."""

    folder: Folder
    field: FolderField
    before: str | int | bool | None
    after: str | int | bool | None

    def inverse(self) -> FolderChange:
        """Return the change that takes this one back."""
        return FolderChange(self.folder, self.field, self.after, self.before)


@dataclass(frozen=True, slots=True)
class Altered:
    """What became different in the library at one moment: ids of pictures, and what of the altered ones."""

    added: frozenset[int] = frozenset()
    removed: frozenset[int] = frozenset()
    altered: frozenset[int] = frozenset()
    what: frozenset[Field | Fact] = field(default_factory=frozenset)


_TagShelf = list[tuple[str, int]]
"""A folder's pictures in order: each one's natural key and id."""


class Library:
    """Pictures by id, in the order in which they are shown: by folder, then by name, numbers by their value.

    Datasets come in the order in which they were opened, folders within them by their paths. It belongs to one thread;
    workers hand their findings over through `Tasks`. It does not touch the disk.
    """

    def __init__(self) -> None:
        self.altered: Emitter[Altered] = Emitter()
        self._images: dict[int, LibraryImage] = {}
        self._numbers = count(1)
        self._shelves: dict[Folder, _TagShelf] = {}
        self._folders: list[tuple[tuple[int, list[str]], int, Folder]] = []
        self._roots: dict[Path, int] = {}
        self._former: dict[tuple[Path, str], int] = {}
        self._places: dict[Path, Folder] = {}

    @property
    def images(self) -> Mapping[int, LibraryImage]:
        """All pictures by id, in their order."""
        return MappingProxyType(self._images)

    def at(self, path: Path) -> LibraryImage | None:
        """Return the picture that lies there."""
        folder = self._places.get(path.parent)
        shelf = self._shelves[folder] if folder else []
        key = natural_key(path.name)
        place = bisect_left(shelf, (key, 0))
        return self._images[shelf[place][1]] if place < len(shelf) and shelf[place][0] == key else None

    def folder_at(self, path: Path) -> Folder | None:
        """Return the folder with that path, if it ever held an image."""
        return self._places.get(path)

    def expect(self, root: Path) -> None:
        """Give a dataset its place behind those opened before it, whichever disk is the first to answer.

        One that was open before gets a new place: what lies in it comes in folders of its own again.
        """
        self._roots[root] = max(self._roots.values(), default=-1) + 1

    def add(self, found: Iterable[tuple[Folder, str, Mapping[str, Any]]]) -> list[int]:
        """Enter pictures by folder, name and what is known of them already; return their ids.

        A file that was here before in this session gets the id that it had, so that undoing reaches it again.
        """
        ids, in_order = [], True
        for folder, name, known in found:
            number = self._former.pop((folder.path, name), 0) or next(self._numbers)
            self._images[number] = LibraryImage(number, folder, name, **known)
            in_order &= self._shelve(folder, natural_key(name), number)
            ids.append(number)
        if not in_order:
            self._reorder()
        if ids:
            self.altered.emit(Altered(added=frozenset(ids)))
        return ids

    def remove(self, ids: Iterable[int]) -> None:
        """Forget pictures; their files are not touched."""
        gone = {number: self._images.pop(number) for number in ids if number in self._images}
        for folder in {image.folder for image in gone.values()}:
            self._shelves[folder] = [entry for entry in self._shelves[folder] if entry[1] not in gone]
        for number, image in gone.items():
            self._former[image.folder.path, image.name] = number
        if gone:
            self.altered.emit(Altered(removed=frozenset(gone)))

    def apply(self, changes: Iterable[ValueChange]) -> None:
        """Take over what the user changed; pictures that are gone are passed over."""
        changes = [change for change in changes if change.image in self._images]
        for change in changes:
            setattr(self._images[change.image], change.field, change.after)
        if changes:
            ids, fields = zip(*((change.image, change.field) for change in changes), strict=True)
            self.altered.emit(Altered(altered=frozenset(ids), what=frozenset(fields)))

    def apply_to_folders(self, changes: Iterable[FolderChange]) -> None:
        """Take over what the user changed of whole folders; all their pictures count as altered."""
        folders = set()
        for change in changes:
            setattr(change.folder, change.field, change.after)
            folders.add(change.folder)
        ids = frozenset(image.id for image in self._images.values() if image.folder in folders)
        if ids:
            self.altered.emit(Altered(altered=ids, what=frozenset({"folder"})))

    def learn(self, facts: Mapping[int, Mapping[str, Any]], *what: Fact | Field) -> None:
        """Take over what a look at the disk showed: new values of attributes by picture, and of which kinds."""
        known = [number for number in facts if number in self._images]
        for number in known:
            for name, value in facts[number].items():
                setattr(self._images[number], name, value)
        if known:
            self.altered.emit(Altered(altered=frozenset(known), what=frozenset(what)))

    def _shelve(self, folder: Folder, key: str, number: int) -> bool:
        """Put a picture into its folder; return whether it came last of all, as it does in `_pictures`."""
        shelf = self._shelves.get(folder)
        if shelf is None:
            shelf = self._shelves[folder] = []
            self._places[folder.path] = folder
            insort(self._folders, (self._folder_key(folder), len(self._folders), folder))
        if shelf and (key, number) < shelf[-1]:
            insort(shelf, (key, number))
            return False
        shelf.append((key, number))
        return self._folders[-1][2] is folder

    def _folder_key(self, folder: Folder) -> tuple[int, list[str]]:
        if folder.root not in self._roots:
            self.expect(folder.root)
        inside = folder.path.relative_to(folder.root)
        return self._roots[folder.root], [natural_key(part) for part in inside.parts]

    def _reorder(self) -> None:
        """Bring the mapping itself into order: 6 ms at 100,000 pictures."""
        images = {number: self._images[number] for *_, shelf in self._folders for _, number in self._shelves[shelf]}
        self._images.clear()
        self._images.update(images)
