"""The open datasets: enters what workers find on disk into the library, at once and whenever it changes."""

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

from app.core.disk.roots import Forgetting, identity_of, overlapping, silence
from app.core.events import Emitter
from app.core.library import Altered, Fact, Field, Folder, FolderField, Library, Picture, Value
from app.core.tasks import Tasks, in_turns, raise_again
from trainer.errors import ImpastoError

if TYPE_CHECKING:  # brings numpy, Pillow and pydantic: a window without a dataset does not wait for them
    from app.core.disk.scanner import FolderScanner, News, NotesRead, OrphanFiles, Stage
    from trainer.dataset.folders import FolderMarks

_AHEAD = 2
"""Batches that wait for the library's thread; more would keep it from answering the user."""
_HEADERS = 400
"""Headers read in one go, about a fifth of a second: other work comes between."""
_SILENT = 15.0
"""Seconds without an answer after which a disk is said not to answer; one that has to start turning takes ten."""
_USERS: frozenset[Field] = frozenset({"caption", "rating", "excluded", "crop"})
_KNOWN = [attribute.name for attribute in fields(Picture) if attribute.name not in ("id", "folder", "name")]
_FACTS: tuple[FolderField, ...] = ("repeats", "regularisation", "trigger")
_KINDS: Mapping[str, Fact | Field] = {
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
    """A dataset whose pictures are all listed now."""

    folder: Path
    pictures: int


class ReadingProgress(NamedTuple):
    """How far the reading of a dataset has come."""

    folder: Path
    stage: Stage
    done: int
    total: int


class OnDisk(NamedTuple):
    """A value that differs on disk from an edit that has not been saved yet; the edit stays."""

    picture: int
    field: Field
    value: Value


@dataclass(eq=False)
class _Dataset:
    """One open folder, as the library's thread knows it."""

    root: Path
    others: tuple[_Dataset, ...] = ()
    """Those that were open before, one of which may be the same folder by another path."""
    stop: threading.Event = field(default_factory=threading.Event)
    slots: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_AHEAD))
    looker: FolderScanner | None = None
    looking: bool = False
    listed: bool = False
    known: bool = False
    whole: bool = False
    """Whether the next look is to be a thorough one."""
    lost: ImpastoError | None = None
    identity: tuple[int, int] | None = None
    """Device and number of the folder, once its disk has told them."""
    answered: float = math.inf
    """When its disk was asked for something or answered last; from workers, by the monotonic clock."""
    silent: bool = False
    """Whether it is lost for not answering."""
    ids: dict[Folder, dict[str, int]] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    """Pictures that the user changed since the look that runs began: what it read may be older."""
    again: dict[Path, set[str]] = field(default_factory=dict)
    """Pictures whose captions and notes the next look has to read again, by folders whose facts it tells again."""
    dropped: dict[Path, set[str]] = field(default_factory=dict)
    """Pictures that the next look is to forget."""
    unsized: dict[int, None] = field(default_factory=dict)
    sizing: bool = False
    sized: int = 0

    def answer(self) -> None:
        """Note that the disk answers; from any thread."""
        self.answered = time.monotonic()


class Datasets:
    """Opens folders as datasets and keeps the library equal to what lies in them. Nothing is copied, nothing written.

    Belongs to the library's thread. `refresh` is called every few seconds by whoever has a clock; a look at the disk
    runs on a worker, and a dataset whose disk does not answer holds up no other.
    """

    def __init__(self, library: Library, tasks: Tasks) -> None:
        self.opened: Emitter[OpenedDataset] = Emitter()
        self.known: Emitter[OpenedDataset] = Emitter()
        """All that is cheap to know of a dataset is known: now is the time for work that takes long."""
        self.closed: Emitter[Path] = Emitter()
        self.looked: Emitter[Path] = Emitter()
        """A look at that dataset is over, and all that it found is told."""
        self.progress: Emitter[ReadingProgress] = Emitter()
        self.problems: Emitter[ImpastoError] = Emitter()
        self.found: Emitter[ImpastoError] = Emitter()
        """What was told by `problems` is over: the dataset can be reached again, or is closed."""
        self.reworded: Emitter[Collection[int]] = Emitter()
        """Other captions than before stand in the files of these pictures, of which all was known."""
        self.notes: Emitter[NotesRead] = Emitter()
        """The notes of a folder cannot be read, or can again."""
        self.strays: Emitter[OrphanFiles] = Emitter()
        """Files of a folder have no picture, or others than before have none."""
        self.differs: Emitter[OnDisk] = Emitter()
        """The disk shows another value than an unsaved edit."""
        self.unsaved: Callable[[Folder, str], Mapping[Field, Value]] = lambda folder, name: {}
        """Returns the edits of an image that are not on disk; they are shown, whatever is there. Set by the session."""
        self.unsaved_of_folder: Callable[[Folder], Mapping[FolderField, Value]] = lambda folder: {}
        """Returns those of a folder, likewise."""
        self._library, self._tasks = library, tasks
        self._forgetting = Forgetting(library, tasks.post)
        self._open: dict[Path, _Dataset] = {}
        self._leaving: set[tuple[Folder, str]] = set()
        """Pictures whose files are being moved away: a look finds them still, and they are none."""
        self._learning = False
        library.altered.connect(self._note_edits)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The open datasets, in the order in which they were opened."""
        return tuple(self._open)

    @property
    def lost(self) -> Mapping[Path, ImpastoError]:
        """Why datasets cannot be reached now."""
        return {root: dataset.lost for root, dataset in self._open.items() if dataset.lost}

    def open(self, folder: Path) -> None:
        """Open a folder with all folders inside; pictures appear in the library as they are found.

        What stands against it is told by `problems`.
        """
        root = folder.absolute()
        if root in self._open:
            return
        other = next((one for one in self._open if root.is_relative_to(one) or one.is_relative_to(root)), None)
        if other:
            self._tasks.run(lambda: overlapping(root, other), self.problems.emit, raise_again, kept=False)
            return
        self._forgetting.finish(root)  # those of this folder that are on their way out come back as what they were
        self._library.expect(root)
        self._open[root] = _Dataset(root, others=tuple(self._open.values()))
        self._look(self._open[root], {})

    def close(self, folder: Path) -> None:
        """Forget a dataset; its files are not touched. A large one's pictures leave the library by and by."""
        dataset = self._open.pop(folder.absolute(), None)
        if dataset:
            dataset.stop.set()
            self._forgetting.begin([number for ids in dataset.ids.values() for number in ids.values()])
            if dataset.lost:
                self.found.emit(dataset.lost)
            self.closed.emit(dataset.root)

    def stop(self) -> None:
        """Let all looks end soon; the library stays as it is."""
        for dataset in self._open.values():
            dataset.stop.set()

    def refresh(self, near: Iterable[int] = (), whole: bool = False) -> None:
        """Look for what other programs changed, first at the pictures in `near`; `whole`: ask for every single file.

        Cheap enough for every other second; a thorough look is for the moment at which the user comes back. A dataset
        whose disk has not answered for long is said to be lost until it does.
        """
        names: dict[Path, dict[Path, set[str]]] = {}
        for number in near:
            if picture := self._library.pictures.get(number):
                stem = picture.path.stem
                beside = {picture.name, f"{stem}.txt", f"{stem}.caption"}
                names.setdefault(picture.folder.root, {}).setdefault(picture.folder.path, set()).update(beside)
        for root, dataset in self._open.items():
            dataset.whole |= whole
            self._watch(dataset)
            self._look(dataset, names.get(root, {}))

    def _watch(self, dataset: _Dataset) -> None:
        """Say once that a disk does not answer."""
        waits = dataset.looking or dataset.sizing
        if waits and not dataset.lost and time.monotonic() > dataset.answered + _SILENT:
            dataset.silent = True
            self._lose(dataset, silence(dataset.root))

    def _hear(self, dataset: _Dataset) -> None:
        """Take it that the disk answers, if need be again."""
        if dataset.silent:
            dataset.silent = False
            self._lose(dataset, None)

    def drop(self, ids: Iterable[int]) -> None:
        """Forget pictures whose files this app itself moves away; `moved` says when that is over."""
        gone = set(ids)
        for dataset in self._open.values():
            for folder, names in dataset.ids.items():
                for name in [name for name, number in names.items() if number in gone]:
                    del names[name]
                    self._leaving.add((folder, name))
        self._library.remove(gone)

    def moved(self, pictures: Iterable[Picture]) -> None:
        """Take what lies where these were for pictures again, from the next look on: none of their files is moved."""
        for one in pictures:
            self._leaving.discard((one.folder, one.name))
            for dataset in self._open.values():
                if one.folder in dataset.ids:
                    dataset.dropped.setdefault(one.folder.path, set()).add(one.name)

    def take_back(self, pictures: Iterable[Picture]) -> None:
        """Enter pictures again that were dropped, with all that was known of them, now that their files are back."""
        names = {folder: ids for dataset in self._open.values() for folder, ids in dataset.ids.items()}
        back = [one for one in pictures if one.name not in names.get(one.folder, {one.name})]
        known = [{name: getattr(one, name) for name in _KNOWN} for one in back]
        ids = self._library.add((one.folder, one.name, facts) for one, facts in zip(back, known, strict=True))
        for one, number in zip(back, ids, strict=True):
            names[one.folder][one.name] = number

    # Looking

    def _look(self, dataset: _Dataset, near: Mapping[Path, set[str]]) -> None:
        if dataset.looking:
            return
        dataset.looking, dataset.answered = True, math.inf
        dataset.touched.clear()
        again, dataset.again = dataset.again, {}
        dropped, dataset.dropped = dataset.dropped, {}
        whole, dataset.whole = dataset.whole, False

        def look() -> None:
            from app.core.disk.scanner import FolderScanner
            from trainer.dataset.links import Links

            dataset.answer()
            dataset.identity = identity_of(dataset.root)
            if dataset.identity and any(other.identity == dataset.identity for other in dataset.others):
                raise _OpenAlready

            if dataset.looker is None:
                links = Links([dataset.root, *(other.root for other in dataset.others)])
                dataset.looker = FolderScanner(
                    dataset.root, lambda news: self._hand(dataset, news), dataset.answer, links
                )
            dataset.looker.look(whole, near, again, dropped)

        self._tasks.run(look, lambda _: self._looked(dataset), lambda fault: self._failed(dataset, fault), kept=False)

    def _hand(self, dataset: _Dataset, news: News) -> None:
        """Send news to the library's thread, from a worker; waits while that has enough to do."""
        while not dataset.slots.acquire(timeout=0.1):
            if dataset.stop.is_set():
                raise _Stopped
        if dataset.stop.is_set():
            raise _Stopped

        def take() -> None:
            dataset.slots.release()
            if not dataset.stop.is_set():
                self._take(dataset, news)

        self._tasks.post(take)

    def _looked(self, dataset: _Dataset) -> None:
        dataset.looking = False
        if dataset.stop.is_set():
            return
        self._hear(dataset)
        if not dataset.listed and not dataset.lost:
            dataset.listed = True
            self.opened.emit(OpenedDataset(dataset.root, sum(map(len, dataset.ids.values()))))
        self._size_more(dataset)
        self.looked.emit(dataset.root)
        if dataset.whole:  # asked for while this look ran, which may have passed what has changed since
            self._look(dataset, {})

    def _failed(self, dataset: _Dataset, fault: BaseException) -> None:
        dataset.looking = False
        if dataset.stop.is_set():
            return
        if isinstance(fault, _OpenAlready):
            self._drop_twin(dataset)
        elif not isinstance(fault, _Stopped):
            self._hear(dataset)
            logging.getLogger(__name__).error("A look at %s ended early", dataset.root, exc_info=fault)

    def _drop_twin(self, dataset: _Dataset) -> None:
        """Close what is open by another path too; look anew where that one may have been closed meanwhile."""
        before, dataset.others = dataset.others, tuple(filter(self._is_open, dataset.others))
        if not self._is_open(dataset):
            return
        if len(dataset.others) == len(before):
            self.close(dataset.root)
        else:
            self._look(dataset, {})

    def _is_open(self, dataset: _Dataset) -> bool:
        """Tell whether it is this one that is open, not one opened later by the same path."""
        return self._open.get(dataset.root) is dataset

    # Taking in

    def _take(self, dataset: _Dataset, news: News) -> None:
        from app.core.disk import scanner

        self._hear(dataset)
        match news:
            case scanner.FilesFound():
                self._enter(dataset, news.folder, news.pictures)
            case scanner.Facts():
                self._learn(dataset, news.folder, news.pictures)
            case scanner.Gone():
                self._forget(dataset, news.folder, news.names)
            case scanner.Marked():
                self._mark(dataset, news.folder, news.marks)
            case scanner.OrphanFiles():
                self.strays.emit(news)
            case scanner.NotesRead():
                self.notes.emit(news)
            case scanner.ScanProblem():
                self.problems.emit(news.error)
            case scanner.Lost():
                self._lose(dataset, news.error)
            case scanner.ScanProgress():
                self.progress.emit(ReadingProgress(dataset.root, news.stage, news.done, news.total))

    def _enter(self, dataset: _Dataset, folder: Folder, pictures: Mapping[str, Mapping[str, Any]]) -> None:
        if folder not in dataset.ids:
            for fact, value in self.unsaved_of_folder(folder).items():
                setattr(folder, fact, value)
        ids = dataset.ids.setdefault(folder, {})
        pictures = {name: facts for name, facts in pictures.items() if (folder, name) not in self._leaving}
        kept = {name: {**facts, "problem": None} for name, facts in pictures.items() if name in ids}
        new = {name: facts for name, facts in pictures.items() if name not in ids}
        shown = ((folder, name, {**facts, **self.unsaved(folder, name)}) for name, facts in new.items())
        ids.update(zip(new, self._library.add(shown), strict=True))
        dataset.unsized.update(dict.fromkeys(ids[name] for name in new))
        self._learn(dataset, folder, kept)
        self.progress.emit(ReadingProgress(dataset.root, "listing", sum(map(len, dataset.ids.values())), 0))
        self._size_more(dataset)

    def _learn(self, dataset: _Dataset, folder: Folder, pictures: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what differs from the library, but for edits that the disk does not show yet."""
        ids, learned, changed, reworded = dataset.ids.get(folder, {}), {}, set[Fact | Field](), list[int]()
        for name, facts in pictures.items():
            picture = self._library.pictures.get(ids.get(name, 0))
            if picture is None:
                continue
            values = {key: value for key, value in facts.items() if getattr(picture, key) != value}
            values = self._without_edited(dataset, picture, values)
            if values:
                learned[picture.id] = values
                changed.update(_KINDS[key] for key in values)
                reworded += [picture.id] if "caption" in values else []
            if "width" in facts and facts["width"] is None:
                dataset.unsized[picture.id] = None
        self._tell(learned, changed)
        if reworded and dataset.known:
            self.reworded.emit(reworded)

    def _without_edited(self, dataset: _Dataset, picture: Picture, values: dict[str, Any]) -> dict[str, Any]:
        """Leave out what the user changed meanwhile: read again later where the look is too old, else reported.

        Of an edit that is not on disk it is the edit that is shown.
        """
        if _USERS.isdisjoint(values):
            return values
        kept, edits = dict(values), self.unsaved(picture.folder, picture.name)
        for key in _USERS & values.keys():
            if key in edits or picture.id in dataset.touched:
                del kept[key]
                dataset.again.setdefault(picture.folder.path, set()).add(picture.name)
            if key in edits and picture.id not in dataset.touched:
                self.differs.emit(OnDisk(picture.id, key, values[key]))
        kept.update((key, value) for key, value in edits.items() if picture.value(key) != value)
        return kept

    def _tell(self, learned: Mapping[int, Mapping[str, Any]], changed: Iterable[Fact | Field]) -> None:
        self._learning = True
        try:
            self._library.learn(learned, *changed)
        finally:
            self._learning = False

    def _note_edits(self, altered: Altered) -> None:
        if not self._learning and not altered.what.isdisjoint({*_USERS, "folder"}):
            for dataset in self._open.values():
                if dataset.looking:
                    dataset.touched |= altered.altered

    def _forget(self, dataset: _Dataset, folder: Folder, names: Iterable[str]) -> None:
        """Let pictures go that are gone on disk, but for those whose edits are not saved."""
        ids = dataset.ids.get(folder, {})
        gone = [name for name in names if name in ids and not self._has_unsaved(ids[name])]
        self._library.remove([ids.pop(name) for name in gone])

    def _has_unsaved(self, picture: int) -> bool:
        found = self._library.pictures.get(picture)
        return found is not None and bool(self.unsaved(found.folder, found.name))

    def _mark(self, dataset: _Dataset, folder: Folder, marks: FolderMarks) -> None:
        """Take over what holds for a folder, but for what the user changed: that is told again by the next look."""
        ids = dataset.ids.get(folder, {}).values()
        new = {fact for fact in _FACTS if getattr(folder, fact) != getattr(marks, fact)}
        edited = new if not dataset.touched.isdisjoint(ids) else new.intersection(self.unsaved_of_folder(folder))
        if edited:
            dataset.again.setdefault(folder.path, set())
        for fact in new - edited:
            setattr(folder, fact, getattr(marks, fact))
        if new - edited:
            self._tell({number: {} for number in ids}, ["folder"])

    def _lose(self, dataset: _Dataset, error: ImpastoError | None) -> None:
        """Say of every picture why it cannot be reached, or that it can be again."""
        lost, dataset.lost = dataset.lost, error
        pictures = [self._library.pictures[number] for ids in dataset.ids.values() for number in ids.values()]
        if error:
            self._tell({one.id: {"problem": error.sentence} for one in pictures}, ["problem"])
            self.problems.emit(error)
        elif lost:
            back = [one for one in pictures if one.problem == lost.sentence]
            # What was said of a file before may have been that it had gone with its folder.
            dataset.unsized.update(dict.fromkeys(one.id for one in back if one.width is None))
            self._tell({one.id: {"problem": None} for one in back}, ["problem"])
            self.found.emit(lost)

    # Sizes

    def _size_more(self, dataset: _Dataset) -> None:
        """Read the headers of some pictures whose size is unknown, and go on until all are known."""
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
        pictures = [self._library.pictures[number] for number in some if number in self._library.pictures]
        asked = [(picture.id, picture.folder.path, picture.name, picture.changed_ns) for picture in pictures]
        dataset.sizing, dataset.answered = True, math.inf

        def read() -> list[Mapping[str, Any]]:
            from app.core.disk.reading import read_size

            dataset.answer()
            wanted = takewhile(lambda _: not dataset.stop.is_set(), asked)
            return [read_size(path / name) for _, path, name, _ in in_turns(wanted, dataset.answer)]

        def failed(fault: BaseException) -> None:
            dataset.sizing = False
            logging.getLogger(__name__).error("Reading headers in %s ended early", dataset.root, exc_info=fault)

        self._tasks.run(read, lambda sizes: self._sized(dataset, asked, sizes), failed, kept=False)

    def _sized(
        self, dataset: _Dataset, asked: list[tuple[int, Path, str, int]], sizes: list[Mapping[str, Any]]
    ) -> None:
        dataset.sizing = False
        if dataset.stop.is_set():
            return
        self._hear(dataset)
        if dataset.lost:  # they tell of the folder, not of its pictures
            dataset.unsized.update(dict.fromkeys(number for number, *_ in asked))
            return
        facts = {}
        for (number, *_, changed_ns), size in zip(asked, sizes, strict=True):
            picture = self._library.pictures.get(number)
            if picture and picture.changed_ns == changed_ns:
                facts[number] = size
        self._tell(facts, ["size", "problem"])
        dataset.sized = dataset.sized + len(asked) if dataset.unsized else 0
        total = dataset.sized + len(dataset.unsized)
        self.progress.emit(ReadingProgress(dataset.root, "sizes" if dataset.unsized else "done", dataset.sized, total))
        self._size_more(dataset)


class _Stopped(Exception):
    """The dataset was closed while a worker looked at it."""


class _OpenAlready(Exception):
    """The folder is open by another path: one of the two leads through a link."""
