"""A new job made of a run: the same base, pictures and recipe, as they are now."""

from __future__ import annotations

from pathlib import Path

from app.core.jobs.jobs import Jobs
from trainer.protocol.rundir import RunDirectory


def new_job(jobs: Jobs, run: RunDirectory) -> Path:
    """Write a job with what a run was to learn and return its file; how it is made to fit is planned anew.

    Raises JobError when the run's job cannot be read or the new one not be written.
    """
    from app.core.jobs.file import read_values

    values = read_values(run.job)
    values.pop("fit", None)
    values.get("output", {}).pop("runs", None)
    return jobs.create(values)
