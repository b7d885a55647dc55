"""A process beside this one that traces what is likely to be asked for next, so that a second core does its part."""

from __future__ import annotations

import _thread
import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

from trainer.dataset.decoders import no_interrupts
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import TraceRequest

_SPAWN = multiprocessing.get_context("spawn")
# Longer than any one trace takes, on slow and busy cores too: a process that is at it still has come to a standstill.
LONGEST = 120.0
# Seconds within which it ends in order when it is told to; one that cannot hear is killed.
PATIENCE = 3.0


Tracer = Callable[[TraceStore], Callable[[TraceRequest], None]]
"""Returns what traces a wish into a store, in the worker process. A module-level function: it is pickled by name."""


class TracePrefetcher:
    """Traces wishes into a store, one after the other, in a process that starts with the first of them.

    It takes some seconds to start and 0.8 GB of main memory while it lives. What goes wrong in it is no loss: whoever
    asks for those tapes finds them missing, traces them and meets the error himself. When the process that asked ends,
    in whatever way, so does this one, in the middle of a trace too.
    """

    def __init__(self, store: TraceStore, tracer: Tracer) -> None:
        self._tracer, self._folder, self._shipped = tracer, store.folder, store.shipped
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tracer aside")  # gives out wishes, waits for each
        self._futures: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> TracePrefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `close`."""
        self.close()

    def close(self) -> None:
        """End the process, whatever it does; what it has traced is kept."""
        self._end()
        if self._process is not None:
            self._process.join(PATIENCE)
            self._process.kill()
            self._process.join()
        self._executor.shutdown(cancel_futures=True)  # only now: it waits for what the process is at
        if self._pipe is not None:
            self._pipe.close()

    def want(self, requests: Sequence[TraceRequest]) -> None:
        """Trace these next, in their order; what was asked for before and is not begun is taken back."""
        for key in [key for key, asked in self._futures.items() if asked.cancel()]:
            del self._futures[key]
        for request in requests:
            self.ask(request)

    def ask(self, request: TraceRequest) -> Future[None]:
        """Trace this too, after what was asked for before; the result is there when that is done with, or not to be."""
        if request.key not in self._futures:
            self._futures[request.key] = self._executor.submit(self._trace, request)
        return self._futures[request.key]

    def finish(self, key: str) -> None:
        """Return when these tapes are not in work: at once where they are not begun, and then they will not be.

        A process that does not come to an end with them is ended, and traces nothing more.
        """
        asked = self._futures.get(key)
        if asked is None or asked.cancel():
            return
        try:
            asked.exception(LONGEST)  # waits; the store tells what came of it
        except TimeoutError:
            self._end()

    def _trace(self, request: TraceRequest) -> None:
        with suppress(EOFError, OSError):  # the process was ended, or has died
            pipe = self._pipe or self._start()
            pipe.send(request)
            pipe.recv()

    def _end(self) -> None:
        """Trace nothing more."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.terminate()

    def _start(self) -> Connection:
        with self._lock:
            if self._closed:
                raise EOFError
            pipe, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(
                target=_serve, args=(theirs, self._tracer, self._folder, self._shipped), daemon=True
            )
            with no_interrupts():
                process.start()
            theirs.close()
            self._process, self._pipe = process, pipe  # only now: what has not begun cannot be ended
            return pipe


def _serve(pipe: Connection, tracer: Tracer, folder: Path, shipped: Path | None) -> None:
    """Trace until the other end is closed; what runs in the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    fulfil = tracer(TraceStore(folder, shipped))
    with suppress(EOFError, OSError):
        while True:
            request = pipe.recv()
            with suppress(Exception):  # who needs these tapes meets it himself
                fulfil(request)
            pipe.send(None)


def _leave(*_: object) -> None:
    """End in the middle of a trace, in order: a kill would have Python complain of semaphores that libraries leave.

    Not by an exception, which whatever is going on just then might swallow.
    """
    atexit._run_exitfuncs()
    os._exit(0)


def _end_with_parent() -> None:
    """End as soon as the process that asked has died: who reads its output to the end waits for this one's end too.

    In order, for the sake of semaphores, or at once where that does not come about.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _thread.interrupt_main(signal.SIGTERM)
    threading.Event().wait(PATIENCE)
    os._exit(1)
