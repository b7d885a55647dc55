"""A dataset as a whole: read and checked, and frozen as the listing (dataset.jsonl) that a run trains from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config.dataset import DatasetConfig
from trainer.config.recipe import RecipeConfig
from trainer.dataset.assembly import Assembler
from trainer.dataset.doubts import mark_pictures
from trainer.dataset.duplicates import alike
from trainer.dataset.facts import Progress, inspect_pictures
from trainer.dataset.findings import Finding
from trainer.dataset.folders import Imported, scan_folders
from trainer.dataset.health import by_severity, word_marks
from trainer.dataset.picture import Picture
from trainer.dataset.split import held_out
from trainer.errors import DatasetError
from trainer.protocol.atomic import write_text
from trainer.protocol.fields import build, to_record
from trainer.protocol.reading import UnusableFileError, decoded, parse_json, read_text, reason_of


@dataclass(frozen=True, slots=True)
class Dataset:
    """The pictures that can be used, validation ones included, and all that is wrong or doubtful."""

    pictures: tuple[Picture, ...]
    findings: tuple[Finding, ...]


def read_dataset(
    dataset: DatasetConfig, recipe: RecipeConfig, progress: Progress | None = None, imported: Imported | None = None
) -> Dataset:
    """Read and check all of a dataset: every picture is hashed and decoded once, then remembered while unchanged.

    `recipe.resolution` has to be resolved (it decides the buckets). `imported` holds captions by picture that came
    from another trainer's files. Faulty pictures are left out and reported as findings of severity "error"; only
    folders that are missing, unreadable or without pictures, and damaged impasto.jsonl files, raise DatasetError.
    """
    scan = scan_folders(dataset, imported or {})
    masks = [candidate.mask_path for candidate in scan.candidates if candidate.mask_path]
    inspected = inspect_pictures(
        [*(candidate.path for candidate in scan.candidates), *masks], dataset.max_megapixels, progress
    )
    assembler = Assembler(dataset, recipe, inspected, scan)
    made = [made for candidate in scan.candidates if (made := assembler.picture(candidate))]
    pictures = [picture for picture, _ in made]
    groups = alike([bytes.fromhex(facts.fingerprint) for _, facts in made])
    mark_pictures(pictures, groups, recipe, scan)
    split = _hold_out(pictures, groups, dataset)
    return Dataset(tuple(split), by_severity([*scan.findings, *word_marks(scan.marks)]))


def _hold_out(pictures: Sequence[Picture], groups: Iterable[Sequence[int]], dataset: DatasetConfig) -> list[Picture]:
    """Make some training pictures validation ones; a stated validation folder replaces the automatic share."""
    share = dataset.validation_share
    if share == "auto" and any(picture.kind == "validation" for picture in pictures):
        return list(pictures)
    trained = [place for place, picture in enumerate(pictures) if picture.kind == "train"]
    within = {place: rank for rank, place in enumerate(trained)}
    kin = [[within[place] for place in group if place in within] for group in groups]
    chosen = {trained[rank] for rank in held_out([pictures[place].id for place in trained], kin, share)}
    return [
        replace(picture, kind="validation") if place in chosen else picture for place, picture in enumerate(pictures)
    ]


def write_listing(path: Path, pictures: Iterable[Picture]) -> None:
    """Write the listing in one go: it is there whole or not at all."""
    write_text(path, "".join(_line(picture) + "\n" for picture in pictures))


def read_listing(path: Path) -> tuple[Picture, ...]:
    """Return the pictures of a listing exactly as they were written.

    Raises DatasetError when the file is missing or damaged.
    """
    try:
        lines = read_text(path, "listing").split("\n")
        return tuple(decoded(parse_json(line, path), _picture, path) for line in lines if line)
    except (OSError, UnusableFileError) as fault:
        raise DatasetError(
            "listing.damaged",
            f"Could not read the run's list of images {path}: {reason_of(fault)}.",
            "Restore the file from a backup, or start the job as a new run.",
        ) from fault


def _line(picture: Picture) -> str:
    # ASCII only: a file name on Linux need not be valid Unicode, and must survive.
    return json.dumps(to_record(picture), default=str)


def _picture(facts: Mapping[str, Any]) -> Picture:
    crop, mask_path = facts["crop"], facts["mask_path"]
    typed = {
        "path": Path(facts["path"]),
        "captions": tuple(facts["captions"]),
        "mask_path": None if mask_path is None else Path(mask_path),
        "crop": None if crop is None else tuple(crop),
        "bucket": tuple(facts["bucket"]),
    }
    return build(Picture, {**facts, **typed})
