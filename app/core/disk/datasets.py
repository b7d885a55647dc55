"""Keep the library up to date with the folders of the open datasets, which workers scan."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.core.disk.roots import ImageRemover, identity_of, not_responding_error, overlap_error
from app.core.events import Emitter
from app.core.library import Fact, Field, Folder, FolderField, Library, LibraryChange, LibraryImage, Value
from app.core.tasks import Tasks, iterate_yielding, reraise
from trainer.errors import ImpastoError

if TYPE_CHECKING:  # imports numpy, Pillow and pydantic, which would delay the start of a window without a dataset
    from app.core.disk.scanner import FolderScanner, News, NotesRead, OrphanFiles, Stage
    from trainer.dataset.folders import FolderMarks

_MAX_QUEUED = 2
"""Maximum number of batches queued for the library's thread; more would make the window unresponsive."""
_HEADERS = 400
"""Number of image headers read per task; this takes about 0.2 s, and other tasks can run before the next one."""
_SILENT = 15.0
"""Seconds after which a disk counts as not responding; a hard disk in standby takes ten to spin up."""
_USER_FIELDS: frozenset[Field] = frozenset({"caption", "rating", "excluded", "crop"})
_KNOWN_FIELDS = [attribute.name for attribute in fields(LibraryImage) if attribute.name not in ("id", "folder", "name")]
_FACTS: tuple[FolderField, ...] = ("repeats", "regularization", "trigger")
_FIELD_OF_KEY: Mapping[str, Fact | Field] = {
    "caption": "caption",
    "rating": "rating",
    "excluded": "excluded",
    "crop": "crop",
    "width": "size",
    "height": "size",
    "bytes": "file",
    "changed_ns": "file",
    "clash": "inspection",
    "mask": "mask",
    "mask_changed_ns": "mask",
    "problem": "problem",
    "content": "inspection",
    "fingerprint": "inspection",
}


class OpenedDataset(NamedTuple):
    """A dataset whose images have all been listed, and the number of its images."""

    folder: Path
    images: int


class ReadingProgress(NamedTuple):
    """Progress of one stage of reading a dataset: images done, and images in total (0 if unknown)."""

    folder: Path
    stage: Stage
    done: int
    total: int


class OnDisk(NamedTuple):
    """A value on disk that differs from the user's unsaved edit, which is kept."""

    image: int
    field: Field
    value: Value


@dataclass(eq=False)
class _Dataset:
    """State of one open dataset, owned by the library's thread."""

    root: Path
    others: tuple[_Dataset, ...] = ()
    """Datasets opened earlier; one of them may be the same folder under another path."""
    stop: threading.Event = field(default_factory=threading.Event)
    slots: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_MAX_QUEUED))
    """Free places in the queue of the library's thread; a scan waits for one before it sends a batch."""
    scanner: FolderScanner | None = None
    scanning: bool = False
    listed: bool = False
    """Whether a first scan has listed all images and read their captions."""
    known: bool = False
    """Whether all image sizes have been read too."""
    whole: bool = False
    """Whether the next scan checks every file."""
    lost: ImpastoError | None = None
    identity: tuple[int, int] | None = None
    """Device and inode of the folder, once its disk has responded."""
    answered: float = math.inf
    """Monotonic time at which the disk last responded to the current task; set by workers."""
    silent: bool = False
    """Whether the dataset counts as lost because its disk does not respond."""
    ids: dict[Folder, dict[str, int]] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    """Images that the user changed during the current scan, which may have read older values."""
    again: dict[Path, set[str]] = field(default_factory=dict)
    """Names of images, by folder: the next scan rereads their captions and notes, and reports the folders' settings."""
    dropped: dict[Path, set[str]] = field(default_factory=dict)
    """Names of images, by folder, that the next scan forgets and, if they still exist, reports as new."""
    unsized: dict[int, None] = field(default_factory=dict)
    """Ids of images whose headers still have to be read, in order."""
    sizing: bool = False
    sized: int = 0
    """Number of headers read since `unsized` was last empty, for the progress."""

    def answer(self) -> None:
        """Record that the disk responds; may be called from any thread."""
        self.answered = time.monotonic()


class Datasets:
    """The open datasets; keeps the library in sync with their folders without copying or writing files.

    Belongs to the library's thread. A timer calls `refresh` every few seconds. Each dataset is scanned on a worker, so
    that a disk that does not respond does not delay the other datasets.
    """

    def __init__(self, library: Library, tasks: Tasks) -> None:
        self.opened: Emitter[OpenedDataset] = Emitter()
        self.known: Emitter[OpenedDataset] = Emitter()
        """Emitted when all captions and image sizes of a dataset have been read, so that slow work may start."""
        self.closed: Emitter[Path] = Emitter()
        self.scanned: Emitter[Path] = Emitter()
        """Emitted when a scan of a dataset has ended and all its results are in the library."""
        self.progress: Emitter[ReadingProgress] = Emitter()
        self.problems: Emitter[ImpastoError] = Emitter()
        self.recovered: Emitter[ImpastoError] = Emitter()
        """Emitted with the error of a lost dataset when it can be reached again or is closed."""
        self.captions_changed: Emitter[Collection[int]] = Emitter()
        """Emitted with the ids of images whose captions changed on disk after the dataset was fully read."""
        self.notes: Emitter[NotesRead] = Emitter()
        """Emitted when a folder's notes become unreadable, or readable again."""
        self.orphans_changed: Emitter[OrphanFiles] = Emitter()
        """Emitted when a folder's set of files without an image changes."""
        self.differs: Emitter[OnDisk] = Emitter()
        """Emitted when a value on disk differs from an unsaved edit."""
        self.unsaved: Callable[[Folder, str], Mapping[Field, Value]] = lambda folder, name: {}
        """Returns the unsaved edits of an image, which take precedence over the disk. Set by the session."""
        self.unsaved_of_folder: Callable[[Folder], Mapping[FolderField, Value]] = lambda folder: {}
        """Returns the unsaved edits of a folder. Set by the session."""
        self._library, self._tasks = library, tasks
        self._remover = ImageRemover(library, tasks.post)
        self._open: dict[Path, _Dataset] = {}
        self._leaving: set[tuple[Folder, str]] = set()
        """Images whose files the app is moving away; they are ignored if a scan still finds them."""
        self._learning = False
        library.altered.connect(self._note_edits)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders of the open datasets in the order in which they were opened."""
        return tuple(self._open)

    @property
    def lost(self) -> Mapping[Path, ImpastoError]:
        """Return the errors of unreachable datasets by folder."""
        return {root: dataset.lost for root, dataset in self._open.items() if dataset.lost}

    def open(self, folder: Path) -> None:
        """Open a folder and its subfolders; images appear in the library as they are found.

        Errors are emitted by `problems`.
        """
        root = folder.absolute()
        if root in self._open:
            return
        other = next((path for path in self._open if root.is_relative_to(path) or path.is_relative_to(root)), None)
        if other:
            self._tasks.run(lambda: overlap_error(root, other), self.problems.emit, reraise, kept=False)
            return
        self._remover.finish(root)  # otherwise the removal of a just closed dataset would remove the new images
        self._library.reserve_position(root)
        self._open[root] = _Dataset(root, others=tuple(self._open.values()))
        self._scan(self._open[root], {})

    def close(self, folder: Path) -> None:
        """Close a dataset without touching its files; many images are removed from the library in batches."""
        dataset = self._open.pop(folder.absolute(), None)
        if dataset:
            dataset.stop.set()
            self._remover.begin([number for ids in dataset.ids.values() for number in ids.values()])
            if dataset.lost:
                self.recovered.emit(dataset.lost)
            self.closed.emit(dataset.root)

    def stop(self) -> None:
        """Stop all scans; the library stays unchanged."""
        for dataset in self._open.values():
            dataset.stop.set()

    def refresh(self, near: Iterable[int] = (), whole: bool = False) -> None:
        """Scan for changes by other programs: check the files of the images in `near` or, with `whole`, every file.

        A scan is cheap enough to run every two seconds; use `whole` when the user returns to the window. A dataset
        whose disk has not responded for `_SILENT` seconds counts as lost until it responds.
        """
        names: dict[Path, dict[Path, set[str]]] = {}
        for number in near:
            if image := self._library.images.get(number):
                stem = image.path.stem
                files = {image.name, f"{stem}.txt", f"{stem}.caption"}
                names.setdefault(image.folder.root, {}).setdefault(image.folder.path, set()).update(files)
        for root, dataset in self._open.items():
            dataset.whole |= whole
            self._watch(dataset)
            self._scan(dataset, names.get(root, {}))

    def _watch(self, dataset: _Dataset) -> None:
        """If a dataset's disk does not respond, mark the dataset as lost and report it once."""
        waits = dataset.scanning or dataset.sizing
        if waits and not dataset.lost and time.monotonic() > dataset.answered + _SILENT:
            dataset.silent = True
            self._set_lost(dataset, not_responding_error(dataset.root))

    def _mark_responding(self, dataset: _Dataset) -> None:
        """Clear the error of a dataset that was lost because its disk did not respond."""
        if dataset.silent:
            dataset.silent = False
            self._set_lost(dataset, None)

    def drop(self, ids: Iterable[int]) -> None:
        """Remove images whose files the app is about to move, and ignore these files until `moved` is called."""
        gone = set(ids)
        for dataset in self._open.values():
            for folder, names in dataset.ids.items():
                for name in [name for name, number in names.items() if number in gone]:
                    del names[name]
                    self._leaving.add((folder, name))
        self._library.remove(gone)

    def moved(self, images: Iterable[LibraryImage]) -> None:
        """Stop ignoring files at these images' paths; the next scan reports them as new images."""
        for one in images:
            self._leaving.discard((one.folder, one.name))
            for dataset in self._open.values():
                if one.folder in dataset.ids:
                    dataset.dropped.setdefault(one.folder.path, set()).add(one.name)

    def take_back(self, images: Iterable[LibraryImage]) -> None:
        """Add dropped images back with all their known values, once their files are back in place."""
        names = {folder: ids for dataset in self._open.values() for folder, ids in dataset.ids.items()}
        back = [one for one in images if one.name not in names.get(one.folder, {one.name})]
        known = [{name: getattr(one, name) for name in _KNOWN_FIELDS} for one in back]
        ids = self._library.add((one.folder, one.name, facts) for one, facts in zip(back, known, strict=True))
        for one, number in zip(back, ids, strict=True):
            names[one.folder][one.name] = number

    # Scanning

    def _scan(self, dataset: _Dataset, near: Mapping[Path, set[str]]) -> None:
        if dataset.scanning:
            return
        dataset.scanning, dataset.answered = True, math.inf
        dataset.touched.clear()
        again, dataset.again = dataset.again, {}
        dropped, dataset.dropped = dataset.dropped, {}
        whole, dataset.whole = dataset.whole, False

        def look() -> None:
            from app.core.disk.scanner import FolderScanner
            from trainer.protocol.files import Links

            dataset.answer()
            dataset.identity = identity_of(dataset.root)
            if dataset.identity and any(other.identity == dataset.identity for other in dataset.others):
                raise _AlreadyOpenError

            if dataset.scanner is None:
                links = Links([dataset.root, *(other.root for other in dataset.others)])
                dataset.scanner = FolderScanner(
                    dataset.root, lambda news: self._send(dataset, news), dataset.answer, links
                )
            dataset.scanner.scan(whole, near, again, dropped)

        self._tasks.run(
            look, lambda _: self._on_scanned(dataset), lambda fault: self._on_scan_failed(dataset, fault), kept=False
        )

    def _send(self, dataset: _Dataset, news: News) -> None:
        """Send a change to the library's thread from a worker; blocks while its queue is full."""
        while not dataset.slots.acquire(timeout=0.1):
            if dataset.stop.is_set():
                raise _StoppedError
        if dataset.stop.is_set():
            raise _StoppedError

        def take() -> None:
            dataset.slots.release()
            if not dataset.stop.is_set():
                self._apply(dataset, news)

        self._tasks.post(take)

    def _on_scanned(self, dataset: _Dataset) -> None:
        dataset.scanning = False
        if dataset.stop.is_set():
            return
        self._mark_responding(dataset)
        if not dataset.listed and not dataset.lost:
            dataset.listed = True
            self.opened.emit(OpenedDataset(dataset.root, sum(map(len, dataset.ids.values()))))
        self._read_sizes(dataset)
        self.scanned.emit(dataset.root)
        if dataset.whole:  # requested during this scan, which may have missed later changes
            self._scan(dataset, {})

    def _on_scan_failed(self, dataset: _Dataset, fault: BaseException) -> None:
        dataset.scanning = False
        if dataset.stop.is_set():
            return
        if isinstance(fault, _AlreadyOpenError):
            self._drop_twin(dataset)
        elif not isinstance(fault, _StoppedError):
            self._mark_responding(dataset)
            logging.getLogger(__name__).error("Scanning %s failed", dataset.root, exc_info=fault)

    def _drop_twin(self, dataset: _Dataset) -> None:
        """Close a dataset whose folder is already open under another path.

        If the other dataset has been closed by now, rescan this one instead.
        """
        before, dataset.others = dataset.others, tuple(filter(self._is_open, dataset.others))
        if not self._is_open(dataset):
            return
        if len(dataset.others) == len(before):
            self.close(dataset.root)
        else:
            self._scan(dataset, {})

    def _is_open(self, dataset: _Dataset) -> bool:
        """Return whether this dataset is still open; one opened later at the same path is a different dataset."""
        return self._open.get(dataset.root) is dataset

    # Applying changes

    def _apply(self, dataset: _Dataset, news: News) -> None:
        from app.core.disk import scanner

        self._mark_responding(dataset)
        match news:
            case scanner.FilesFound():
                self._add_found(dataset, news.folder, news.images)
            case scanner.Facts():
                self._update(dataset, news.folder, news.images)
            case scanner.Gone():
                self._remove_gone(dataset, news.folder, news.names)
            case scanner.Marked():
                self._mark(dataset, news.folder, news.marks)
            case scanner.OrphanFiles():
                self.orphans_changed.emit(news)
            case scanner.NotesRead():
                self.notes.emit(news)
            case scanner.ScanProblem():
                self.problems.emit(news.error)
            case scanner.Lost():
                self._set_lost(dataset, news.error)
            case scanner.ScanProgress():
                self.progress.emit(ReadingProgress(dataset.root, news.stage, news.done, news.total))

    def _add_found(self, dataset: _Dataset, folder: Folder, images: Mapping[str, Mapping[str, Any]]) -> None:
        if folder not in dataset.ids:
            for fact, value in self.unsaved_of_folder(folder).items():
                setattr(folder, fact, value)
        ids = dataset.ids.setdefault(folder, {})
        images = {name: facts for name, facts in images.items() if (folder, name) not in self._leaving}
        known = {name: {**facts, "problem": None} for name, facts in images.items() if name in ids}
        new = {name: facts for name, facts in images.items() if name not in ids}
        shown = ((folder, name, {**facts, **self.unsaved(folder, name)}) for name, facts in new.items())
        ids.update(zip(new, self._library.add(shown), strict=True))
        dataset.unsized.update(dict.fromkeys(ids[name] for name in new))
        self._update(dataset, folder, known)
        self.progress.emit(ReadingProgress(dataset.root, "listing", sum(map(len, dataset.ids.values())), 0))
        self._read_sizes(dataset)

    def _update(self, dataset: _Dataset, folder: Folder, images: Mapping[str, Mapping[str, Any]]) -> None:
        """Update the library with values read from disk, except where the user has unsaved edits."""
        ids, learned, changed, reworded = dataset.ids.get(folder, {}), {}, set[Fact | Field](), list[int]()
        for name, facts in images.items():
            image = self._library.images.get(ids.get(name, 0))
            if image is None:
                continue
            values = {key: value for key, value in facts.items() if getattr(image, key) != value}
            values = self._without_edited(dataset, image, values)
            if values:
                learned[image.id] = values
                changed.update(_FIELD_OF_KEY[key] for key in values)
                reworded += [image.id] if "caption" in values else []
            if "width" in facts and facts["width"] is None:
                dataset.unsized[image.id] = None
        self._update_library(learned, changed)
        if reworded and dataset.known:
            self.captions_changed.emit(reworded)

    def _without_edited(self, dataset: _Dataset, image: LibraryImage, values: dict[str, Any]) -> dict[str, Any]:
        """Return values read from disk without those that the user has edited.

        The next scan reads an edited value again. Unless the edit was made during this scan, `differs` is emitted.
        The library keeps showing the unsaved edit.
        """
        if _USER_FIELDS.isdisjoint(values):
            return values
        remaining, edits = dict(values), self.unsaved(image.folder, image.name)
        for key in _USER_FIELDS & values.keys():
            if key in edits or image.id in dataset.touched:
                del remaining[key]
                dataset.again.setdefault(image.folder.path, set()).add(image.name)
            if key in edits and image.id not in dataset.touched:
                self.differs.emit(OnDisk(image.id, key, values[key]))
        remaining.update((key, value) for key, value in edits.items() if image.value(key) != value)
        return remaining

    def _update_library(self, learned: Mapping[int, Mapping[str, Any]], changed: Iterable[Fact | Field]) -> None:
        self._learning = True
        try:
            self._library.set_facts(learned, *changed)
        finally:
            self._learning = False

    def _note_edits(self, altered: LibraryChange) -> None:
        if not self._learning and not altered.what.isdisjoint({*_USER_FIELDS, "folder"}):
            for dataset in self._open.values():
                if dataset.scanning:
                    dataset.touched |= altered.altered

    def _remove_gone(self, dataset: _Dataset, folder: Folder, names: Iterable[str]) -> None:
        """Remove images that are gone from disk, except those with unsaved edits."""
        ids = dataset.ids.get(folder, {})
        gone = [name for name in names if name in ids and not self._has_unsaved(ids[name])]
        self._library.remove([ids.pop(name) for name in gone])

    def _has_unsaved(self, image: int) -> bool:
        found = self._library.images.get(image)
        return found is not None and bool(self.unsaved(found.folder, found.name))

    def _mark(self, dataset: _Dataset, folder: Folder, marks: FolderMarks) -> None:
        """Update a folder's repeats, regularization and trigger to ``marks``, except values with unsaved edits.

        If a value is skipped because of such an edit, the next scan reports the folder's settings again.
        """
        ids = dataset.ids.get(folder, {}).values()
        new = {fact for fact in _FACTS if getattr(folder, fact) != getattr(marks, fact)}
        edited = new if not dataset.touched.isdisjoint(ids) else new.intersection(self.unsaved_of_folder(folder))
        if edited:
            dataset.again.setdefault(folder.path, set())
        for fact in new - edited:
            setattr(folder, fact, getattr(marks, fact))
        if new - edited:
            self._update_library({number: {} for number in ids}, ["folder"])

    def _set_lost(self, dataset: _Dataset, error: ImpastoError | None) -> None:
        """Set the error as the problem of every image in a lost dataset, or clear it when the dataset is back."""
        lost, dataset.lost = dataset.lost, error
        images = [self._library.images[number] for ids in dataset.ids.values() for number in ids.values()]
        if error:
            self._update_library({one.id: {"problem": error.sentence} for one in images}, ["problem"])
            self.problems.emit(error)
        elif lost:
            back = [one for one in images if one.problem == lost.sentence]
            # A file's earlier problem may have been caused by its missing folder, so its size is read again.
            dataset.unsized.update(dict.fromkeys(one.id for one in back if one.width is None))
            self._update_library({one.id: {"problem": None} for one in back}, ["problem"])
            self.recovered.emit(lost)

    # Sizes

    def _read_sizes(self, dataset: _Dataset) -> None:
        """Read the headers of images whose size is unknown, in batches until all sizes are known."""
        if dataset.sizing or dataset.stop.is_set() or dataset.lost:
            return
        if not dataset.unsized:
            if dataset.listed and not dataset.known:
                dataset.known = True
                self.known.emit(OpenedDataset(dataset.root, sum(map(len, dataset.ids.values()))))
            return
        some = list(islice(dataset.unsized, _HEADERS))
        for number in some:
            del dataset.unsized[number]
        images = [self._library.images[number] for number in some if number in self._library.images]
        queried = [(image.id, image.folder.path, image.name, image.changed_ns) for image in images]
        dataset.sizing, dataset.answered = True, math.inf

        def read() -> list[Mapping[str, Any]]:
            from app.core.disk.reading import read_size

            dataset.answer()
            wanted = takewhile(lambda _: not dataset.stop.is_set(), queried)
            return [read_size(path / name) for _, path, name, _ in iterate_yielding(wanted, dataset.answer)]

        def failed(fault: BaseException) -> None:
            dataset.sizing = False
            logging.getLogger(__name__).error("Reading image headers in %s failed", dataset.root, exc_info=fault)

        self._tasks.run(read, lambda sizes: self._on_sizes_read(dataset, queried, sizes), failed, kept=False)

    def _on_sizes_read(
        self, dataset: _Dataset, queried: list[tuple[int, Path, str, int]], sizes: list[Mapping[str, Any]]
    ) -> None:
        dataset.sizing = False
        if dataset.stop.is_set():
            return
        self._mark_responding(dataset)
        if dataset.lost:  # the errors are about the folder, not its images
            dataset.unsized.update(dict.fromkeys(number for number, *_ in queried))
            return
        facts = {}
        for (number, *_, changed_ns), size in zip(queried, sizes, strict=True):
            image = self._library.images.get(number)
            if image and image.changed_ns == changed_ns:  # otherwise the file has changed since and is read again
                facts[number] = size
        self._update_library(facts, ["size", "problem"])
        dataset.sized = dataset.sized + len(queried) if dataset.unsized else 0
        total = dataset.sized + len(dataset.unsized)
        self.progress.emit(ReadingProgress(dataset.root, "sizes" if dataset.unsized else "done", dataset.sized, total))
        self._read_sizes(dataset)


class _StoppedError(Exception):
    """Raised when a dataset was closed during its scan."""


class _AlreadyOpenError(Exception):
    """Raised when a folder is already open under another path, such as a link."""
