"""A new job made of a run: the same base, pictures and recipe, as they are now."""

from __future__ import annotations

from pathlib import Path

from app.core.jobs.jobs import write_new
from trainer.protocol.run_directory import RunDirectory


def new_job(jobs: Path, run: RunDirectory) -> Path:
    """Write a job with what a run was to learn into the folder of jobs, and return its file; on a worker.

    How it is made to fit is planned anew. Raises JobError when the run's job cannot be read or the new one not be
    written.
    """
    from app.core.jobs.file import read_values

    values = read_values(run.job)
    values.pop("fit", None)
    values.get("output", {}).pop("runs", None)
    return write_new(jobs, values)
