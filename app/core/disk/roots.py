"""What can be told of a dataset's own folder: which one it is, and why it cannot be opened or reached."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from app.core.library import Library
from app.core.tasks import Post
from trainer.errors import DatasetError
from trainer.protocol.files import long_path

_AT_ONCE = 4000
"""Pictures forgotten in one go, some 15 ms for all who hear of it; a closed dataset of 100,000 took half a second."""


def told_apart(root: Path, others: Iterable[Path]) -> str:
    """Return a folder's name, with as many of the folders above it as tell it from others of that name."""
    besides = [other.parts for other in others if other != root]
    for count in range(1, len(root.parts)):
        parts = root.parts[-count:]
        if all(other[-count:] != parts for other in besides):
            return "/".join(parts)
    return str(root)


def identity_of(folder: Path) -> tuple[int, int] | None:
    """Return what two paths to one folder share, also where one of them is a link; None where nothing is."""
    try:
        facts = long_path(folder).stat()
    except OSError:
        return None
    return (facts.st_dev, facts.st_ino) if facts.st_ino else None


def overlapping(root: Path, other: Path) -> DatasetError:
    """Return why a folder is not opened besides another that it lies in, or that lies in it; asks the disk."""
    if root.is_relative_to(other):
        if not os.path.lexists(long_path(root)):
            sentence = f"There is nothing at {root}."
            return DatasetError("dataset.folder_lost", sentence, "It was moved or renamed, or the path has a typo.")
        sentence = f"{root} is inside {other}, which is already open."
        return DatasetError("dataset.open_already", sentence, "Find its images there.")
    sentence = f"{root} contains {other}, which is already open."
    return DatasetError("dataset.open_already", sentence, f"Close {other.name} first to open all of {root.name}.")


def silence(folder: Path) -> DatasetError:
    """Return what is said of a folder whose disk does not answer."""
    sentence = f"The folder {folder} does not answer."
    remedy = "Check its drive or network. Its images stay listed until you close it."
    return DatasetError("dataset.silent", sentence, remedy)


class Forgetting:
    """Pictures on their way out of the library; it belongs to the library's thread."""

    def __init__(self, library: Library, post: Post) -> None:
        self._library, self._post = library, post
        self._left: list[int] = []

    def begin(self, ids: Sequence[int]) -> None:
        """Forget these, the last ones first, as those in sight are mostly the first; at once where they are few."""
        self._left = [*ids, *self._left]
        if len(self._left) == len(ids):
            self._go_on()

    def finish(self, root: Path) -> None:
        """Forget now what is left of that folder, and of those that lie in it or that it lies in."""
        known = self._library.pictures
        left = {number: known[number].folder.root for number in self._left if number in known}
        here = {one for one in set(left.values()) if one.is_relative_to(root) or root.is_relative_to(one)}
        self._left = [number for number, of in left.items() if of not in here]
        self._library.remove([number for number, of in left.items() if of in here])

    def _go_on(self) -> None:
        some, self._left = self._left[-_AT_ONCE:], self._left[:-_AT_ONCE]
        self._library.remove(some)
        if self._left:
            self._post(self._go_on)
