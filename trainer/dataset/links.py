"""Symbolic links are followed only inside the dataset: a stranger's folder may link to the user's own files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the window imports this module, and does not wait for pydantic
    from trainer.config.job import DatasetConfig


class Links:
    """Check that links lead into a folder that the user listed.

    These are the dataset's folders and `dataset.linked_folders`, each at its real location. Hard links cannot be told
    from regular files and are read as such.
    """

    def __init__(self, folders: Iterable[str | Path]) -> None:
        self.refused: set[Path] = set()
        """Links refused so far."""
        self._folders = tuple(_real(str(folder)) for folder in folders)

    @classmethod
    def of(cls, dataset: DatasetConfig) -> Links:
        """Create the checker for a job's dataset."""
        return cls([*(folder.path for folder in dataset.folders), *dataset.linked_folders])

    def allow_file(self, path: Path) -> bool:
        """Return whether a file may be read: not a link, or an allowed one. Costs one lstat."""
        return not path.is_symlink() or self.allow(path)

    def allow(self, path: Path) -> bool:
        """Return whether a link, or a folder that may be one (Windows junctions), leads into an allowed folder."""
        target = _real(str(path))
        if any(target == folder or target.startswith(folder.rstrip(os.sep) + os.sep) for folder in self._folders):
            return True
        self.refused.add(path)
        return False


def _real(path: str) -> str:
    return os.path.normcase(os.path.realpath(path))
