"""Separate processes that decode images, since a file can hang or crash its decoder."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from math import inf
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

from trainer.dataset.findings import file_fault
from trainer.dataset.inspection import (
    ImageFacts,
    Inspection,
    InspectionCache,
    State,
    file_state,
    inspect,
    inspection_cache,
)
from trainer.dataset.pixels import check_megapixels
from trainer.errors import DatasetError
from trainer.host import usable_cores

# Far more than any valid image takes, even from a slow disk: the largest allowed ones take seconds.
SECONDS = 60.0
_HERE = "the process is running"
_LARGE = "a large image: may it be decoded now?"

Inspected = tuple[Path, State | None, Inspection]
_SPAWN = multiprocessing.get_context("spawn")
PROCESS_COUNT = min(4, usable_cores())
"""Number of decoder processes; more would need more memory and gain little."""


class DecoderPool:
    """Pool of decoder processes, which are started when they are first needed.

    All its code runs in the calling thread, so no lock can be held when Ctrl-C interrupts it.
    """

    def __init__(self, count: int) -> None:
        self._all = [_Decoder() for _ in range(count)]
        self._large: deque[_Decoder] = deque()  # decoders with a large image; only the first may decode

    def __enter__(self) -> DecoderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for decoder in self._all:
            decoder.end()

    def interrupt(self) -> None:
        """Kill the processes from another thread; their current images count as failed."""
        for decoder in self._all:
            decoder.kill()

    def inspect(self, paths: Iterable[Path], max_megapixels: float) -> Iterator[Inspected]:
        """Inspect images as `inspection.inspect` does, and yield each result with its path when it is ready.

        Raises DatasetError if a process cannot be started. The pool can be used again afterwards, even after an error;
        images that were not finished by then are dropped.
        """
        left = deque(paths)
        try:
            while True:
                for decoder in self._all:
                    if left and decoder.path is None:
                        decoder.give(left.popleft(), max_megapixels)
                busy = [decoder for decoder in self._all if decoder.path is not None]
                if not busy:
                    return
                yield from self._collect(busy)
        finally:
            self._put_down()

    def _put_down(self) -> None:
        """Kill the processes that are still working on an image; the others keep running."""
        self._large.clear()
        for decoder in self._all:
            if decoder.path is not None:
                decoder.end()

    def _collect(self, busy: list[_Decoder]) -> Iterator[Inspected]:
        """Wait for a message or an image's deadline, and yield the available results."""
        soonest = min(decoder.deadline for decoder in busy) - time.monotonic()
        ready = connection.wait([decoder.pipe for decoder in busy], None if soonest == inf else max(0.0, soonest))
        for decoder in busy:
            if decoder.pipe in ready:
                if decoder.comes_up():
                    continue
                found = decoder.receive()
            elif decoder.deadline <= time.monotonic():
                found = decoder.give_up(hung=True)
            else:
                continue
            if found is not None:
                yield found
            self._turn(decoder, asks=found is None)

    def _turn(self, decoder: _Decoder, *, asks: bool) -> None:
        """Update the queue for large images: add ``decoder`` if it ``asks``, else remove it; let the first one decode.

        Only one large image is decoded at a time.
        """
        first = self._large[0] if self._large else None
        if asks:
            decoder.deadline = inf
            self._large.append(decoder)
        elif decoder in self._large:
            self._large.remove(decoder)
        if self._large and self._large[0] is not first:
            self._large[0].let()


class _Decoder:
    """One decoder process, its pipe, and its current image."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.deadline = inf
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._up = False

    @property
    def pipe(self) -> Connection:
        """Return the pipe to the process, starting it if needed; raises DatasetError if that fails."""
        if self._pipe is None:
            try:
                self._start()
            except OSError as fault:
                raise _no_process(fault.strerror or str(fault)) from fault
        assert self._pipe is not None
        return self._pipe

    def _start(self) -> None:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        try:
            with no_interrupts():
                process.start()
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._process, self._pipe = process, ours  # set last: another thread may kill a started process

    def comes_up(self) -> bool:
        """Receive the process's start message; return False if it was received before.

        Raises DatasetError if the process ended before sending it.
        """
        if self._up:
            return False
        try:
            self.pipe.recv()
        except (EOFError, OSError) as fault:
            self.end()
            raise _no_process("it ended immediately after starting") from fault
        self._up = True
        return True

    def give(self, path: Path, max_megapixels: float) -> None:
        """Send an image's path to the process, which starts to inspect it."""
        self._send((path, max_megapixels))
        self.path = path  # set last: without a process no image is being decoded

    def let(self) -> None:
        """Let the process decode its large image."""
        self._send(None)

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the process died; noticed when its answer is read
            self.pipe.send(message)
        self.deadline = time.monotonic() + SECONDS

    def receive(self) -> Inspected | None:
        """Return the image's result; None if the process asks for permission to decode a large image."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            return self.give_up(hung=False)
        return None if answer == _LARGE else (self._put_down(), *answer)

    def give_up(self, *, hung: bool) -> Inspected:
        """Kill the process and return its image's error; raises DatasetError if the process never started."""
        up, path = self._up, self._put_down()
        self.end()
        if not up:
            raise _no_process(f"it did not start within {SECONDS:g} seconds")
        fault = file_fault("image.hangs", path, seconds=SECONDS) if hung else file_fault("image.crashes", path)
        return path, None, fault

    def kill(self) -> None:
        """Kill the process; a caller waiting for its result gets an end of file."""
        process = self._process
        if process:
            process.kill()

    def end(self) -> None:
        """Kill the process, close its pipe and forget its image."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        self._up, self.path, self.deadline = False, None, inf
        if process and pipe:
            process.kill()
            process.join()
            pipe.close()

    def _put_down(self) -> Path:
        path, self.path, self.deadline = self.path, None, inf
        assert path is not None
        return path


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Make processes that are started in the block ignore Ctrl-C.

    Terminals send Ctrl-C to these processes too, but only the main process should handle it.
    """
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing's helper; starting it later would unblock SIGINT
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _no_process(reason: str) -> DatasetError:
    return DatasetError(
        "image.no_process",
        f"Could not start the process that decodes images: {reason}.",
        "The images may be fine. Close programs that use a lot of memory, then try again.",
    )


def _serve(pipe: Connection) -> None:
    """Inspect images until the pipe is closed; this runs in the decoder process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    @contextmanager
    def turn() -> Iterator[None]:
        pipe.send(_LARGE)
        pipe.recv()
        yield

    try:
        pipe.send(_HERE)
        while True:
            path, max_megapixels = pipe.recv()
            pipe.send(inspect(path, max_megapixels, turn))
    except (EOFError, OSError):
        return


Progress = Callable[[int, int], None]
"""Callback that takes the number of files checked so far and the total."""


def inspect_images(
    paths: Iterable[Path], max_megapixels: float, progress: Progress | None = None, decoders: DecoderPool | None = None
) -> dict[Path, Inspection]:
    """Return the facts about each file, or the error if it cannot be used; images are decoded completely.

    A file whose size and modification time have not changed since an earlier check is not opened again. Frequent
    callers pass `decoders` to avoid starting new processes each time.
    """
    paths = list(dict.fromkeys(paths))
    with inspection_cache() as memory, nullcontext(decoders) if decoders else _started() as decoders:
        found = {path: facts for path in paths if (facts := _recall(path, max_megapixels, memory))}
        unknown = [path for path in paths if path not in found]
        for path, state, facts in decoders.inspect(unknown, max_megapixels):
            found[path] = facts
            if state and isinstance(facts, ImageFacts):
                memory.keep(path, state, facts)
            if progress:
                progress(len(found), len(paths))
    return found


def _started() -> AbstractContextManager[DecoderPool]:
    return DecoderPool(PROCESS_COUNT)


def _recall(path: Path, max_megapixels: float, memory: InspectionCache) -> Inspection | None:
    try:
        facts = memory.recall(path, file_state(path))
        if facts:
            check_megapixels(path, facts.width, facts.height, max_megapixels)
    except DatasetError as error:
        return error
    return facts
