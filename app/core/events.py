"""Lets one part of the app hear of what happens in another, without Qt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class Emitter(Generic[_Value]):
    """Something that happens again and again; listeners are called in the order in which they came.

    It belongs to the thread that owns the library: connect and emit only there.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[_Value], None]] = []

    def connect(self, listener: Callable[[_Value], None]) -> Callable[[], None]:
        """Call the listener from now on; return the function that ends this."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def emit(self, value: _Value) -> None:
        """Tell every listener; one that is connected or removed meanwhile counts from the next time on."""
        for listener in tuple(self._listeners):
            listener(value)
