"""Deletes cached pictures and texts that no resumable run needs any more."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.base.source import open_base
from trainer.config.load import load_job
from trainer.dataset.listing import read_listing
from trainer.errors import ImpastoError, RunError
from trainer.protocol import places
from trainer.protocol.rundir import RunDirectory, known_runs
from trainer.training.build import build_parts
from trainer.training.cache import Cache
from trainer.training.preview import Previewer
from trainer.training.validation import Validator

# A finished run can be extended too, but then encodes what it lacks from its pictures, as a new run does.
_OVER = ("new", "done")
# What a killed writer left is as old as that; what somebody is writing now is younger.
_STRAY_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was, or would be, deleted, and how many entries stay."""

    deleted: int
    deleted_bytes: int
    kept: int


def prune(*, dry_run: bool = False) -> Pruned:
    """Delete every entry that no resumable run of this user's list needs.

    Raises RunError when it cannot be found out what a run needs: then nothing is deleted. A run that starts in the
    very moment may find an entry gone that it had just seen; it then pauses and makes the entry anew when resumed.
    """
    folder = places.cache_folder()
    needed = set[Path]()
    for path in known_runs():
        run = RunDirectory.open(path)
        if run.state() not in _OVER:
            needed |= _asked(run, folder)
    entries = set(folder.glob("*/??/*.safetensors"))
    unneeded = [*(entries - needed), *_strays(folder)]
    size = sum(path.stat().st_size for path in unneeded)
    if not dry_run:
        for path in unneeded:
            path.unlink(missing_ok=True)
    return Pruned(len(unneeded), size, len(entries & needed))


def _asked(run: RunDirectory, folder: Path) -> set[Path]:
    try:
        return set(entries_of(run, folder))
    except ImpastoError as error:
        raise RunError(
            "prune.unknown_need",
            f'What the run "{run.name}" still needs cannot be found out: {error.sentence}',
            f"{error.remedy} Or delete {run.path}, if it shall never be resumed.",
        ) from error


def entries_of(run: RunDirectory, folder: Path) -> Iterator[Path]:
    """Yield where the entries of a run lie, from its first step to its last; raises ImpastoError like `resume`."""
    job = load_job(run.job)
    pictures = read_listing(run.listing)
    source = open_base(job.base, None)
    parts = build_parts(job, pictures, source, folder)
    samples = [sample for step in range(job.recipe.steps or 0) for sample in parts.feed.batch(step)]
    samples += Validator(pictures, job, parts.assembler, parts.device).samples
    texts = (*Previewer(job, source, parts.cache, run.samples).texts(), *(sample.caption for sample in samples))
    yield from (parts.cache.pictures.path(parts.cache.picture_key(sample)) for sample in set(samples))
    yield from _text_entries(parts.cache, texts)


def _text_entries(cache: Cache, texts: Iterable[str]) -> Iterator[Path]:
    return (cache.texts.path(cache.text_key(text)) for text in dict.fromkeys(texts))


def _strays(folder: Path) -> Iterator[Path]:
    oldest = time.time() - _STRAY_SECONDS
    return (path for path in folder.glob("*/??/.impasto-*.tmp") if path.stat().st_mtime < oldest)
