"""The frozen listing of a run, dataset.jsonl: one picture a line, complete, so that training reads nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.dataset.picture import Picture
from trainer.errors import DatasetError
from trainer.protocol.atomic import write_text


def write_listing(path: Path, pictures: Iterable[Picture]) -> None:
    """Write the listing in one go: it is there whole or not at all."""
    write_text(path, "".join(_line(picture) + "\n" for picture in pictures))


def read_listing(path: Path) -> tuple[Picture, ...]:
    """Return the pictures of a listing exactly as they were written.

    Raises DatasetError when the file is missing or damaged.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(_picture(json.loads(line)) for line in lines)
    except (OSError, ValueError, TypeError, LookupError) as fault:
        raise DatasetError(
            "listing.damaged",
            f"The run's list of pictures, {path}, cannot be read ({fault}).",
            "Restore the file from a backup, or start the job as a new run.",
        ) from fault


def _line(picture: Picture) -> str:
    return json.dumps(asdict(picture), ensure_ascii=False, default=str)


def _picture(facts: Mapping[str, Any]) -> Picture:
    crop, mask_path = facts["crop"], facts["mask_path"]
    decoded = {
        "path": Path(facts["path"]),
        "captions": tuple(facts["captions"]),
        "mask_path": None if mask_path is None else Path(mask_path),
        "crop": None if crop is None else tuple(crop),
        "bucket": tuple(facts["bucket"]),
    }
    return Picture(**{**facts, **decoded})
