"""Finds which pictures are nearly the same while they become known one after the other. For one worker thread."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.dataset.duplicates import Fingerprints


class Near:
    """All fingerprints so far: a new one is compared with all others, 0.3 ms at 100,000."""

    def __init__(self) -> None:
        self._prints = Fingerprints()
        self._pictures: list[int] = []
        self._place: dict[int, int] = {}

    def add(self, known: Iterable[tuple[int, str]]) -> list[tuple[int, int]]:
        """Take pictures with their fingerprints in hex; return the pairs that each makes with one known already."""
        known = list(known)
        start = len(self._prints)
        self._prints.add([bytes.fromhex(fingerprint) for _, fingerprint in known])
        pairs = []
        for place, (picture, _) in enumerate(known, start):
            if picture in self._place:  # its file has changed
                self._pictures[self._place[picture]] = 0
            self._place[picture] = place
            self._pictures.append(picture)
            others = (self._pictures[other] for other in self._prints.near(place, slice(0, place)))
            pairs += [(other, picture) for other in others if other]
        return pairs
