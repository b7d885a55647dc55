"""Deletes cached pictures and texts that no resumable run needs any more: when asked, or above a limit."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.base.source import open_base
from trainer.config.load import load_job
from trainer.dataset.dataset import read_listing
from trainer.errors import ImpastoError, RunError
from trainer.protocol import places
from trainer.protocol.run_directory import RunDirectory, known_runs
from trainer.training.build import build_parts
from trainer.training.callbacks.preview import Previewer
from trainer.training.callbacks.validation import Validator
from trainer.training.data.latent_cache import Cache
from trainer.training.reporting.reporter import Reporter

# A finished run can be extended too, but then encodes what it lacks from its pictures, as a new run does.
_OVER = ("new", "done")
# What a killed writer left is as old as that; what somebody is writing now is younger.
_STRAY_NS = 24 * 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was, or would be, deleted, and what stays, in entries and bytes."""

    deleted: int
    deleted_bytes: int
    kept: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    bytes: int
    used: int
    """When it was last made or found sound, in nanoseconds."""


def prune(*, dry_run: bool = False) -> Pruned:
    """Delete every entry that no resumable run of this user's list needs.

    Raises RunError when it cannot be found out what a run needs: then nothing is deleted. A run that starts in the
    very moment may find an entry gone that it had just seen; it then pauses and makes the entry anew when resumed.
    """
    folder = places.cache_folder()
    needed = _needed(folder)
    entries = _entries(folder)
    unneeded = [entry for entry in entries if entry.path not in needed] + list(_strays(folder))
    if not dry_run:
        _delete(unneeded)
    return _counted(unneeded, [entry for entry in entries if entry.path in needed])


def trim(limit: int) -> Pruned | None:
    """Delete the entries unused for longest while all take more than ``limit`` bytes; None where they do not.

    Entries that resumable runs need stay, whatever they take. Raises RunError like `prune`; costs a look at every
    entry, and only above the limit what it takes to list what the runs need.
    """
    folder = places.cache_folder()
    entries = _entries(folder)
    excess = sum(entry.bytes for entry in entries) - limit
    if excess <= 0:
        return None
    needed = _needed(folder)
    chosen: list[_Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.used):
        if excess > 0 and entry.path not in needed:
            chosen.append(entry)
            excess -= entry.bytes
    _delete(chosen)
    return _counted(chosen, set(entries).difference(chosen))


def tell_trimmed(reporter: Reporter) -> None:
    """Trim the cache to the user's limit and say so; that it cannot be done stops no run."""
    limit = places.cache_limit()
    try:
        pruned = trim(limit)
    except RunError as error:
        reporter.notice("cache.untrimmed", f"The cache is above its limit of {_gigabytes(limit)}. {error.sentence}")
        return
    if pruned and pruned.deleted:
        made = f"{pruned.deleted:,} entries unused for longest were deleted ({_gigabytes(pruned.deleted_bytes)})"
        reporter.notice("cache.trimmed", f"The cache was above its limit of {_gigabytes(limit)}: {made}.")
    if pruned and pruned.kept_bytes > limit:
        sentence = f"Resumable runs need {_gigabytes(pruned.kept_bytes)} of the cache, above its limit of"
        reporter.notice("cache.above_limit", f"{sentence} {_gigabytes(limit)}: finish or delete some of them.")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


def _counted(deleted: Collection[_Entry], kept: Collection[_Entry]) -> Pruned:
    return Pruned(len(deleted), sum(one.bytes for one in deleted), len(kept), sum(one.bytes for one in kept))


def _entries(folder: Path) -> list[_Entry]:
    return [entry for path in folder.glob("*/??/*.safetensors") if (entry := _entry(path))]


def _entry(path: Path) -> _Entry | None:
    """Look at a file; None when another process has just deleted it."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return _Entry(path, facts.st_size, facts.st_mtime_ns)


def _delete(entries: Iterable[_Entry]) -> None:
    for entry in entries:
        with suppress(OSError):  # Windows keeps what another process has open: the next time, then
            entry.path.unlink(missing_ok=True)


def _needed(folder: Path) -> set[Path]:
    """Where the entries lie that resumable runs need; raises RunError."""
    runs = (RunDirectory.open(path) for path in known_runs())
    return {path for run in runs if run.state() not in _OVER for path in _asked(run, folder)}


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


def _strays(folder: Path) -> Iterator[_Entry]:
    oldest = time.time_ns() - _STRAY_NS
    found = (_entry(path) for path in folder.glob("*/??/.impasto-*.tmp"))
    return (entry for entry in found if entry and entry.used < oldest)
