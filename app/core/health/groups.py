"""Two small indexes over pictures that are cheap to keep right: by what they have, and by what they share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Set

Key = tuple[str, Hashable]
"""What a picture can be filed under: a kind ("mark", "bucket", "tokens", ...) and which of it."""
_NONE: frozenset[int] = frozenset()


class Files:
    """Pictures filed under any number of keys; one picture's keys are replaced in a few microseconds."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Key, ...]] = {}
        self._combinations: dict[tuple[Key, ...], tuple[Key, ...]] = {}
        self._kinds: dict[str, dict[Hashable, set[int]]] = {}

    def put(self, picture: int, keys: Iterable[Key]) -> None:
        """File a picture under these keys and no others; none: forget it."""
        # One tuple for all pictures of the same keys: 100,000 would keep the garbage collector busy for 0.1 s.
        new = tuple(keys)
        new = self._combinations.setdefault(new, new)
        before = self._of.get(picture, ())
        if new == before:
            return
        for kind, which in before:
            if (kind, which) not in new:
                self._kinds[kind][which].discard(picture)
                if not self._kinds[kind][which]:
                    del self._kinds[kind][which]
        for kind, which in new:
            self._kinds.setdefault(kind, {}).setdefault(which, set()).add(picture)
        if new:
            self._of[picture] = new
        else:
            self._of.pop(picture, None)

    def under(self, kind: str, which: Hashable) -> Set[int]:
        """Return the pictures under one key: the index's own set, not to be changed."""
        return self._kinds.get(kind, {}).get(which, _NONE)

    def all(self, kind: str) -> Mapping[Hashable, Set[int]]:
        """Return what there is of a kind, each with its pictures; not to be changed."""
        return self._kinds.get(kind, {})


class Shared:
    """Which pictures have something (content, place and stem) in common with another one."""

    def __init__(self) -> None:
        self.pictures: set[int] = set()
        """All that share theirs."""
        self._key: dict[int, Hashable] = {}
        self._first: dict[Hashable, int] = {}
        self._groups: dict[Hashable, set[int]] = {}

    def put(self, picture: int, key: Hashable | None) -> None:
        """Say what a picture has; None: nothing to share."""
        before = self._key.get(picture)
        if key == before:
            return
        if before is not None:
            self._leave(picture, before)
        if key is not None:
            self._key[picture] = key
            first = self._first.setdefault(key, picture)
            if first != picture:
                group = self._groups.setdefault(key, {first})
                group.add(picture)
                self.pictures |= group

    def groups(self) -> list[list[int]]:
        """Return the pictures that share, those that share the same together."""
        return [sorted(group) for group in tuple(self._groups.values())]

    def _leave(self, picture: int, key: Hashable) -> None:
        del self._key[picture]
        self.pictures.discard(picture)
        group = self._groups.get(key)
        if group is None:
            del self._first[key]
            return
        group.discard(picture)
        self._first[key] = next(iter(group))
        if len(group) == 1:
            self.pictures -= group
            del self._groups[key]
