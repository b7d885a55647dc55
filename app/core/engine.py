"""A resident child `python -m trainer ... --serve`: JSON lines to it, JSON lines from it."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO, Any

from app.core.events import Emitter
from app.core.tasks import Post
from trainer.protocol.processes import command
from trainer.protocol.reading import parse_json

_LAST_LINES = 20


class ServedProcess:
    """One such child; it belongs to the thread that makes it, and ends with its input: when the app ends, it ends.

    `ask` starts it where it does not run, and never waits for it: a pipe holds little, 4 KiB on Windows, and a child
    that is only starting reads none of it. A child that died is told by `ended` and started anew by the next `ask`.
    """

    def __init__(self, words: Sequence[str], post: Post) -> None:
        self._words = words
        self._post = post
        self._process: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """What the child is still to be sent; None: nothing more."""
        self.answered: Emitter[dict[str, Any]] = Emitter()
        """One object that the child said."""
        self.ended: Emitter[str] = Emitter()
        """The child ended without being asked to; with its last words, which may be empty."""

    def ask(self, request: dict[str, Any]) -> None:
        """Send one object. Raises OSError when the child cannot be started."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._requests.put(json.dumps(request, ensure_ascii=False) + "\n")

    def stop(self) -> None:
        """End the child without waiting for its end, which takes an engine a while; the next `ask` starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._requests.put(None)

    def close(self) -> None:
        """End the child and wait until nothing of it is left."""
        self.stop()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        process = subprocess.Popen(
            command(self._words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            creationflags=_no_console(),
        )
        assert process.stdin is not None and process.stderr is not None
        last: deque[str] = deque(maxlen=_LAST_LINES)
        requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        asking = threading.Thread(target=_write, args=(process.stdin, requests), name="engine-requests", daemon=True)
        errors = threading.Thread(target=last.extend, args=(process.stderr,), name="engine-errors", daemon=True)

        def hear() -> None:
            self._hear(process)
            requests.put(None)
            for thread in (asking, errors):
                thread.join()
            _put_away(process)
            self._post(lambda: self._lose(process, "".join(last).strip()))

        answers = threading.Thread(target=hear, name="engine-answers", daemon=True)
        self._requests = requests
        self._process = process
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [asking, errors, answers]
        for thread in (asking, errors, answers):
            thread.start()

    def _hear(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            with contextlib.suppress(ValueError):  # a library's print is no answer
                said = parse_json(line, finite=False)  # without an answer, what asked would wait for ever
                if isinstance(said, dict):
                    self._post(lambda said=said: self._tell(process, said))  # type: ignore[misc]

    def _tell(self, process: subprocess.Popen[str], said: dict[str, Any]) -> None:
        if process is self._process:
            self.answered.emit(said)

    def _lose(self, process: subprocess.Popen[str], words: str) -> None:
        if process is self._process:
            self._process = None
            self.ended.emit(words)


def _write(pipe: IO[str], requests: queue.SimpleQueue[str | None]) -> None:
    """Send what is asked until there is nothing more; what a child that died did not read is told by its end."""
    with contextlib.suppress(OSError):
        for line in iter(requests.get, None):
            pipe.write(line)
            pipe.flush()


def _put_away(process: subprocess.Popen[str]) -> None:
    """Let go of a child that has ended, and whose output has been read."""
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):  # what was written and never read
            if pipe:
                pipe.close()


def _no_console() -> int:
    """Return what keeps Windows from opening a console for a child; nothing elsewhere."""
    if sys.platform == "win32":
        return subprocess.CREATE_NO_WINDOW
    return 0
