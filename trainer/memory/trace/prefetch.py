"""Prefetch traces in a second process, which can use a second CPU core."""

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
# Seconds; longer than any trace takes, even on a slow and busy core. A process that takes longer is stuck.
LONGEST = 120.0
# Seconds to wait for the process to exit after SIGTERM before it is killed.
PATIENCE = 3.0


Tracer = Callable[[TraceStore], Callable[[TraceRequest], object]]
"""Factory of a store's tracing function, called in the second process; must be at module level to be pickled."""


class TracePrefetcher:
    """Prefetcher that traces requests into a store, in order, in a second process.

    The process starts with the first request, takes some seconds to start and uses 0.8 GB of main memory. Its errors
    are ignored: the parent process finds the traces missing, traces them itself and gets the error. When the parent
    process ends, for whatever reason, this one ends as well, even in the middle of a trace.
    """

    def __init__(self, store: TraceStore, tracer: Tracer) -> None:
        self._tracer, self._folder, self._shipped = tracer, store.folder, store.shipped
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trace prefetcher")  # sends requests, waits for each
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
        """Close the prefetcher."""
        self.close()

    def close(self) -> None:
        """End the process, even in the middle of a trace; finished traces are kept."""
        self._end()
        if self._process is not None:
            self._process.join(PATIENCE)
            self._process.kill()
            self._process.join()
        self._executor.shutdown(cancel_futures=True)  # last: its thread waits for an answer until the process is gone
        if self._pipe is not None:
            self._pipe.close()

    def replace_requests(self, requests: Sequence[TraceRequest]) -> None:
        """Trace these requests next, in order; drop earlier requests that have not started."""
        for key in [key for key, asked in self._futures.items() if asked.cancel()]:
            del self._futures[key]
        for request in requests:
            self.submit(request)

    def submit(self, request: TraceRequest) -> Future[None]:
        """Trace a request after all earlier ones; the future is done when the request succeeds, fails or is dropped."""
        if request.key not in self._futures:
            self._futures[request.key] = self._executor.submit(self._trace, request)
        return self._futures[request.key]

    def finish(self, key: str) -> None:
        """Wait until the request for ``key`` is no longer in progress; if it has not started, drop it instead.

        If the process seems to hang, it is terminated and nothing more is prefetched.
        """
        asked = self._futures.get(key)
        if asked is None or asked.cancel():
            return
        try:
            asked.exception(LONGEST)  # only waits: the caller looks into the store for the result
        except TimeoutError:
            self._end()

    def _trace(self, request: TraceRequest) -> None:
        with suppress(EOFError, OSError):  # the process was terminated or has crashed
            pipe = self._pipe or self._start()
            pipe.send(request)
            pipe.recv()

    def _end(self) -> None:
        """Stop prefetching for good and terminate the process."""
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
            self._process, self._pipe = process, pipe  # only after start(): _end must not terminate an unstarted one
            return pipe


def _serve(pipe: Connection, tracer: Tracer, folder: Path, shipped: Path | None) -> None:
    """Trace requests until the other end of the pipe is closed; main function of the second process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ensure = tracer(TraceStore(folder, shipped))
    with suppress(EOFError, OSError):
        while True:
            request = pipe.recv()
            with suppress(Exception):  # whoever needs these traces meets the error there
                ensure(request)
            pipe.send(None)


def _leave(*_: object) -> None:
    """Exit cleanly in the middle of a trace; if the process were killed, Python would warn about leaked semaphores.

    Raising an exception is not enough, because the code that is running might catch it.
    """
    atexit._run_exitfuncs()
    os._exit(0)


def _end_with_parent() -> None:
    """Exit as soon as the parent has ended, because readers of the parent's output would wait for this process too.

    The exit is clean, to release semaphores, or forced if that takes too long.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _thread.interrupt_main(signal.SIGTERM)
    threading.Event().wait(PATIENCE)
    os._exit(1)
