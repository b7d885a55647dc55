"""Compare a finished run with the current state of its dataset, and its job with other jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.core.jobs.jobs import write_new
from trainer.config.job import Job
from trainer.config.resolve import flatten
from trainer.errors import DatasetError
from trainer.protocol.run_directory import RunDirectory

if TYPE_CHECKING:
    from trainer.config.job import Job

_SAME_MEANING = ("name",)
# The fit depends on the PC, not on the artist's choices: it changes results only by rounding, so it is listed apart.
_FIT_PREFIX = "fit."


@dataclass(frozen=True, slots=True)
class Edited:
    """Numbers of images changed, added or removed since a run started; the run does not use these changes."""

    captions: int = 0
    """Number of images whose captions changed."""
    added: int = 0
    removed: int = 0
    """Number of images that were deleted or excluded."""

    def __bool__(self) -> bool:
        """Return whether anything changed."""
        return bool(self.captions or self.added or self.removed)


def edited(run: RunDirectory, job: Job) -> Edited:
    """Compare a run's saved image list with its dataset folders, without opening images.

    Returns no changes if a folder is missing or unreadable, or the saved list is damaged.
    """
    from trainer.dataset.dataset import read_listing
    from trainer.dataset.folders import scan_folders

    try:
        frozen = {image.path: image.captions for image in read_listing(run.listing)}
        now = {candidate.path: candidate.captions for candidate in scan_folders(job.dataset, {}).candidates}
    except DatasetError:
        return Edited()
    captions = sum(now[path] != texts for path, texts in frozen.items() if path in now)
    added = sum(_is_newer(path, run) for path in now.keys() - frozen.keys())
    return Edited(captions, added, len(frozen.keys() - now.keys()))


def _is_newer(image: Path, run: RunDirectory) -> bool:
    """Return whether an image was added or modified after the run's image list was saved.

    An older image that is not in the list was not added later: the run skipped it as unusable.
    """
    try:
        facts = image.stat()
        # A copy keeps the modification date but has a new st_ctime: its creation on Windows, its last change elsewhere.
        return max(facts.st_mtime, facts.st_ctime) > run.listing.stat().st_mtime
    except OSError:
        return False


def new_job(jobs: Path, run: RunDirectory) -> Path:
    """Create a job with a run's settings in the jobs folder and return its file; call it on a worker.

    Fit settings are left out, so they are planned again. Raises JobError if the run's job cannot be read or the new one
    cannot be written.
    """
    from app.core.jobs.job_file import read_values

    values = read_values(run.job)
    values.pop("fit", None)
    values.get("output", {}).pop("runs", None)
    return write_new(jobs, values)


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value differs between jobs, with one value per job (None if not set)."""

    key: str
    values: tuple[object, ...]
    fit: bool
    """Whether the key is part of the fit, which depends only on the PC."""


def differences(jobs: Sequence[Job]) -> list[Difference]:
    """Return the keys whose values differ between jobs, in file order, with fit settings last."""
    tables = [dict(flatten(job.model_dump(mode="json", by_alias=True), "")) for job in jobs]
    keys = dict.fromkeys(key for table in tables for key in table)
    found = [
        Difference(key, values, key.startswith(_FIT_PREFIX))
        for key in keys
        if key not in _SAME_MEANING and not _equal(values := tuple(table.get(key) for table in tables))
    ]
    return sorted(found, key=lambda difference: difference.fit)


def _equal(values: tuple[object, ...]) -> bool:
    return all(value == values[0] for value in values)
