"""Queue of jobs and runs: a folder that any program may read and edit, and whose entries a worker runs in order.

    queue/
      queue.json                 the order, and whether the queue is on hold; replaced atomically
      entries/ID.json            the job or run and its state; replaced atomically
      entries/ID.lock            held by the entry's engine as long as it runs
      entries/ID.log             output of that engine until its run exists; the rest is in the run's console.log
      lock  worker.lock  worker.log

Every edit reads and writes under `lock`, so that several programs can edit at once. Entries that `queue.json` does not
list come last, in the order in which they were added, so adding an entry changes no other file.

An entry contains the text that its job file had when the entry was added, and training uses that text. The file can be
changed and queued again, or deleted. Paths in the text are still relative to the file's folder.
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

from trainer.errors import RunError, sentence_and_remedy
from trainer.protocol import commands, files, locks, places
from trainer.protocol.processes import last_words
from trainer.protocol.queue_entry import (
    ENDED,
    VERSION,
    EndRequest,
    Entry,
    NewerVersionError,
    State,
    entry_of,
    new_entry,
    new_id,
    requeued,
    typed,
    versioned,
)
from trainer.protocol.reading import UnusableFileError, read_record, reason_of
from trainer.protocol.records import json_keys, to_record
from trainer.protocol.run_directory import RunDirectory

__all__ = ["EndRequest", "Entry", "Queue", "QueueFault", "QueueSnapshot", "State", "new_entry", "new_id"]

_NAME = re.compile(r"[0-9a-f]{8}")
_PATIENCE = 10.0
_INTERRUPTED = "The process was killed, or the computer shut down."


@json_keys("id", "sentence")
@dataclass(frozen=True)
class QueueFault:
    """Unusable file in the queue's folder; `id` is the entry's id, or empty for queue.json."""

    id: str
    sentence: str


@json_keys("entries", "faults", "held", "reason", "hold_on_failure")
@dataclass(frozen=True)
class QueueSnapshot:
    """Entries, faults and settings of the queue at one moment."""

    entries: tuple[Entry, ...] = ()
    """All entries in order, ended ones included."""
    faults: tuple[QueueFault, ...] = ()
    held: bool = False
    """Whether the queue is on hold: no new entry starts until `release`."""
    reason: str = ""
    """Sentence that says why the queue is on hold; empty if the user put it on hold."""
    hold_on_failure: bool = False
    """Whether every failure puts the queue on hold."""

    def find(self, name: str) -> Entry | None:
        """Return the entry with this id; None if there is none."""
        return next((entry for entry in self.entries if entry.id == name), None)


@json_keys("order", "held", "reason", "hold_on_failure")
@dataclass(frozen=True)
class _Settings:
    order: tuple[str, ...] = ()
    held: bool = False
    reason: str = ""
    hold_on_failure: bool = False


class Queue:
    """The queue in `folder` (default: the user's queue). Every method raises RunError if the disk fails."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or places.home() / "queue"
        self.settings = self.folder / "queue.json"
        self.worker_lock = self.folder / "worker.lock"
        self.worker_log = self.folder / "worker.log"
        self._entries = self.folder / "entries"

    # --- reading

    def entries(self) -> list[Entry]:
        """Return the readable entries in order; `read` also reports the unreadable ones."""
        return list(self.read().entries)

    def read(self) -> QueueSnapshot:
        """Return a snapshot of the queue; needs no lock, because every file is replaced atomically."""
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
        return QueueSnapshot(tuple(found), tuple(faults), settings.held, settings.reason, settings.hold_on_failure)

    def get(self, name: str) -> Entry:
        """Return the entry with this id; raises RunError if there is none or its file cannot be used."""
        entry = self._read_entry(self._file(name)) if _NAME.fullmatch(name) else None
        if entry is None:
            raise RunError("queue.none", f'There is no entry "{name}" in the queue.', "`queue list` shows the entries.")
        if isinstance(entry, QueueFault):
            raise RunError("queue.entry", entry.sentence, "Update Impasto, or remove the entry from the queue.")
        return entry

    def log(self, name: str) -> Path:
        """Return the log file of an entry's engine."""
        return self._entries / f"{name}.log"

    def worker_alive(self) -> bool:
        """Return whether a worker is running the queue."""
        try:
            locks.require_file(self.worker_lock)  # anything else at this path would keep every worker from starting
        except OSError as error:
            raise _refused(self.folder, error) from error
        return self._is_held(self.worker_lock)

    def engine_alive(self, name: str) -> bool:
        """Return whether an engine is running this entry."""
        return self._is_held(self._engine_lock(name))

    # --- adding and removing

    def add(
        self, job: Path, *, after: float | None = None, hold: bool = False, before: str | None = None,
        text: str | None = None,
    ) -> Entry:  # fmt: skip
        """Add an entry with `text`, or a job file's current content, at the end or before another; return it.

        Raises JobError if the file cannot be read.
        """
        entry = self.put(new_entry(job, after=after, hold=hold, text=text))
        if before is not None:
            self.move(entry.id, before)
        return entry

    def add_run(self, run: Path, steps: int | None = None) -> Entry:
        """Return an entry that continues a run: the run's entry in the queue, or a new one at the end if there is none.

        An existing entry keeps its place. It waits again if it was neither waiting nor running.
        """
        run = run.absolute()
        with self.editing():
            former = next((one for one in self.entries() if one.run == run and one.state != "done"), None)
            if former is None:
                return self._append(new_entry(None, run, steps=steps))
            if former.state in ("waiting", "running"):
                return former
            return self._write(requeued(former, steps))

    def put(self, entry: Entry) -> Entry:
        """Add an entry created with `new_entry` at the end of the queue, and return it."""
        with self.editing():
            return self._append(entry)

    def remove(self, name: str) -> None:
        """Remove an entry, even a damaged one; its run stays on disk. A running entry cannot be removed."""
        with self.editing():
            if self.engine_alive(name):
                raise RunError("queue.running", "Could not remove the entry: it is running.", "Stop it first.")
            # Delete the entry's file last: if Windows refuses because another file is open, it can be removed later.
            for path in (self.log(name), self._engine_lock(name), self._file(name)):
                path.unlink(missing_ok=True)

    def clear(self, states: Collection[State] = ENDED, age: float = 0.0) -> None:
        """Remove the entries in one of `states` that were last changed at least `age` seconds ago."""
        for entry in self.entries():
            if entry.state in states and self._age(entry) >= age:
                self.remove(entry.id)

    # --- order and state

    def move(self, name: str, before: str | None) -> None:
        """Move an entry before another, or to the end."""
        if name == before:
            return
        with self.editing():
            self.get(name)
            order = [entry.id for entry in self.entries() if entry.id != name]
            place = order.index(before) if before in order else len(order)
            order.insert(place, name)
            self._change_settings(order=tuple(order))

    def pause(self, name: str) -> Entry:
        """Pause a running or waiting entry, which keeps its place."""
        return self._end(name, "pause", "paused", ("waiting",))

    def stop(self, name: str) -> Entry:
        """Stop an entry: if it is running, it saves its LoRA first; otherwise, it is only marked as stopped."""
        return self._end(name, "stop", "stopped", ("waiting", "paused", "interrupted"))

    def withdraw(self, name: str) -> Entry:
        """Withdraw a pause or stop request; raises RunError "queue.late" if it is already being carried out."""
        request = self.get(name).wish
        entry = self.change(name, lambda now: dataclasses.replace(now, wish=None))  # the worker then does not send it
        if request is None or entry.run is None:
            return entry
        run = RunDirectory(entry.run)
        try:
            withdrawn, ending = commands.withdraw(run.commands, request), commands.ending(run.commands)
        except OSError as error:
            raise _refused(run.commands, error) from error
        if not withdrawn and ending is not None and ending.accepted:
            sentence = f"Could not withdraw {request}: {entry.name} is already carrying it out."
            raise RunError("queue.late", sentence, "Resume the run when it has ended.")
        return entry

    def resume(self, name: str) -> Entry:
        """Put an entry back in line: its run continues, or a job without a run starts from the beginning.

        If a job failed before it had a run, its file is read again, because the user may have corrected it.
        """
        return self.change(name, requeued)

    def start_after(self, name: str, after: float | None) -> Entry:
        """Set the Unix time in seconds before which an entry does not start; None removes the limit.

        Raises RunError "queue.state" for a running entry.
        """

        def wait(entry: Entry) -> Entry:
            if entry.state == "running":
                sentence = "Could not set a start time: the entry is already running."
                raise RunError("queue.state", sentence, "Pause it first.")
            return dataclasses.replace(entry, after=after)

        return self.change(name, wait)

    def hold(self, reason: str = "") -> None:
        """Put the queue on hold: no new entry starts until `release`; running ones continue."""
        with self.editing():
            self._change_settings(held=True, reason=reason)

    def release(self) -> None:
        """Take the queue off hold and put interrupted entries back in line."""
        with self.editing():
            self._change_settings(held=False, reason="")
            for entry in self.entries():
                if entry.state == "interrupted":
                    self._write(requeued(entry))

    def set_hold_on_failure(self, hold: bool) -> None:
        """Set whether every failure puts the queue on hold; otherwise the next entry starts."""
        with self.editing():
            self._change_settings(hold_on_failure=hold)

    # --- for worker and engine

    @contextlib.contextmanager
    def editing(self) -> Iterator[None]:
        """Hold the queue's lock during the block, which must not call another editing method."""
        try:
            self._entries.mkdir(parents=True, exist_ok=True)
            with locks.hold_lock(self.folder / "lock", _PATIENCE):
                yield
        except locks.LockBusyError as error:
            raise RunError(
                "queue.busy",
                "Could not change the queue: another program has been changing it for too long.",
                "Try again; if that does not help, close other Impasto windows.",
            ) from error
        except OSError as error:
            raise _refused(self.folder, error) from error

    def change(self, name: str, change: Callable[[Entry], Entry]) -> Entry:
        """Replace an entry with the one that `change` returns for it, and return the new entry."""
        with self.editing():
            return self._write(change(self.get(name)))

    def record_outcome(self, name: str, state: State, problem: str = "") -> Entry:
        """Record how an entry ended; if it failed or was interrupted, put the queue on hold if the settings say so."""
        with self.editing():
            return self._conclude(self.get(name), state, problem)

    def record_dead_engines(
        self, outcome: Callable[[Entry], tuple[State, str]], alive: Collection[str] = ()
    ) -> list[Entry]:
        """Find entries that are marked as running but whose engine is gone, record how they ended, and return them.

        `outcome` returns an entry's state and a sentence that says what went wrong. Entries in `alive` have just
        started and may not hold their lock yet, so they are skipped.
        """
        with self.editing():
            gone = [one for one in self.entries() if one.state == "running" and one.id not in alive]
            return [self._conclude(one, *outcome(one)) for one in gone if not self.engine_alive(one.id)]

    @contextlib.contextmanager
    def engine(self, name: str) -> Iterator[None]:
        """Hold an entry's lock while its engine runs; raises RunError "queue.taken" if another engine holds it."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locks.hold_lock(self._engine_lock(name), locks.CHECK_PATIENCE))
            except locks.LockBusyError as error:
                raise RunError(
                    "queue.taken", "Another process is already running this entry.", "Follow it with `watch`."
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

    def _end(self, name: str, request: EndRequest, state: State, at_once: tuple[State, ...]) -> Entry:
        """Store a pause or stop request in a running entry; the worker passes it on to the engine.

        An entry in one of the `at_once` states gets `state` right away. Raises RunError for all others.
        """

        def end(entry: Entry) -> Entry:
            if entry.state == "running":
                return dataclasses.replace(entry, wish=request)
            if entry.state in at_once:
                return dataclasses.replace(entry, state=state, problem="")
            sentence = f"Could not {request} the entry: it is {entry.state}."
            raise RunError("queue.state", sentence, "There is nothing to do.")

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
        """Return the seconds since an entry was last changed; 0 if another program has just removed it."""
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
        """Write a new entry, dated later than all others even if the clock is coarse (15 ms) or was set back."""
        latest = max((one.added for one in self.entries()), default=0.0)
        return self._write(dataclasses.replace(entry, added=max(entry.added, math.nextafter(latest, math.inf))))

    def _write(self, entry: Entry) -> Entry:
        fields = {key: str(value) if isinstance(value, Path) else value for key, value in to_record(entry).items()}
        del fields["id"]
        files.write_json(self._file(entry.id), {"version": VERSION, **fields})
        return entry

    def _read_entry(self, path: Path) -> Entry | QueueFault | None:
        """Return the entry in a file, or a fault if the file is unusable; None if it has just been removed."""
        try:
            return read_record(path, "record", lambda found: entry_of(path.stem, versioned(found)))
        except FileNotFoundError:
            return None
        except NewerVersionError:
            return QueueFault(path.stem, f"The queue entry {path} was written by a newer version of Impasto.")
        except (OSError, UnusableFileError) as error:
            return QueueFault(path.stem, f"Could not read the queue entry {path}: {reason_of(error)}.")

    def _read_settings(self) -> tuple[_Settings, str]:
        """Return the queue's settings and a sentence that says what is wrong with queue.json, "" if nothing is."""
        try:
            return read_record(self.settings, "record", _settings), ""
        except FileNotFoundError:
            return _Settings(), ""
        except NewerVersionError:
            problem = "was written by a newer version of Impasto, so this version starts no jobs"
            return _Settings(held=True, reason="Update Impasto to use the queue."), f"{self.settings} {problem}."
        except (OSError, UnusableFileError) as error:
            problem = f"is damaged ({reason_of(error)}), so the entries are shown in the order in which they were added"
            return _Settings(), f"{self.settings} {problem}."

    def _change_settings(self, **changes: object) -> None:
        """Change settings in queue.json; raises RunError if a newer version wrote the file."""
        settings, problem = self._read_settings()
        if problem and settings.held:
            raise RunError("queue.newer", problem, "Update Impasto.")
        changed = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
        files.write_json(self.settings, {"version": VERSION, **to_record(changed)})


def _settings(found: Any) -> _Settings:
    fields = versioned(found)
    order = typed(fields, "order", list)
    if not all(isinstance(name, str) for name in order):
        raise TypeError("its order is not a list of entries")
    held, always = typed(fields, "held", bool), typed(fields, "hold_on_failure", bool)
    return _Settings(tuple(order), held, typed(fields, "reason", str), always)


def _refused(folder: Path, error: OSError) -> RunError:
    full = places.is_disk_full(error)
    reason = "the disk is full" if full else error.strerror or str(error)
    return RunError(
        "queue.unwritable",
        f"Could not use the queue in {folder}: {reason}.",
        f"{places.write_remedy(error)} The environment variable IMPASTO_HOME sets its folder.",
    )


def outcome(queue: Queue, entry: Entry, code: int | None = None) -> tuple[State, str]:
    """Return an entry's final state and what went wrong; `code` is the engine's exit code, if known."""
    if entry.run is not None:
        recorded = _recorded_outcome(RunDirectory(entry.run), entry.attempts)
        if recorded is not None:
            return recorded
    if entry.wish is not None and code != 1:  # the engine was ended on request before it had a run
        return ("paused" if entry.wish == "pause" else "stopped"), ""
    if code is not None and code > 0 and entry.run is None:
        words = last_words(queue.log(entry.id))
        return "failed", words or f"The process ended with exit code {code} and printed nothing."
    return "interrupted", _INTERRUPTED


def _recorded_outcome(run: RunDirectory, before: int) -> tuple[State, str] | None:
    """Return the state and problem that the run recorded; None if it recorded none after attempt number `before`."""
    try:
        state, status = run.state(), run.read_status()
    except RunError as error:
        return "failed", sentence_and_remedy(error.sentence, error.remedy)
    if state == "running":
        return "interrupted", "Another process is continuing this run."
    if status is None or status.attempt <= before or state == "new" or state == "interrupted":
        return None
    return state, "" if state != "failed" else "The run failed; see its log."
