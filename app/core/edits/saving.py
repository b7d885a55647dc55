"""Brings edits to disk behind the user's back, and says how far it is and what stands in its way."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Literal, TypeVar

from app.core.edits.journal import Journal
from app.core.edits.replacing import refusal
from app.core.edits.states import Conflict, Learned, Notice, SaveProblem, SaveState
from app.core.edits.wishes import Key, Wish
from app.core.edits.writer import Outcome, Writer
from app.core.events import Event
from app.core.pictures import Field, Folder, FolderField, Picture
from app.core.priority import stand_back, step_back
from app.core.tasks import Post
from trainer.errors import DatasetError

PAUSE = 0.7
"""Seconds without a key after which typed words are written."""
RETRY = 20.0
"""Seconds after which what could not be written is tried again by itself."""
_PATIENCE = 10.0
"""Seconds in which the disk has to answer once when the app ends."""
_BATCH = 2000
_Name = TypeVar("_Name", Field, FolderField)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    wish: Wish
    due: float
    """By the monotonic clock."""
    first: int
    """The number of the first wish of those in a row of which it is made."""


@dataclass
class _Arrived:
    """Wishes of one edit that are still to be entered, which takes some hundred milliseconds for 100,000."""

    wishes: Sequence[Wish]
    due: float

    @cached_property
    def first(self) -> int:
        """The number of the first edit among them."""
        return min((wish.number for wish in self.wishes), default=0)

    @cached_property
    def latest(self) -> int:
        """The number of the latest."""
        return max((wish.number for wish in self.wishes), default=0)

    @cached_property
    def numbers(self) -> dict[Key, int]:
        """What they are for, and the latest edit of it; 25 ms for 100,000. Some may be entered since it was asked."""
        return {wish.key: wish.number for wish in self.wishes}


class Saver:
    """Writes captions and notes in a thread of its own, each file once a pause of typing; see `Writer` for how.

    Its events come on the library's thread, and its methods belong there. Without `threaded` nothing happens until
    `flush`, in the caller's thread: for programs without a window.
    """

    def __init__(
        self, journal: Journal, writer: Writer, post: Post, *, pause: float = PAUSE, threaded: bool = True
    ) -> None:
        self.post = post
        self.state: Event[SaveState] = Event()
        self.learned: Event[Learned] = Event()
        """Where the user's own wish is void, or something older was written after all; `History` takes it over."""
        self.notices: Event[Notice] = Event()
        self.recovered: tuple[Wish, ...] = ()
        """What sessions that crashed had left unwritten at the start of this one."""
        self.now = SaveState()
        """The last state that was told."""
        self._journal, self._writer, self._pause = journal, writer, pause
        self._inbox: list[_Arrived] = []
        self._open: dict[Key, _Waiting] = {}
        self._flight: dict[Key, _Waiting] = {}
        self._refused: dict[Key, Outcome] = {}
        self._conflicts: dict[Key, Outcome] = {}
        self._again: dict[Key, None] = {}
        """Of which of these it is to be looked whether they can be written now."""
        self._behind: dict[Key, list[Wish]] = {}
        """What the user wanted besides a newer wish that does not go on from it: judged when that one is done with."""
        self._saved = self._taken = 0
        self._noticed: set[tuple[str, str]] = set()
        self._retry_at = float("inf")
        self._closing = self._left = False
        self._came = 0.0
        """When something came of the writing last, by the monotonic clock."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="app-saver", daemon=True) if threaded else None
        if self._thread:
            self._thread.start()

    def take(self, wishes: Sequence[Wish], *, typing: bool = False) -> None:
        """Write these soon: at once, or after a pause where they come from typing. They are in the journal already."""
        with self._changed:
            self._inbox.append(_Arrived(wishes, time.monotonic() + self._pause * typing))
            self._changed.notify_all()
            state = replace(self.now, pending=self._pending())
        self._tell(state)

    def recover(self) -> None:
        """Take over what sessions that crashed left unwritten; a notice says how much that is.

        What still stands on disk as it was is written, all else becomes a conflict.
        """
        wishes = self._journal.adopt()
        self.recovered = tuple(wishes)
        roots = Counter(wish.key.root for wish in wishes)
        self._report([], [Notice("notice.recovered", root, count) for root, count in roots.items()])
        newest = {wish.key: wish for wish in wishes}
        with self._changed:
            for wish in wishes:
                if wish is not newest[wish.key]:
                    self._put_behind(wish)
        self.take(list(newest.values()))

    def unsaved(self, picture: Picture) -> frozenset[Field]:
        """Return what of a picture is not on disk yet: a look at the disk must not overwrite that in the library."""
        fields: tuple[Field, ...] = ("caption", "rating", "excluded", "crop")
        return self._waiting_of(picture.folder.root, picture.path, fields)

    def unsaved_of_folder(self, folder: Folder) -> frozenset[FolderField]:
        """Return which facts of a folder are not on disk yet, as `unsaved` does for a picture."""
        fields: tuple[FolderField, ...] = ("repeats", "regularisation", "trigger")
        return self._waiting_of(folder.root, folder.path, fields)

    def _waiting_of(self, root: Path, path: Path, fields: Sequence[_Name]) -> frozenset[_Name]:
        name = path.relative_to(root).as_posix() if path != root else ""
        with self._changed:
            stores: list[Container[Key]] = [self._open, self._flight, self._refused, self._conflicts]
            stores += [arrived.numbers for arrived in self._inbox]
            return frozenset(field for field in fields if any(Key(str(root), name, field) in each for each in stores))

    def wants_more(self, learned: Learned) -> bool:
        """Tell whether something waits that the user wanted of the same value later."""
        with self._changed:
            stores = (self._flight, self._open, self._refused, self._conflicts)
            numbers = [held.wish.number for store in stores if (held := store.get(learned.key))]
            numbers += [arrived.numbers.get(learned.key, 0) for arrived in self._inbox]
            return any(number > learned.number for number in numbers)

    def hurry(self) -> None:
        """Write now what waits for a pause of typing, and try again what was refused or in conflict; does not wait."""
        with self._changed:
            now = time.monotonic()
            for waiting in self._open.values():
                waiting.due = now
            for arrived in self._inbox:
                arrived.due = now
            self._again.update(dict.fromkeys((*self._refused, *self._conflicts)))  # others may have gone on, or back
            self._retry_at = float("inf")
            self._changed.notify_all()

    def flush(self, patience: float = math.inf) -> None:
        """Wait until all that was wished for by now is on disk or refused, or in conflict; workers may wait too.

        Not for what is typed meanwhile, for hours maybe; nor where nothing comes of it for `patience` seconds.
        """
        self.hurry()
        if self._thread is None:
            while self._open or self._inbox or self._again:
                self._step()
            return
        with self._changed:
            latest = max((self._taken, *(arrived.latest for arrived in self._inbox)))
            while self._thread.is_alive() and self._owes(latest):
                if self._flight and time.monotonic() > self._came + patience:
                    return
                self._changed.wait(1.0)

    def _owes(self, latest: int) -> bool:
        """Tell whether something is on its way that was wished up to that number."""
        entered = chain(self._flight.values(), self._open.values())
        owed = any(one.first <= latest for one in entered) or any(one.first <= latest for one in self._inbox)
        return owed or bool(self._again)

    def resolve(self, conflict: Conflict, keep: Literal["mine", "theirs"]) -> None:
        """End a conflict: write the user's value over the other, of which a copy is kept, or take the other over."""
        with self._changed:
            self._absorb_of(conflict.key)  # where the user went on since, it is judged anew
            outcome = self._conflicts.pop(conflict.key, None)
            if outcome is None:
                return
            self._decide(outcome, keep)
            self._changed.notify_all()
            state = self._state()
        self._tell(state)

    def _decide(self, outcome: Outcome, keep: Literal["mine", "theirs"]) -> None:
        wish, now = outcome.wish, time.monotonic()
        later, flying = self._open.get(wish.key), self._flight.get(wish.key)
        if keep == "mine":
            newer = [one.wish for one in (flying, later) if one]
            written = [value for one in newer for value in (*one.bases, one.desired)]
            mine = replace(wish, bases=(*wish.bases, outcome.found, *written))
            self._open[wish.key] = _Waiting(mine, now, wish.number)
            if later:
                self._journal.saved([later.wish])
        elif later:
            self._journal.saved([wish])
        else:
            # Nothing is wished in place of it any more; the writer finds what stands there by now.
            self._open[wish.key] = _Waiting(replace(wish, bases=(wish.desired,)), now, wish.number)

    def close(self) -> None:
        """Write what can be written and end; what cannot, or no disk answers for, stays for the next start."""
        self.flush(_PATIENCE)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._left = bool(self._flight)
        if self._thread and not self._left:
            self._thread.join()
        with self._changed:
            self._absorb(None)
            unwritten = [*self._unwritten(), *(waiting.wish for waiting in self._flight.values())]
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
        if batch:
            self._journal.sync()
            outcomes = self._write(batch)
            with self._changed:
                if self._left:  # it answers when nobody waits any more: the next start will see
                    return False
            self._settle(batch, outcomes)
        while self._inbox:
            with self._changed:  # and not for all of a large edit: the window may want it meanwhile
                self._absorb(_BATCH)
            stand_back()  # else it would have the lock again before the window has woken up
        with self._changed:
            self._absorb(None)
            wishes, taken = self._unwritten(), self._taken
        self._journal.roll(wishes, taken)
        with self._changed:
            self._flight = {}
            self._bring_forward()
            state = self._state()
            self._changed.notify_all()
        self.post(lambda: self._tell(state))
        return True

    def _write(self, batch: Sequence[Wish]) -> list[Outcome]:
        try:
            return list(map(self._note, self._writer.write(batch)))
        except Exception as fault:  # noqa: BLE001 (the edge of a thread that has to live as long as the window)
            _log.exception("Writing failed in a way that nobody foresaw")
            error = DatasetError(
                "save.fault",
                f"Writing failed in a way that nobody foresaw ({fault}).",
                "What you changed is kept and tried again; the log says more.",
            )
            return [Outcome(wish, "refused", error=error) for wish in batch]

    def _note(self, outcome: Outcome) -> Outcome:
        self._came = time.monotonic()
        stand_back()
        return outcome

    def _next(self) -> list[Wish] | None:
        """Wait for work; return what is due, or nothing where only a state is to be told, or None at the end."""
        with self._changed:
            while True:
                self._absorb(_BATCH)
                now = time.monotonic()
                if now >= self._retry_at:
                    self._again.update(dict.fromkeys(self._refused))
                    self._retry_at = float("inf")
                self._reopen(_BATCH)
                due = [waiting for waiting in self._open.values() if waiting.due <= now][:_BATCH]
                if due or self._closing or self._thread is None:
                    break
                if not self._inbox and not self._again:
                    self._changed.wait(self._patience(now))
            if not due:
                return None if self._closing else []
            self._came = time.monotonic()
            self._flight = {waiting.wish.key: waiting for waiting in due}
            for key in self._flight:
                del self._open[key]
            return [waiting.wish for waiting in due]

    def _patience(self, now: float) -> float | None:
        first = min([self._retry_at, *(waiting.due for waiting in self._open.values())])
        return None if first == float("inf") else max(0.0, first - now)

    def _absorb(self, most: int | None) -> None:
        """Take wishes out of the inbox, of a large edit only so many, so that nobody waits for the lock."""
        while self._inbox:
            arrived = self._inbox[0]
            for wish in arrived.wishes[:most]:
                self._add(wish, arrived.due)
            if most is not None and len(arrived.wishes) > most:
                arrived.wishes = arrived.wishes[most:]
                return
            del self._inbox[0]

    def _absorb_of(self, key: Key) -> None:
        """Take the wishes for one value out of the inbox, before all others."""
        for arrived in self._inbox:
            if key in arrived.numbers:
                for wish in arrived.wishes:
                    if wish.key == key:
                        self._add(wish, arrived.due)
                arrived.wishes = [wish for wish in arrived.wishes if wish.key != key]

    def _add(self, wish: Wish, due: float) -> None:
        self._taken = max(self._taken, wish.number)
        waiting = self._open.get(wish.key)
        if waiting and waiting.wish.leads_to(wish):
            waiting.wish = waiting.wish.followed_by(wish)
            if waiting.due > time.monotonic():  # what is due stays so: somebody may wait for it
                waiting.due = due
            return
        before = self._before(wish)
        self._open[wish.key] = _Waiting(before.followed_by(wish) if before else wish, due, wish.number)

    def _before(self, wish: Wish) -> Wish | None:
        """Take out what this wish goes on from; what it does not, waits on as the problem that it is, or behind it."""
        if earlier := self._open.get(wish.key):
            self._put_behind(earlier.wish)
        else:
            for store in (self._refused, self._conflicts):
                if stopped := store.get(wish.key):
                    if stopped.wish.leads_to(wish):
                        del store[wish.key]
                        return stopped.wish
                    store[wish.key] = replace(stopped, wish=stopped.wish.overtaken())
        return None

    def _put_behind(self, wish: Wish) -> None:
        self._behind.setdefault(wish.key, []).append(wish.overtaken())

    def _bring_forward(self) -> None:
        """Judge what stood behind another wish for the same value, now that its place is free; the newest first."""
        for key, wishes in list(self._behind.items()):
            if not any(key in store for store in (self._open, self._refused, self._conflicts)):
                wish = wishes.pop()
                self._open[key] = _Waiting(wish, time.monotonic(), wish.number)
                if not wishes:
                    del self._behind[key]

    def _reopen(self, most: int) -> None:
        """Judge again some of what was set aside, but where a newer wish is on its way."""
        now = time.monotonic()
        for key in list(islice(self._again, most)):
            del self._again[key]
            for store in (self._refused, self._conflicts):
                if key in store and key not in self._open:
                    wish = store.pop(key).wish
                    self._open[key] = _Waiting(wish, now, wish.number)

    def _settle(self, batch: Sequence[Wish], outcomes: Sequence[Outcome]) -> None:
        assert len(batch) == len(outcomes)
        saved = [outcome for outcome in outcomes if outcome.kind == "saved"]
        self._journal.saved(outcome.wish for outcome in saved)
        with self._changed:
            self._saved += len(saved)
            for outcome in outcomes:
                if outcome.kind != "saved":
                    self._set_aside(outcome)
                elif conflict := self._conflicts.get(outcome.wish.key):
                    if outcome.found == conflict.wish.desired:
                        del self._conflicts[outcome.wish.key]
                        self._journal.saved([conflict.wish])
                    else:
                        self._conflicts[outcome.wish.key] = replace(conflict, found=outcome.found)
            if self._refused:
                self._retry_at = time.monotonic() + RETRY
        learned = [
            Learned(outcome.wish.key, outcome.wish.number, outcome.found)
            for outcome in saved
            if not outcome.wish.key.of_folder and (outcome.found != outcome.wish.desired or not outcome.wish.shown)
        ]
        told = self._worth_saying(outcomes)
        self.post(lambda: self._report(learned, told))

    def _set_aside(self, outcome: Outcome) -> None:
        """Keep what was not written; where the user went on from it meanwhile, as one wish with what he wants now."""
        key = outcome.wish.key
        later = self._open.get(key)
        if later and outcome.wish.leads_to(later.wish):
            later.wish = outcome.wish.followed_by(later.wish)
            return
        for store in (self._refused, self._conflicts):
            if before := store.pop(key, None):
                self._put_behind(before.wish)
        (self._refused if outcome.kind == "refused" else self._conflicts)[key] = outcome

    def _worth_saying(self, outcomes: Sequence[Outcome]) -> list[Notice]:
        counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        for outcome in outcomes:
            if outcome.notice:
                counts[outcome.notice, outcome.wish.key.root] += 1
        fresh = [what for what in counts if what not in self._noticed]
        self._noticed.update(fresh)
        return [Notice(code, root, counts[code, root]) for code, root in fresh]  # type: ignore[arg-type]

    def _report(self, learned: Sequence[Learned], notices: Sequence[Notice]) -> None:
        for each in learned:
            self.learned.emit(each)
        for notice in notices:
            self.notices.emit(notice)

    def _unwritten(self) -> list[Wish]:
        stopped = (*self._refused.values(), *self._conflicts.values())
        behind = [wish for wishes in self._behind.values() for wish in wishes]
        return behind + [waiting.wish for waiting in self._open.values()] + [outcome.wish for outcome in stopped]

    def _pending(self) -> int:
        known = len(self._open) + len(self._flight) + len(self._refused) + len(self._conflicts)
        return known + sum(len(arrived.wishes) for arrived in self._inbox)

    def _state(self) -> SaveState:
        reasons: defaultdict[DatasetError, list[Wish]] = defaultdict(list)
        by_sentence: dict[str, DatasetError] = {}
        for outcome in self._refused.values():
            assert outcome.error is not None
            reasons[by_sentence.setdefault(outcome.error.sentence, outcome.error)].append(outcome.wish)
        problems = [_problem(error, wishes) for error, wishes in reasons.items()]
        if self._journal.fault:
            problems.append(_problem(_no_journal(self._journal.fault), []))
        return SaveState(
            pending=self._pending(),
            saved=self._saved,
            backed_up=all(problem.code != "save.no_backup" for problem in problems),
            problems=tuple(problems),
            conflicts=tuple(
                Conflict(outcome.wish.key, outcome.wish.desired, outcome.found) for outcome in self._conflicts.values()
            ),
        )

    def _tell(self, state: SaveState) -> None:
        if state != self.now:
            self.now = state
            self.state.emit(state)


def _problem(error: DatasetError, wishes: Sequence[Wish]) -> SaveProblem:
    pictures = frozenset(wish.picture for wish in wishes if wish.picture is not None)
    return SaveProblem(error.code, error.sentence, error.remedy, len(wishes), pictures)


def _no_journal(fault: OSError) -> DatasetError:
    place = Path(str(fault.filename)).parent if fault.filename else Path()
    reason = refusal(fault, place)
    return DatasetError(
        "save.no_journal",
        f"{reason.sentence} Changes go straight to their files, but a crash could lose those of the last moment.",
        reason.remedy,
    )
