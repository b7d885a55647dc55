"""Create the objects that the pages share, connect them, and close them in the right order."""

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
from app.core.library import Library, LibraryChange
from app.core.models.models import Models
from app.core.presets.presets import Presets
from app.core.query.filtering import ActiveFilter, SavedFilters
from app.core.query.finder import Finder
from app.core.runs.queue import QueueManager
from app.core.runs.runs import RunCommands, Runs
from app.core.runs.training import NowTraining
from app.core.runs.watcher import RunWatcher
from app.core.settings.preferences import Settings
from app.core.settings.recent import OpenFailure, RecentFolders
from app.core.tags.completion import Completer, lists_folder
from app.core.tags.index import TagIndex
from app.core.tasks import Post, Tasks, reraise
from trainer.files.header import contains_preset
from trainer.protocol.files import long_path
from trainer.protocol.places import cache_folder, home

Kind = Literal["folder", "lora", "preset", "image", "other"]

Sorted = Callable[[list[Path], list[Path], list[Path]], None]
"""Callback that takes three lists: the folders, the image and caption files, and all other files."""
_EDITS_PATIENCE = 10.0
"""Seconds without progress after which a job is queued even though image edits are not on disk yet."""


class Navigator:
    """Requests to show something on another page; each event carries what to show."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.run: Emitter[Path] = Emitter()
        """Folder of a run to show on the Runs page."""
        self.entry: Emitter[str] = Emitter()
        """Id of a newly started queue entry to show on the Runs page."""
        self.job: Emitter[Path] = Emitter()
        """Job file to show on the Train page."""
        self.recipe: Emitter[str] = Emitter()
        """Preset, such as "sdxl/style", from which to create a job on the Train page."""
        self.lora: Emitter[Path] = Emitter()
        """LoRA file to show in the viewer."""
        self.preset: Emitter[Path] = Emitter()
        """Received preset file or image to show on the Presets page."""

    def open_paths(self, paths: Iterable[Path], then: Sorted) -> None:
        """Show LoRAs and presets on their pages; call `then` with the other folders and files.

        Missing paths count as folders. A worker reads the disk, which keeps a sleeping disk from blocking the window.
        """
        paths = list(paths)

        def dispatch(kinds: list[Kind]) -> None:
            by_kind = list(zip(paths, kinds, strict=True))
            for path, kind in by_kind:
                if kind == "lora":
                    self.lora.emit(path)
                elif kind == "preset":
                    self.preset.emit(path)
            then(*([path for path, kind in by_kind if kind == wanted] for wanted in ("folder", "image", "other")))

        self._tasks.run(lambda: [*map(_kind, paths)], dispatch, reraise, kept=False)


def _kind(path: Path) -> Kind:
    from trainer.dataset import caption_files, pixels  # late: they import Pillow

    ending = path.suffix.lower()
    with contextlib.suppress(OSError, ValueError):  # access denied, or an impossible file name
        if long_path(path).is_dir():
            return "folder"
        if ending == ".safetensors":
            return "lora"
        if ending == ".toml" or (ending == ".png" and contains_preset(path)):
            return "preset"
        if long_path(path).is_file():
            captions = ending in caption_files.SUFFIXES or path.name == caption_files.METADATA_NAME
            return "image" if captions or ending in pixels.SUFFIXES else "other"
    return "folder"


class View:
    """The view of the library: the images shown, their order, the selection and the current image.

    Filters do not change the selection: a hidden image is still selected, or current, when it is shown again. Hidden
    images cannot be edited: `current` and `scope` contain only shown ones.
    """

    def __init__(self, library: Library) -> None:
        self.ids: list[int] = []
        self.selected: frozenset[int] = frozenset()
        self.current: int | None = None
        """Id of the image in the loupe and caption editor; None if there is none or it is hidden."""
        self.shown: Emitter[None] = Emitter()
        """Emitted when `ids` has changed."""
        self.selection: Emitter[None] = Emitter()
        """Emitted when `selected` or `current` has changed."""
        self._chosen: int | None = None
        self._scope: list[int] | None = None
        library.altered.connect(self._on_altered)

    def show(self, ids: Iterable[int]) -> None:
        """Show these images in this order, without changing the selection."""
        self.ids, self._scope = list(ids), None
        before, self.current = self.current, self._chosen if self._chosen in self.ids else None
        self.shown.emit(None)
        if self.current != before:
            self.selection.emit(None)

    def select(self, selected: Iterable[int], current: int | None) -> None:
        """Select these images; `current` is the one to show in the loupe and the caption editor."""
        selection = frozenset(selected)
        if (selection, current) != (self.selected, self._chosen):
            self.selected, self._chosen, self._scope = selection, current, None
            self.current = current if current in self.ids else None
            self.selection.emit(None)

    def scope(self) -> Sequence[int]:
        """Return the images that actions apply to: the selected ones that are shown, in display order."""
        if self._scope is None:
            self._scope = list(filter(self.selected.__contains__, self.ids))  # three times as fast as a comprehension
        return self._scope

    def _on_altered(self, altered: LibraryChange) -> None:
        if not altered.removed:
            return
        if not altered.removed.isdisjoint(self.ids):
            self.show(number for number in self.ids if number not in altered.removed)
        self.select(self.selected - altered.removed, None if self._chosen in altered.removed else self._chosen)


class Session:
    """All objects shared by the pages, for the thread that creates it.

    `post` schedules a function on that thread: through Qt's event loop in the window, through a queue in tests. Create
    each new shared object in `__init__`, and close it in `close` if it has threads or open files.
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
        self.filtering = ActiveFilter(self.library, self.view, self.tags, self.finder, post)
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
        self.queue = QueueManager(post)
        self.queue.write_edits = partial(self.saver.flush, _EDITS_PATIENCE)
        self.runs = Runs(post)
        self.run_watcher = RunWatcher(self.runs, self.queue, self.tasks)
        self.run_commands = RunCommands(self.tasks)
        self.training = NowTraining(self.runs, self.queue, self.run_watcher, self.run_commands)
        self.renderer = RenderClient(post)
        self.queue.changed.connect(lambda _: self.renderer.make_way(self.queue.now))
        self.folder_missing: Emitter[Path] = Emitter()
        """Emitted with a folder of the last session that cannot be reopened."""
        self.datasets.opened.connect(lambda opened: self.recent.opened(opened.folder))
        self.datasets.closed.connect(self.recent.closed)
        self.thumbnails = Thumbnails(post, cache_folder() / FILE_NAME)
        self.thumbnails.reachable = lambda image: image.folder.root not in self.datasets.lost
        self.datasets.known.connect(lambda _: self.thumbnails.prepare(self.library.images.values(), EDGES[0]))
        for event in (self.view.shown, self.view.selection, self.history.changed):
            event.connect(lambda _: self.thumbnails.give_way())
        self.library.altered.connect(self._on_altered)
        self.health = Health(self.library, self.tags, self.tasks, post, self.target.target)
        self.finder.findings = self.health.images_by_finding
        self.datasets.orphans_changed.connect(self.health.set_orphan_files)
        self.datasets.notes.connect(self.health.set_notes_error)
        self.datasets.captions_changed.connect(self.health.inspect_again)
        self.datasets.closed.connect(self.health.forget_dataset)
        self.datasets.known.connect(lambda _: self.health.start_inspection())
        self.datasets.scanned.connect(lambda _: self.health.retry_missing())
        self.target.changed.connect(lambda _: self.health.set_target(self.target.target))
        self.target.changed.connect(lambda _: self.tags.read_lines(self.target.target.lines))
        post(self.saver.recover)  # posted: the window must already listen when edits of a crashed session are reported

    def reopen(self) -> None:
        """Reopen the last session's folders if the preferences say so; emit `folder_missing` if that fails."""
        for folder in self.recent.folders_to_reopen(self.settings.preferences.starting.reopen):
            self.recent.check_folder(folder, partial(self._reopen, folder))
        self.recent.check()

    def close(self) -> None:
        """Stop all background work; each part stops only after all parts that need it."""
        for folder in self.datasets.folders:
            if folder not in self.datasets.lost:
                self.recent.opened(folder)  # also folders whose images are not all listed yet
        self.settings.file.settle()
        self.filters.file.settle()
        self.recent.close()
        self.renderer.close()
        self.jobs.close()  # before the queue, as closing may write a job file and then queue the job
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

    def _reopen(self, folder: Path, failure: OpenFailure | None) -> None:
        if failure:
            self.folder_missing.emit(folder)
        else:
            self.datasets.open(folder)
        if folder not in self.datasets.folders:  # missing, or inside another open folder
            self.recent.closed(folder)

    def _on_altered(self, altered: LibraryChange) -> None:
        if "problem" in altered.what:
            self.thumbnails.retry(altered.altered)
