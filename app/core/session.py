"""One sitting with the app: builds and owns what the pages share, and closes it in the right order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from app.core.after.drawing import RenderClient
from app.core.disk.datasets import Datasets
from app.core.disk.thumbnails import EDGES, FILE_NAME, Thumbnails
from app.core.edits.backups import Backups
from app.core.edits.file_actions import Rewriter
from app.core.edits.history import History
from app.core.edits.journal import Journal
from app.core.edits.save_state import SaveNotice
from app.core.edits.saver import Saver
from app.core.edits.writer import Writer
from app.core.events import Emitter
from app.core.health.health import Health
from app.core.jobs.jobs import Jobs
from app.core.jobs.target import TargetTracker
from app.core.library import Altered, Library
from app.core.models.models import Models
from app.core.presets.presets import Presets
from app.core.query.filtering import Filtering, SavedFilters
from app.core.query.finder import Finder
from app.core.runs.queue import QueueKeeper
from app.core.runs.runs import Orders, Runs
from app.core.runs.training import NowTraining
from app.core.runs.watcher import RunWatcher
from app.core.settings.preferences import Settings
from app.core.settings.recent import Absence, RecentFolders
from app.core.tags.completion import Completer, lists_folder
from app.core.tags.index import TagIndex
from app.core.tasks import Post, Tasks, raise_again
from trainer.config.presets.embedded import contains_preset
from trainer.protocol.files import long_path
from trainer.protocol.places import cache_folder, home

Kind = Literal["folder", "lora", "preset", "picture", "other"]

Sorted = Callable[[list[Path], list[Path], list[Path]], None]
"""Takes folders, pictures with captions, and other files."""
_EDITS_PATIENCE = 10.0
"""Seconds without progress after which a job is queued although edits of images are not on disk."""


class Navigator:
    """Each event names what should be shown."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.run: Emitter[Path] = Emitter()
        """A run's folder, on the Runs page."""
        self.entry: Emitter[str] = Emitter()
        """An entry of the queue that was started just now, on the Runs page."""
        self.job: Emitter[Path] = Emitter()
        """A job file, on the Train page."""
        self.recipe: Emitter[str] = Emitter()
        """A preset as "sdxl/style": a new job from it, on the Train page."""
        self.lora: Emitter[Path] = Emitter()
        """A LoRA file, in the viewer."""
        self.preset: Emitter[Path] = Emitter()
        """A preset file or picture that was received, on the Presets page."""

    def take(self, paths: Iterable[Path], then: Sorted) -> None:
        """Let LoRAs and presets go to their places; call `then` with the folders and the files that are left.

        What is not there is among the folders. The disk is looked at by a worker: one that sleeps holds up nobody.
        """
        paths = list(paths)

        def go(kinds: list[Kind]) -> None:
            sorted_ = list(zip(paths, kinds, strict=True))
            for path, kind in sorted_:
                if kind == "lora":
                    self.lora.emit(path)
                elif kind == "preset":
                    self.preset.emit(path)
            then(*([path for path, kind in sorted_ if kind == wanted] for wanted in ("folder", "picture", "other")))

        self._tasks.run(lambda: [*map(_kind, paths)], go, raise_again, kept=False)


def _kind(path: Path) -> Kind:
    from trainer.dataset import caption_files, pixels  # late: they bring Pillow

    ending = path.suffix.lower()
    with contextlib.suppress(OSError, ValueError):  # a place that must not be looked at, a name that none can have
        if long_path(path).is_dir():
            return "folder"
        if ending == ".safetensors":
            return "lora"
        if ending == ".toml" or (ending == ".png" and contains_preset(path)):
            return "preset"
        if long_path(path).is_file():
            captions = ending in caption_files.SUFFIXES or path.name == caption_files.METADATA_NAME
            return "picture" if captions or ending in pixels.SUFFIXES else "other"
    return "folder"


class View:
    """What is shown of the library: which pictures, in which order, which of them are selected, which is current.

    The selection is kept by id, so a picture that a filter hides stays selected and is selected when it comes back; so
    does the current one. Nothing that is hidden can be worked on: `current` and `scope` hold only what is shown.
    """

    def __init__(self, library: Library) -> None:
        self.ids: list[int] = []
        self.selected: frozenset[int] = frozenset()
        self.current: int | None = None
        """The picture that loupe and caption editor show; None while the one that was chosen is hidden."""
        self.shown: Emitter[None] = Emitter()
        """`ids` is another list now."""
        self.selection: Emitter[None] = Emitter()
        """`selected` or `current` is another now."""
        self._chosen: int | None = None
        self._scope: list[int] | None = None
        library.altered.connect(self._forget)

    def show(self, ids: Iterable[int]) -> None:
        """Show these pictures in this order; the selection stays."""
        self.ids, self._scope = list(ids), None
        before, self.current = self.current, self._chosen if self._chosen in self.ids else None
        self.shown.emit(None)
        if self.current != before:
            self.selection.emit(None)

    def select(self, selected: Iterable[int], current: int | None) -> None:
        """Select these pictures; `current` is the one that the loupe and the caption editor show."""
        chosen = frozenset(selected)
        if (chosen, current) != (self.selected, self._chosen):
            self.selected, self._chosen, self._scope = chosen, current, None
            self.current = current if current in self.ids else None
            self.selection.emit(None)

    def scope(self) -> Sequence[int]:
        """Return the selected pictures that are shown, in their order; what an action on the selection works on."""
        if self._scope is None:
            self._scope = list(filter(self.selected.__contains__, self.ids))  # in a third of the time
        return self._scope

    def _forget(self, altered: Altered) -> None:
        if not altered.removed:
            return
        if not altered.removed.isdisjoint(self.ids):
            self.show(number for number in self.ids if number not in altered.removed)
        self.select(self.selected - altered.removed, None if self._chosen in altered.removed else self._chosen)


class Session:
    """Everything that the pages are handed. It belongs to the thread that makes it.

    `post` calls a function soon on that thread: the window gives one that goes through Qt's event loop, tests a queue.
    An owner of a room adds his part here: one line in `__init__`, and one in `close` where it holds threads or files.
    """

    def __init__(self, post: Post, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.settings.file.post = post
        self.tasks = Tasks(post, behind=True)
        self.navigator = Navigator(self.tasks)
        self.library = Library()
        self.view = View(self.library)
        self.tags = TagIndex(self.library, self.tasks, self.settings.preferences.judging.lines)
        self.finder = Finder(self.library, self.tags, self.tasks)
        self.filtering = Filtering(self.library, self.view, self.tags, self.finder, post)
        self.filters = SavedFilters(post)
        self.completer = Completer(self.tags)
        self.completer.load_when_requested(self.tasks, lists_folder())
        self.backups = Backups(home() / "captions" / "backups")
        journal = Journal(home() / "captions" / "journal")
        self.saver = Saver(journal, Writer(self.backups), post)
        self.backups.damaged = lambda root, file: post(
            lambda: self.saver.notices.emit(SaveNotice("notice.backups_damaged", root, 1, file=str(file)))
        )
        self.history = History(self.library, journal, self.saver)
        self.rewriter = Rewriter(self.library, self.history, self.saver, self.backups, self.tasks)
        self.datasets = Datasets(self.library, self.tasks)
        self.datasets.unsaved = self.saver.unsaved_at
        self.datasets.unsaved_of_folder = self.saver.unsaved_of_folder
        self.recent = RecentFolders(post)
        self.models = Models(post)
        self.presets = Presets(self.tasks)
        self.jobs = Jobs(self.tasks)
        self.target = TargetTracker(self.jobs, self.datasets, self.settings, self.tasks)
        self.queue = QueueKeeper(post)
        self.queue.write_edits = partial(self.saver.flush, _EDITS_PATIENCE)
        self.runs = Runs(post)
        self.run_watcher = RunWatcher(self.runs, self.queue, self.tasks)
        self.run_commands = Orders(self.tasks)
        self.training = NowTraining(self.runs, self.queue, self.run_watcher, self.run_commands)
        self.renderer = RenderClient(post)
        self.queue.changed.connect(lambda _: self.renderer.make_way(self.queue.now))
        self.missed: Emitter[Path] = Emitter()
        """A folder that was open last is not there any more."""
        self.datasets.opened.connect(lambda opened: self.recent.opened(opened.folder))
        self.datasets.closed.connect(self.recent.closed)
        self.thumbnails = Thumbnails(post, cache_folder() / FILE_NAME)
        self.thumbnails.reachable = lambda image: image.folder.root not in self.datasets.lost
        self.datasets.known.connect(lambda _: self.thumbnails.prepare(self.library.images.values(), EDGES[0]))
        for event in (self.view.shown, self.view.selection, self.history.changed):
            event.connect(lambda _: self.thumbnails.give_way())
        self.library.altered.connect(self._retry)
        self.health = Health(self.library, self.tags, self.tasks, post, self.target.aim)
        self.finder.findings = self.health.marked
        self.datasets.strays.connect(self.health.take_strays)
        self.datasets.notes.connect(self.health.take_notes)
        self.datasets.reworded.connect(self.health.look_again)
        self.datasets.closed.connect(self.health.drop_strays)
        self.datasets.known.connect(lambda _: self.health.begin())
        self.datasets.looked.connect(lambda _: self.health.look_for_gone())
        self.target.changed.connect(lambda _: self.health.aim_at(self.target.aim))
        self.target.changed.connect(lambda _: self.tags.read_lines(self.target.aim.lines))
        post(self.saver.recover)  # when the window listens: it says what was saved of a session that crashed

    def reopen(self) -> None:
        """Open what was open when the app ended last, where the user wants that; `missed` tells what is gone."""
        for folder in self.recent.left_open(self.settings.preferences.starting.reopen):
            self.recent.look_at(folder, partial(self._reopen, folder))
        self.recent.look()

    def close(self) -> None:
        """End what runs behind; last started, first ended."""
        for folder in self.datasets.folders:
            if folder not in self.datasets.lost:
                self.recent.opened(folder)  # also one whose pictures are not all listed yet
        self.settings.file.settle()
        self.filters.file.settle()
        self.recent.close()
        self.renderer.close()
        self.jobs.close()  # before the queue, into which a job goes whose file is written only now
        self.queue.close()
        self.presets.close()
        self.models.close()
        self.runs.close()
        self.datasets.stop()
        self.health.close()
        self.thumbnails.close()
        self.history.finish()
        self.saver.close()
        self.tasks.close()
        self.run_watcher.close()

    def _reopen(self, folder: Path, absence: Absence | None) -> None:
        if absence:
            self.missed.emit(folder)
        else:
            self.datasets.open(folder)
        if folder not in self.datasets.folders:  # gone, or part of what is open besides
            self.recent.closed(folder)

    def _retry(self, altered: Altered) -> None:
        if "problem" in altered.what:
            self.thumbnails.retry(altered.altered)
