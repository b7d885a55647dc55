"""Processes that look at pictures, so that a file which hangs or crashes its decoder takes down nothing else."""

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
    Inspection,
    PictureFacts,
    PictureMemory,
    State,
    file_state,
    inspect,
    picture_memory,
)
from trainer.dataset.pixels import check_megapixels
from trainer.errors import DatasetError
from trainer.host import usable_cores

# Far beyond what a sound picture takes, from a slow disk too: the largest allowed ones take seconds.
SECONDS = 60.0
_HERE = "the process is there"
_LARGE = "a large picture: may it be decoded now?"

Inspected = tuple[Path, State | None, Inspection]
_SPAWN = multiprocessing.get_context("spawn")
AT_ONCE = min(4, usable_cores())
"""Pictures looked at at once; more would gain little and take more memory."""


class Decoders:
    """As many processes as pictures are looked at at once, each started when it is first needed.

    All is done by one thread, so that Ctrl-C meets no lock.
    """

    def __init__(self, count: int) -> None:
        self._all = [_Decoder() for _ in range(count)]
        self._large: deque[_Decoder] = deque()  # those with a large picture; the first one has the turn

    def __enter__(self) -> Decoders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for decoder in self._all:
            decoder.end()

    def interrupt(self) -> None:
        """End what the processes do now, from another thread: the pictures in their hands count as given up."""
        for decoder in self._all:
            decoder.kill()

    def inspect(self, paths: Iterable[Path], max_megapixels: float) -> Iterator[Inspected]:
        """Look at pictures as `inspection.inspect` does; they come as they are done, each with its path.

        Raises DatasetError where no process can be started, which says nothing of any picture. Whatever ends it early,
        they can be used again, with no picture of before in their hands.
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
        """End the processes that still have a picture; the others stay."""
        self._large.clear()
        for decoder in self._all:
            if decoder.path is not None:
                decoder.end()

    def _collect(self, busy: list[_Decoder]) -> Iterator[Inspected]:
        """Wait until something has come, or the time of a picture is over."""
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
        """Let the first of those with a large picture decode it."""
        first = self._large[0] if self._large else None
        if asks:
            decoder.deadline = inf
            self._large.append(decoder)
        elif decoder in self._large:
            self._large.remove(decoder)
        if self._large and self._large[0] is not first:
            self._large[0].let()


class _Decoder:
    """One process, the pipe to it, and the picture in its hand."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.deadline = inf
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._up = False

    @property
    def pipe(self) -> Connection:
        """The pipe to the process, which is started if there is none; raises DatasetError where it cannot be."""
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
        self._process, self._pipe = process, ours  # only now: another thread may want to kill what has begun

    def comes_up(self) -> bool:
        """Take the first word of the process, if that is what came; raises DatasetError where it ended without."""
        if self._up:
            return False
        try:
            self.pipe.recv()
        except (EOFError, OSError) as fault:
            self.end()
            raise _no_process("it ends as soon as it is started") from fault
        self._up = True
        return True

    def give(self, path: Path, max_megapixels: float) -> None:
        """Let the process look at a picture."""
        self._send((path, max_megapixels))
        self.path = path  # only now: without a process it is in nobody's hand

    def let(self) -> None:
        """Let the process go on with a large picture."""
        self._send(None)

    def _send(self, message: object) -> None:
        with suppress(OSError):  # it has died: that is met when its answer is read
            self.pipe.send(message)
        self.deadline = time.monotonic() + SECONDS

    def receive(self) -> Inspected | None:
        """Return what came of the picture; None when the process asks for its turn."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            return self.give_up(hung=False)
        return None if answer == _LARGE else (self._put_down(), *answer)

    def give_up(self, *, hung: bool) -> Inspected:
        """End the process and say why; raises DatasetError where it never came up."""
        up, path = self._up, self._put_down()
        self.end()
        if not up:
            raise _no_process(f"it does not come up within {SECONDS:g} seconds")
        fault = file_fault("picture.hangs", path, seconds=SECONDS) if hung else file_fault("picture.crashes", path)
        return path, None, fault

    def kill(self) -> None:
        """End the process without a word; whoever waits for its answer meets the end of the pipe."""
        process = self._process
        if process:
            process.kill()

    def end(self) -> None:
        """End the process, whatever it does; its picture is in nobody's hand then."""
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
    """Inside, processes are started that never hear of Ctrl-C: it reaches all of a terminal, and is meant for us."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing's own helper, whose start would let interrupts through again
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _no_process(reason: str) -> DatasetError:
    return DatasetError(
        "picture.no_process",
        f"Pictures cannot be looked at: the process that decodes them cannot be started ({reason}).",
        "Nothing is known to be wrong with them. Close programs that take memory, then try again.",
    )


def _serve(pipe: Connection) -> None:
    """Answer until the other end is closed; what runs in the process."""
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
"""Called with the number of files checked and the number of all."""


def inspect_pictures(
    paths: Iterable[Path], max_megapixels: float, progress: Progress | None = None, decoders: Decoders | None = None
) -> dict[Path, Inspection]:
    """Return for each file what it is, or why it cannot be used; every picture is decoded to its end.

    A file whose size and time are those of an earlier check is not opened again. Whoever asks again and again gives
    the `decoders`, so that their processes need not start each time.
    """
    paths = list(dict.fromkeys(paths))
    with picture_memory() as memory, nullcontext(decoders) if decoders else _started() as decoders:
        found = {path: facts for path in paths if (facts := _recall(path, max_megapixels, memory))}
        unknown = [path for path in paths if path not in found]
        for path, state, facts in decoders.inspect(unknown, max_megapixels):
            found[path] = facts
            if state and isinstance(facts, PictureFacts):
                memory.keep(path, state, facts)
            if progress:
                progress(len(found), len(paths))
    return found


def _started() -> AbstractContextManager[Decoders]:
    return Decoders(AT_ONCE)


def _recall(path: Path, max_megapixels: float, memory: PictureMemory) -> Inspection | None:
    try:
        facts = memory.recall(path, file_state(path))
        if facts:
            check_megapixels(path, facts.width, facts.height, max_megapixels)
    except DatasetError as error:
        return error
    return facts
