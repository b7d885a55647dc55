"""Starts engine processes that go on when whoever started them ends.

Answers requests over two streams, JSON lines in, JSON lines out: what every `--serve` has in common.

A request is one line, an object with an ``id`` (a text or number of the asker's). Every answer carries the id of what
it answers, and a ``state``: "done"; "cancelled", when another request came before it was done, since only the last
counts; "error" with code, sentence and remedy; or a word of the service's own while it is under way. A line that is no
request is answered by an error with the id it has, or null. The end of the input ends the process; a request under way
is finished first.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from trainer.errors import ImpastoError
from trainer.protocol.files import long_path
from trainer.protocol.places import refusal
from trainer.protocol.reading import UnusableFileError, open_file, parse_json

LONGEST_LINE = 1 << 20


def command(words: Sequence[str]) -> list[str]:
    """Return the command line of `python -m trainer WORDS` with the Python that runs this."""
    return [sys.executable, "-X", "utf8", "-m", "trainer", *words]


def launch(words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `python -m trainer WORDS` on its own; what it prints goes on at the end of `log`.

    It has no console and no parent that could take it along: closing a window or a terminal, or ending the parent,
    leaves it running. Who does not wait for it calls `let_go`. Raises OSError when it cannot be started or the log
    cannot be written.
    """
    long_path(log.parent).mkdir(parents=True, exist_ok=True)
    with long_path(log).open("ab") as out:
        return subprocess.Popen(
            command(words),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=_within_reach(log.parent),
            env={**os.environ, **(environment or {})},
            creationflags=_own_group(),
            start_new_session=sys.platform != "win32",
        )


def let_go(process: subprocess.Popen[bytes]) -> None:
    """Wait no more for a process: without this Python warns when the object goes while the process lives."""
    if process.poll() is None:
        process.returncode = 0


def speak_into(log: Path, before: Path) -> None:
    """Lead what this process prints from now on to the end of `log`, and move there what it has printed so far.

    `before` is the file that its output went into; where that is another, nothing happens. What libraries and the
    system print by themselves comes along: the last words of a process that dies are in the log. Raises OSError where
    the disk does not take all that was printed, which then stays where it was.
    """
    with long_path(before).open("r+b") as former, long_path(log).open("ab", buffering=0) as out:
        if not os.path.samestat(os.fstat(1), os.fstat(former.fileno())):
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        end = out.seek(0, os.SEEK_END)
        printed = former.read()
        if out.write(printed) < len(printed):  # a disk that fills up takes a part, and says so only at the next write
            out.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        former.truncate(0)
        for number in (1, 2):
            os.dup2(out.fileno(), number)


def last_words(log: Path, since: int = 0, lines: int = 12) -> str:
    """Return the end of what a process printed into `log`, from byte `since` on; empty where that cannot be read."""
    try:
        with open_file(log, "stream") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - 16_384))
            text = file.read().decode("utf-8", errors="replace")
    except (OSError, UnusableFileError):
        return ""
    return "\n".join(text.strip().splitlines()[-lines:])


def _within_reach(folder: Path) -> Path:
    """Return the folder, or the next above it that Windows starts a process in: there is no long form for those."""
    return next(each for each in (folder, *folder.parents) if long_path(each) == each)


def _own_group() -> int:
    if sys.platform == "win32":
        return subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP
    return 0


Answer = dict[str, Any]
Request = Mapping[str, Any]


class OvertakenError(Exception):
    """Another request came."""


class Turn:
    """One request while it is worked on."""

    def __init__(self, request: Request, say: Callable[[Answer], None], overtaken: Callable[[], bool]) -> None:
        self.request = request
        self._say = say
        self._overtaken = overtaken

    def tell(self, state: str, **facts: Any) -> None:
        """Say how far it is."""
        self._say({"id": self.request["id"], "state": state, **facts})

    def go_on(self) -> None:
        """Raises OvertakenError when another request waits; to be asked before anything that takes long."""
        if self._overtaken():
            raise OvertakenError


Work = Callable[[Turn], Answer]
"""Works out a request and returns what belongs to its "done". Raises ImpastoError, or OSError as a disk refuses."""
Fault = Callable[[Request], str | None]
"""Says what is wrong with a request, as the end of "cannot be answered: "; None when nothing is."""


class Server:
    """One asker's requests, in order; the newest wins.

    `code` is that of a line that is no request, `guide` the file that says what one is. After `idle` seconds without a
    line `on_idle` is called, once.
    """

    def __init__(
        self,
        work: Work,
        fault: Fault,
        output: TextIO,
        *,
        code: str,
        guide: str,
        idle: float | None = None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._work = work
        self._fault = fault
        self._output = output
        self._code = code
        self._guide = guide
        self._idle = idle
        self._on_idle = on_idle
        self._waiting: queue.Queue[str | None] = queue.Queue()

    def run(self, lines: Iterable[str]) -> None:
        """Answer until `lines` end; they are read in a thread of their own, so that a new one is noticed at once."""
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        while (line := self._next()) is not None:
            self._answer(line)

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line.strip():
                self._waiting.put(line)
        self._waiting.put(None)

    def _next(self) -> str | None:
        try:
            return self._waiting.get(timeout=self._idle)
        except queue.Empty:
            self._on_idle()
            return self._waiting.get()

    def _answer(self, line: str) -> None:
        identity = _identity(line)
        try:
            turn = Turn(self._request(line), self._say, self._overtaken)
            try:
                turn.go_on()
                self._say({"id": identity, "state": "done", **self._work(turn)})
            except OvertakenError:
                self._say({"id": identity, "state": "cancelled"})
        except ImpastoError as error:
            self._refuse(identity, error)
        except OSError as error:
            refused = refusal(error)
            if refused is None:
                raise
            self._refuse(identity, refused)

    def _refuse(self, identity: Any, error: ImpastoError) -> None:
        told = {"code": error.code, "sentence": error.sentence, "remedy": error.remedy}
        self._say({"id": identity, "state": "error", **told})

    def _overtaken(self) -> bool:
        """Whether another line waits; the end of the input is none."""
        return any(line is not None for line in tuple(self._waiting.queue))

    def _request(self, line: str) -> Request:
        """A line as a request; raises ImpastoError that says what is wrong with it."""
        if len(line) > LONGEST_LINE:
            raise self._unusable("it is longer than a million characters")
        try:
            request = parse_json(line)
        except UnusableFileError as error:
            raise self._unusable(error.reason) from error
        if not isinstance(request, dict):
            raise self._unusable("it is no object")
        if not isinstance(request.get("id"), str | int):
            raise self._unusable('it has no "id"')
        if wrong := self._fault(request):
            raise self._unusable(wrong)
        return request

    def _unusable(self, reason: str) -> ImpastoError:
        sentence = f"This request cannot be answered: {reason}."
        return ImpastoError(self._code, sentence, f"See {self._guide}.")

    def _say(self, answer: Answer) -> None:
        self._output.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._output.flush()


def _identity(line: str) -> Any:
    """The id of a line, be it a request otherwise or not; None where it has none."""
    try:
        found = parse_json(line[:LONGEST_LINE])
    except UnusableFileError:
        return None
    identity = found.get("id") if isinstance(found, dict) else None
    return identity if isinstance(identity, str | int) else None
