"""Runs work in processes of its own, one at a time; each is begun ahead of its turn, so that imports cost no time."""

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
class Told(Generic[T]):
    """What a piece of work yielded before it ended, and why it did not come to its end, if so."""

    items: list[T]
    failure: str = ""
    """The error's class and first line, or what became of the process."""


@dataclass(frozen=True)
class _End:
    failure: str = ""


class Apart:
    """A fresh process for each piece of work: what one breaks, or leaves on a card, does not touch the next."""

    def __init__(self, module: str) -> None:
        """``module`` is what the work is in, imported ahead."""
        self.module = module
        self._next = self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process that no work came for."""
        _end(*self._next)

    def run(
        self,
        seconds: float,
        work: Callable[..., Iterable[T]],
        *args: Any,
        told: Callable[[T], object] = lambda _: None,
    ) -> Told[T]:
        """What ``work(*args)`` yields within so many seconds, imports not counted; all of it has to be picklable.

        ``told`` is called with each as it comes.
        """
        process, pipe = self._next
        self._next = self._begin()
        items: list[T] = []
        try:
            pipe.recv()  # it is ready
            pipe.send((work, args))
            until = time.monotonic() + seconds
            while pipe.poll(max(0.0, until - time.monotonic())):
                item = pipe.recv()
                if isinstance(item, _End):
                    process.join(max(0.0, until - time.monotonic()))
                    return Told(items, item.failure)
                items.append(item)
                told(item)
            return Told(items, f"took longer than {seconds:.0f} s")
        except (EOFError, OSError):
            process.join(60.0)  # it is ending, and on a busy machine that takes its time
            return Told(items, f"its process ended with {process.exitcode}")
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
    except (EOFError, OSError):  # nothing was to be done
        return
    try:
        for item in work(*args):
            pipe.send(item)
    except Exception as error:  # noqa: BLE001 (whatever it was, it is told)
        pipe.send(_End(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
    else:
        pipe.send(_End())


def _end(process: SpawnProcess, pipe: Connection) -> None:
    process.kill()
    process.join()
    pipe.close()
