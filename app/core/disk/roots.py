"""Identify dataset folders, explain why a folder cannot be opened, and remove closed ones from the library."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from app.core.library import Library
from app.core.tasks import Post
from trainer.errors import DatasetError
from trainer.protocol.files import long_path

_BATCH = 4000
"""Number of images removed per batch (about 15 ms); 100,000 at once blocked the window for half a second."""


def unique_name(root: Path, others: Iterable[Path]) -> str:
    """Return a folder's name, with as many parent folders as needed to make it unique among `others`."""
    other_parts = [other.parts for other in others if other != root]
    for count in range(1, len(root.parts)):
        parts = root.parts[-count:]
        if all(other[-count:] != parts for other in other_parts):
            return "/".join(parts)
    return str(root)


def identity_of(folder: Path) -> tuple[int, int] | None:
    """Return a folder's device and inode, which are the same for all links to it; None if it cannot be read."""
    try:
        facts = long_path(folder).stat()
    except OSError:
        return None
    return (facts.st_dev, facts.st_ino) if facts.st_ino else None


def overlap_error(root: Path, other: Path) -> DatasetError:
    """Return the error for opening a folder that contains or is inside an open dataset; accesses the disk."""
    if root.is_relative_to(other):
        if not os.path.lexists(long_path(root)):
            sentence = f"Could not open {root}: it does not exist."
            return DatasetError(
                "dataset.folder_lost", sentence, "Check whether it was moved or renamed, or the path has a typo."
            )
        sentence = f"Could not open {root}: it is inside {other}, which is already open."
        return DatasetError("dataset.open_already", sentence, f"Its images are listed in {other.name}.")
    sentence = f"Could not open {root}: it contains {other}, which is already open."
    return DatasetError("dataset.open_already", sentence, f"Close {other.name} first to open all of {root.name}.")


def not_responding_error(folder: Path) -> DatasetError:
    """Return the error for a folder whose disk does not respond."""
    sentence = f"The folder {folder} does not respond."
    remedy = "Check its drive or network connection. Its images stay listed until you close the dataset."
    return DatasetError("dataset.silent", sentence, remedy)


class ImageRemover:
    """Batched removal of closed datasets' images from the library; belongs to the library's thread."""

    def __init__(self, library: Library, post: Post) -> None:
        self._library, self._post = library, post
        self._remaining: list[int] = []

    def begin(self, ids: Sequence[int]) -> None:
        """Remove images in batches, the first batch now; the last images go first because few of them are visible."""
        self._remaining = [*ids, *self._remaining]
        if len(self._remaining) == len(ids):
            self._remove_batch()

    def finish(self, root: Path) -> None:
        """Immediately remove the remaining images of datasets at this folder, below it or above it."""
        known = self._library.images
        remaining = {number: known[number].folder.root for number in self._remaining if number in known}
        affected = {path for path in set(remaining.values()) if path.is_relative_to(root) or root.is_relative_to(path)}
        self._remaining = [number for number, path in remaining.items() if path not in affected]
        self._library.remove([number for number, path in remaining.items() if path in affected])

    def _remove_batch(self) -> None:
        batch, self._remaining = self._remaining[-_BATCH:], self._remaining[:-_BATCH]
        self._library.remove(batch)
        if self._remaining:
            self._post(self._remove_batch)
