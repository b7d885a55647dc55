"""Scan the folders of one dataset and report what changed since the last scan."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.core.disk.reading import (
    FileState,
    Listing,
    file_state,
    has_changed,
    is_settled,
    list_directory,
    note_values,
    read_caption,
    stem_of,
)
from app.core.library import Folder
from app.core.tasks import iterate_yielding
from trainer.dataset.caption_files import METADATA_NAME, read_metadata
from trainer.dataset.folders import FolderMarks, below, chain_of, folder_marks
from trainer.dataset.sidecar import FILE_NAME, Sidecar, read_sidecar
from trainer.errors import DatasetError, ImpastoError
from trainer.protocol.files import Links

Stage = Literal["listing", "captions", "sizes", "done"]
BATCH = 500
"""Number of images reported per batch: a few milliseconds of work for the receiving thread."""
_CHECK_SECONDS = 0.005
"""Seconds that each scan spends on checking whether off-screen files were written in place; this is enough for a few
thousand files on a local disk, or a few on a network drive."""
_CHEAP_LISTING = 0.05
"""Maximum listing time, in CPU seconds, of a directory that is listed after every change (about 5,000 files)."""
_REST_FACTOR = 10
"""Pause between listings of a directory that takes longer than `_CHEAP_LISTING`, as a multiple of its listing time.
Without a pause, every save would cause another listing, because it changes the directory."""
_NO_STATE = FileState(-1, -1)
"""File state that no existing file has."""
# Values to determine again for an image whose file changed.
_STALE_VALUES = {"width": None, "height": None, "problem": None, "content": None, "fingerprint": None}


@dataclass(frozen=True, slots=True)
class FilesFound:
    """Up to `BATCH` new images of one folder, with the values known from its listing."""

    folder: Folder
    images: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Facts:
    """New values of a folder's images, by image name."""

    folder: Folder
    images: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Gone:
    """Images that two scans in a row did not find."""

    folder: Folder
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Marked:
    """Settings of a folder, such as its repeats, which apply to all of its images."""

    folder: Folder
    marks: FolderMarks


@dataclass(frozen=True, slots=True)
class OrphanFiles:
    """All files in a folder that do not belong to an image in it, by issue code."""

    folder: Folder
    names: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ScanProblem:
    """A problem to show to the user; the scan continues."""

    error: ImpastoError


@dataclass(frozen=True, slots=True)
class NotesRead:
    """The reason why a folder's notes cannot be read, or None if they can be read or do not exist."""

    folder: Folder
    error: ImpastoError | None


@dataclass(frozen=True, slots=True)
class Lost:
    """The reason why the dataset's folder cannot be reached or is suddenly empty, or None when it is back."""

    error: ImpastoError | None


@dataclass(frozen=True, slots=True)
class ScanProgress:
    """Progress of a scan: number of images done, and of images known so far."""

    stage: Stage
    done: int
    total: int


News = FilesFound | Facts | Gone | Marked | OrphanFiles | NotesRead | ScanProblem | Lost | ScanProgress


Names = Mapping[Path, Collection[str]]
"""File names by directory."""


@dataclass(slots=True)
class _SeenDirectory:
    """State of a directory at the last scan."""

    folder: Folder
    listing: Listing = field(default_factory=Listing)
    notes: Sidecar = field(default_factory=Sidecar)
    notes_damaged: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    """Known images that were not found."""
    reported: set[str] = field(default_factory=set)
    """Missing images that the previous scan already reported."""
    unread: set[str] = field(default_factory=set)
    """Images whose captions and notes still have to be read."""
    unsettled: set[str] = field(default_factory=set)
    """Images whose captions were read so soon after a write that a later one could have the same timestamp."""
    unreadable: bool = False
    rests_until: float = 0.0
    """Monotonic time before which a large directory is not listed again."""
    searched: Listing | None = None
    """Last listing that was searched for files without an image."""
    orphans: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder.path


class FolderScanner:
    """Scanner for one dataset's folders that remembers their contents. Only one thread at a time may scan.

    `alive` is called repeatedly while the disk responds.
    """

    def __init__(
        self,
        root: Path,
        hand: Callable[[News], None],
        alive: Callable[[], None] = lambda: None,
        links: Links | None = None,
    ) -> None:
        """Create a scanner; without `links`, only links into the dataset itself are followed."""
        self.root = root
        self._report, self._alive = hand, alive
        self._links = links or Links([root])
        self._directories: dict[Path, _SeenDirectory] = {}
        self._lost = False
        self._pending_checks: Iterator[tuple[Path, str]] = iter(())

    def scan(self, whole: bool, near: Names, again: Names, dropped: Names) -> None:
        """Report what changed on disk since the last scan.

        A directory is listed again when its timestamp has changed, but a large one only every few seconds. Every scan
        checks whether files in `near` were written in place, plus a few of the other files; with `whole`, it checks all
        files. Captions and notes of images in `again` are read regardless of timestamps, and the settings of their
        folders are reported again. Images in `dropped` are forgotten, and reported as new if they still exist.

        An image that was not found is first reported as missing, and removed if the next scan does not find it either:
        some programs delete a file for a moment when they save it. If all images vanish at once, the drive is probably
        disconnected, so they stay listed.
        """
        self._remember(again, dropped)
        # A lost dataset is listed completely: files may have changed while its drive was disconnected.
        try:
            self._walk(whole or self._lost, near)
        except OSError as fault:
            self._set_lost(_unreachable(self.root, fault, listed=bool(self._directories)))
            return
        if self._emptied():
            self._set_lost(_emptied_error(self.root))
            return
        self._set_found()
        for path in again.keys() & self._directories.keys():
            self._report_marks(self._directories[path])
        self._report_missing()
        self._read()

    def _remember(self, again: Names, dropped: Names) -> None:
        for path, names in again.items():
            if directory := self._directories.get(path):
                directory.unread.update(names)
        for path, names in dropped.items():
            if directory := self._directories.get(path):
                for name in names:
                    directory.listing.images.pop(name, None)
                directory.listing.settled = False
        for directory in self._directories.values():
            # A write soon after the last read may have kept the timestamp, so read these captions again.
            directory.unread |= directory.unsettled
            directory.unsettled = set()

    def _walk(self, whole: bool, near: Names) -> None:
        """List and compare all directories from the root down; raises OSError if the root cannot be listed."""
        due = self._files_to_check(near)
        seen, visited, stack = set[tuple[int, int]](), set[Path](), [self.root]
        while stack:
            path = stack.pop()
            self._alive()
            listing = self._list(path, whole, due.get(path, ()))
            if listing is None or listing.identity in seen:  # reached a second time through a Windows junction
                continue
            if listing.identity:
                seen.add(listing.identity)
            visited.add(path)
            stack.extend(path / name for name in reversed(listing.inside))
            self._compare(path, listing)
        # A directory that is gone is compared with an empty listing, which marks all of its images as missing.
        for path in self._directories.keys() - visited:
            self._compare(path, Listing())

    def _files_to_check(self, near: Names) -> Names:
        """Return the files in `near`, plus other files that were found to have changed.

        Each call checks files for `_CHECK_SECONDS`, continuing where the previous call stopped.
        """
        due = {path: set(names) for path, names in near.items()}
        end = time.perf_counter() + _CHECK_SECONDS
        for path, name in self._pending_checks:
            directory = self._directories.get(path)
            if directory and directory.listing.is_changed(path, name):
                due.setdefault(path, set()).add(name)
            if time.perf_counter() > end:
                return due
        self._pending_checks = self._files()  # every file was checked: start over
        return due

    def _files(self) -> Iterator[tuple[Path, str]]:
        for path, directory in list(self._directories.items()):
            for name in [*directory.listing.images, *directory.listing.texts]:
                yield path, name

    def _list(self, path: Path, whole: bool, names: Collection[str]) -> Listing | None:
        """Return a directory's listing: the previous one if nothing changed, None if the directory is gone."""
        directory = self._directories.get(path)
        try:
            if directory and not (whole or directory.missing or directory.unreadable):
                resting = time.monotonic() < directory.rests_until
                if resting or not has_changed(path, directory.listing, names):
                    return directory.listing
            began = time.thread_time()  # CPU time: waiting for a slow disk does not delay the window
            listing = list_directory(path, self._links, self._alive)
            took = time.thread_time() - began
        except FileNotFoundError:
            if path == self.root:
                raise  # the whole dataset cannot be reached: `scan` keeps its images listed
            return None
        except OSError as fault:
            if path == self.root:
                raise
            return self._on_unlistable(path, fault)
        if directory:
            directory.unreadable = False
            directory.rests_until = time.monotonic() + _REST_FACTOR * took if took > _CHEAP_LISTING else 0.0
        return listing

    def _on_unlistable(self, path: Path, fault: OSError) -> Listing:
        """Report once that a subfolder cannot be listed, and return its last known listing."""
        directory = self._directory(path)
        if not directory.unreadable:
            directory.unreadable = True
            self._report(ScanProblem(_unreachable(path, fault, listed=True)))
        return directory.listing

    def _directory(self, path: Path) -> _SeenDirectory:
        directory = self._directories.get(path)
        if directory is None:
            directory = self._directories[path] = _SeenDirectory(Folder(path, self.root))
            self._report_marks(directory)
        return directory

    def _compare(self, path: Path, now: Listing) -> None:
        """Report the changes of a directory, and collect the images whose captions and notes must be read."""
        directory = self._directory(path)
        known, directory.listing = directory.listing, now
        if known is now:  # `_list` returned the previous listing, so nothing changed
            return
        new = [name for name in now.images if name not in known.images and name not in directory.missing]
        for batch in _batches(new):
            self._report(FilesFound(directory.folder, {name: _file_facts(now, name) for name in batch}))
        back = directory.missing & now.images.keys()
        self._report_changed(directory, known, back)
        directory.unread.update(new, back, _with_changed_captions(known, now))
        directory.missing |= known.images.keys() - now.images.keys()
        directory.missing -= back
        directory.reported -= back
        if known.texts.get(FILE_NAME) != now.texts.get(FILE_NAME):
            self._read_notes(directory)
        if known.texts.get(METADATA_NAME) != now.texts.get(METADATA_NAME):
            self._read_metadata(directory)

    def _report_changed(self, directory: _SeenDirectory, known: Listing, back: Collection[str]) -> None:
        now, changed = directory.listing, {}
        for name, before in known.images.items():
            if now.images.get(name, before) != before:
                changed[name] = {**_file_facts(now, name), **_STALE_VALUES}
            elif known.mask_of(name) != now.mask_of(name):
                changed[name] = _mask_facts(now, name)
        changed.update({name: {**_file_facts(now, name), **_STALE_VALUES} for name in back})
        self._report_facts(directory, changed)

    def _report_facts(self, directory: _SeenDirectory, facts: Mapping[str, Mapping[str, Any]]) -> None:
        for batch in _batches(list(facts)):
            self._report(Facts(directory.folder, {name: facts[name] for name in batch}))

    # Missing files

    def _emptied(self) -> bool:
        directories = self._directories.values()
        return any(known.missing for known in directories) and not any(known.listing.images for known in directories)

    def _set_lost(self, error: DatasetError) -> None:
        if not self._lost:
            self._lost = True
            self._report(Lost(error))

    def _set_found(self) -> None:
        if self._lost:
            self._lost = False
            self._report(Lost(None))

    def _report_missing(self) -> None:
        for path, directory in list(self._directories.items()):
            gone, fresh = directory.missing & directory.reported, directory.missing - directory.reported
            if gone:
                self._report(Gone(directory.folder, frozenset(gone)))
            directory.missing, directory.reported = fresh, set(fresh)
            self._report_orphans(directory)
            self._report_facts(directory, {name: {"problem": f"{path / name} no longer exists."} for name in fresh})
            # Forget a directory that is gone, once all of its images have been reported as gone.
            if not (directory.listing.identity or directory.listing.inside or fresh or directory.listing.images):
                del self._directories[path]

    def _report_orphans(self, directory: _SeenDirectory) -> None:
        """Report captions and masks without an image, if they differ from those reported last.

        The caption and mask of an image that was not found are not reported until the image is removed.
        """
        if directory.searched is directory.listing:
            return
        directory.searched = directory.listing
        found = directory.listing.orphans(directory.missing)
        if found != directory.orphans:
            directory.orphans = found
            self._report(OrphanFiles(directory.folder, found))

    # Captions and notes

    def _read_notes(self, directory: _SeenDirectory) -> None:
        before = directory.notes
        try:
            notes = read_sidecar(directory.path)
        except DatasetError as error:
            if not _vanished(directory, FILE_NAME):
                directory.notes_damaged = True
                self._report(ScanProblem(error))
                self._report(NotesRead(directory.folder, error))
            return
        if _vanished(directory, FILE_NAME):
            return
        if directory.notes_damaged:
            directory.notes_damaged = False
            self._report(NotesRead(directory.folder, None))
        directory.notes = notes
        others = directory.notes.changed_since(before, directory.listing.images.keys() - directory.unread)
        self._report_facts(directory, {name: note_values(directory.notes.of(name)) for name in others})
        for path, other in self._directories.items():  # subfolders inherit these facts
            if path.is_relative_to(directory.path):
                self._report_marks(other)

    def _report_marks(self, directory: _SeenDirectory) -> None:
        chain = chain_of(self.root, directory.path)
        known = [
            self._directories[path].notes.folder if path in self._directories else Sidecar().folder for path in chain
        ]
        marks = folder_marks(list(zip([path.name for path in chain], known, strict=True)))
        self._report(Marked(directory.folder, marks))

    def _read_metadata(self, directory: _SeenDirectory) -> None:
        metadata, faults = read_metadata(directory.path / METADATA_NAME)
        if _vanished(directory, METADATA_NAME):
            return
        directory.metadata = metadata
        for fault in faults:
            sentence = f"In {directory.path / METADATA_NAME}, {fault}."
            self._report(ScanProblem(DatasetError("metadata.damaged", sentence, "Fix that line.")))
        # The root's metadata.jsonl can also contain captions of images in subfolders.
        for other in self._directories.values() if directory.path == self.root else (directory,):
            other.unread.update(other.listing.images)

    def _read(self) -> None:
        """Read pending captions and notes in batches.

        Files that vanish during the read stay pending; the next scan finds out whether the whole folder is gone.
        """
        total, done = sum(len(directory.unread) for directory in self._directories.values()), 0
        for directory in self._directories.values():
            gone = set[str]()
            metadata = {**self._from_root(directory), **directory.metadata} if directory.unread else {}
            for batch in _batches([name for name in directory.listing.images if name in directory.unread]):
                names = iterate_yielding(batch, self._alive)
                read = {name: self._read_caption_of(directory, name, metadata.get(name)) for name in names}
                facts = {name: words for name, words in read.items() if words}
                gone.update(read.keys() - facts.keys())
                self._report(Facts(directory.folder, facts))
                done += len(batch)
                self._report(ScanProgress("captions", done, total))
            directory.unread = gone

    def _read_caption_of(self, directory: _SeenDirectory, name: str, listed: str | None) -> dict[str, Any] | None:
        sources = directory.listing.captions_of(name)
        words = read_caption(directory.path, sources, listed)
        if not words.whole:
            return None
        for error in words.faults:
            self._report(ScanProblem(error))
        if not all(is_settled(directory.listing.texts[source]) for source in sources):
            directory.unsettled.add(name)
        return {"caption": words.caption, "clash": words.clash, **note_values(directory.notes.of(name))}

    def _from_root(self, directory: _SeenDirectory) -> dict[str, str]:
        """Return the captions of this subfolder's images in the root's metadata.jsonl; none for the root itself."""
        if directory.path == self.root:
            return {}
        return below(self._directories[self.root].metadata, directory.path.relative_to(self.root).as_posix())


def _vanished(directory: _SeenDirectory, name: str) -> bool:
    """Return whether a text file vanished after its directory was listed.

    If it did, make the next scan list the directory again and treat the file as changed.
    """
    if name not in directory.listing.texts or file_state(directory.path / name):
        return False
    directory.listing.texts[name] = _NO_STATE
    directory.listing.settled = False
    return True


def _file_facts(listing: Listing, name: str) -> dict[str, Any]:
    state = listing.images[name]
    return {"bytes": state.bytes, "changed_ns": state.changed_ns, **_mask_facts(listing, name)}


def _mask_facts(listing: Listing, name: str) -> dict[str, Any]:
    mask = listing.mask_of(name)
    return {"mask": mask is not None, "mask_changed_ns": mask.changed_ns if mask else 0}


def _with_changed_captions(known: Listing, now: Listing) -> list[str]:
    """Return the images whose caption files were changed, added or removed."""
    names = known.texts.keys() | now.texts.keys()
    stems = {stem_of(name) for name in names if known.texts.get(name) != now.texts.get(name)}
    return [name for name in now.images if stem_of(name) in stems] if stems else []


def _batches(names: list[str]) -> Iterable[list[str]]:
    return (names[start : start + BATCH] for start in range(0, len(names), BATCH))


def _unreachable(folder: Path, fault: OSError, *, listed: bool) -> DatasetError:
    sentence = f"Could not read the folder {folder}: {fault.strerror or fault}."
    follows = "Its images stay listed until it is back." if listed else "Its images appear once it is readable."
    remedy = f"{follows} Reconnect its drive or network, or close the dataset."
    return DatasetError("dataset.folder_lost", sentence, remedy)


def _emptied_error(folder: Path) -> DatasetError:
    sentence = f"All images in {folder} disappeared at once."
    remedy = "They stay listed in case the drive or network is reconnected. If you deleted them, close the dataset."
    return DatasetError("dataset.folder_emptied", sentence, remedy)
