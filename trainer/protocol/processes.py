"""Start engine processes that outlive their parent, and run the request server behind every `--serve`.

The server reads and writes JSON lines. A request is an object with an ``id`` (a string or number chosen by the client).
Every answer has the id of its request and a ``state``: "done"; "cancelled" if a newer request arrived first, because
only the newest counts; "error" with code, sentence, remedy and problems; or a progress state of the service. An invalid
line gets an error with its id, or with null. The process exits at the end of the input, after finishing the current
request.
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
from trainer.protocol.places import user_error_of
from trainer.protocol.reading import UnusableFileError, open_file, parse_json

LONGEST_LINE = 1 << 20


def command(words: Sequence[str]) -> list[str]:
    """Return the command line of `python -m trainer WORDS` with the current Python."""
    return [sys.executable, "-X", "utf8", "-m", "trainer", *words]


def launch(words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `python -m trainer WORDS` as a detached process whose output is appended to `log`.

    It has no console and its own process group, so it keeps running when a window or terminal is closed or the parent
    exits. A caller that does not wait for it must call `stop_tracking`. Raises OSError if it cannot be started or the
    log cannot be written.
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


def stop_tracking(process: subprocess.Popen[bytes]) -> None:
    """Stop tracking a process; otherwise, Python warns if its object is garbage-collected before it exits."""
    if process.poll() is None:
        process.returncode = 0


def redirect_output(log: Path, before: Path) -> None:
    """Redirect the output of this process to the end of `log` and move its earlier output there.

    `before` is the file that has received the output so far; does nothing if the output goes elsewhere. The file
    descriptors are redirected, so the log also gets the output of native libraries and crashes. Raises OSError if the
    earlier output does not fit on the disk; it then stays in `before`.
    """
    with long_path(before).open("r+b") as former, long_path(log).open("ab", buffering=0) as out:
        if not os.path.samestat(os.fstat(1), os.fstat(former.fileno())):
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        end = out.seek(0, os.SEEK_END)
        printed = former.read()
        if out.write(printed) < len(printed):  # a full disk accepts a part and fails only at the next write
            out.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        former.truncate(0)
        for number in (1, 2):
            os.dup2(out.fileno(), number)


def last_words(log: Path, since: int = 0, lines: int = 12) -> str:
    """Return the last lines of `log` after byte `since`; empty if it cannot be read."""
    try:
        with open_file(log, "stream") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - 16_384))
            text = file.read().decode("utf-8", errors="replace")
    except (OSError, UnusableFileError):
        return ""
    return "\n".join(text.strip().splitlines()[-lines:])


def _within_reach(folder: Path) -> Path:
    """Return the folder, or its nearest parent if the path is too long for a working directory on Windows.

    Windows does not support extended-length paths as working directories.
    """
    return next(each for each in (folder, *folder.parents) if long_path(each) == each)


def _own_group() -> int:
    if sys.platform == "win32":
        return subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP
    return 0


Answer = dict[str, Any]
Request = Mapping[str, Any]


class SupersededError(Exception):
    """Error that ends the current request because a newer one has arrived."""


class ActiveRequest:
    """The request that is being processed."""

    def __init__(self, request: Request, say: Callable[[Answer], None], overtaken: Callable[[], bool]) -> None:
        self.request = request
        self._say = say
        self._overtaken = overtaken

    def report_progress(self, state: str, **facts: Any) -> None:
        """Send a progress answer."""
        self._say({"id": self.request["id"], "state": state, **facts})

    def raise_if_overtaken(self) -> None:
        """Raise SupersededError if a newer request is waiting; call this before any long operation."""
        if self._overtaken():
            raise SupersededError


def error_in(answer: Request) -> ImpastoError:
    """Return the error in an "error" answer."""
    error = ImpastoError(answer["code"], answer["sentence"], answer["remedy"])
    error.problems = tuple(answer["problems"])
    return error


Handler = Callable[[ActiveRequest], Answer]
"""Callback that processes a request and returns the fields of its "done"; may raise ImpastoError and OSError."""
Validator = Callable[[Request], str | None]
"""Callback that returns what is wrong with a request, as part of an error sentence; None if it is valid."""


class Server:
    """Server that answers the requests of one client in order; a newer request cancels the current one.

    `code` is the error code for invalid requests, `guide` the file that documents requests. After `idle` seconds
    without a request, `on_idle` is called once.
    """

    def __init__(
        self,
        work: Handler,
        fault: Validator,
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
        """Answer requests until `lines` end; a thread reads them to notice newer requests at once."""
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
            turn = ActiveRequest(self._request(line), self._say, self._overtaken)
            try:
                turn.raise_if_overtaken()
                self._say({"id": identity, "state": "done", **self._work(turn)})
            except SupersededError:
                self._say({"id": identity, "state": "cancelled"})
        except ImpastoError as error:
            self._refuse(identity, error)
        except OSError as error:
            refused = user_error_of(error)
            if refused is None:
                raise
            self._refuse(identity, refused)

    def _refuse(self, identity: Any, error: ImpastoError) -> None:
        details = {"code": error.code, "sentence": error.sentence, "remedy": error.remedy}
        self._say({"id": identity, "state": "error", **details, "problems": error.problems})

    def _overtaken(self) -> bool:
        """Return whether a newer request is waiting; the end of the input does not count."""
        return any(line is not None for line in tuple(self._waiting.queue))

    def _request(self, line: str) -> Request:
        """Return the request in a line; raises ImpastoError if it is invalid."""
        if len(line) > LONGEST_LINE:
            raise self._unusable("it is longer than a million characters")
        try:
            request = parse_json(line)
        except UnusableFileError as error:
            raise self._unusable(error.reason) from error
        if not isinstance(request, dict):
            raise self._unusable("it is not a JSON object")
        if not isinstance(request.get("id"), str | int):
            raise self._unusable('it has no "id"')
        if wrong := self._fault(request):
            raise self._unusable(wrong)
        return request

    def _unusable(self, reason: str) -> ImpastoError:
        sentence = f"Could not answer this request: {reason}."
        return ImpastoError(self._code, sentence, f"See {self._guide}.")

    def _say(self, answer: Answer) -> None:
        self._output.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._output.flush()


def _identity(line: str) -> Any:
    """Return the id in a line, even if the line is not a valid request; None if there is no valid id."""
    try:
        found = parse_json(line[:LONGEST_LINE])
    except UnusableFileError:
        return None
    identity = found.get("id") if isinstance(found, dict) else None
    return identity if isinstance(identity, str | int) else None
