"""Edits of images as undoable operations, and their history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from app.core.edits.journal import Journal
from app.core.edits.save_state import Conflict, DiskValue, Key, SaveRequest
from app.core.edits.saver import Saver
from app.core.events import Emitter
from app.core.library import Field, Folder, FolderChange, FolderField, Library, Value, ValueChange
from trainer.errors import ImpastoError

AT_ONCE = 500
"""Number of changes applied at once (about 5 ms); larger edits run in batches to keep the window responsive."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A user's edit; its English name includes the number of changes."""

    name: str
    changes: tuple[ValueChange, ...]
    folders: tuple[FolderChange, ...] = ()

    def inverse(self) -> Edit:
        """Return the edit that undoes this one, with the same name; callers prefix "Undo" or "Redo"."""
        return Edit(
            self.name,
            tuple(change.inverse() for change in reversed(self.changes)),
            tuple(change.inverse() for change in reversed(self.folders)),
        )

    def __bool__(self) -> bool:
        """Return whether the edit changes anything."""
        return bool(self.changes or self.folders)


Ended = Callable[[ImpastoError | None], None]
"""Callback that receives the error, or None, when a file action has ended."""


class FileAction(Protocol):
    """An undoable action on files instead of values, such as deleting images or painting a mask.

    Implemented by `app.core.edits.file_actions` and by the window, which moves images to the trash.
    """

    name: str
    """Name of the action, in the same wording as names of edits."""

    def undo(self, ended: Ended) -> None:
        """Undo the action, but keep later changes that other programs made to the files."""

    def redo(self, ended: Ended) -> None:
        """Redo the action, but keep later changes that other programs made to the files."""


class History:
    """Unlimited undo history of this session; belongs to the library's thread.

    An edit survives a crash once it is in the journal: when `do` returns or, with more than AT_ONCE changes, when
    `done` is emitted. A change is skipped if its value is no longer `before` because another program wrote the file;
    `done` is emitted with the changes that were made.
    """

    def __init__(self, library: Library, journal: Journal, saver: Saver) -> None:
        self.done: Emitter[Edit] = Emitter()
        self.changed: Emitter[None] = Emitter()
        """Emitted when `undo_name`, `redo_name` or `busy` may have changed."""
        self.failed: Emitter[ImpastoError] = Emitter()
        """Emitted when a file action could not be undone or redone; the action has been removed from the history."""
        self._library, self._journal, self._saver = library, journal, saver
        self._undo: list[Edit | FileAction] = []
        self._redo: list[Edit | FileAction] = []
        self._running_action: FileAction | None = None
        self._queued: list[tuple[Edit | FileAction, list[Edit | FileAction]]] = []
        """Steps to undo or redo after the running file action, each with the stack that already contains it."""
        self._running: Iterator[None] | None = None
        self._inside: dict[Folder, str] = {}
        saver.learned.connect(self._learn)

    @property
    def undo_name(self) -> str | None:
        """Return the name of the step that `undo` would undo, or None."""
        return self._undo[-1].name if self._undo else None

    @property
    def redo_name(self) -> str | None:
        """Return the name of the step that `redo` would redo, or None."""
        return self._redo[-1].name if self._redo else None

    @property
    def depths(self) -> tuple[int, int]:
        """Return how many steps can be undone and redone."""
        return len(self._undo), len(self._redo)

    @property
    def busy(self) -> bool:
        """Return whether a large edit is still being applied; any new action completes it first."""
        return self._running is not None

    @property
    def writing(self) -> Edit | FileAction | None:
        """Return the step whose files are being written, else the next step in the queue, else None."""
        return self._running_action or (self._queued[0][0] if self._queued else None)

    def do(self, edit: Edit, *, joins: bool = False) -> None:
        """Apply an edit; with `joins` (typing), merge it into the previous step if both change the same single value.

        Call it on every keystroke, so that typed text is in the journal immediately; the file is written after a pause.
        """
        self.finish()

        def remember(made: Edit) -> None:
            self._redo.clear()
            last = self._undo[-1] if self._undo else None
            if joins and isinstance(last, Edit) and (whole := _joined(last, made)):
                self._undo[-1] = whole
            else:
                self._undo.append(made)

        self._start(edit, edit.name, remember, typing=joins)

    def record(self, action: FileAction) -> None:
        """Add a file action that has already happened, as the next step to undo."""
        self.finish()
        self._redo.clear()
        self._undo.append(action)
        self.changed.emit(None)

    def perform(self, action: FileAction) -> None:
        """Run a file action after any earlier ones; it immediately becomes the next step to undo."""
        self.settle(lambda: self._perform(action))

    def _perform(self, action: FileAction) -> None:
        self._redo.clear()
        self._move(action, self._undo)
        self.changed.emit(None)

    def settle(self, then: Callable[[], object]) -> None:
        """Call `then` as soon as no large edit is being applied."""
        if self.busy:
            self._saver.post(lambda: self.settle(then))
        else:
            then()

    def resolve(self, choices: Iterable[tuple[Conflict, Value]], name: str) -> None:
        """Resolve conflicts with the values that the user chose, as one step; undoing it sets the rejected values.

        Conflicts whose value has been edited since are skipped. If the file has changed again, a new conflict may
        result.
        """
        self.finish()
        changes: list[ValueChange] = []
        folders: list[FolderChange] = []
        theirs: list[Conflict] = []
        requests: list[SaveRequest] = []
        for conflict, value in choices:
            if not (self._shows(conflict) and self._saver.is_open(conflict)):
                continue
            # The step goes from the value not chosen to the chosen one, so that undo restores the other value.
            before = conflict.mine if value == conflict.theirs else conflict.theirs
            image, folder = self._library.at(conflict.path), self._library.folder_at(conflict.path)
            if value == conflict.theirs:
                theirs.append(conflict)
            else:
                number = image.id if image and not conflict.key.of_folder else None
                requests.append(SaveRequest(conflict.key, (conflict.theirs,), value, number, shown=True))
            if conflict.key.of_folder and folder:
                folders.append(FolderChange(folder, cast(FolderField, conflict.field), before, value))  # type: ignore[arg-type]
            elif image:
                changes.append(ValueChange(image.id, cast(Field, conflict.field), before, value))
        self._library.apply(changes)
        self._library.apply_to_folders(folders)
        if requests:
            requests = self._journal.append(name, requests)
            self._journal.end()
        self._saver.choose(theirs, requests)
        if whole := Edit(name, tuple(changes), tuple(folders)):
            self._redo.clear()
            self._undo.append(whole)
            self.done.emit(whole)
            self.changed.emit(None)

    def _shows(self, conflict: Conflict) -> bool:
        """Return whether the library shows the user's value of a conflict, or no longer has the image or folder."""
        if conflict.key.of_folder:
            folder = self._library.folder_at(conflict.path)
            return folder is None or getattr(folder, conflict.field) == conflict.mine
        image = self._library.at(conflict.path)
        return image is None or image.value(cast(Field, conflict.field)) == conflict.mine

    def forget(self, action: FileAction) -> None:
        """Remove a file action from the history."""
        for steps in (self._undo, self._redo):
            _put(steps, action, [])
        self._queued = [(step, onto) for step, onto in self._queued if step is not action]
        self.changed.emit(None)

    def undo(self, above: int = 0) -> Edit | FileAction | None:
        """Undo the last step and return it, or None if the stack has no more than `above` steps.

        If files of another step are still being written, the step waits for them.
        """
        return self._back(self._undo, self._redo, above)

    def redo(self, above: int = 0) -> Edit | FileAction | None:
        """Redo the last undone step and return it, with the same rules as `undo`."""
        return self._back(self._redo, self._undo, above)

    def finish(self) -> None:
        """Complete a large edit immediately instead of in batches."""
        while self._running is not None:
            self._step()

    def _back(
        self, taken: list[Edit | FileAction], onto: list[Edit | FileAction], above: int
    ) -> Edit | FileAction | None:
        self.finish()
        step = None
        while step is None and len(taken) > above:
            step = taken.pop()  # a step that would change nothing is dropped, and the next one is tried
            if self._has_not_begun(step, taken):  # the two cancel out, so nothing has to be written
                self._queued.pop()
                onto.append(step)
            elif not self._move(step, onto):
                step = None
        self.changed.emit(None)
        return step

    def _has_not_begun(self, step: Edit | FileAction, taken: list[Edit | FileAction]) -> bool:
        """Return whether a step just popped from stack `taken` is the last in the queue, and thus has not started."""
        return bool(self._queued) and self._queued[-1][0] is step and self._queued[-1][1] is taken

    def _move(self, step: Edit | FileAction, onto: list[Edit | FileAction]) -> bool:
        """Undo or redo a step now, or queue it; return False if it could run now but would change nothing.

        The step moves to its new stack immediately, below anything the user does before it starts.
        """
        if not self._running_action and isinstance(step, Edit) and not self._can_go_back(step):
            return False
        onto.append(step)
        if self._running_action:  # its worker is writing files; edits must not overtake it
            self._queued.append((step, onto))
        else:
            self._begin(step, onto)
        return True

    def _begin(self, step: Edit | FileAction, onto: list[Edit | FileAction]) -> None:
        """Undo or redo a step already on its new stack; remove it if other programs changed all of its values."""
        undoing = onto is self._redo
        if not isinstance(step, Edit):
            self._running_action = step
            (step.undo if undoing else step.redo)(self._ended)
        elif self._can_go_back(step):
            title = ("Undo: " if undoing else "Redo: ") + step.name
            self._start(step, title, lambda made: _put(onto, step, [made]), back=True)
        else:
            _put(onto, step, [])

    def _ended(self, error: ImpastoError | None) -> None:
        action, self._running_action = self._running_action, None
        if error and action:
            self.forget(action)
            self.failed.emit(error)
        while self._queued and self._running_action is None:
            self.finish()
            self._begin(*self._queued.pop(0))
        self.changed.emit(None)

    def _start(
        self, edit: Edit, title: str, remember: Callable[[Edit], None], *, typing: bool = False, back: bool = False
    ) -> None:
        self._running = self._make(edit, title, remember, typing, back)
        if len(edit.changes) <= AT_ONCE:
            self.finish()
        else:
            self._continue()

    def _continue(self) -> None:
        if self._running is not None:
            self._step()
            self._saver.post(self._continue)

    def _step(self) -> None:
        if self._running is not None and next(self._running, self) is self:
            self._running = None
            self.changed.emit(None)

    def _make(
        self, edit: Edit, title: str, remember: Callable[[Edit], None], typing: bool, back: bool
    ) -> Iterator[None]:
        """Apply an edit to the journal and library, yielding between batches; the saver gets it when it is complete."""
        made: list[ValueChange] = []
        requests: list[SaveRequest] = []
        for batch in _batches(edit.changes, back):
            if made:
                yield  # lets the window handle events; the generator resumes in `_continue` or `finish`
            # The library may have changed during the pause, so check each batch only when it is applied.
            part = [change for change in batch if self._holds(change)]
            requests += self._write_journal(title, [self._request(change) for change in part])
            self._library.apply(part)
            made += part
        wanted = edit.inverse().folders if back and edit.folders else edit.folders
        folders = tuple(change for change in wanted if getattr(change.folder, change.field) == change.before)
        requests += self._write_journal(title, [self._folder_request(change) for change in folders])
        self._library.apply_to_folders(folders)
        whole = Edit(edit.name, tuple(made), folders)
        if whole:
            # Until this line is written, recovery ignores the edit; files must not be written before that.
            self._journal.end()
            self._saver.take(requests, typing=typing)
            remember(whole)
            self.done.emit(whole)

    def _write_journal(self, title: str, requests: list[SaveRequest]) -> list[SaveRequest]:
        return self._journal.append(title, requests) if requests else requests

    def _request(self, change: ValueChange) -> SaveRequest:
        image = self._library.images[change.image]
        key = Key(str(image.folder.root), self._prefix(image.folder) + image.name, change.field)
        return SaveRequest(key, (change.before,), change.after, change.image, shown=True)

    def _folder_request(self, change: FolderChange) -> SaveRequest:
        name = self._prefix(change.folder).removesuffix("/")
        return SaveRequest(Key(str(change.folder.root), name, change.field), (change.before,), change.after, shown=True)

    def _prefix(self, folder: Folder) -> str:
        """Return a folder's path in its dataset with a trailing slash, cached because each image needs it."""
        if folder not in self._inside:
            inside = folder.path.relative_to(folder.root).as_posix()
            self._inside[folder] = "" if inside == "." else inside + "/"
        return self._inside[folder]

    def _can_go_back(self, edit: Edit) -> bool:
        return any(self._holds(change.inverse()) for change in edit.changes) or any(
            getattr(change.folder, change.field) == change.after for change in edit.folders
        )

    def _holds(self, change: ValueChange) -> bool:
        image = self._library.images.get(change.image)
        return image is not None and image.value(change.field) == change.before and change.before != change.after

    def _learn(self, learned: DiskValue) -> None:
        """Update the library with a value from disk (without undo), unless the user has edited it since."""
        if self.busy:  # only a completed edit shows which images the user changed
            self._saver.post(lambda: self._learn(learned))
            return
        image = self._library.at(learned.key.path)
        if image and not self._saver.wants_more(learned):
            field = cast(Field, learned.key.field)
            self._library.apply([ValueChange(image.id, field, image.value(field), learned.found)])


def _put(steps: list[Edit | FileAction], place: Edit | FileAction, instead: Sequence[Edit]) -> None:
    """Replace a step with other steps; do nothing if it is not on the stack."""
    steps[:] = [one for step in steps for one in (instead if step is place else (step,))]


def _batches(changes: Sequence[ValueChange], back: bool) -> Iterator[Sequence[ValueChange]]:
    """Yield changes in batches; with `back`, yield their inverses from last to first."""
    for start in range(0, len(changes), AT_ONCE):
        if back:
            end = len(changes) - start
            yield [change.inverse() for change in reversed(changes[max(0, end - AT_ONCE) : end])]
        else:
            yield changes[start : start + AT_ONCE]


def _joined(first: Edit, second: Edit) -> Edit | None:
    """Merge two edits if each is a single change and the second continues the first; else return None."""
    if len(first.changes) != 1 or len(second.changes) != 1 or first.folders or second.folders:
        return None
    (earlier,), (later,) = first.changes, second.changes
    if (earlier.image, earlier.field, earlier.after) != (later.image, later.field, later.before):
        return None
    return Edit(second.name, (ValueChange(earlier.image, earlier.field, earlier.before, later.after),))


class UndoScope:
    """Undo and redo limited to steps made after the scope was created."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._done, self._undone = history.depths

    @property
    def can_undo(self) -> bool:
        """Return whether a step of this scope can be undone."""
        return self._history.depths[0] > self._done

    @property
    def can_redo(self) -> bool:
        """Return whether a step undone in this scope can be redone."""
        return self._history.depths[1] > self._undone

    def do(self, edit: Edit) -> None:
        """Apply an edit."""
        self._history.do(edit)
        self._undone = min(self._undone, self._history.depths[1])  # a new edit clears the redo stack

    def undo(self) -> None:
        """Undo the last step if it belongs to this scope."""
        self._history.undo(above=self._done)

    def redo(self) -> None:
        """Redo the last undone step if it belongs to this scope."""
        self._history.redo(above=self._undone)
