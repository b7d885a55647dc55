"""What the user does to pictures as operations that can be taken back, and the history of them."""

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
"""Changes that are made in one go, some 5 ms; more are made in portions, the window alive between them."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Something that the user does; its name says what, in English with its count."""

    name: str
    changes: tuple[ValueChange, ...]
    folders: tuple[FolderChange, ...] = ()

    def inverse(self) -> Edit:
        """Return the edit that takes this one back, under the same name: "Undo" and "Redo" are put before it."""
        return Edit(
            self.name,
            tuple(change.inverse() for change in reversed(self.changes)),
            tuple(change.inverse() for change in reversed(self.folders)),
        )

    def __bool__(self) -> bool:
        """Tell whether it changes anything."""
        return bool(self.changes or self.folders)


Ended = Callable[[ImpastoError | None], None]
"""Is called once when files are written, with what stood against it."""


class FileAction(Protocol):
    """Something that the user did to files and that is no change of values: pictures thrown away, a mask painted."""

    name: str
    """What, as an edit says it."""

    def undo(self, ended: Ended) -> None:
        """Take it back; what other programs did to the files meanwhile stays."""

    def redo(self, ended: Ended) -> None:
        """Do it again, likewise."""


class History:
    """All edits of this session: does them, takes them back and does them again, without limit.

    It belongs to the library's thread. An edit is in the journal, and so outlives a crash, when `do` returns, or for
    more than AT_ONCE changes when `done` is emitted. Changes of pictures that hold something else than `before` by
    now, because another program wrote meanwhile, are left out: `done` tells what was really done.
    """

    def __init__(self, library: Library, journal: Journal, saver: Saver) -> None:
        self.done: Emitter[Edit] = Emitter()
        self.changed: Emitter[None] = Emitter()
        """The names below, or `busy`, may be different now."""
        self.failed: Emitter[ImpastoError] = Emitter()
        """A deed could not be taken back or done again, and is no step any more."""
        self._library, self._journal, self._saver = library, journal, saver
        self._undo: list[Edit | FileAction] = []
        self._redo: list[Edit | FileAction] = []
        self._under_way: FileAction | None = None
        self._asked: list[tuple[Edit | FileAction, list[Edit | FileAction]]] = []
        """What is to be undone or done, once the files that are under way are written, and where it lies already."""
        self._running: Iterator[None] | None = None
        self._inside: dict[Folder, str] = {}
        saver.learned.connect(self._learn)

    @property
    def undo_name(self) -> str | None:
        """Return what undoing would take back."""
        return self._undo[-1].name if self._undo else None

    @property
    def redo_name(self) -> str | None:
        """Return what redoing would do again."""
        return self._redo[-1].name if self._redo else None

    @property
    def depths(self) -> tuple[int, int]:
        """Return how many steps can be taken back, and how many done again."""
        return len(self._undo), len(self._redo)

    @property
    def busy(self) -> bool:
        """Tell whether a large edit is still being made; whatever is asked meanwhile ends it first."""
        return self._running is not None

    @property
    def writing(self) -> Edit | FileAction | None:
        """Return the first of those that still have files to write, or wait for one that has, of deeds and undos."""
        return self._under_way or (self._asked[0][0] if self._asked else None)

    def do(self, edit: Edit, *, joins: bool = False) -> None:
        """Make an edit. With `joins` it is one step with the one before, if both are of the same single value: typing.

        Words typed should come here at every key: that is what makes them safe. The file is written after a pause.
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

    def record(self, deed: FileAction) -> None:
        """Enter something that was done to files: it is the next step to be taken back."""
        self.finish()
        self._redo.clear()
        self._undo.append(deed)
        self.changed.emit(None)

    def perform(self, deed: FileAction) -> None:
        """Do a deed, when the files of those before are written: it is the next step to be taken back, at once."""
        self.settle(lambda: self._perform(deed))

    def _perform(self, deed: FileAction) -> None:
        self._redo.clear()
        self._move(deed, self._undo)
        self.changed.emit(None)

    def settle(self, then: Callable[[], object]) -> None:
        """Call `then` when no large edit is being made, at once if none is."""
        if self.busy:
            self._saver.post(lambda: self.settle(then))
        else:
            then()

    def resolve(self, choices: Iterable[tuple[Conflict, Value]], name: str) -> None:
        """End conflicts, each with the value that the user chose, as one step: undoing it gives the other value back.

        What the user has changed since, or something else is on disk of by now, is judged again and may be a conflict
        again.
        """
        self.finish()
        changes: list[ValueChange] = []
        folders: list[FolderChange] = []
        theirs: list[Conflict] = []
        requests: list[SaveRequest] = []
        for conflict, value in choices:
            if not (self._shows(conflict) and self._saver.is_open(conflict)):
                continue
            before = conflict.mine if value == conflict.theirs else conflict.theirs
            picture, folder = self._library.at(conflict.path), self._library.folder_at(conflict.path)
            if value == conflict.theirs:
                theirs.append(conflict)
            else:
                number = picture.id if picture and not conflict.key.of_folder else None
                requests.append(SaveRequest(conflict.key, (conflict.theirs,), value, number, shown=True))
            if conflict.key.of_folder and folder:
                folders.append(FolderChange(folder, cast(FolderField, conflict.field), before, value))  # type: ignore[arg-type]
            elif picture:
                changes.append(ValueChange(picture.id, cast(Field, conflict.field), before, value))
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
        """Return whether the library shows the user's value of a conflict, or has no such image or folder."""
        if conflict.key.of_folder:
            folder = self._library.folder_at(conflict.path)
            return folder is None or getattr(folder, conflict.field) == conflict.mine
        picture = self._library.at(conflict.path)
        return picture is None or picture.value(cast(Field, conflict.field)) == conflict.mine

    def forget(self, deed: FileAction) -> None:
        """Let a deed be no step any more."""
        for steps in (self._undo, self._redo):
            _put(steps, deed, [])
        self._asked = [(step, onto) for step, onto in self._asked if step is not deed]
        self.changed.emit(None)

    def undo(self, above: int = 0) -> Edit | FileAction | None:
        """Take the last step back; return it, or None where none lies above so many others.

        While files of another step are still being written it waits its turn.
        """
        return self._back(self._undo, self._redo, above)

    def redo(self, above: int = 0) -> Edit | FileAction | None:
        """Make again what was last taken back, as `undo` does."""
        return self._back(self._redo, self._undo, above)

    def finish(self) -> None:
        """Bring a large edit to its end now, instead of in portions."""
        while self._running is not None:
            self._step()

    def _back(
        self, taken: list[Edit | FileAction], onto: list[Edit | FileAction], above: int
    ) -> Edit | FileAction | None:
        self.finish()
        step = None
        while step is None and len(taken) > above:
            step = taken.pop()
            if self._has_not_begun(step, taken):  # so nothing is to be written for either
                self._asked.pop()
                onto.append(step)
            elif not self._move(step, onto):
                step = None
        self.changed.emit(None)
        return step

    def _has_not_begun(self, step: Edit | FileAction, taken: list[Edit | FileAction]) -> bool:
        """Tell whether a step is what was asked for last, and still waits to come where it is taken from."""
        return bool(self._asked) and self._asked[-1][0] is step and self._asked[-1][1] is taken

    def _move(self, step: Edit | FileAction, onto: list[Edit | FileAction]) -> bool:
        """Undo or do a step when its turn comes; return False where that is now and nothing of it can be.

        It lies in its new place at once, below what the user does until then.
        """
        if not self._under_way and isinstance(step, Edit) and not self._can_go_back(step):
            return False
        onto.append(step)
        if self._under_way:
            self._asked.append((step, onto))
        else:
            self._begin(step, onto)
        return True

    def _begin(self, step: Edit | FileAction, onto: list[Edit | FileAction]) -> None:
        """Undo or do a step that lies in its new place; out of it where other programs wrote meanwhile."""
        undoing = onto is self._redo
        if not isinstance(step, Edit):
            self._under_way = step
            (step.undo if undoing else step.redo)(self._ended)
        elif self._can_go_back(step):
            title = ("Undo: " if undoing else "Redo: ") + step.name
            self._start(step, title, lambda made: _put(onto, step, [made]), back=True)
        else:
            _put(onto, step, [])

    def _ended(self, error: ImpastoError | None) -> None:
        deed, self._under_way = self._under_way, None
        if error and deed:
            self.forget(deed)
            self.failed.emit(error)
        while self._asked and self._under_way is None:
            self.finish()
            self._begin(*self._asked.pop(0))
        self.changed.emit(None)

    def _start(
        self, edit: Edit, title: str, remember: Callable[[Edit], None], *, typing: bool = False, back: bool = False
    ) -> None:
        self._running = self._make(edit, title, remember, typing, back)
        if len(edit.changes) <= AT_ONCE:
            self.finish()
        else:
            self._go_on()

    def _go_on(self) -> None:
        if self._running is not None:
            self._step()
            self._saver.post(self._go_on)

    def _step(self) -> None:
        if self._running is not None and next(self._running, self) is self:
            self._running = None
            self.changed.emit(None)

    def _make(
        self, edit: Edit, title: str, remember: Callable[[Edit], None], typing: bool, back: bool
    ) -> Iterator[None]:
        """Make an edit by portions: journal, library; the writer hears of it at last, so all of it or nothing."""
        made: list[ValueChange] = []
        wishes: list[SaveRequest] = []
        for portion in _portions(edit.changes, back):
            if made:
                yield
            part = [change for change in portion if self._holds(change)]
            wishes += self._enter(title, [self._wish(change) for change in part])
            self._library.apply(part)
            made += part
        wanted = edit.inverse().folders if back and edit.folders else edit.folders
        folders = tuple(change for change in wanted if getattr(change.folder, change.field) == change.before)
        wishes += self._enter(title, [self._folder_wish(change) for change in folders])
        self._library.apply_to_folders(folders)
        whole = Edit(edit.name, tuple(made), folders)
        if whole:
            self._journal.end()
            self._saver.take(wishes, typing=typing)
            remember(whole)
            self.done.emit(whole)

    def _enter(self, title: str, wishes: list[SaveRequest]) -> list[SaveRequest]:
        return self._journal.append(title, wishes) if wishes else wishes

    def _wish(self, change: ValueChange) -> SaveRequest:
        picture = self._library.pictures[change.picture]
        key = Key(str(picture.folder.root), self._prefix(picture.folder) + picture.name, change.field)
        return SaveRequest(key, (change.before,), change.after, change.picture, shown=True)

    def _folder_wish(self, change: FolderChange) -> SaveRequest:
        name = self._prefix(change.folder).removesuffix("/")
        return SaveRequest(Key(str(change.folder.root), name, change.field), (change.before,), change.after, shown=True)

    def _prefix(self, folder: Folder) -> str:
        """Return the folder's place in its dataset, ending in a slash; a hundred thousand pictures ask for it."""
        if folder not in self._inside:
            inside = folder.path.relative_to(folder.root).as_posix()
            self._inside[folder] = "" if inside == "." else inside + "/"
        return self._inside[folder]

    def _can_go_back(self, edit: Edit) -> bool:
        return any(self._holds(change.inverse()) for change in edit.changes) or any(
            getattr(change.folder, change.field) == change.after for change in edit.folders
        )

    def _holds(self, change: ValueChange) -> bool:
        picture = self._library.pictures.get(change.picture)
        return picture is not None and picture.value(change.field) == change.before and change.before != change.after

    def _learn(self, learned: DiskValue) -> None:
        """Take over what stands on disk, unless the user went on meanwhile: it is no edit of his to be undone."""
        if self.busy:  # only at its end is it known of which pictures he did
            self._saver.post(lambda: self._learn(learned))
            return
        picture = self._library.at(learned.key.path)
        if picture and not self._saver.wants_more(learned):
            field = cast(Field, learned.key.field)
            self._library.apply([ValueChange(picture.id, field, picture.value(field), learned.found)])


def _put(steps: list[Edit | FileAction], place: Edit | FileAction, instead: Sequence[Edit]) -> None:
    """Put something else in the place of a step, or nothing; where it is there no more, all stays."""
    steps[:] = [one for step in steps for one in (instead if step is place else (step,))]


def _portions(changes: Sequence[ValueChange], back: bool) -> Iterator[Sequence[ValueChange]]:
    """Give changes in portions, or from the last to the first what takes each back."""
    for start in range(0, len(changes), AT_ONCE):
        if back:
            end = len(changes) - start
            yield [change.inverse() for change in reversed(changes[max(0, end - AT_ONCE) : end])]
        else:
            yield changes[start : start + AT_ONCE]


def _joined(first: Edit, second: Edit) -> Edit | None:
    """Return both as one edit, if each is one change and the second goes on where the first ended."""
    if len(first.changes) != 1 or len(second.changes) != 1 or first.folders or second.folders:
        return None
    (earlier,), (later,) = first.changes, second.changes
    if (earlier.picture, earlier.field, earlier.after) != (later.picture, later.field, later.before):
        return None
    return Edit(second.name, (ValueChange(earlier.picture, earlier.field, earlier.before, later.after),))


class UndoScope:
    """It begins when it is made; what lies before it in the history is out of reach."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._done, self._undone = history.depths

    @property
    def can_undo(self) -> bool:
        """Tell whether there is a step of this stretch to take back."""
        return self._history.depths[0] > self._done

    @property
    def can_redo(self) -> bool:
        """Tell whether one was taken back within it."""
        return self._history.depths[1] > self._undone

    def do(self, edit: Edit) -> None:
        """Make an edit."""
        self._history.do(edit)
        self._undone = min(self._undone, self._history.depths[1])  # it ended what could be done again

    def undo(self) -> None:
        """Take the last step back, if it is one of this stretch."""
        self._history.undo(above=self._done)

    def redo(self) -> None:
        """Make it again."""
        self._history.redo(above=self._undone)
