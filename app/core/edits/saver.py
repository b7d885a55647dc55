"""Save edits to disk in the background, and report progress and problems."""

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
from app.core.library import Field, Folder, FolderField, LibraryImage, Value
from app.core.tasks import Post, lower_priority, yield_to_window
from trainer.errors import DatasetError

PAUSE = 0.7
"""Seconds between the last keystroke and writing the typed text."""
RETRY = 20.0
"""Seconds after which failed writes are retried automatically."""
_PATIENCE = 10.0
"""Seconds without a completed write after which closing the app stops waiting for a disk."""
_BATCH = 2000
_NEVER = math.inf
_Name = TypeVar("_Name", Field, FolderField)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _UnsavedValue:
    """A value that is not known to be on disk; at most one per key.

    States and transitions:

    * `waiting`: the writer takes it at `due`.
    * `writing`: the writer has it. The outcome "saved" removes the entry, or replaces it with `later` if that is set;
      "refused" and "conflict" become its state.
    * `refused`: writing failed for the reason in `outcome`. It is retried at `due` if that is set, or with all others
      at the saver's next attempt.
    * `conflict`: the disk has a value that the user has not seen, stored in `outcome`. Nothing is written until
      the user chooses, or a retry at `due` no longer finds a conflict.

    Invariants while the lock is held:

    * `newest` is the newest acknowledged edit of the value. An earlier edit is never written after it: it is either
      part of `request.bases`, as a value that may be on disk, or was dropped because the user made `newest` on top of a
      different value from disk.
    * The library shows `newest.desired`, so the next edit is made on top of it.
    * `later` is set only in `writing`. `outcome` is set in `refused` and `conflict`, and stays set during a retry, so
      that a retried entry is still reported as refused or in conflict.
    * The journal contains `newest` until it is recorded as saved, so a kill in any state leads back to `waiting`.
    """

    request: SaveRequest
    due: float
    """Monotonic time at which the writer takes it."""
    state: Literal["waiting", "writing", "refused", "conflict"] = "waiting"
    later: SaveRequest | None = None
    """Edit made after the writer took the request."""
    later_due: float = _NEVER
    outcome: Outcome | None = None

    @property
    def newest(self) -> SaveRequest:
        """Return the newest edit of the value."""
        return self.later or self.request

    @property
    def is_conflict(self) -> bool:
        """Return whether the user has to choose, even while a retry is running."""
        return self.outcome is not None and self.outcome.kind == "conflict"

    def add(self, request: SaveRequest, due: float, now: float) -> None:
        """Add a later edit of the value."""
        if self.state == "writing":
            self.later = self.later.then(request) if self.later else request
            self.later_due = due
        elif self.state == "waiting":
            self.request = self.request.then(request)
            if self.due > now:  # an entry already due is not postponed, because a caller may wait for it
                self.due = due
        elif self.request.leads_to(request):
            self.request, self.due = self.request.followed_by(request), due
        else:  # the user resolved the conflict, or edited the value on disk
            self.request, self.due, self.state, self.outcome = request, due, "waiting", None

    def settle(self, outcome: Outcome) -> bool:
        """Apply the outcome of a write; return whether the entry can be removed."""
        later, self.later, due = self.later, None, self.later_due
        self.later_due = _NEVER
        if outcome.kind == "saved":
            if later is None:
                return True
            self.request, self.due, self.state, self.outcome = later, due, "waiting", None
        elif later is None or self.request.leads_to(later):
            # A failed write may still have reached the disk, so the combined request may replace its value too.
            self.request = self.request.followed_by(later) if later else self.request
            self.due, self.state, self.outcome = due, outcome.kind, outcome
        else:  # the user has since edited the value on disk, which supersedes the failed request
            self.request, self.due, self.state, self.outcome = later, due, "waiting", None
        return False

    def unwritten(self) -> SaveRequest:
        """Return the request that remains if the current write fails."""
        return self.request.then(self.later) if self.later else self.request


@dataclass
class _Arrived:
    """Requests of one edit, not yet moved into the saver's entries; moving 100,000 takes about 100 ms."""

    requests: Sequence[SaveRequest]
    due: float

    @cached_property
    def first(self) -> int:
        """Return the lowest edit number among these requests."""
        return min((request.number for request in self.requests), default=0)

    @cached_property
    def latest(self) -> int:
        """Return the highest edit number among these requests."""
        return max((request.number for request in self.requests), default=0)

    @cached_property
    def by_key(self) -> dict[Key, SaveRequest]:
        """Return the requests by key; some of them may already have been moved to the saver's entries.

        Cached, because building it takes 25 ms for 100,000 requests.
        """
        return {request.key: request for request in self.requests}


class Saver:
    """Saves captions and notes on its own thread, after a pause in typing; `Writer` accesses the files.

    Methods and events belong to the library's thread. Without `threaded`, everything is written by `flush` in the
    caller's thread, for programs without a window.
    """

    def __init__(
        self, journal: Journal, writer: Writer, post: Post, *, pause: float = PAUSE, threaded: bool = True
    ) -> None:
        self.post = post
        self.state: Emitter[SaveState] = Emitter()
        self.learned: Emitter[DiskValue] = Emitter()
        """Emitted for `History` when the value on disk replaces an edit, or an earlier session's edit was written."""
        self.notices: Emitter[SaveNotice] = Emitter()
        self.recovered: tuple[SaveRequest, ...] = ()
        """Unsaved edits of crashed sessions, found when this session started."""
        self.now = SaveState()
        """Last state that was emitted."""
        self._journal, self._writer, self._pause = journal, writer, pause
        self._inbox: list[_Arrived] = []
        """Edits to be moved into `_entries`; they are newer than all entries."""
        self._entries: dict[Key, _UnsavedValue] = {}
        self._untried: dict[SaveNotice, set[Key]] = {}
        """Keys of earlier sessions' edits that the writer has not processed yet, by the notice to send afterward."""
        self._saved = self._taken = 0
        self._states = self._emitted = 0
        """Number of states computed so far, and the number of the newest one that was emitted."""
        self._path_in_dataset: dict[Folder, str] = {}
        self._noticed: set[tuple[str, str]] = set()
        self._retry_at = _NEVER
        self._closing = self._abandoned = False
        self._last_finished = 0.0
        """Monotonic time at which the writer last finished a value."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="app-saver", daemon=True) if threaded else None
        if self._thread:
            self._thread.start()

    def take(self, requests: Sequence[SaveRequest], *, typing: bool = False) -> None:
        """Schedule writing requests that are already in the journal: now, or after a pause if they come from typing."""
        with self._changed:
            self._inbox.append(_Arrived(requests, time.monotonic() + self._pause * typing))
            self._changed.notify_all()
            state = replace(self.now, pending=self._pending())
        self._emit(state)

    def recover(self) -> None:
        """Take over unsaved edits of earlier sessions; notices report the result.

        An edit is written if the disk still has the value that it was based on; otherwise it becomes a conflict.
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

    def unsaved(self, image: LibraryImage) -> Mapping[Field, Value]:
        """Return the unsaved edits of an image, which the library shows instead of the values on disk."""
        return self.unsaved_at(image.folder, image.name)

    def unsaved_at(self, folder: Folder, name: str) -> Mapping[Field, Value]:
        """Return the unsaved edits of an image by folder and name; fast enough for 100,000 images."""
        if not self._entries and not self._inbox:
            return {}
        fields: tuple[Field, ...] = ("caption", "rating", "excluded", "crop")
        within = self._within(folder)
        return self._unsaved(folder, f"{within}/{name}" if within else name, fields)

    def unsaved_of_folder(self, folder: Folder) -> Mapping[FolderField, Value]:
        """Return the unsaved edits of a folder's settings."""
        fields: tuple[FolderField, ...] = ("repeats", "regularization", "trigger")
        return self._unsaved(folder, self._within(folder), fields)

    def _unsaved(self, folder: Folder, name: str, fields: Sequence[_Name]) -> Mapping[_Name, Value]:
        root = str(folder.root)
        with self._changed:
            newest = {field: self._newest(Key(root, name, field)) for field in fields}
        return {field: request.desired for field, request in newest.items() if request}

    def _within(self, folder: Folder) -> str:
        """Return a folder's path in its dataset; empty for the root."""
        if folder not in self._path_in_dataset:
            inside = folder.path.relative_to(folder.root).as_posix()
            self._path_in_dataset[folder] = "" if inside == "." else inside
        return self._path_in_dataset[folder]

    def _newest(self, key: Key) -> SaveRequest | None:
        for arrived in reversed(self._inbox):  # the inbox is newer than all entries
            if found := arrived.by_key.get(key):
                return found
        entry = self._entries.get(key)
        return entry.newest if entry else None

    def wants_more(self, learned: DiskValue) -> bool:
        """Return whether the value has an unsaved edit that is newer than `learned`."""
        with self._changed:
            newest = self._newest(learned.key)
        return newest is not None and newest.number > learned.number

    def hurry(self) -> None:
        """Write pending edits now and retry refused and conflicting ones, without waiting for the result."""
        with self._changed:
            now = time.monotonic()
            for entry in self._entries.values():
                if entry.state == "writing":
                    entry.later_due = now
                else:
                    entry.due = now  # conflicts too: the other program may have reverted or changed its value
            for arrived in self._inbox:
                arrived.due = now
            self._retry_at = _NEVER
            self._changed.notify_all()

    def flush(self, patience: float = math.inf) -> None:
        """Wait until every edit made so far is on disk, refused or in conflict; workers may call it too.

        Does not wait for later edits, and gives up if no write finishes for `patience` seconds.
        """
        self.hurry()
        if self._thread is None:
            while self._inbox or any(entry.due < _NEVER for entry in self._entries.values()):
                self._step()
            return
        with self._changed:
            latest = max((self._taken, *(arrived.latest for arrived in self._inbox)))
            # The wait has a timeout, because a disk that does not respond never notifies.
            while self._thread.is_alive() and self._has_pending(latest):
                if self._is_writing() and time.monotonic() > self._last_finished + patience:
                    return
                self._changed.wait(1.0)

    def _has_pending(self, latest: int) -> bool:
        """Return whether an edit up to number `latest` is still to be written."""
        if any(arrived.first <= latest for arrived in self._inbox):
            return True
        entries = self._entries.values()
        return any((one.state == "writing" or one.due < _NEVER) and one.request.first <= latest for one in entries)

    def _is_writing(self) -> bool:
        return any(entry.state == "writing" for entry in self._entries.values())

    def is_open(self, conflict: Conflict) -> bool:
        """Return whether a conflict is still open: no later edit or earlier choice has settled it."""
        with self._changed:
            self._absorb_of(conflict.key)
            self._changed.wait_for(lambda: not self._is_in_flight(conflict.key), timeout=2.0)
            entry = self._entries.get(conflict.key)
            return entry is not None and entry.state == "conflict" and entry.request.desired == conflict.mine

    def refresh(self) -> SaveState:
        """Compute and emit the current state, and return it."""
        with self._changed:
            number, state = self._numbered_state()
        self._emit(state, number)
        return state

    def choose(self, theirs: Sequence[Conflict], others: Sequence[SaveRequest]) -> None:
        """Resolve conflicts: drop the user's values of the conflicts in `theirs`, and write the requests in `others`.

        The requests must be in the journal already.
        """
        with self._changed:
            for request in others:  # the inbox can be bypassed: `is_open` has moved older edits of these keys out of it
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
        """Write everything that can be written, then stop; the rest stays in the journal for the next start."""
        self.flush(_PATIENCE)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._abandoned = self._is_writing()
        if self._thread and not self._abandoned:  # a write to a disk that does not respond may never return
            self._thread.join()
        with self._changed:
            self._absorb(None)
            unwritten = list(self._unwritten(()))
        self._journal.close(unwritten)

    def _run(self) -> None:
        lower_priority()
        while self._step():
            pass

    def _step(self) -> bool:
        """Wait for a batch of due requests and write it; return False when the thread should end."""
        batch = self._next()
        if batch is None:
            return False
        outcomes: list[Outcome] = []
        if batch:
            # Otherwise, a power failure could leave a written file whose edit the journal does not contain.
            self._journal.sync()
            outcomes = self._write(batch)
            with self._changed:
                if self._abandoned:  # `close` has given up waiting: the next start handles these
                    return False
        saved = [outcome for outcome in outcomes if outcome.kind == "saved"]
        self._journal.saved(outcome.request for outcome in saved)
        while self._inbox:
            with self._changed:  # for one batch at a time, because the window may need the lock in between
                self._absorb(_BATCH)
            yield_to_window()  # otherwise this thread takes the lock again before the window's thread wakes up
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
            return list(map(self._on_finished, self._writer.write(batch)))
        except Exception as fault:  # noqa: BLE001 (this thread has to live as long as the window)
            _log.exception("Could not save: unexpected error")
            error = DatasetError(
                "save.fault",
                f"Could not save your changes: unexpected error ({fault}).",
                "They are kept, and Impasto will keep trying to save them. See the log for details.",
            )
            return [Outcome(request, "refused", error=error) for request in batch]

    def _on_finished(self, outcome: Outcome) -> Outcome:
        self._last_finished = time.monotonic()
        yield_to_window()
        return outcome

    def _next(self) -> list[SaveRequest] | None:
        """Wait for due requests and return them: [] if only the state has changed, None if the thread should end."""
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
            self._last_finished = time.monotonic()
            for entry in due:
                entry.state, entry.due = "writing", _NEVER
            return [entry.request for entry in due]

    def _until_due(self, now: float) -> float | None:
        first = min([self._retry_at, *(entry.due for entry in self._entries.values())])
        return None if first == _NEVER else max(0.0, first - now)

    def _absorb(self, most: int | None) -> None:
        """Move all requests from the inbox into the entries, or only `most` of them to hold the lock only briefly."""
        while self._inbox:
            arrived = self._inbox[0]
            for request in arrived.requests[:most]:
                self._add(request, arrived.due)
            if most is not None and len(arrived.requests) > most:
                arrived.requests = arrived.requests[most:]
                return
            del self._inbox[0]

    def _absorb_of(self, key: Key) -> None:
        """Move the requests for one key from the inbox into the entries."""
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
        """Apply the outcomes of a batch; return the notices to show."""
        for outcome in outcomes:
            self._saved += outcome.kind == "saved"
            entry = self._entries.get(outcome.request.key)
            if entry and entry.state == "writing" and entry.settle(outcome):  # otherwise the user resolved it first
                del self._entries[outcome.request.key]
        if any(outcome.kind == "refused" for outcome in outcomes):
            self._retry_at = time.monotonic() + RETRY
        return [*self._recovery_notices(outcomes), *self._new_notices(outcomes)]

    def _recovery_notices(self, outcomes: Sequence[Outcome]) -> Iterator[SaveNotice]:
        """Yield a notice for each dataset once the writer has tried to save all of its edits from earlier sessions."""
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

    def _new_notices(self, outcomes: Sequence[Outcome]) -> Iterator[SaveNotice]:
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
        """Yield the requests that are still unsaved once the values in `written` have been saved."""
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
        """Emit a state if it changed, unless a newer one (with a higher number) was emitted already."""
        if number is not None and number < self._emitted:
            return
        self._emitted = number or self._emitted
        if state != self.now:
            self.now = state
            self.state.emit(state)


def _problem(error: DatasetError, requests: Sequence[SaveRequest]) -> SaveProblem:
    images = frozenset(request.image for request in requests if request.image is not None)
    return SaveProblem(error.code, error.sentence, error.remedy, len(requests), images)


def _no_journal(fault: OSError) -> DatasetError:
    place = Path(str(fault.filename)).parent if fault.filename else Path()
    reason = refusal(fault, place)
    return DatasetError(
        "save.no_journal",
        f"{reason.sentence} Your changes are still written to their files, but a crash could lose the latest ones.",
        reason.remedy,
    )
