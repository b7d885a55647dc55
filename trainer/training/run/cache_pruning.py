"""Deletion of cached images and texts that no resumable run needs, on request or above a limit."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
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
from trainer.training.reporting.reporter import Reporter

# A finished run can be extended, but then it encodes its missing entries from the images, as a new run does.
_NO_RESUME = ("new", "done")
# Temporary files older than this were left by a killed process; younger ones may still be in use.
_ORPHAN_AGE_NS = 24 * 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Pruned:
    """Numbers of deleted and remaining cache entries and bytes; in a dry run, nothing has been deleted yet."""

    deleted: int
    deleted_bytes: int
    kept: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    """Path of the file; a `Path` takes several times the memory, and there are hundreds of thousands of entries."""
    bytes: int
    used: int
    """Unix time in nanoseconds at which the entry was last written or verified."""


def prune(*, dry_run: bool = False) -> Pruned:
    """Delete every entry that no resumable run in this user's list needs.

    Raises RunError, and deletes nothing, if it cannot be determined what a run needs. A run that is just starting may
    lose an entry that it has already found; it then pauses, and encodes the entry again when resumed.
    """
    folder = places.cache_folder()
    needed = _needed(folder)
    deleted, deleted_bytes, kept, kept_bytes = 0, 0, 0, 0
    for entry in chain(_entries(folder), _orphans(folder)):
        if entry.path in needed:
            kept, kept_bytes = kept + 1, kept_bytes + entry.bytes
        else:
            deleted, deleted_bytes = deleted + 1, deleted_bytes + entry.bytes
            if not dry_run:
                _delete(entry)
    return Pruned(deleted, deleted_bytes, kept, kept_bytes)


def trim(limit: int) -> Pruned | None:
    """Delete the least recently used entries until the rest fits in ``limit`` bytes.

    Returns None if everything fits already. Entries that resumable runs need are kept, even above the limit.
    Raises RunError like `prune`. Costs a stat call for each entry; determining what the runs need costs more and is
    done only above the limit.
    """
    folder = places.cache_folder()
    entries = list(_entries(folder))
    excess = sum(entry.bytes for entry in entries) - limit
    if excess <= 0:
        return None
    needed = _needed(folder)
    chosen: list[_Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.used):
        if excess > 0 and entry.path not in needed:
            chosen.append(entry)
            excess -= entry.bytes
            _delete(entry)
    return _counted(chosen, set(entries).difference(chosen))


def trim_and_report(reporter: Reporter) -> None:
    """Trim the cache to the user's limit and report what was deleted; a failure does not stop the run."""
    limit = places.cache_limit()
    try:
        pruned = trim(limit)
    except RunError as error:
        reporter.notice("cache.untrimmed", f"The cache is above its limit of {_gigabytes(limit)}. {error.sentence}")
        return
    if pruned and pruned.deleted:
        entries = "entry" if pruned.deleted == 1 else "entries"
        deleted = f"deleted {pruned.deleted:,} least recently used {entries} ({_gigabytes(pruned.deleted_bytes)})"
        reporter.notice("cache.trimmed", f"The cache was above its limit of {_gigabytes(limit)}: {deleted}.")
    if pruned and pruned.kept_bytes > limit:
        need = (
            f"Resumable runs need {_gigabytes(pruned.kept_bytes)} of cache, more than the limit of {_gigabytes(limit)}"
        )
        reporter.notice("cache.above_limit", f"{need}. Finish or delete some of these runs.")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


def _counted(deleted: Collection[_Entry], kept: Collection[_Entry]) -> Pruned:
    return Pruned(len(deleted), sum(one.bytes for one in deleted), len(kept), sum(one.bytes for one in kept))


def _entries(folder: Path) -> Iterator[_Entry]:
    """Yield all entries; a folder is listed before its entries are yielded, so that the caller may delete them."""
    for inner in folder.glob("*/??"):
        yield from [entry for path in inner.glob("*.safetensors") if (entry := _entry(path))]


def _entry(path: Path) -> _Entry | None:
    """Return the entry in a file, or None if another process has just deleted it."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return _Entry(str(path), facts.st_size, facts.st_mtime_ns)


def _delete(entry: _Entry) -> None:
    with suppress(OSError):  # Windows refuses while another process has the file open; the next call deletes it
        Path(entry.path).unlink(missing_ok=True)


def _needed(folder: Path) -> set[str]:
    """Return the paths of all entries that resumable runs need; raises RunError."""
    runs = (RunDirectory.open(path) for path in known_runs())
    return {path for run in runs if run.state() not in _NO_RESUME for path in _needed_by(run, folder)}


def _needed_by(run: RunDirectory, folder: Path) -> set[str]:
    try:
        return set(map(str, entries_of(run, folder)))
    except ImpastoError as error:
        raise RunError(
            "prune.unknown_need",
            f'Could not determine which cache entries the run "{run.name}" still needs: {error.sentence}',
            f"{error.remedy} Or delete {run.path} if you will never resume it.",
        ) from error


def entries_of(run: RunDirectory, folder: Path) -> Iterator[Path]:
    """Yield the paths of all cache entries of a run; raises ImpastoError like `resume`."""
    job = load_job(run.job)
    images = read_listing(run.listing)
    source = open_base(job.base, None)
    parts = build_parts(job, images, source, folder)
    texts = set(Previewer(job, source, parts.cache, run.samples).texts())
    batches = (parts.batches.batch(step) for step in range(job.recipe.steps or 0))
    # Samples are not kept: those of a long run on many images would take gigabytes.
    for sample in chain(Validator(images, job, parts.collator, parts.device).samples, chain.from_iterable(batches)):
        texts.add(sample.caption)
        yield parts.cache.latent_store.path(parts.cache.image_key(sample))
    yield from (parts.cache.texts.path(parts.cache.text_key(text)) for text in texts)


def _orphans(folder: Path) -> Iterator[_Entry]:
    oldest = time.time_ns() - _ORPHAN_AGE_NS
    found = (_entry(path) for path in folder.glob("*/??/.impasto-*.tmp"))
    return (entry for entry in found if entry and entry.used < oldest)
