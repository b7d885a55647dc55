"""The demo as the tour uses it: a copy of its pictures, free to be edited, and its job among the user's."""

from __future__ import annotations

import shutil
from pathlib import Path

from app.core.jobs.jobs import FILE_NAME, write_new
from trainer.files.assets import asset_path
from trainer.protocol import files, places
from trainer.protocol.files import long_path
from trainer.protocol.reading import parse_toml, read_toml


def demo_pictures() -> Path:
    """Return the folder with the demo's pictures in the per-user folder; what the user changed there stays.

    Raises OSError where it cannot be written. Takes some milliseconds: 18 small files.
    """
    folder = places.home() / "demo" / "pictures"
    long_path(folder).mkdir(parents=True, exist_ok=True)
    for source in asset_path("demo", "pictures").iterdir():
        if not long_path(folder / source.name).exists():
            with files.staged(folder / source.name, durable=False) as target:
                shutil.copyfile(source, target)
    return folder


def demo_job(jobs: Path) -> Path:
    """Return the demo's job: that of an earlier tour as it is now, else a new one in the folder of jobs; on a worker.

    Raises JobError.
    """
    from trainer.config.write import demo_job as text  # brings the schema

    values = parse_toml(text(places.home() / "demo" / "pictures"))
    earlier = jobs.absolute() / str(values["name"]) / FILE_NAME
    return earlier if _is_whole(earlier) else write_new(jobs, values)


def _is_whole(job: Path) -> bool:
    """Tell whether a job can be read and its base is still there: Impasto may have been installed anew elsewhere."""
    try:
        return Path(read_toml(job, "text")["base"]["model"]).exists()
    except (OSError, ValueError, KeyError, TypeError):
        return False
