"""Works the queue off: starts an engine for each entry, one at a time on each lane, and ends when nothing is left."""

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
from trainer.errors import EXIT_DONE, ImpastoError, RunError, closed, joined, plain_reason
from trainer.protocol import commands, locks
from trainer.protocol.files import long_path
from trainer.protocol.locks import gpu_held, occupied
from trainer.protocol.processes import launch, let_go, speak_into
from trainer.protocol.queue import Entry, Queue, Reading, State, Wish, outcome
from trainer.protocol.reading import parse_toml, read_text
from trainer.protocol.run_directory import RunDirectory

_POLL = 0.5  # seconds: entries are files, whose changes wake nobody
# What ended well longer ago interests nobody in the queue any more; its run stays in the list of runs.
_DAY = 86_400.0


def machine_lanes() -> list[str]:
    """Return "cuda:0", "cuda:1" ... for the NVIDIA cards, as PyTorch numbers them; "cpu" where there is none."""
    try:
        count = len(gpu.cards())
    except ImpastoError:  # training says it in words, and goes on with the CPU
        count = 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        count = min(count, len([one for one in chosen.split(",") if one.strip() and not one.strip().startswith("-")]))
    return [f"cuda:{index}" for index in range(count)] or ["cpu"]


def lanes_for(entry: Entry, lanes: Sequence[str]) -> list[str]:
    """Return the lanes that an entry can go on: the one that its job names, else any."""
    device = _device(entry)
    return [device] if device is not None and device in ("cpu", *lanes) else list(lanes)


def settings_for(entry: Entry, lane: str, lanes: Sequence[str]) -> list[str]:
    """Return the words for `train` that lead a job to its lane, where the machine has several and it names none."""
    return ["--set", f"fit.device={lane}"] if len(lanes) > 1 and _device(entry) is None else []


def _device(entry: Entry) -> str | None:
    """Return the device that a job or run names: "cpu", "cuda:1"; None where it leaves the choice open."""
    try:
        device = parse_toml(_job_text(entry))["fit"]["device"]
    except (OSError, ValueError, KeyError, TypeError):  # training says what is wrong with the file
        return None
    return None if device == "cuda" else str(device)


def _job_text(entry: Entry) -> str:
    """Return the job of a run, or the frozen one that is to become a run; raises OSError and UnusableFileError."""
    if entry.run is None and entry.text is not None:
        return entry.text
    path = RunDirectory(entry.run).job if entry.run else entry.job
    assert path is not None
    return read_text(path, "text")


class Worker:
    """The one that works off a queue. What it starts goes on without it, and the next worker takes it over.

    `say` gets a line for each thing that happens.
    """

    def __init__(self, queue: Queue, say: Callable[[str], None], lanes: Sequence[str] | None = None) -> None:
        self._queue = queue
        self._say = say
        self._lanes = lanes or machine_lanes()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._asked: dict[str, tuple[Wish, Path | None]] = {}
        self._followed: set[str] = set()

    def run(self) -> bool:
        """Work until nothing is left; returns False when another worker is at it. Raises RunError."""
        self._queue.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locks.held(self._queue.worker_lock, locks.ASKED))
            except locks.LockBusyError:
                return False
            with contextlib.suppress(RunError):  # what another program has open goes another time
                self._queue.clear(("done", "stopped"), _DAY)
            try:
                while not self._over(self.look(), stack):
                    self._wait()
            finally:
                for child in self._children.values():
                    let_go(child)
        return True

    def look(self) -> Reading:
        """Do all that can be done now, and return the queue as it is then."""
        codes = self._ended_children()
        for entry in self._queue.settle(lambda one: outcome(self._queue, one, codes.get(one.id)), self._children):
            self._followed.discard(entry.id)
            self._tell(entry)
        reading = self._queue.read()
        for entry in reading.entries:
            if entry.state == "running":
                self._followed.add(entry.id)
                self._order(entry)
            elif entry.id in self._followed:
                self._followed.discard(entry.id)
                self._tell(entry)
        if reading.held:
            return reading
        return self._queue.read() if self._begin(reading) else reading

    def _ended_children(self) -> dict[str, int]:
        codes = {name: code for name, child in self._children.items() if (code := child.poll()) is not None}
        for name in codes:
            del self._children[name]
        return codes

    def _over(self, reading: Reading, stack: contextlib.ExitStack) -> bool:
        """Tell whether nothing is left, and then let go of the worker's lock in the same moment.

        Whoever adds an entry after that sees that no worker is there.
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

    def _begin(self, reading: Reading) -> bool:
        """Start what can be started on free lanes; returns whether anything was."""
        busy = {entry.lane for entry in reading.entries if entry.state == "running"}
        before = len(busy)
        for entry in reading.entries:
            if entry.state != "waiting" or (entry.after or 0.0) > time.time():
                continue
            free = [lane for lane in lanes_for(entry, self._lanes) if lane not in busy and not gpu_held(lane)]
            if free and self._start(entry, free[0]):
                busy.add(free[0])
        return len(busy) > before

    def _start(self, entry: Entry, lane: str) -> bool:
        """Start an engine for an entry, unless somebody has taken it back meanwhile."""

        run = _gone_on_with(entry)

        def begun(now: Entry) -> Entry:
            if now.state != "waiting":
                raise RunError("queue.state", "It does not wait any more.", "Nothing to do.")
            return dataclasses.replace(now, run=run, state="running", lane=lane, problem="", wish=None, pid=None)

        try:
            entry = self._queue.change(entry.id, begun)
        except RunError as error:
            if error.code in ("queue.state", "queue.none"):
                return False
            raise
        words = _words(entry) if entry.run else [*_words(entry), *settings_for(entry, lane, self._lanes)]
        try:
            self._children[entry.id] = launch([*words, "--queued", entry.id], self._queue.log(entry.id))
        except OSError as error:
            self._tell(self._queue.conclude(entry.id, "failed", f"It could not be started: {error.strerror or error}."))
            return False
        self._followed.add(entry.id)
        self._say(f"{entry.name} ({entry.id}): started on {lane}")
        return True

    def _order(self, entry: Entry) -> None:
        """Pass the pause or stop of a running entry on to its engine, once that can be done."""
        if entry.wish is None:
            self._take_back(entry)
            return
        asked, sent = self._asked.get(entry.id, (None, None))
        if entry.run is None:
            # Before there is a run nothing is written that could be lost.
            if asked is None:
                self._end_early(entry)
            return
        run = RunDirectory(entry.run)
        if not run.is_alive():
            if asked is None and _is_before_its_attempt(run, entry):
                self._end_early(entry)  # it hashes the base and the like, and has nothing that could be lost
        elif asked != entry.wish or sent is None or (_is_unread(sent) and self._still_wants(entry)):
            with contextlib.suppress(OSError):
                self._asked[entry.id] = entry.wish, commands.send(run.commands, entry.wish)

    def _still_wants(self, entry: Entry) -> bool:
        """Return whether the pause or stop of an entry was given again, after the first was withdrawn.

        Whoever withdraws clears the entry first, so an entry that is read now shows it.
        """
        with contextlib.suppress(RunError):
            return self._queue.get(entry.id).wish == entry.wish
        return False

    def _end_early(self, entry: Entry) -> None:
        """End an engine that has not begun to train, so that it reads no commands."""
        assert entry.wish is not None
        if entry.pid is not None and self._queue.engine_alive(entry.id):
            with contextlib.suppress(OSError):
                os.kill(entry.pid, signal.SIGTERM)
            self._asked[entry.id] = entry.wish, None

    def _take_back(self, entry: Entry) -> None:
        """Withdraw a command that was passed on before the user took it back."""
        asked, sent = self._asked.pop(entry.id, (None, None))
        if asked is not None and sent is not None and entry.run is not None:
            with contextlib.suppress(OSError):
                commands.withdraw(RunDirectory(entry.run).commands, asked)

    def _tell(self, entry: Entry) -> None:
        self._asked.pop(entry.id, None)
        self._say(f"{entry.name} ({entry.id}): {entry.state}{'. ' if entry.problem else ''}{entry.problem}")


def _left(reading: Reading) -> bool:
    return any(entry.state == "running" or (entry.state == "waiting" and not reading.held) for entry in reading.entries)


def _is_unread(sent: Path) -> bool:
    """Return whether a command was meant for a former start of the engine, or withdrawn before the run read it."""
    answer = commands.answer(sent)
    return answer is not None and answer.outcome in ("void", "withdrawn")


def _is_before_its_attempt(run: RunDirectory, entry: Entry) -> bool:
    """Tell whether the engine of an entry has not begun its attempt at the run yet; no for a run that is damaged."""
    with contextlib.suppress(RunError):
        return len(run.attempts()) <= entry.attempts
    return False


def _gone_on_with(entry: Entry) -> Path | None:
    """Return the run that an entry goes on with; None for a job without one, or with one that never began."""
    if entry.run is not None and entry.job is not None:
        with contextlib.suppress(RunError):
            return entry.run if RunDirectory(entry.run).attempts() else None
    return entry.run


def _words(entry: Entry) -> list[str]:
    if entry.run is None:
        return ["train", str(entry.job)]
    return ["resume", str(entry.run), *(["--steps", str(entry.steps)] if entry.steps is not None else [])]


Made = Callable[[Path], None]
"""Called with the run's folder as soon as there is one and it is this engine's, not that of another one."""


def carried_out(name: str, work: Callable[[Made], int]) -> int:
    """Do an entry of the user's queue by calling `work`, and enter how it goes and ends; returns the exit code.

    The entry and its lane are held meanwhile, so that whoever looks sees that it lives, also when the worker that
    began it is gone. Raises RunError when another engine does it already, and what `work` raises.
    """
    queue = Queue()
    with queue.engine(name):
        begun = time.time()
        entry = queue.change(name, _begun)
        try:
            with occupied(entry.lane or "cpu"):
                code = work(lambda run: _note_run(queue, name, run))
        except ImpastoError as error:
            _conclude(queue, name, "failed", _in_words(error))
            raise
        except Exception as error:
            _conclude(queue, name, "failed", f"Something in Impasto went wrong: {plain_reason(error)}")
            raise
        with contextlib.suppress(ImpastoError):  # an entry that was damaged meanwhile
            _conclude(queue, name, *(("done", "") if code == EXIT_DONE else _early(queue.get(name), begun)))
        return code


def _begun(entry: Entry) -> Entry:
    before = len(RunDirectory(entry.run).attempts()) if entry.run else 0
    return dataclasses.replace(entry, state="running", problem="", pid=os.getpid(), attempts=before)


def _note_run(queue: Queue, name: str, run: Path) -> None:
    """Enter the run; training does not end because that fails."""
    with contextlib.suppress(ImpastoError):
        queue.change(name, lambda entry: dataclasses.replace(entry, run=run))
    _speak_in(queue, name, run)


def _speak_in(queue: Queue, name: str, run: Path) -> None:
    """Let what is printed lie with the run, which outlives its entry; where the disk refuses, the entry has it."""
    with contextlib.suppress(OSError):
        speak_into(RunDirectory(run).console, queue.log(name))


def _early(entry: Entry, begun: float) -> tuple[State, str]:
    """Tell what the engine ended for before the end: what somebody asked for, else the system's request to end."""
    run = RunDirectory(entry.run) if entry.run else None
    status = run.read_status() if run else None
    if entry.wish == "stop" or (status and status.state == "stopped"):
        return "stopped", ""
    if entry.wish == "pause" or (run and _pause_was_asked(run, begun)):
        return "paused", ""
    return "interrupted", "The system ended it, with all its work saved: the computer was shut down."


def _pause_was_asked(run: RunDirectory, begun: float) -> bool:
    answered = long_path(run.commands / "done").glob("*-pause-*.json")
    # A file system may keep whole seconds only.
    return any(path.stat().st_mtime >= begun - 1.0 for path in answered)


def _conclude(queue: Queue, name: str, state: State, problem: str = "") -> None:
    """Enter the end; where the disk refuses, the worker finds it in the run's status."""
    with contextlib.suppress(ImpastoError):
        queue.conclude(name, state, problem)


def _in_words(error: ImpastoError) -> str:
    return joined(" ".join(map(closed, (error.sentence, *error.untold))), error.remedy)
