"""Processes that look at pictures, so that a file which hangs or crashes its decoder takes down nothing else."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from trainer.dataset.inspection import Inspection, inspect
from trainer.dataset.memory import State
from trainer.errors import DatasetError

# Far beyond what a sound picture takes, from a slow disk too: the largest allowed ones take seconds.
SECONDS = 60.0
_LARGE = "a large picture: may it be decoded now?"
_large_picture = threading.Lock()

Inspected = tuple[State | None, Inspection]


class Decoders:
    """As many processes as pictures are looked at at once, each started when it is first needed."""

    def __init__(self, count: int) -> None:
        self._all = [_Decoder() for _ in range(count)]
        self._idle: SimpleQueue[_Decoder] = SimpleQueue()
        for decoder in self._all:
            self._idle.put(decoder)

    def __enter__(self) -> Decoders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for decoder in self._all:
            decoder.end()

    def inspect(self, path: Path, max_megapixels: float) -> Inspected:
        """Look at a picture as `inspection.inspect` does; from any thread, which waits for a free process."""
        decoder = self._idle.get()
        try:
            return decoder.inspect(path, max_megapixels)
        finally:
            self._idle.put(decoder)


class _Decoder:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def inspect(self, path: Path, max_megapixels: float) -> Inspected:
        pipe = self._pipe or self._start()
        try:
            pipe.send((path, max_megapixels))
            answer = _receive(pipe)
            if answer == _LARGE:
                with _large_picture:
                    pipe.send(None)
                    answer = _receive(pipe)
        except (TimeoutError, EOFError, OSError) as fault:
            self.end()
            return None, _given_up(path, hung=isinstance(fault, TimeoutError))
        except BaseException:  # Ctrl-C in the middle: what comes next from there would be taken for another picture's
            self.end()
            raise
        assert isinstance(answer, tuple)
        return answer

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self._pipe

    def end(self) -> None:
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if process and pipe:
            process.kill()
            process.join()
            pipe.close()


def _receive(pipe: Connection) -> object:
    if not pipe.poll(SECONDS):
        raise TimeoutError
    return pipe.recv()


def _given_up(path: Path, *, hung: bool) -> DatasetError:
    if hung:
        sentence = f"{path} could not be decoded within {SECONDS:g} seconds."
        return DatasetError("picture.hangs", sentence, "Save the picture again from its source, or remove it.")
    sentence = f"{path} makes the program that decodes it crash."
    return DatasetError("picture.crashes", sentence, "Remove it; do not open it in other programs if you doubt it.")


def _serve(pipe: Connection) -> None:
    """Answer until the other end is closed; what runs in the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; ours ends this one

    @contextmanager
    def turn() -> Iterator[None]:
        pipe.send(_LARGE)
        pipe.recv()
        yield

    try:
        while True:
            path, max_megapixels = pipe.recv()
            pipe.send(inspect(path, max_megapixels, turn))
    except (EOFError, OSError):
        return
