"""The cache's limit: what is unused for longest goes first, and what resumable runs need stays."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path
from typing import Literal

import pytest

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from tests.train.dataset.test_cache import prepared, quiet, showings
from tests.train.training.run.test_run import Watcher, run_of, stop_at, tensors_sha, train
from trainer.errors import RunError
from trainer.protocol import events, places
from trainer.protocol.run_directory import RunDirectory, State, Status
from trainer.training.reporting.reporter import Reporter
from trainer.training.run.cache_pruning import prune, trim, trim_and_report
from trainer.training.run.resume import resume
from trainer.training.run.start import start

QUICK = ["report.previews.prompts=[]", "recipe.layers=attention"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(
        tmp_path / "job", tiny_base("sd15", tmp_path / "bases", depth=1), photographs(tmp_path / "pictures", count=3)
    )


def entry(number: int, size: int = 1000) -> Path:
    """An entry of no run, used longer ago the lower its number."""
    path = places.cache_folder() / "pictures" / "ab" / f"{number:064x}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (1e6 - number, number))  # the time of access says the contrary
    return path


def entries() -> set[Path]:
    return set(places.cache_folder().glob("*/??/*.safetensors"))


def notices(watcher: Watcher) -> dict[str, str]:
    return {event.code: event.sentence for event in watcher.seen if isinstance(event, events.Notice)}


def lost_run(job: Path, state: State | Literal["new"] = "running") -> RunDirectory:
    """A run of whose base nothing is left, so that nobody can tell what it needs."""
    run = RunDirectory.create(job.parent / "runs", "lost")
    if state != "new":
        run.begin_attempt({})
        run.write_status(Status(state, None, 3, 6, 1, time.time()))
    text = job.read_text(encoding="utf-8")
    run.job.write_text(text.replace("tiny-sd15", "gone"), encoding="utf-8")
    run.listing.write_text("", encoding="utf-8")
    return run


def test_below_the_limit_nothing_is_looked_at_closer(job: Path) -> None:
    entry(1)
    lost_run(job)
    assert trim(1000) is None
    assert len(entries()) == 1


@pytest.mark.parametrize("limit", [2000, 2500])
def test_what_is_unused_for_longest_goes_until_the_rest_fits(limit: int) -> None:
    kept, newest = entry(3), entry(4)
    oldest, old = entry(1), entry(2)
    trimmed = trim(limit)
    assert trimmed is not None
    assert (trimmed.deleted, trimmed.deleted_bytes, trimmed.kept, trimmed.kept_bytes) == (2, 2000, 2, 2000)
    assert entries() == {kept, newest}
    assert not oldest.exists() and not old.exists()


def test_pruning_a_large_cache_takes_hardly_any_memory() -> None:
    """As much for 2,000 entries as for the 100 in one folder: of 200,000, all paths at once would take 137 MB."""
    for folder in range(20):
        inner = places.cache_folder() / "pictures" / f"{folder:02x}"
        inner.mkdir(parents=True)
        for number in range(100):
            (inner / f"{number:064x}.safetensors").touch()
    tracemalloc.start()
    assert prune(dry_run=True).deleted == 2000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2000 * 100


def test_what_cannot_be_deleted_stops_nothing() -> None:
    """A folder in an entry's place; on Windows it may be a file that another process has open."""
    kept, old = entry(3), entry(2)
    stuck = old.with_name(f"{1:064x}.safetensors")
    stuck.mkdir()
    os.utime(stuck, (1, 1))
    trim(1000)
    assert stuck.exists() and not old.exists() and kept.exists()


def told_when_trimming(limit: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("IMPASTO_CACHE_GB", limit)
    watcher = Watcher()
    trim_and_report(Reporter(watcher))
    return notices(watcher)


def test_only_what_was_done_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        entry(number, 2_000_000)
    assert told_when_trimming("0.004", monkeypatch) == {
        "cache.trimmed": "The cache was above its limit of 0.004 GB: deleted 1 least recently used entry (0.002 GB)."
    }
    assert told_when_trimming("0.004", monkeypatch) == {}


@pytest.mark.parametrize("state", ["new", "done", "running", "paused", "stopped", "failed"])
def test_only_a_run_that_is_over_or_never_began_needs_nothing(job: Path, state: State | Literal["new"]) -> None:
    """Nobody can tell what this one needs: deleting is refused where it needs anything."""
    stray, _ = entry(1), lost_run(job, state)
    if state in ("new", "done"):
        assert prune().deleted == 1
    else:
        with pytest.raises(RunError, match="lost"):
            prune()
        assert stray.exists()


def test_an_entry_found_sound_counts_as_used(tmp_path: Path) -> None:
    job, pictures, parts = prepared(tmp_path)
    sample = next(showings(job, pictures, 1))
    path = parts.cache.latent_store.path(parts.cache.image_key(sample))
    parts.cache.ensure_latents([sample], quiet)
    os.utime(path, (1, 1))
    parts.cache.ensure_latents([sample], quiet)
    assert path.stat().st_mtime > 1e9


def test_a_cache_that_may_only_be_read_serves_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is made where the system's call fails, since root may do everything."""
    job, pictures, parts = prepared(tmp_path)
    sample = next(showings(job, pictures, 1))
    parts.cache.ensure_latents([sample], quiet)

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "utime", refuse)
    parts.cache.ensure_latents([sample], quiet)
    assert parts.cache.latents(sample)


def test_above_the_limit_a_run_trims_the_cache_but_not_what_runs_need(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(job, QUICK, Watcher(stop_at(3, job, "stop"))) == 75
    needed_by_the_stopped = entries()
    stray = entry(1)
    whole = train(job, ["name=whole", *QUICK, "recipe.images.flip=true"])
    assert stray.exists()

    monkeypatch.setenv("IMPASTO_CACHE_GB", "0")
    watcher = Watcher()
    assert start(job, ["name=again", *QUICK, "recipe.images.flip=true"], watcher) == 0
    told = notices(watcher)
    assert "1 least recently used entry" in told["cache.trimmed"] and not stray.exists()
    assert "Resumable runs need" in told["cache.above_limit"]
    assert tensors_sha(whole) == tensors_sha(run_of(job, name="again").output / "again.safetensors")
    assert needed_by_the_stopped <= entries()
    assert told_when_trimming("0", monkeypatch).keys() == {"cache.trimmed", "cache.above_limit"}  # of runs now done
    assert told_when_trimming("0", monkeypatch).keys() == {"cache.above_limit"}
    monkeypatch.delenv("IMPASTO_CACHE_GB")
    assert resume(run_of(job), Watcher()) == 0


def test_a_run_whose_need_is_unknown_keeps_the_cache_and_stops_nobody(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray, lost = entry(1), lost_run(job)
    monkeypatch.setenv("IMPASTO_CACHE_GB", "0")
    watcher = Watcher()
    assert start(job, QUICK, watcher) == 0
    assert 'Could not determine which cache entries the run "lost" still needs' in notices(watcher)["cache.untrimmed"]
    assert stray.exists() and lost.path.exists()
    with pytest.raises(RunError, match="lost"):
        trim(0)


def test_all_that_a_paused_run_has_made_is_needed_and_young_strays_are_left(job: Path) -> None:
    """Training, preview and validation: what it made so far it still needs, for steps done are not forgotten."""
    settings = ["recipe.layers=attention", "dataset.validation_share=0.34", "recipe.captions.shuffle=true"]
    assert start(job, settings, Watcher(stop_at(3, job))) == 75
    made = entries()
    young, old = (places.cache_folder() / "texts" / "ab" / f".impasto-{digit * 16}.tmp" for digit in "12")
    for stray in (young, old):
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"half of an entry")
    day = 24 * 3600
    os.utime(young, (0, time.time() - day + 600))
    os.utime(old, (0, time.time() - day - 600))
    assert prune(dry_run=True).deleted == 1 and old.exists()
    pruned = prune()
    assert (pruned.deleted, pruned.kept) == (1, len(made)) and entries() == made
    assert young.exists() and not old.exists()


def test_a_limit_that_is_no_number_is_refused_before_a_run_is_made(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMPASTO_CACHE_GB", "much")
    with pytest.raises(RunError, match="IMPASTO_CACHE_GB"):
        start(job, QUICK, Watcher())
    assert not (job.parent / "runs").exists()
