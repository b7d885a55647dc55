"""Every picture of the open datasets, and the one place where what is known of them changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from types import MappingProxyType
from typing import Any

from app.core.events import Event
from app.core.pictures import Altered, Change, Fact, Folder, Picture


class Library:
    """Pictures by id, in the order in which they are shown: by folder, then by name.

    It belongs to one thread; workers hand their findings over through `Tasks`. It does not touch the disk.
    """

    def __init__(self) -> None:
        self.altered: Event[Altered] = Event()
        self._pictures: dict[int, Picture] = {}
        self._numbers = count(1)

    @property
    def pictures(self) -> Mapping[int, Picture]:
        """All pictures by id."""
        return MappingProxyType(self._pictures)

    def add(self, found: Iterable[tuple[Folder, str, Mapping[str, Any]]]) -> list[int]:
        """Enter pictures by folder, name and what is known of them already; return their ids."""
        ids = []
        for folder, name, known in found:
            number = next(self._numbers)
            self._pictures[number] = Picture(number, folder, name, **known)
            ids.append(number)
        if ids:
            self.altered.emit(Altered(added=frozenset(ids)))
        return ids

    def remove(self, ids: Iterable[int]) -> None:
        """Forget pictures; their files are not touched."""
        gone = frozenset(number for number in ids if self._pictures.pop(number, None))
        if gone:
            self.altered.emit(Altered(removed=gone))

    def apply(self, changes: Iterable[Change]) -> None:
        """Take over what the user changed; pictures that are gone are passed over."""
        changes = [change for change in changes if change.picture in self._pictures]
        for change in changes:
            setattr(self._pictures[change.picture], change.field, change.after)
        if changes:
            ids, fields = zip(*((change.picture, change.field) for change in changes), strict=True)
            self.altered.emit(Altered(altered=frozenset(ids), what=frozenset(fields)))

    def learn(self, facts: Mapping[int, Mapping[str, Any]], *what: Fact) -> None:
        """Take over what a look at the disk showed: new values of attributes by picture, and of which kinds."""
        known = [number for number in facts if number in self._pictures]
        for number in known:
            for name, value in facts[number].items():
                setattr(self._pictures[number], name, value)
        if known:
            self.altered.emit(Altered(altered=frozenset(known), what=frozenset(what)))
