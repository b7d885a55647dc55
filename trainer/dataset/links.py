"""Follow links only inside the dataset: a folder from a stranger may hold one to the user's own files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the window imports this module, and does not wait for pydantic
    from trainer.config.job import DatasetConfig


class Links:
    """Follows a link only where it leads into a folder that the user named.

    Those are the folders of the dataset and `dataset.linked_folders`, each wherever it really is. Hard links look like
    files of their own and are taken as such.
    """

    def __init__(self, folders: Iterable[str | Path]) -> None:
        self.refused: set[Path] = set()
        """Links that were refused so far."""
        self._folders = tuple(_real(str(folder)) for folder in folders)

    @classmethod
    def of(cls, dataset: DatasetConfig) -> Links:
        """Return the links that a job follows."""
        return cls([*(folder.path for folder in dataset.folders), *dataset.linked_folders])

    def allow_file(self, path: Path) -> bool:
        """Return whether a file may be read: it is not a link, or one that is followed. Costs one lstat."""
        return not path.is_symlink() or self.allow(path)

    def allow(self, path: Path) -> bool:
        """Return whether a link, or a folder that may be one under another name (Windows' junctions), is followed."""
        target = _real(str(path))
        if any(target == folder or target.startswith(folder.rstrip(os.sep) + os.sep) for folder in self._folders):
            return True
        self.refused.add(path)
        return False


def _real(path: str) -> str:
    return os.path.normcase(os.path.realpath(path))
