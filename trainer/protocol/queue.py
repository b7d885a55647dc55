"""The queue: a folder of jobs and runs that a worker does one after the other, which anybody may read and edit.

    queue/
      queue.json                 the order, and whether the queue is held; replaced atomically
      entries/ID.json            what is to be done and how it stands; replaced atomically
      entries/ID.lock            held by the engine that does it, for as long as it lives
      entries/ID.log             what that engine printed before it had a run; the rest is in the run's console.log
      lock  worker.lock  worker.log

Every edit reads and writes under `lock`, so that several programs may edit at once. Entries that `queue.json` does not
name stand at the end by the time they were added: putting one in touches no other file.

An entry holds the text that its job file had when it was put in, and that is what is trained: the file may be changed,
and trained once more, or be deleted. Paths in it count from the file's folder all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import RunError, joined
from trainer.protocol import commands, files, locks, places
from trainer.protocol.processes import last_words
from trainer.protocol.queue_entry import (
    ENDED,
    VERSION,
    Entry,
    NewerError,
    State,
    Wish,
    again,
    entry_of,
    new_entry,
    new_id,
    typed,
    versioned,
)
from trainer.protocol.reading import UnusableFileError, read_record, reason_of
from trainer.protocol.records import json_keys, to_record
from trainer.protocol.run_directory import RunDirectory

__all__ = ["Entry", "Queue", "QueueFault", "Reading", "State", "Wish", "new_entry", "new_id"]

_NAME = re.compile(r"[0-9a-f]{8}")
_PATIENCE = 10.0
_BROKEN_OFF = "Its process was ended from outside, or the computer went down."


@json_keys("id", "sentence")
@dataclass(frozen=True)
class QueueFault:
    """A file of the queue that cannot be used; `id` is the entry's, empty for queue.json."""

    id: str
    sentence: str


@json_keys("entries", "faults", "held", "reason", "hold_on_failure")
@dataclass(frozen=True)
class Reading:
    """The queue at one moment."""

    entries: tuple[Entry, ...] = ()
    """In order, ended ones too."""
    faults: tuple[QueueFault, ...] = ()
    held: bool = False
    """Whether nothing is begun until `go_on`."""
    reason: str = ""
    """Why it is held, in words; empty when somebody asked for it."""
    hold_on_failure: bool = False
    """Whether every failure holds the queue."""

    def find(self, name: str) -> Entry | None:
        """Return the entry with this id."""
        return next((entry for entry in self.entries if entry.id == name), None)


@json_keys("order", "held", "reason", "hold_on_failure")
@dataclass(frozen=True)
class _Settings:
    order: tuple[str, ...] = ()
    held: bool = False
    reason: str = ""
    hold_on_failure: bool = False


class Queue:
    """The queue in `folder`, by default the user's. Every method may raise RunError when the disk refuses."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or places.home() / "queue"
        self.settings = self.folder / "queue.json"
        self.worker_lock = self.folder / "worker.lock"
        self.worker_log = self.folder / "worker.log"
        self._entries = self.folder / "entries"

    # --- reading

    def entries(self) -> list[Entry]:
        """Return the entries in order; those that cannot be read are left out, `read` tells of them."""
        return list(self.read().entries)

    def read(self) -> Reading:
        """Return all there is; needs no lock, for every file is whole at any time."""
        settings, problem = self._read_settings()
        faults = [QueueFault("", problem)] if problem else []
        found: list[Entry] = []
        for path in self._files():
            entry = self._read_entry(path)
            if isinstance(entry, QueueFault):
                faults.append(entry)
            elif entry is not None:
                found.append(entry)
        rank = {name: place for place, name in enumerate(settings.order)}
        found.sort(key=lambda entry: (rank.get(entry.id, len(rank)), entry.added, entry.id))
        return Reading(tuple(found), tuple(faults), settings.held, settings.reason, settings.hold_on_failure)

    def get(self, name: str) -> Entry:
        """Return the entry with this id; raises RunError when there is none, or one that cannot be used."""
        entry = self._read_entry(self._file(name)) if _NAME.fullmatch(name) else None
        if entry is None:
            raise RunError("queue.none", f'There is no entry "{name}" in the queue.', "`queue list` names them.")
        if isinstance(entry, QueueFault):
            raise RunError("queue.entry", entry.sentence, "Update Impasto, or remove the entry from the queue.")
        return entry

    def log(self, name: str) -> Path:
        """Return where the output of an entry's engine goes."""
        return self._entries / f"{name}.log"

    def worker_alive(self) -> bool:
        """Tell whether a worker is at it."""
        try:
            locks.require_file(self.worker_lock)  # without it no worker can ever start: that concerns the whole queue
        except OSError as error:
            raise _refused(self.folder, error) from error
        return self._is_held(self.worker_lock)

    def engine_alive(self, name: str) -> bool:
        """Tell whether an engine does this entry."""
        return self._is_held(self._engine_lock(name))

    # --- putting in and taking out

    def add(
        self, job: Path, *, after: float | None = None, hold: bool = False, before: str | None = None
    ) -> Entry:  # fmt: skip
        """Put a job as its file is now at the end, or before another entry; raises JobError when it cannot be read."""
        entry = self.put(new_entry(job, after=after, hold=hold))
        if before is not None:
            self.move(entry.id, before)
        return entry

    def add_resume(self, run: Path, steps: int | None = None) -> Entry:
        """Ask for a run to be gone on with; one that stands in the queue keeps its place.

        An entry of it that waits or runs is returned as it is.
        """
        run = run.absolute()
        with self.editing():
            former = next((one for one in self.entries() if one.run == run and one.state != "done"), None)
            if former is None:
                return self._append(new_entry(None, run, steps=steps))
            if former.state in ("waiting", "running"):
                return former
            return self._write(again(former, steps))

    def put(self, entry: Entry) -> Entry:
        """Put in an entry that `new_entry` made."""
        with self.editing():
            return self._append(entry)

    def remove(self, name: str) -> None:
        """Take an entry out; its run stays on disk. A damaged one can be removed too; one that runs cannot."""
        with self.editing():
            if self.engine_alive(name):
                raise RunError("queue.running", "This is running, so it cannot be removed.", "Stop it first.")
            # The entry last: what another program has open on Windows keeps it, to be removed once more.
            for path in (self.log(name), self._engine_lock(name), self._file(name)):
                path.unlink(missing_ok=True)

    def clear(self, states: Collection[State] = ENDED, age: float = 0.0) -> None:
        """Take out what has ended in one of these states, `age` seconds ago or earlier."""
        for entry in self.entries():
            if entry.state in states and self._age(entry) >= age:
                self.remove(entry.id)

    # --- how it goes on

    def move(self, name: str, before: str | None) -> None:
        """Put an entry before another, or at the end."""
        if name == before:
            return
        with self.editing():
            self.get(name)
            order = [entry.id for entry in self.entries() if entry.id != name]
            place = order.index(before) if before in order else len(order)
            order.insert(place, name)
            self._change_settings(order=tuple(order))

    def pause(self, name: str) -> Entry:
        """Ask what runs to pause, hold back what waits; it keeps its place."""
        return self._end(name, "pause", "paused", ("waiting",))

    def stop(self, name: str) -> Entry:
        """Ask what runs to stop, which also writes its LoRA; what waits or is paused leaves the queue."""
        return self._end(name, "stop", "stopped", ("waiting", "paused", "interrupted"))

    def withdraw(self, name: str) -> Entry:
        """Take back a pause or stop of what runs; raises RunError "queue.late" when it is being carried out."""
        wish = self.get(name).wish
        entry = self.change(name, lambda now: dataclasses.replace(now, wish=None))  # so that no worker passes it on
        if wish is None or entry.run is None:
            return entry
        run = RunDirectory(entry.run)
        try:
            withdrawn, ending = commands.withdraw(run.commands, wish), commands.ending(run.commands)
        except OSError as error:
            raise _refused(run.commands, error) from error
        if not withdrawn and ending is not None and ending.accepted:
            sentence = f"Could not take {wish} back: {entry.name} is carrying it out already."
            raise RunError("queue.late", sentence, "Resume it when it has ended.")
        return entry

    def resume(self, name: str) -> Entry:
        """Let an entry wait for its turn again: a run is gone on with, a job without a run begins anew.

        A job that failed before there was a run is frozen anew: what was wrong with its file may be corrected by now.
        """
        return self.change(name, again)

    def start_after(self, name: str, after: float | None) -> Entry:
        """Let an entry wait for a moment (Unix time in seconds); None: for its turn only.

        Raises RunError "queue.state" for one that runs.
        """

        def wait(entry: Entry) -> Entry:
            if entry.state == "running":
                sentence = "This has begun meanwhile, so it cannot start later."
                raise RunError("queue.state", sentence, "Pause it first to give it a time.")
            return dataclasses.replace(entry, after=after)

        return self.change(name, wait)

    def hold(self, reason: str = "") -> None:
        """Begin nothing more until `go_on`; what runs is not touched."""
        with self.editing():
            self._change_settings(held=True, reason=reason)

    def go_on(self) -> None:
        """Begin again, and let what was interrupted wait for its turn."""
        with self.editing():
            self._change_settings(held=False, reason="")
            for entry in self.entries():
                if entry.state == "interrupted":
                    self._write(again(entry))

    def set_hold_on_failure(self, hold: bool) -> None:
        """Hold the queue after each failure, or go on with the next entry."""
        with self.editing():
            self._change_settings(hold_on_failure=hold)

    # --- for worker and engine

    @contextlib.contextmanager
    def editing(self) -> Iterator[None]:
        """Let nobody else edit for the length of the block, which calls no other method that edits."""
        try:
            self._entries.mkdir(parents=True, exist_ok=True)
            with locks.held(self.folder / "lock", _PATIENCE):
                yield
        except locks.LockBusyError as error:
            raise RunError(
                "queue.busy",
                "Another program has been changing the queue for too long.",
                "Try again; if that does not help, end other windows of Impasto.",
            ) from error
        except OSError as error:
            raise _refused(self.folder, error) from error

    def change(self, name: str, change: Callable[[Entry], Entry]) -> Entry:
        """Replace an entry by what `change` makes of it."""
        with self.editing():
            return self._write(change(self.get(name)))

    def conclude(self, name: str, state: State, problem: str = "") -> Entry:
        """Enter how an entry ended; a failure or interruption holds the queue where that was asked for."""
        with self.editing():
            return self._conclude(self.get(name), state, problem)

    def settle(self, outcome: Callable[[Entry], tuple[State, str]], alive: Collection[str] = ()) -> list[Entry]:
        """Enter how those ended whose engine is gone without having said so; `alive` ones have only just begun.

        `outcome` gives the state and a problem in words. Returns the entries as they are now.
        """
        with self.editing():
            gone = [one for one in self.entries() if one.state == "running" and one.id not in alive]
            return [self._conclude(one, *outcome(one)) for one in gone if not self.engine_alive(one.id)]

    @contextlib.contextmanager
    def engine(self, name: str) -> Iterator[None]:
        """Hold an entry for an engine's life; raises RunError "queue.taken" when another engine does."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locks.held(self._engine_lock(name), locks.ASKED))
            except locks.LockBusyError as error:
                raise RunError(
                    "queue.taken", "Another process does this already.", "Follow it with `watch`."
                ) from error
            except OSError as error:
                raise _refused(self.folder, error) from error
            yield

    # --- inside

    def _conclude(self, entry: Entry, state: State, problem: str) -> Entry:
        settings, _ = self._read_settings()
        if state in ("failed", "interrupted") and (entry.hold or settings.hold_on_failure):
            self._change_settings(held=True, reason=f"{entry.name}: {problem}")
        return self._write(dataclasses.replace(entry, state=state, problem=problem, wish=None, pid=None))

    def _end(self, name: str, wish: Wish, state: State, at_once: tuple[State, ...]) -> Entry:
        """Note a wish where the entry runs; where it is in one of the other states, carry it out at once."""

        def end(entry: Entry) -> Entry:
            if entry.state == "running":
                return dataclasses.replace(entry, wish=wish)
            if entry.state in at_once:
                return dataclasses.replace(entry, state=state, problem="")
            raise RunError("queue.state", f"This is {entry.state}, so there is nothing to {wish}.", "Nothing to do.")

        return self.change(name, end)

    def _files(self) -> list[Path]:
        try:
            return [path for path in self._entries.glob("*.json") if _NAME.fullmatch(path.stem)]
        except OSError as error:
            raise _refused(self._entries, error) from error

    def _file(self, name: str) -> Path:
        return self._entries / f"{name}.json"

    def _engine_lock(self, name: str) -> Path:
        return self._entries / f"{name}.lock"

    def _age(self, entry: Entry) -> float:
        """Return the seconds since an entry was last changed; 0 where another program has just taken it out."""
        try:
            return time.time() - self._file(entry.id).stat().st_mtime
        except OSError:
            return 0.0

    def _is_held(self, lock: Path) -> bool:
        try:
            return locks.is_held(lock)
        except OSError as error:
            raise _refused(self.folder, error) from error

    def _append(self, entry: Entry) -> Entry:
        """Write one as added after all others, also where the clock goes by steps (15 ms on Windows) or went back."""
        latest = max((one.added for one in self.entries()), default=0.0)
        return self._write(dataclasses.replace(entry, added=max(entry.added, math.nextafter(latest, math.inf))))

    def _write(self, entry: Entry) -> Entry:
        fields = {key: str(value) if isinstance(value, Path) else value for key, value in to_record(entry).items()}
        del fields["id"]
        files.write_json(self._file(entry.id), {"version": VERSION, **fields})
        return entry

    def _read_entry(self, path: Path) -> Entry | QueueFault | None:
        """Return an entry, what is wrong with it, or None when it has just been taken out."""
        try:
            return read_record(path, "record", lambda found: entry_of(path.stem, versioned(found)))
        except FileNotFoundError:
            return None
        except NewerError:
            return QueueFault(path.stem, f"The queue's entry {path} was written by a newer version of Impasto.")
        except (OSError, UnusableFileError) as error:
            return QueueFault(path.stem, f"The queue's entry {path} is damaged: {reason_of(error)}.")

    def _read_settings(self) -> tuple[_Settings, str]:
        """Return the order and what holds the queue, and in words what is wrong with the file."""
        try:
            return read_record(self.settings, "record", _settings), ""
        except FileNotFoundError:
            return _Settings(), ""
        except NewerError:
            problem = "was written by a newer version of Impasto, so nothing is begun by this one"
            return _Settings(held=True, reason="Update Impasto to go on with the queue."), f"{self.settings} {problem}."
        except (OSError, UnusableFileError) as error:
            problem = f"is damaged ({reason_of(error)}), so the entries are in the order in which they were added"
            return _Settings(), f"{self.settings} {problem}."

    def _change_settings(self, **changes: object) -> None:
        """Replace some of queue.json; one of a newer version stays as it is."""
        settings, problem = self._read_settings()
        if problem and settings.held:
            raise RunError("queue.newer", problem, "Update Impasto.")
        changed = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
        files.write_json(self.settings, {"version": VERSION, **to_record(changed)})


def _settings(found: Any) -> _Settings:
    fields = versioned(found)
    order = typed(fields, "order", list)
    if not all(isinstance(name, str) for name in order):
        raise TypeError("its order is no list of entries")
    held, always = typed(fields, "held", bool), typed(fields, "hold_on_failure", bool)
    return _Settings(tuple(order), held, typed(fields, "reason", str), always)


def _refused(folder: Path, error: OSError) -> RunError:
    full = places.is_disk_full(error)
    reason = "the disk is full" if full else error.strerror or str(error)
    return RunError(
        "queue.unwritable",
        f"The queue in {folder} cannot be used: {reason}.",
        f"{places.write_remedy(error)} The environment variable IMPASTO_HOME names it.",
    )


def outcome(queue: Queue, entry: Entry, code: int | None = None) -> tuple[State, str]:
    """Return how an entry ended and why; `code` is its engine's exit code where that is known."""
    if entry.run is not None:
        said = _said(RunDirectory(entry.run), entry.attempts)
        if said is not None:
            return said
    if entry.wish is not None and code != 1:  # before there was a run, it was simply ended
        return ("paused" if entry.wish == "pause" else "stopped"), ""
    if code is not None and code > 0 and entry.run is None:
        words = last_words(queue.log(entry.id))
        return "failed", words or f"It ended with exit code {code} and said nothing."
    return "interrupted", _BROKEN_OFF


def _said(run: RunDirectory, before: int) -> tuple[State, str] | None:
    """Return what the run itself tells; None where it says nothing of the start that came after `before` others."""
    try:
        state, status = run.state(), run.read_status()
    except RunError as error:
        return "failed", joined(error.sentence, error.remedy)
    if state == "running":
        return "interrupted", "Another process goes on with this run."
    if status is None or status.attempt <= before or state == "new" or state == "interrupted":
        return None
    return state, "" if state != "failed" else "It failed; its log tells why."
