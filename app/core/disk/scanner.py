"""Looks at the folders of one dataset and tells what is new since the last look; opening is the first look."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.core.disk.reading import (
    Listing,
    State,
    file_state,
    is_settled,
    list_directory,
    look_again,
    noted,
    read_caption,
    stem_of,
)
from app.core.library import Folder
from app.core.tasks import in_turns
from trainer.dataset.caption_files import METADATA_NAME, read_metadata
from trainer.dataset.folders import FolderMarks, below, chain_of, folder_marks
from trainer.dataset.links import Links
from trainer.dataset.sidecar import FILE_NAME, Sidecar, read_sidecar
from trainer.errors import DatasetError, ImpastoError

Stage = Literal["listing", "captions", "sizes", "done"]
BATCH = 500
"""Pictures handed over at once: a few milliseconds of work for the thread that takes them."""
_TURN = 0.005
"""Seconds in which a look asks for files besides those that are shown, to find what was written in place: some thousand
on a disk of one's own, a few on one that is far away."""
_EASY = 0.05
"""Seconds of the processor that listing a directory may take to be done whenever it changes; some 5,000 files."""
_REST = 10
"""Times as long as it took a larger one is not listed again: the app's own writing changes it with every caption."""
_GONE = State(-1, -1)
"""As no file is."""
# What has to be found out anew about a picture whose file is another now.
_UNKNOWN = {"width": None, "height": None, "problem": None, "content": None, "fingerprint": None}


@dataclass(frozen=True, slots=True)
class FilesFound:
    """Pictures that were not there before, with what the directory says of each; at most a batch of one folder."""

    folder: Folder
    pictures: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known now of pictures of a folder, by name."""

    folder: Folder
    pictures: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Gone:
    """Pictures that two looks in a row did not find."""

    folder: Folder
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Marked:
    """What holds for all pictures of a folder."""

    folder: Folder
    marks: FolderMarks


@dataclass(frozen=True, slots=True)
class OrphanFiles:
    """Names of all files of a folder that were to belong to a picture which is not there, by the code of their kind."""

    folder: Folder
    names: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ScanProblem:
    """Something that the user should know of; the rest goes on."""

    error: ImpastoError


@dataclass(frozen=True, slots=True)
class NotesRead:
    """Whether the notes of a folder can be read; None: they can, or there are none."""

    folder: Folder
    error: ImpastoError | None


@dataclass(frozen=True, slots=True)
class Lost:
    """The dataset's folder cannot be reached, or is empty all of a sudden; None: it is there again."""

    error: ImpastoError | None


@dataclass(frozen=True, slots=True)
class ScanProgress:
    """How far a look has come: pictures done, and how many there are as far as is known."""

    stage: Stage
    done: int
    total: int


News = FilesFound | Facts | Gone | Marked | OrphanFiles | NotesRead | ScanProblem | Lost | ScanProgress


Names = Mapping[Path, Collection[str]]
"""Names of files by directory."""


@dataclass(slots=True)
class _SeenDirectory:
    """What the last look saw of a directory."""

    folder: Folder
    listing: Listing = field(default_factory=Listing)
    notes: Sidecar = field(default_factory=Sidecar)
    notes_damaged: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    """Pictures that were here and are not."""
    told: set[str] = field(default_factory=set)
    """Those of them that the look before missed already."""
    unread: set[str] = field(default_factory=set)
    """Pictures whose captions and notes have to be read."""
    unsettled: set[str] = field(default_factory=set)
    """Pictures whose captions were read so soon after they were written that their time may hide another change."""
    unreadable: bool = False
    rests_until: float = 0.0
    """By the monotonic clock."""
    searched: Listing | None = None
    """The listing in which files without a picture were looked for."""
    strays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder.path


class FolderScanner:
    """Remembers what the folders of one dataset held. Only one thread at a time may look.

    While the disk answers, `alive` is called again and again.
    """

    def __init__(
        self,
        root: Path,
        hand: Callable[[News], None],
        alive: Callable[[], None] = lambda: None,
        links: Links | None = None,
    ) -> None:
        """Without `links`, those that lead into the dataset itself are followed."""
        self.root = root
        self._hand, self._alive = hand, alive
        self._links = links or Links([root])
        self._directories: dict[Path, _SeenDirectory] = {}
        self._lost = False
        self._rounds: Iterator[tuple[Path, str]] = iter(())

    def look(self, whole: bool, near: Names, again: Names, dropped: Names) -> None:
        """Tell what changed on disk since the last look.

        A directory is listed again when its own time changed, a large one after a rest; files written in place are
        found among those in `near` at once, among the others by and by, or with `whole` at once too. Captions and
        notes of the pictures in `again` are read whatever their times say, and what holds for those folders is told;
        those `dropped` are forgotten, and new should they still be there.

        A picture that is gone is called missing first, and forgotten by the next look that misses it: programs that
        save by replacing leave a moment without. When all are gone at once, the place that they lie in is: they stay.
        """
        self._remember(again, dropped)
        try:
            self._walk(whole or self._lost, near)
        except OSError as fault:
            self._lose(_unreachable(self.root, fault, listed=bool(self._directories)))
            return
        if self._emptied():
            self._lose(_nothing_left(self.root))
            return
        self._find()
        for path in again.keys() & self._directories.keys():
            self._mark(self._directories[path])
        self._tell_missing()
        self._read()

    def _remember(self, again: Names, dropped: Names) -> None:
        for path, names in again.items():
            if directory := self._directories.get(path):
                directory.unread.update(names)
        for path, names in dropped.items():
            if directory := self._directories.get(path):
                for name in names:
                    directory.listing.pictures.pop(name, None)
                directory.listing.settled = False
        for directory in self._directories.values():
            directory.unread |= directory.unsettled
            directory.unsettled = set()

    def _walk(self, whole: bool, near: Names) -> None:
        """Go through all directories, the dataset's own first; raises OSError when that cannot be listed."""
        due = self._due(near)
        seen, visited, stack = set[tuple[int, int]](), set[Path](), [self.root]
        while stack:
            path = stack.pop()
            self._alive()
            listing = self._listed(path, whole, due.get(path, ()))
            if listing is None or listing.identity in seen:  # met twice through a link of Windows' own kind
                continue
            if listing.identity:
                seen.add(listing.identity)
            visited.add(path)
            stack.extend(path / name for name in reversed(listing.inside))
            self._compare(path, listing)
        for path in self._directories.keys() - visited:
            self._compare(path, Listing())

    def _due(self, near: Names) -> Names:
        """Return the files to ask for: those that are shown, and what is another among the next few of all."""
        due = {path: set(names) for path, names in near.items()}
        end = time.perf_counter() + _TURN
        for path, name in self._rounds:
            directory = self._directories.get(path)
            if directory and directory.listing.is_other(path, name):
                due.setdefault(path, set()).add(name)
            if time.perf_counter() > end:
                return due
        self._rounds = self._files()  # each has had its turn
        return due

    def _files(self) -> Iterator[tuple[Path, str]]:
        for path, directory in list(self._directories.items()):
            for name in [*directory.listing.pictures, *directory.listing.texts]:
                yield path, name

    def _listed(self, path: Path, whole: bool, names: Collection[str]) -> Listing | None:
        """Return what a directory holds: the known listing where nothing hints at a change, None when it is gone."""
        directory = self._directories.get(path)
        try:
            if directory and not (whole or directory.missing or directory.unreadable):
                resting = time.monotonic() < directory.rests_until
                if resting or not look_again(path, directory.listing, names):
                    return directory.listing
            began = time.thread_time()
            listing = list_directory(path, self._links, self._alive)
            took = time.thread_time() - began
        except FileNotFoundError:
            if path == self.root:
                raise
            return None
        except OSError as fault:
            if path == self.root:
                raise
            return self._refused(path, fault)
        if directory:
            directory.unreadable = False
            directory.rests_until = time.monotonic() + _REST * took if took > _EASY else 0.0
        return listing

    def _refused(self, path: Path, fault: OSError) -> Listing:
        """Tell once of a folder inside that cannot be listed; what was known of it stays."""
        directory = self._directory(path)
        if not directory.unreadable:
            directory.unreadable = True
            self._hand(ScanProblem(_unreachable(path, fault, listed=True)))
        return directory.listing

    def _directory(self, path: Path) -> _SeenDirectory:
        directory = self._directories.get(path)
        if directory is None:
            directory = self._directories[path] = _SeenDirectory(Folder(path, self.root))
            self._mark(directory)
        return directory

    def _compare(self, path: Path, now: Listing) -> None:
        """Tell of what is new in a directory, and note what has to be read."""
        directory = self._directory(path)
        known, directory.listing = directory.listing, now
        if known is now:
            return
        new = [name for name in now.pictures if name not in known.pictures and name not in directory.missing]
        for batch in _batches(new):
            self._hand(FilesFound(directory.folder, {name: _file_facts(now, name) for name in batch}))
        back = directory.missing & now.pictures.keys()
        self._tell_changed(directory, known, back)
        directory.unread.update(new, back, _reworded(known, now))
        directory.missing |= known.pictures.keys() - now.pictures.keys()
        directory.missing -= back
        directory.told -= back
        if known.texts.get(FILE_NAME) != now.texts.get(FILE_NAME):
            self._read_notes(directory)
        if known.texts.get(METADATA_NAME) != now.texts.get(METADATA_NAME):
            self._read_metadata(directory)

    def _tell_changed(self, directory: _SeenDirectory, known: Listing, back: Collection[str]) -> None:
        now, changed = directory.listing, {}
        for name, before in known.pictures.items():
            if now.pictures.get(name, before) != before:
                changed[name] = {**_file_facts(now, name), **_UNKNOWN}
            elif known.mask_of(name) != now.mask_of(name):
                changed[name] = _mask_facts(now, name)
        changed.update({name: {**_file_facts(now, name), **_UNKNOWN} for name in back})
        self._tell(directory, changed)

    def _tell(self, directory: _SeenDirectory, facts: Mapping[str, Mapping[str, Any]]) -> None:
        for batch in _batches(list(facts)):
            self._hand(Facts(directory.folder, {name: facts[name] for name in batch}))

    # What is missing

    def _emptied(self) -> bool:
        directories = self._directories.values()
        return any(each.missing for each in directories) and not any(each.listing.pictures for each in directories)

    def _lose(self, error: DatasetError) -> None:
        if not self._lost:
            self._lost = True
            self._hand(Lost(error))

    def _find(self) -> None:
        if self._lost:
            self._lost = False
            self._hand(Lost(None))

    def _tell_missing(self) -> None:
        for path, directory in list(self._directories.items()):
            gone, fresh = directory.missing & directory.told, directory.missing - directory.told
            if gone:
                self._hand(Gone(directory.folder, frozenset(gone)))
            directory.missing, directory.told = fresh, set(fresh)
            self._tell_strays(directory)
            self._tell(directory, {name: {"problem": f"{path / name} is no longer there."} for name in fresh})
            if not (directory.listing.identity or directory.listing.inside or fresh or directory.listing.pictures):
                del self._directories[path]

    def _tell_strays(self, directory: _SeenDirectory) -> None:
        """Tell of captions and masks without a picture, if they are others now; a missing one may come back."""
        if directory.searched is directory.listing:
            return
        directory.searched = directory.listing
        found = directory.listing.strays(directory.missing)
        if found != directory.strays:
            directory.strays = found
            self._hand(OrphanFiles(directory.folder, found))

    # Captions and notes

    def _read_notes(self, directory: _SeenDirectory) -> None:
        before = directory.notes
        try:
            notes = read_sidecar(directory.path)
        except DatasetError as error:
            if not _has_gone(directory, FILE_NAME):
                directory.notes_damaged = True
                self._hand(ScanProblem(error))
                self._hand(NotesRead(directory.folder, error))
            return
        if _has_gone(directory, FILE_NAME):
            return
        if directory.notes_damaged:
            directory.notes_damaged = False
            self._hand(NotesRead(directory.folder, None))
        directory.notes = notes
        others = directory.notes.changed_since(before, directory.listing.pictures.keys() - directory.unread)
        self._tell(directory, {name: noted(directory.notes.of(name)) for name in others})
        for path, other in self._directories.items():
            if path.is_relative_to(directory.path):
                self._mark(other)

    def _mark(self, directory: _SeenDirectory) -> None:
        chain = chain_of(self.root, directory.path)
        known = [
            self._directories[path].notes.folder if path in self._directories else Sidecar().folder for path in chain
        ]
        marks = folder_marks(list(zip([path.name for path in chain], known, strict=True)))
        self._hand(Marked(directory.folder, marks))

    def _read_metadata(self, directory: _SeenDirectory) -> None:
        metadata, faults = read_metadata(directory.path / METADATA_NAME)
        if _has_gone(directory, METADATA_NAME):
            return
        directory.metadata = metadata
        for fault in faults:
            sentence = f"In {directory.path / METADATA_NAME}, {fault}."
            self._hand(ScanProblem(DatasetError("metadata.damaged", sentence, "Correct that line.")))
        for other in self._directories.values() if directory.path == self.root else (directory,):
            other.unread.update(other.listing.pictures)

    def _read(self) -> None:
        """Read the captions and notes that have to be, in batches.

        What goes meanwhile waits for the next look, which tells whether it is gone, or the folder is.
        """
        total, done = sum(len(directory.unread) for directory in self._directories.values()), 0
        for directory in self._directories.values():
            gone = set[str]()
            metadata = {**self._from_root(directory), **directory.metadata} if directory.unread else {}
            for batch in _batches([name for name in directory.listing.pictures if name in directory.unread]):
                each = in_turns(batch, self._alive)
                read = {name: self._words(directory, name, metadata.get(name)) for name in each}
                facts = {name: words for name, words in read.items() if words}
                gone.update(read.keys() - facts.keys())
                self._hand(Facts(directory.folder, facts))
                done += len(batch)
                self._hand(ScanProgress("captions", done, total))
            directory.unread = gone

    def _words(self, directory: _SeenDirectory, name: str, listed: str | None) -> dict[str, Any] | None:
        sources = directory.listing.captions_of(name)
        words = read_caption(directory.path, sources, listed)
        if not words.whole:
            return None
        for error in words.faults:
            self._hand(ScanProblem(error))
        if not all(is_settled(directory.listing.texts[source]) for source in sources):
            directory.unsettled.add(name)
        return {"caption": words.caption, "clash": words.clash, **noted(directory.notes.of(name))}

    def _from_root(self, directory: _SeenDirectory) -> dict[str, str]:
        """Return what the metadata file of the dataset's own folder says of the pictures of a directory inside."""
        if directory.path == self.root:
            return {}
        return below(self._directories[self.root].metadata, directory.path.relative_to(self.root).as_posix())


def _has_gone(directory: _SeenDirectory, name: str) -> bool:
    """Tell whether a text went after it was listed; then the next look lists and reads anew, whatever times say."""
    if name not in directory.listing.texts or file_state(directory.path / name):
        return False
    directory.listing.texts[name] = _GONE
    directory.listing.settled = False
    return True


def _file_facts(listing: Listing, name: str) -> dict[str, Any]:
    state = listing.pictures[name]
    return {"bytes": state.bytes, "changed_ns": state.changed_ns, **_mask_facts(listing, name)}


def _mask_facts(listing: Listing, name: str) -> dict[str, Any]:
    mask = listing.mask_of(name)
    return {"mask": mask is not None, "mask_changed_ns": mask.changed_ns if mask else 0}


def _reworded(known: Listing, now: Listing) -> list[str]:
    """Return the pictures whose caption files are others now, or came, or went."""
    names = known.texts.keys() | now.texts.keys()
    stems = {stem_of(name) for name in names if known.texts.get(name) != now.texts.get(name)}
    return [name for name in now.pictures if stem_of(name) in stems] if stems else []


def _batches(names: list[str]) -> Iterable[list[str]]:
    return (names[start : start + BATCH] for start in range(0, len(names), BATCH))


def _unreachable(folder: Path, fault: OSError, *, listed: bool) -> DatasetError:
    sentence = f"The folder {folder} cannot be read ({fault.strerror or fault})."
    follows = "Its images stay listed until it is back." if listed else "Its images appear once it can."
    remedy = f"{follows} Reconnect its drive or network, or close the dataset."
    return DatasetError("dataset.folder_lost", sentence, remedy)


def _nothing_left(folder: Path) -> DatasetError:
    sentence = f"All images of {folder} disappeared at once."
    remedy = "They stay listed in case their drive or network comes back; close the dataset if they were deleted."
    return DatasetError("dataset.folder_emptied", sentence, remedy)
