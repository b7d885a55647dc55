"""Whether a run's pictures and captions were changed since it began: it trains from what it froze then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import DatasetError
from trainer.protocol.run_directory import RunDirectory

if TYPE_CHECKING:
    from trainer.config.job import Job


@dataclass(frozen=True, slots=True)
class Edited:
    """How many pictures are another matter now."""

    captions: int = 0
    """Whose captions are others."""
    added: int = 0
    removed: int = 0
    """Taken away, or excluded."""

    def __bool__(self) -> bool:
        """Whether anything was changed."""
        return bool(self.captions or self.added or self.removed)


def edited(run: RunDirectory, job: Job) -> Edited:
    """Compare a run's frozen listing with the folders of its dataset; opens no picture.

    A folder that is gone or cannot be read now tells nothing, and neither does a listing that is damaged.
    """
    from trainer.dataset.dataset import read_listing
    from trainer.dataset.folders import scan_folders

    try:
        frozen = {picture.path: picture.captions for picture in read_listing(run.listing)}
        now = {candidate.path: candidate.captions for candidate in scan_folders(job.dataset, {}).candidates}
    except DatasetError:
        return Edited()
    captions = sum(now[path] != texts for path, texts in frozen.items() if path in now)
    added = sum(_could_be_used(path, run) for path in now.keys() - frozen.keys())
    return Edited(captions, added, len(frozen.keys() - now.keys()))


def _could_be_used(picture: Path, run: RunDirectory) -> bool:
    """Whether a picture that the run does not have is newer than it; an older one was left out for a fault."""
    try:
        return picture.stat().st_mtime > run.listing.stat().st_mtime
    except OSError:
        return False
