"""Signals between parts of the app, without Qt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class Emitter(Generic[_Value]):
    """Signal with one value; listeners are called in the order in which they were connected.

    Connect and emit only on the thread that owns the library.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[_Value], None]] = []

    def connect(self, listener: Callable[[_Value], None]) -> Callable[[], None]:
        """Add a listener; return a function that removes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def emit(self, value: _Value) -> None:
        """Call every listener; listeners added or removed during the call only take effect at the next one."""
        for listener in tuple(self._listeners):
            listener(value)
