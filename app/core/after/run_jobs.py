"""Whether a run's pictures and captions were changed since it began: it trains from what it froze then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.core.jobs.jobs import write_new
from trainer.config.job import Job
from trainer.config.resolve import flat
from trainer.errors import DatasetError
from trainer.protocol.run_directory import RunDirectory

if TYPE_CHECKING:
    from trainer.config.job import Job

_SAME_MEANING = ("name",)
# What a machine, not an artist, decided; it is told apart because it changes no result beyond rounding.
_OF_THE_MACHINE = "fit."


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


def new_job(jobs: Path, run: RunDirectory) -> Path:
    """Write a job with what a run was to learn into the folder of jobs, and return its file; on a worker.

    How it is made to fit is planned anew. Raises JobError when the run's job cannot be read or the new one not be
    written.
    """
    from app.core.jobs.job_file import read_values

    values = read_values(run.job)
    values.pop("fit", None)
    values.get("output", {}).pop("runs", None)
    return write_new(jobs, values)


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose values are not all the same; a value that a job does not have is None."""

    key: str
    values: tuple[object, ...]
    fit: bool
    """Whether it only says how the run was made to fit its machine."""


def differences(jobs: Sequence[Job]) -> list[Difference]:
    """Return the keys in which jobs differ, in the order of the file, those of the fit last."""
    tables = [dict(flat(job.model_dump(mode="json", by_alias=True), "")) for job in jobs]
    keys = dict.fromkeys(key for table in tables for key in table)
    found = [
        Difference(key, values, key.startswith(_OF_THE_MACHINE))
        for key in keys
        if key not in _SAME_MEANING and not _equal(values := tuple(table.get(key) for table in tables))
    ]
    return sorted(found, key=lambda difference: difference.fit)


def _equal(values: tuple[object, ...]) -> bool:
    return all(value == values[0] for value in values)
