"""Jobs opened without the list that a session keeps of them."""

from __future__ import annotations

from pathlib import Path

from app.core.jobs.draft import Draft
from app.core.jobs.file import read_values
from app.core.tasks import Tasks


def opened(path: Path, tasks: Tasks) -> Draft:
    """Open a job file."""
    return Draft(path, read_values(path), tasks)
