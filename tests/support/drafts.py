"""Job files, and jobs opened without a session's list of them."""

from __future__ import annotations

import errno
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from app.core.jobs.draft import Draft
from app.core.jobs.job_file import read_values
from app.core.tasks import Tasks

BARE = """# an artist's own words
schema = 3
name = "höhle"
[base]
model = "owner/name"
[[dataset.folders]]
path = "pictures of cats"
trigger = "sks"
[recipe]
rank = 8
steps = 100
[recipe.optimizer]
name = "prodigy"
d_coef = 2.0
"""


def opened(path: Path, tasks: Tasks) -> Draft:
    """Open a job file."""
    return Draft(path, read_values(path), tasks)


def write_bare(folder: Path) -> Path:
    """Write a minimal job as people do, and return its file."""
    path = folder / "bilder ü" / "job.toml"
    path.parent.mkdir()
    path.write_text(BARE, encoding="utf-8")
    return path


def on_disk(path: Path) -> dict[str, Any]:
    """Return the contents of a job file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def refuse_writing(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int = errno.EROFS) -> None:
    """Make a folder refuse writes like a read-only one, whichever user runs the tests."""
    replace = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if Path(target).parent == folder:
            raise OSError(number, os.strerror(number))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
