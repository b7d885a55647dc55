"""Run work in separate processes, one at a time; each process is started in advance, so that imports cost no time."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class WorkResult(Generic[T]):
    """Items that a piece of work yielded before it ended, and the reason if it failed."""

    items: list[T]
    failure: str = ""
    """The error's class and first line, or what happened to the process."""


@dataclass(frozen=True)
class _End:
    failure: str = ""


class Apart:
    """A fresh process for each piece of work: what one breaks, or leaves on a GPU, does not affect the next."""

    def __init__(self, module: str) -> None:
        """Start the first process, which imports ``module``, the module that contains the work."""
        self.module = module
        self._next = self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process that got no work."""
        _end(*self._next)

    def run(
        self,
        seconds: float,
        work: Callable[..., Iterable[T]],
        *args: Any,
        on_item: Callable[[T], object] = lambda _: None,
    ) -> WorkResult[T]:
        """Return what ``work(*args)`` yields within a time limit, imports not counted; everything must be picklable.

        ``on_item`` is called with each item as it arrives.
        """
        process, pipe = self._next
        self._next = self._begin()
        items: list[T] = []
        try:
            pipe.recv()  # the process is ready
            pipe.send((work, args))
            until = time.monotonic() + seconds
            while pipe.poll(max(0.0, until - time.monotonic())):
                item = pipe.recv()
                if isinstance(item, _End):
                    process.join(max(0.0, until - time.monotonic()))
                    return WorkResult(items, item.failure)
                items.append(item)
                on_item(item)
            return WorkResult(items, f"took longer than {seconds:.0f} s")
        except (EOFError, OSError):
            process.join(60.0)  # the process is ending, which takes a while on a busy machine
            return WorkResult(items, f"its process ended with {process.exitcode}")
        finally:
            _end(process, pipe)

    def _begin(self) -> tuple[SpawnProcess, Connection]:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(self.module, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours


def _serve(module: str, pipe: Connection) -> None:
    importlib.import_module(module)
    try:
        pipe.send(None)
        work, args = pipe.recv()
    except (EOFError, OSError):  # there was no work
        return
    try:
        for item in work(*args):
            pipe.send(item)
    except Exception as error:  # noqa: BLE001 (any failure is reported)
        pipe.send(_End(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
    else:
        pipe.send(_End())


def _end(process: SpawnProcess, pipe: Connection) -> None:
    process.kill()
    process.join()
    pipe.close()
