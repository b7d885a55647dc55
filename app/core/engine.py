"""Long-running child process `python -m trainer ... --serve` that exchanges JSON lines with the app."""

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
    """A long-running child process. Use it only on the thread that created it.

    `send` starts the child if needed and never blocks: a thread writes to the pipe. The child does not read
    the pipe while starting, and the pipe's buffer can be as small as 4 KiB on Windows. The child exits when its input
    closes, and thus with the app. If it exits unexpectedly, `ended` is emitted, and the next `send` starts a new one.
    """

    def __init__(self, words: Sequence[str], post: Post) -> None:
        self._arguments = words
        self._post = post
        self._process: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Lines to send to the child; None ends the sending thread."""
        self.answered: Emitter[dict[str, Any]] = Emitter()
        """Emitted with each JSON object from the child."""
        self.ended: Emitter[str] = Emitter()
        """Emitted when the child ended unexpectedly, with the end of its stderr, which may be empty."""

    def send(self, request: dict[str, Any]) -> None:
        """Send one JSON object. Raises OSError when the child cannot be started."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._requests.put(json.dumps(request, ensure_ascii=False) + "\n")

    def stop(self) -> None:
        """Kill the child without waiting for its exit, which can be slow; the next `send` starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._requests.put(None)

    def close(self) -> None:
        """Kill the child and wait until it and its threads have ended."""
        self.stop()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        process = subprocess.Popen(
            command(self._arguments),
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
        writer = threading.Thread(target=_write, args=(process.stdin, requests), name="engine-requests", daemon=True)
        errors = threading.Thread(target=last.extend, args=(process.stderr,), name="engine-errors", daemon=True)

        def read_until_end() -> None:
            self._read_answers(process)
            requests.put(None)
            for thread in (writer, errors):
                thread.join()
            _close(process)
            self._post(lambda: self._on_ended(process, "".join(last).strip()))

        answers = threading.Thread(target=read_until_end, name="engine-answers", daemon=True)
        self._requests = requests
        self._process = process
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [writer, errors, answers]
        for thread in (writer, errors, answers):
            thread.start()

    def _read_answers(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            with contextlib.suppress(ValueError):  # a library may print to stdout
                answer = parse_json(
                    line, finite=False
                )  # allow NaN: a dropped answer would make the caller wait forever
                if isinstance(answer, dict):
                    self._post(lambda answer=answer: self._on_answer(process, answer))  # type: ignore[misc]

    def _on_answer(self, process: subprocess.Popen[str], answer: dict[str, Any]) -> None:
        if process is self._process:
            self.answered.emit(answer)

    def _on_ended(self, process: subprocess.Popen[str], words: str) -> None:
        if process is self._process:
            self._process = None
            self.ended.emit(words)


def _write(pipe: IO[str], requests: queue.SimpleQueue[str | None]) -> None:
    """Send lines until None arrives. Write errors of a dead child are ignored: `ended` reports its death."""
    with contextlib.suppress(OSError):
        for line in iter(requests.get, None):
            pipe.write(line)
            pipe.flush()


def _close(process: subprocess.Popen[str]) -> None:
    """Reap a child that has ended and close its pipes."""
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):  # flushing input that the child never read
            if pipe:
                pipe.close()


def _no_console() -> int:
    """Return the creation flags that keep Windows from opening a console window; 0 elsewhere."""
    if sys.platform == "win32":
        return subprocess.CREATE_NO_WINDOW
    return 0
