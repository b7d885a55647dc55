"""The tapes in assets/traces are those that this version would make; with other libraries they are merely not found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bench.ship_traces import INDEX, archive_name, noted_key, noted_subject, read_index
from trainer.files.assets import asset_path
from trainer.memory.outline import outline_of
from trainer.memory.packing import Archive
from trainer.memory.store import SUFFIX, TapeStore
from trainer.memory.subject import library_versions
from trainer.memory.traces import Traces

REMEDY = "run python -m tests.bench.ship_traces and commit assets/traces"


@pytest.fixture(scope="module")
def entries() -> Mapping[str, Mapping[str, Any]]:
    index = read_index(asset_path("traces"))
    if tuple(index["versions"]) != library_versions():
        pytest.skip("made with other versions of the libraries, so they are not found here")
    found: Mapping[str, Mapping[str, Any]] = index["entries"]
    return found


def test_every_shipped_file_is_in_the_index_and_all_of_them_are_small() -> None:
    folder = asset_path("traces")
    entries = read_index(folder)["entries"]
    assert {path.name for path in folder.glob(f"*{SUFFIX}")} == {archive_name(note) for note in entries.values()}
    for key, note in entries.items():
        assert key in Archive(folder / archive_name(note))
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8e6
    assert {path.name for path in folder.iterdir() if path.suffix != SUFFIX} == {INDEX, "README.md"}


def test_shipped_keys_are_those_that_are_asked_for(entries: Mapping[str, Mapping[str, Any]]) -> None:
    """A key holds all that its tapes depend on: when a recipe, a config or the form changes, others are asked for."""
    stale = [note for key, note in entries.items() if noted_key(note) != key]
    assert not stale, f"{len(stale)} of {len(entries)} are not asked for any more: {REMEDY}"


# Those that take little to trace again; between them they go through most of what is traced.
@pytest.mark.parametrize(
    ("family", "part", "fit"),
    [
        ("sd15", "steps", {"dtype": "bf16", "quantise": "none", "checkpointing": "none", "micro_batch": 1}),
        ("sd15", "preview", {"dtype": "bf16", "quantise": "none", "vae_tiling": True}),
        ("sdxl", "load", {"dtype": "bf16", "quantise": "none"}),
        ("sdxl", "cache_pictures", {}),
    ],
)
def test_tracing_again_gives_what_ships(
    entries: Mapping[str, Mapping[str, Any]], tmp_path: Path, family: str, part: str, fit: Mapping[str, Any]
) -> None:
    key, note = next(
        (key, note)
        for key, note in entries.items()
        if (note["family"], note["part"]) == (family, part) and fit.items() <= note["fit"].items()
    )
    shipped = TapeStore(tmp_path / "none", asset_path("traces")).load(key)
    subject, traces = noted_subject(note), Traces(TapeStore(tmp_path))
    if part == "steps":
        (width, height), pictures = note["more"]
        traces.steps(subject, (width, height), pictures)
    else:
        traces.phase(subject, note["part"])
    assert traces.made == [key]
    made = traces.store.load(key)
    assert made is not None
    assert shipped is not None
    for one, other in zip(made, shipped, strict=True):
        assert outline_of(one) == outline_of(other), REMEDY
        assert one.storages == other.storages, REMEDY
        assert one.events.tolist() == other.events.tolist(), REMEDY
