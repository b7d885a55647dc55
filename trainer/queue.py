"""Queue worker: starts an engine for each entry, one at a time per device, and exits when nothing is left to run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer import gpu
from trainer.errors import EXIT_DONE, ImpastoError, RunError, plain_reason, sentence_and_remedy, with_period
from trainer.protocol import commands, locks
from trainer.protocol.files import long_path
from trainer.protocol.locks import hold_lane, is_lane_held
from trainer.protocol.processes import launch, redirect_output, stop_tracking
from trainer.protocol.queue import EndRequest, Entry, Queue, QueueSnapshot, State, outcome
from trainer.protocol.reading import parse_toml, read_text
from trainer.protocol.run_directory import RunDirectory

_POLL = 0.5  # seconds; entries are files, which send no change notifications
# Done and stopped entries older than this are removed from the queue; their runs stay in the list of runs.
_DAY = 86_400.0


def machine_lanes() -> list[str]:
    """Return "cuda:0", "cuda:1", … for the NVIDIA GPUs in PyTorch's order; "cpu" if there is none."""
    try:
        count = len(gpu.list_gpus())
    except ImpastoError:  # training reports it and continues on the CPU
        count = 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        count = min(count, len([one for one in chosen.split(",") if one.strip() and not one.strip().startswith("-")]))
    return [f"cuda:{index}" for index in range(count)] or ["cpu"]


def lanes_for(entry: Entry, lanes: Sequence[str]) -> list[str]:
    """Return the devices that an entry can use: the one set in its job, or any if its job sets none."""
    device = _device(entry)
    return [device] if device is not None and device in ("cpu", *lanes) else list(lanes)


def settings_for(entry: Entry, lane: str, lanes: Sequence[str]) -> list[str]:
    """Return arguments for `train` that select the device; empty if the PC has only one device or the job sets it."""
    return ["--set", f"fit.device={lane}"] if len(lanes) > 1 and _device(entry) is None else []


def _device(entry: Entry) -> str | None:
    """Return the device set in an entry's job or run, such as "cpu" or "cuda:1"; None if none is set."""
    try:
        device = parse_toml(_job_text(entry))["fit"]["device"]
    except (OSError, ValueError, KeyError, TypeError):  # training reports what is wrong with the file
        return None
    return None if device == "cuda" else str(device)


def _job_text(entry: Entry) -> str:
    """Return the job text of an entry or of the run it continues; raises OSError and UnusableFileError."""
    if entry.run is None and entry.text is not None:
        return entry.text
    path = RunDirectory(entry.run).job if entry.run else entry.job
    assert path is not None
    return read_text(path, "text")


class Worker:
    """Worker that runs the entries of a queue; engines outlive it, and the next worker takes them over.

    `say` is called with one line of text for each event, such as the start or end of an entry.
    """

    def __init__(self, queue: Queue, say: Callable[[str], None], lanes: Sequence[str] | None = None) -> None:
        self._queue = queue
        self._say = say
        self._lanes = lanes or machine_lanes()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._requested: dict[str, tuple[EndRequest, Path | None]] = {}
        self._followed: set[str] = set()

    def run(self) -> bool:
        """Run entries until none is left to run; return False if another worker is running. Raises RunError."""
        self._queue.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locks.hold_lock(self._queue.worker_lock, locks.CHECK_PATIENCE))
            except locks.LockBusyError:
                return False
            with contextlib.suppress(RunError):  # files that another program has open are removed next time
                self._queue.clear(("done", "stopped"), _DAY)
            try:
                while not self._over(self.look(), stack):
                    self._wait()
            finally:
                for child in self._children.values():
                    stop_tracking(child)
        return True

    def look(self) -> QueueSnapshot:
        """Record which entries ended, pass on requests and start waiting entries; return the resulting queue."""
        codes = self._ended_children()
        for entry in self._queue.record_dead_engines(
            lambda one: outcome(self._queue, one, codes.get(one.id)), self._children
        ):
            self._followed.discard(entry.id)
            self._report(entry)
        reading = self._queue.read()
        for entry in reading.entries:
            if entry.state == "running":
                self._followed.add(entry.id)
                self._send_request(entry)
            elif entry.id in self._followed:
                self._followed.discard(entry.id)
                self._report(entry)
        if reading.held:
            return reading
        return self._queue.read() if self._begin(reading) else reading

    def _ended_children(self) -> dict[str, int]:
        codes = {name: code for name, child in self._children.items() if (code := child.poll()) is not None}
        for name in codes:
            del self._children[name]
        return codes

    def _over(self, reading: QueueSnapshot, stack: contextlib.ExitStack) -> bool:
        """Return whether no entry is left to run; if so, release the worker's lock.

        Checks and releases under the queue's lock, so that a process that adds an entry sees that no worker is running.
        """
        if _left(reading):
            return False
        with self._queue.editing():
            if _left(self._queue.read()):
                return False
            stack.close()
        return True

    def _wait(self) -> None:
        child = next(iter(self._children.values()), None)
        if child is None:
            time.sleep(_POLL)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL)

    def _begin(self, reading: QueueSnapshot) -> bool:
        """Start waiting entries on free devices; return whether any was started."""
        # A lane that looks free may be held by a run started outside the queue, so its lock is checked as well.
        busy = {entry.lane for entry in reading.entries if entry.state == "running"}
        before = len(busy)
        for entry in reading.entries:
            if entry.state != "waiting" or (entry.after or 0.0) > time.time():
                continue
            free = [lane for lane in lanes_for(entry, self._lanes) if lane not in busy and not is_lane_held(lane)]
            if free and self._start(entry, free[0]):
                busy.add(free[0])
        return len(busy) > before

    def _start(self, entry: Entry, lane: str) -> bool:
        """Start an engine for an entry if it is still waiting; return whether it was started."""
        run = _run_to_resume(entry)

        def started(now: Entry) -> Entry:
            if now.state != "waiting":
                raise RunError("queue.state", "The entry is no longer waiting.", "There is nothing to do.")
            return dataclasses.replace(now, run=run, state="running", lane=lane, problem="", wish=None, pid=None)

        try:
            entry = self._queue.change(entry.id, started)
        except RunError as error:
            if error.code in ("queue.state", "queue.none"):
                return False
            raise
        words = _words(entry) if entry.run else [*_words(entry), *settings_for(entry, lane, self._lanes)]
        try:
            self._children[entry.id] = launch([*words, "--queued", entry.id], self._queue.log(entry.id))
        except OSError as error:
            problem = f"Could not start the job: {error.strerror or error}."
            self._report(self._queue.record_outcome(entry.id, "failed", problem))
            return False
        self._followed.add(entry.id)
        self._say(f"{entry.name} ({entry.id}): started on {lane}")
        return True

    def _send_request(self, entry: Entry) -> None:
        """Pass a running entry's pause or stop request on to its engine as soon as possible."""
        if entry.wish is None:
            self._withdraw_request(entry)
            return
        asked, sent = self._requested.get(entry.id, (None, None))
        if entry.run is None:
            # Before there is a run, the engine has written nothing that could be lost.
            if asked is None:
                self._end_early(entry)
            return
        run = RunDirectory(entry.run)
        if not run.is_alive():
            if asked is None and _is_before_its_attempt(run, entry):
                self._end_early(entry)  # it is still preparing, such as hashing the base, so nothing can be lost
        elif asked != entry.wish or sent is None or (_is_unread(sent) and self._is_still_requested(entry)):
            with contextlib.suppress(OSError):
                self._requested[entry.id] = entry.wish, commands.send(run.commands, entry.wish)

    def _is_still_requested(self, entry: Entry) -> bool:
        """Read the entry from the queue again and return whether it still has the same pause or stop request.

        A withdrawal clears the request in the entry before it withdraws the command from the run.
        """
        with contextlib.suppress(RunError):
            return self._queue.get(entry.id).wish == entry.wish
        return False

    def _end_early(self, entry: Entry) -> None:
        """Terminate an engine that has not started training and therefore does not read commands yet."""
        assert entry.wish is not None
        if entry.pid is not None and self._queue.engine_alive(entry.id):
            with contextlib.suppress(OSError):
                os.kill(entry.pid, signal.SIGTERM)
            self._requested[entry.id] = entry.wish, None

    def _withdraw_request(self, entry: Entry) -> None:
        """Withdraw the command sent to the run, if any, after the user withdrew the request."""
        asked, sent = self._requested.pop(entry.id, (None, None))
        if asked is not None and sent is not None and entry.run is not None:
            with contextlib.suppress(OSError):
                commands.withdraw(RunDirectory(entry.run).commands, asked)

    def _report(self, entry: Entry) -> None:
        self._requested.pop(entry.id, None)
        self._say(f"{entry.name} ({entry.id}): {entry.state}{'. ' if entry.problem else ''}{entry.problem}")


def _left(reading: QueueSnapshot) -> bool:
    return any(entry.state == "running" or (entry.state == "waiting" and not reading.held) for entry in reading.entries)


def _is_unread(sent: Path) -> bool:
    """Return whether a command will never be carried out, because it was withdrawn or sent to an earlier attempt."""
    answer = commands.answer(sent)
    return answer is not None and answer.outcome in ("void", "withdrawn")


def _is_before_its_attempt(run: RunDirectory, entry: Entry) -> bool:
    """Return whether an entry's engine has not started its attempt yet; False for a damaged run."""
    with contextlib.suppress(RunError):
        return len(run.attempts()) <= entry.attempts
    return False


def _run_to_resume(entry: Entry) -> Path | None:
    """Return the run that an entry continues; None for a job that has no run or whose run never started."""
    if entry.run is not None and entry.job is not None:
        with contextlib.suppress(RunError):
            return entry.run if RunDirectory(entry.run).attempts() else None
    return entry.run


def _words(entry: Entry) -> list[str]:
    if entry.run is None:
        return ["train", str(entry.job)]
    return ["resume", str(entry.run), *(["--steps", str(entry.steps)] if entry.steps is not None else [])]


OnRunFolder = Callable[[Path], None]
"""Callback that receives the run's folder as soon as this engine has locked it."""


def run_entry(name: str, work: Callable[[OnRunFolder], int]) -> int:
    """Run an entry of the user's queue by calling `work`, record how it ends, and return the exit code.

    The locks of the entry and its device are held while `work` runs, so that other processes see that the engine is
    alive even if its worker is gone. Raises RunError if another engine runs the entry, and whatever `work` raises.
    """
    queue = Queue()
    with queue.engine(name):
        started = time.time()
        entry = queue.change(name, _started)
        try:
            with hold_lane(entry.lane or "cpu"):
                code = work(lambda run: _note_run(queue, name, run))
        except ImpastoError as error:
            _conclude(queue, name, "failed", _error_text(error))
            raise
        except Exception as error:
            _conclude(queue, name, "failed", f"Something in Impasto went wrong: {plain_reason(error)}")
            raise
        with contextlib.suppress(ImpastoError):  # the entry may have been damaged since
            _conclude(queue, name, *(("done", "") if code == EXIT_DONE else _early_end(queue.get(name), started)))
        return code


def _started(entry: Entry) -> Entry:
    before = len(RunDirectory(entry.run).attempts()) if entry.run else 0
    return dataclasses.replace(entry, state="running", problem="", pid=os.getpid(), attempts=before)


def _note_run(queue: Queue, name: str, run: Path) -> None:
    """Record the run in its entry, and redirect the output to the run's log, which outlives the entry.

    Training continues if either fails. If redirecting fails, the output stays in the entry's log.
    """
    with contextlib.suppress(ImpastoError):
        queue.change(name, lambda entry: dataclasses.replace(entry, run=run))
    with contextlib.suppress(OSError):
        redirect_output(RunDirectory(run).console, queue.log(name))


def _early_end(entry: Entry, started: float) -> tuple[State, str]:
    """Return the state and problem of an entry that a stop or pause request, or the operating system, ended early."""
    run = RunDirectory(entry.run) if entry.run else None
    status = run.read_status() if run else None
    if entry.wish == "stop" or (status and status.state == "stopped"):
        return "stopped", ""
    if entry.wish == "pause" or (run and _was_pause_requested(run, started)):
        return "paused", ""
    return "interrupted", "The system ended the run, for example during shutdown; all its work is saved."


def _was_pause_requested(run: RunDirectory, started: float) -> bool:
    answered = long_path(run.commands / "done").glob("*-pause-*.json")
    # The file system may store times in whole seconds.
    return any(path.stat().st_mtime >= started - 1.0 for path in answered)


def _conclude(queue: Queue, name: str, state: State, problem: str = "") -> None:
    """Record how an entry ended; if the disk fails, the worker reads the outcome from the run's status."""
    with contextlib.suppress(ImpastoError):
        queue.record_outcome(name, state, problem)


def _error_text(error: ImpastoError) -> str:
    return sentence_and_remedy(" ".join(map(with_period, (error.sentence, *error.unlisted_problems))), error.remedy)
