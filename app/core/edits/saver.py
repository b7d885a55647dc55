"""Writes edits to disk in the background, and reports how far that is and what stops it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from app.core.edits.journal import Journal
from app.core.edits.safe_files import refusal
from app.core.edits.save_state import Conflict, DiskValue, Key, SaveNotice, SaveProblem, SaveRequest, SaveState
from app.core.edits.writer import Outcome, Writer
from app.core.events import Emitter
from app.core.library import Field, Folder, FolderField, Picture, Value
from app.core.tasks import Post, stand_back, step_back
from trainer.errors import DatasetError

PAUSE = 0.7
"""Seconds without a key after which typed words are written."""
RETRY = 20.0
"""Seconds after which what could not be written is tried again by itself."""
_PATIENCE = 10.0
"""Seconds in which the disk has to answer once when the app ends."""
_BATCH = 2000
_NEVER = math.inf
_Name = TypeVar("_Name", Field, FolderField)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _UnsavedValue:
    """One value that is not known to be on disk. There is at most one for each value.

    The states, and what ends them:

    * `waiting`: the writer takes it at `due`.
    * `writing`: the writer has it. The outcome "saved" removes the entry, unless `later` is there, which then waits in
      its place; "refused" and "conflict" become its state.
    * `refused`: the disk refused it, for the reason in `outcome`. It is tried again at `due`, if that is set, or with
      all others at the saver's next attempt.
    * `conflict`: something on disk that the user has not seen stands in its way; `outcome` holds it. Only the user's
      choice ends this, or a look at `due` that finds the obstacle gone. Nothing is written until then.

    What holds at every moment, with the lock held:

    * `newest` is the newest acknowledged edit of the value. An earlier one is never written after it: it is either part
      of `request.bases`, as something that may be on disk, or was given up when the user edited what stood there
      instead.
    * The library shows `newest.desired`, so that the next edit is made on top of it.
    * `later` is set only while `writing`; `outcome` always in `refused` and `conflict`, and kept while those are looked
      at again, in which `writing` reports them as what they were.
    * The journal holds `newest` until "saved" is entered for it, so a kill in any state leads back to `waiting`.
    """

    request: SaveRequest
    due: float
    """When the writer is to take it, by the monotonic clock."""
    state: Literal["waiting", "writing", "refused", "conflict"] = "waiting"
    later: SaveRequest | None = None
    """An edit made since the writer took it."""
    later_due: float = _NEVER
    outcome: Outcome | None = None

    @property
    def newest(self) -> SaveRequest:
        """The latest edit."""
        return self.later or self.request

    @property
    def is_conflict(self) -> bool:
        """Whether the user has to choose, also while the disk is looked at again."""
        return self.outcome is not None and self.outcome.kind == "conflict"

    def add(self, request: SaveRequest, due: float, now: float) -> None:
        """Take in a later edit."""
        if self.state == "writing":
            self.later = self.later.then(request) if self.later else request
            self.later_due = due
        elif self.state == "waiting":
            self.request = self.request.then(request)
            if self.due > now:  # what is due stays so: a caller may wait for it
                self.due = due
        elif self.request.leads_to(request):
            self.request, self.due = self.request.followed_by(request), due
        else:  # the user chose, or edited what is on disk
            self.request, self.due, self.state, self.outcome = request, due, "waiting", None

    def settle(self, outcome: Outcome) -> bool:
        """Take in what came of writing; return whether the entry is done with."""
        later, self.later, due = self.later, None, self.later_due
        self.later_due = _NEVER
        if outcome.kind == "saved":
            if later is None:
                return True
            self.request, self.due, self.state, self.outcome = later, due, "waiting", None
        elif later is None or self.request.leads_to(later):
            self.request = self.request.followed_by(later) if later else self.request
            self.due, self.state, self.outcome = due, outcome.kind, outcome
        else:
            self.request, self.due, self.state, self.outcome = later, due, "waiting", None
        return False

    def unwritten(self) -> SaveRequest:
        """Return what is still to be written if nothing comes of writing."""
        return self.request.then(self.later) if self.later else self.request


@dataclass
class _Arrived:
    """Requests of one edit that are still to be entered, which takes some hundred milliseconds for 100,000."""

    requests: Sequence[SaveRequest]
    due: float

    @cached_property
    def first(self) -> int:
        """The number of the first edit among them."""
        return min((request.number for request in self.requests), default=0)

    @cached_property
    def latest(self) -> int:
        """The number of the latest."""
        return max((request.number for request in self.requests), default=0)

    @cached_property
    def by_key(self) -> dict[Key, SaveRequest]:
        """Each by its value; 25 ms for 100,000. Some may have been entered since this was first asked for."""
        return {request.key: request for request in self.requests}


class Saver:
    """Writes captions and notes in a thread of its own, each file once a pause of typing; see `Writer` for how.

    Its events come on the library's thread, and its methods belong there. Without `threaded` nothing happens until
    `flush`, in the caller's thread: for programs without a window.
    """

    def __init__(
        self, journal: Journal, writer: Writer, post: Post, *, pause: float = PAUSE, threaded: bool = True
    ) -> None:
        self.post = post
        self.state: Emitter[SaveState] = Emitter()
        self.learned: Emitter[DiskValue] = Emitter()
        """Emitted where the user's edit is void, or an earlier session's was written after all, for `History`."""
        self.notices: Emitter[SaveNotice] = Emitter()
        self.recovered: tuple[SaveRequest, ...] = ()
        """What sessions that stopped unexpectedly had left unwritten at the start of this one."""
        self.now = SaveState()
        """The last state that was emitted."""
        self._journal, self._writer, self._pause = journal, writer, pause
        self._inbox: list[_Arrived] = []
        """Edits on their way into `_entries`: a queue and no state. What is in it is newer than any entry."""
        self._entries: dict[Key, _UnsavedValue] = {}
        self._untried: dict[SaveNotice, set[Key]] = {}
        """What earlier sessions left and nothing has come of yet, by what is to be said when something has."""
        self._saved = self._taken = 0
        self._states = self._emitted = 0
        """How many states were made, and the number of the last one that was emitted."""
        self._places: dict[Folder, str] = {}
        self._noticed: set[tuple[str, str]] = set()
        self._retry_at = _NEVER
        self._closing = self._left = False
        self._came = 0.0
        """When the writer last finished something, by the monotonic clock."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="app-saver", daemon=True) if threaded else None
        if self._thread:
            self._thread.start()

    def take(self, requests: Sequence[SaveRequest], *, typing: bool = False) -> None:
        """Write these soon: at once, or after a pause where they come from typing. They are in the journal already."""
        with self._changed:
            self._inbox.append(_Arrived(requests, time.monotonic() + self._pause * typing))
            self._changed.notify_all()
            state = replace(self.now, pending=self._pending())
        self._emit(state)

    def recover(self) -> None:
        """Take over what earlier sessions left unwritten; notices say what came of it.

        What is still on disk as it was seen is replaced, all else becomes a conflict.
        """
        left = self._journal.adopt()
        self.recovered = tuple(one for one in left.requests if one.key in left.crashed)
        found: defaultdict[tuple[bool, str], set[Key]] = defaultdict(set)
        for one in left.requests:
            found[one.key in left.crashed, one.key.root].add(one.key)
        with self._changed:
            for (crashed, root), keys in found.items():
                self._untried[SaveNotice("notice.recovered" if crashed else "notice.left", root, len(keys))] = keys
        self.take(left.requests)

    def unsaved(self, picture: Picture) -> Mapping[Field, Value]:
        """Return the edits of an image that are not on disk: the library shows them, whatever is on disk."""
        return self.unsaved_at(picture.folder, picture.name)

    def unsaved_at(self, folder: Folder, name: str) -> Mapping[Field, Value]:
        """Return what `unsaved` does, by the image's folder and name; a hundred thousand images are asked about."""
        if not self._entries and not self._inbox:
            return {}
        fields: tuple[Field, ...] = ("caption", "rating", "excluded", "crop")
        within = self._within(folder)
        return self._unsaved(folder, f"{within}/{name}" if within else name, fields)

    def unsaved_of_folder(self, folder: Folder) -> Mapping[FolderField, Value]:
        """Return which facts of a folder are not on disk yet, as `unsaved` does for an image."""
        fields: tuple[FolderField, ...] = ("repeats", "regularisation", "trigger")
        return self._unsaved(folder, self._within(folder), fields)

    def _unsaved(self, folder: Folder, name: str, fields: Sequence[_Name]) -> Mapping[_Name, Value]:
        root = str(folder.root)
        with self._changed:
            newest = {field: self._newest(Key(root, name, field)) for field in fields}
        return {field: request.desired for field, request in newest.items() if request}

    def _within(self, folder: Folder) -> str:
        """Return a folder's place in its dataset, empty for the dataset itself."""
        if folder not in self._places:
            inside = folder.path.relative_to(folder.root).as_posix()
            self._places[folder] = "" if inside == "." else inside
        return self._places[folder]

    def _newest(self, key: Key) -> SaveRequest | None:
        for arrived in reversed(self._inbox):
            if found := arrived.by_key.get(key):
                return found
        entry = self._entries.get(key)
        return entry.newest if entry else None

    def wants_more(self, learned: DiskValue) -> bool:
        """Return whether a later edit of the same value waits."""
        with self._changed:
            newest = self._newest(learned.key)
        return newest is not None and newest.number > learned.number

    def hurry(self) -> None:
        """Write now what waits for a pause of typing, and try again what was refused or in conflict; does not wait."""
        with self._changed:
            now = time.monotonic()
            for entry in self._entries.values():
                if entry.state == "writing":
                    entry.later_due = now
                else:
                    entry.due = now  # in a conflict the other program may have gone back, or further
            for arrived in self._inbox:
                arrived.due = now
            self._retry_at = _NEVER
            self._changed.notify_all()

    def flush(self, patience: float = math.inf) -> None:
        """Wait until all that was asked for by now is on disk or refused, or in conflict; workers may wait too.

        Not for what is typed meanwhile, for hours maybe; nor where nothing comes of it for `patience` seconds.
        """
        self.hurry()
        if self._thread is None:
            while self._inbox or any(entry.due < _NEVER for entry in self._entries.values()):
                self._step()
            return
        with self._changed:
            latest = max((self._taken, *(arrived.latest for arrived in self._inbox)))
            while self._thread.is_alive() and self._owes(latest):
                if self._is_writing() and time.monotonic() > self._came + patience:
                    return
                self._changed.wait(1.0)

    def _owes(self, latest: int) -> bool:
        """Return whether something is on its way that was asked for up to that edit."""
        if any(arrived.first <= latest for arrived in self._inbox):
            return True
        entries = self._entries.values()
        return any((one.state == "writing" or one.due < _NEVER) and one.request.first <= latest for one in entries)

    def _is_writing(self) -> bool:
        return any(entry.state == "writing" for entry in self._entries.values())

    def is_open(self, conflict: Conflict) -> bool:
        """Return whether the user's choice ends a conflict: not after a later edit or an earlier choice."""
        with self._changed:
            self._absorb_of(conflict.key)
            self._changed.wait_for(lambda: not self._is_in_flight(conflict.key), timeout=2.0)
            entry = self._entries.get(conflict.key)
            return entry is not None and entry.state == "conflict" and entry.request.desired == conflict.mine

    def refresh(self) -> SaveState:
        """Emit the state of this moment, not of when the writer last reported, and return it."""
        with self._changed:
            number, state = self._numbered_state()
        self._emit(state, number)
        return state

    def choose(self, theirs: Sequence[Conflict], others: Sequence[SaveRequest]) -> None:
        """End open conflicts: give up the user's value for those in `theirs`, and write these requests of the others.

        The requests are in the journal already.
        """
        with self._changed:
            for request in others:  # past the inbox, in which `is_open` left nothing older of these
                self._add(request, time.monotonic())
            given_up = [self._entries.pop(conflict.key).request for conflict in theirs]
            self._saved += len(given_up)
            number, state = self._numbered_state()
            self._changed.notify_all()
        self._journal.saved(given_up)
        self._emit(state, number)

    def _is_in_flight(self, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.state == "writing"

    def close(self) -> None:
        """Write what can be written and end; what cannot, or no disk answers for, stays for the next start."""
        self.flush(_PATIENCE)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._left = self._is_writing()
        if self._thread and not self._left:
            self._thread.join()
        with self._changed:
            self._absorb(None)
            unwritten = list(self._unwritten(()))
        self._journal.close(unwritten)

    def _run(self) -> None:
        step_back()
        while self._step():
            pass

    def _step(self) -> bool:
        """Write one batch of what is due, waiting for it; return False when it is time to end."""
        batch = self._next()
        if batch is None:
            return False
        outcomes: list[Outcome] = []
        if batch:
            self._journal.sync()
            outcomes = self._write(batch)
            with self._changed:
                if self._left:  # it answers when nobody waits any more: the next start will see
                    return False
        saved = [outcome for outcome in outcomes if outcome.kind == "saved"]
        self._journal.saved(outcome.request for outcome in saved)
        while self._inbox:
            with self._changed:  # and not for all of a large edit: the window may want it meanwhile
                self._absorb(_BATCH)
            stand_back()  # else it would have the lock again before the window has woken up
        with self._changed:
            self._absorb(None)
            requests = list(self._unwritten({outcome.request.key for outcome in saved}))
            taken = self._taken
        self._journal.roll(requests, taken)
        with self._changed:
            notices = self._settle(outcomes)
            number, state = self._numbered_state()
            self._changed.notify_all()
        learned = [
            DiskValue(outcome.request.key, outcome.request.number, outcome.found)
            for outcome in saved
            if not outcome.request.key.of_folder
            and (outcome.found != outcome.request.desired or not outcome.request.shown)
        ]
        self.post(lambda: self._report(learned, notices, state, number))
        return True

    def _write(self, batch: Sequence[SaveRequest]) -> list[Outcome]:
        try:
            return list(map(self._note, self._writer.write(batch)))
        except Exception as fault:  # noqa: BLE001 (the edge of a thread that has to live as long as the window)
            _log.exception("Could not write: an unforeseen error")
            error = DatasetError(
                "save.fault",
                f"Could not write your changes: an unforeseen error ({fault}).",
                "They are kept and tried again; the log has details.",
            )
            return [Outcome(request, "refused", error=error) for request in batch]

    def _note(self, outcome: Outcome) -> Outcome:
        self._came = time.monotonic()
        stand_back()
        return outcome

    def _next(self) -> list[SaveRequest] | None:
        """Wait for work; return what is due, or nothing where only a state is to be emitted, or None at the end."""
        with self._changed:
            while True:
                self._absorb(_BATCH)
                now = time.monotonic()
                if now >= self._retry_at:
                    self._retry_at = _NEVER
                    for entry in self._entries.values():
                        entry.due = now if entry.state == "refused" else entry.due
                due = list(islice((entry for entry in self._entries.values() if entry.due <= now), _BATCH))
                if due or self._closing or self._thread is None:
                    break
                if not self._inbox:
                    self._changed.wait(self._until_due(now))
            if not due:
                return None if self._closing else []
            self._came = time.monotonic()
            for entry in due:
                entry.state, entry.due = "writing", _NEVER
            return [entry.request for entry in due]

    def _until_due(self, now: float) -> float | None:
        first = min([self._retry_at, *(entry.due for entry in self._entries.values())])
        return None if first == _NEVER else max(0.0, first - now)

    def _absorb(self, most: int | None) -> None:
        """Enter what is in the inbox, of a large edit only so many, so that nobody waits for the lock."""
        while self._inbox:
            arrived = self._inbox[0]
            for request in arrived.requests[:most]:
                self._add(request, arrived.due)
            if most is not None and len(arrived.requests) > most:
                arrived.requests = arrived.requests[most:]
                return
            del self._inbox[0]

    def _absorb_of(self, key: Key) -> None:
        """Enter what is in the inbox for one value, before all else."""
        for arrived in self._inbox:
            if key in arrived.by_key:
                for request in arrived.requests:
                    if request.key == key:
                        self._add(request, arrived.due)
                arrived.requests = [request for request in arrived.requests if request.key != key]
                arrived.by_key.pop(key)

    def _add(self, request: SaveRequest, due: float) -> None:
        self._taken = max(self._taken, request.number)
        entry = self._entries.get(request.key)
        if entry is None:
            self._entries[request.key] = _UnsavedValue(request, due)
        else:
            entry.add(request, due, time.monotonic())

    def _settle(self, outcomes: Sequence[Outcome]) -> list[SaveNotice]:
        """Take in what came of a batch; return what the user is to be shown of it."""
        for outcome in outcomes:
            self._saved += outcome.kind == "saved"
            entry = self._entries.get(outcome.request.key)
            if entry and entry.state == "writing" and entry.settle(outcome):  # else the user chose meanwhile
                del self._entries[outcome.request.key]
        if any(outcome.kind == "refused" for outcome in outcomes):
            self._retry_at = time.monotonic() + RETRY
        return [*self._tried(outcomes), *self._worth_saying(outcomes)]

    def _tried(self, outcomes: Sequence[Outcome]) -> Iterator[SaveNotice]:
        """Give what came of earlier sessions' edits, once all of a dataset's were tried."""
        for notice, keys in list(self._untried.items()):
            kinds = [outcome.kind for outcome in outcomes if outcome.request.key in keys]
            rest = keys.difference(outcome.request.key for outcome in outcomes)
            del self._untried[notice]
            notice = replace(
                notice,
                in_conflict=notice.in_conflict + kinds.count("conflict"),
                refused=notice.refused + kinds.count("refused"),
            )
            if rest:
                self._untried[notice] = rest
            else:
                yield notice

    def _worth_saying(self, outcomes: Sequence[Outcome]) -> Iterator[SaveNotice]:
        counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        for outcome in outcomes:
            if outcome.notice:
                counts[outcome.notice, outcome.request.key.root] += 1
        for code, root in counts:
            if (code, root) not in self._noticed:
                self._noticed.add((code, root))
                yield SaveNotice(code, root, counts[code, root])  # type: ignore[arg-type]

    def _report(
        self, learned: Sequence[DiskValue], notices: Sequence[SaveNotice], state: SaveState, number: int
    ) -> None:
        for each in learned:
            self.learned.emit(each)
        for notice in notices:
            self.notices.emit(notice)
        self._emit(state, number)

    def _unwritten(self, written: Collection[Key]) -> Iterator[SaveRequest]:
        """Give what is to be written still, once what the writer has just written is settled."""
        for key, entry in self._entries.items():
            if key not in written:
                yield entry.unwritten()
            elif entry.later:
                yield entry.later

    def _pending(self) -> int:
        return len(self._entries) + sum(len(arrived.requests) for arrived in self._inbox)

    def _state(self) -> SaveState:
        reasons: defaultdict[DatasetError, list[SaveRequest]] = defaultdict(list)
        by_sentence: dict[str, DatasetError] = {}
        conflicts: list[Conflict] = []
        for entry in self._entries.values():
            if (outcome := entry.outcome) is None:
                continue
            if entry.is_conflict:
                conflicts.append(Conflict(entry.newest.key, entry.newest.desired, outcome.found))
            elif outcome.error:
                reasons[by_sentence.setdefault(outcome.error.sentence, outcome.error)].append(entry.newest)
        problems = [_problem(error, requests) for error, requests in reasons.items()]
        if self._journal.fault:
            problems.append(_problem(_no_journal(self._journal.fault), []))
        return SaveState(
            pending=self._pending(),
            saved=self._saved,
            backed_up=all(problem.code != "save.no_backup" for problem in problems),
            problems=tuple(problems),
            conflicts=tuple(conflicts),
        )

    def _numbered_state(self) -> tuple[int, SaveState]:
        self._states += 1
        return self._states, self._state()

    def _emit(self, state: SaveState, number: int | None = None) -> None:
        """Emit a state, unless a later one was emitted while this one was on its way from the writer."""
        if number is not None and number < self._emitted:
            return
        self._emitted = number or self._emitted
        if state != self.now:
            self.now = state
            self.state.emit(state)


def _problem(error: DatasetError, requests: Sequence[SaveRequest]) -> SaveProblem:
    pictures = frozenset(request.picture for request in requests if request.picture is not None)
    return SaveProblem(error.code, error.sentence, error.remedy, len(requests), pictures)


def _no_journal(fault: OSError) -> DatasetError:
    place = Path(str(fault.filename)).parent if fault.filename else Path()
    reason = refusal(fault, place)
    return DatasetError(
        "save.no_journal",
        f"{reason.sentence} Changes go straight to their files, but a crash could lose those of the last moment.",
        reason.remedy,
    )
