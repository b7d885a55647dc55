"""The model against recordings of the real allocator: every segment it takes or returns, every address, every peak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recordings import Comparison, Recording, compare, read_recording, start_state
from trainer.memory import allocator as model
from trainer.memory.allocator import MIB
from trainer.memory.snapshot import PoolName

FOLDER = Path(__file__).parents[1] / "golden" / "allocator"
RECORDINGS = {path.name.removesuffix(".json.gz"): read_recording(path) for path in sorted(FOLDER.glob("*.json.gz"))}


def opened(recording: Recording) -> int:
    return sum(event.kind == "segment_alloc" for event in recording.events)


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_decision_and_the_peak_are_those_of_the_real_allocator(name: str) -> None:
    recording = RECORDINGS[name]
    result = compare(recording)
    assert result.wrong == []
    assert result.peak_reserved == recording.peak_reserved
    assert result.same_address == result.allocations > 1000
    if recording.peak_allocated is not None:
        assert (result.peak_allocated, result.retries) == (recording.peak_allocated, recording.retries)


def test_the_recordings_show_what_they_are_there_for() -> None:
    assert opened(RECORDINGS["growing"]) == 7
    assert opened(RECORDINGS["emptied"]) == 471
    assert sum(event.kind == "segment_free" for event in RECORDINGS["emptied"].events) == 287


def with_fault(monkeypatch: pytest.MonkeyPatch, constant: str, value: object) -> dict[str, Comparison]:
    monkeypatch.setattr(model, constant, value)
    return {name: compare(recording) for name, recording in RECORDINGS.items()}


def test_a_wrong_pool_limit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    results = with_fault(monkeypatch, "LARGEST_SMALL", 2 * MIB)
    assert len(results["growing"].wrong) > 10
    assert results["unknown_sizes"].same_address < results["unknown_sizes"].allocations


@pytest.mark.parametrize(("constant", "value"), [("SEGMENT_OF_ITS_OWN", 4 * MIB), ("SMALL_SEGMENT", 4 * MIB)])
def test_a_wrong_segment_size_is_seen(monkeypatch: pytest.MonkeyPatch, constant: str, value: int) -> None:
    results = with_fault(monkeypatch, constant, value)
    assert results["growing"].wrong
    assert results["emptied"].wrong


def test_never_splitting_large_blocks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unsplit(model._Pool):
        def __init__(self, name: PoolName, least_rest: int, page: int) -> None:
            super().__init__(name, least_rest if name == "small" else 2**40, page)

    results = with_fault(monkeypatch, "_Pool", Unsplit)
    for name in ("unknown_sizes", "growing"):
        assert results[name].peak_reserved > 1.2 * RECORDINGS[name].peak_reserved


def test_block_sizes_that_were_not_recorded_are_derived() -> None:
    small, large = (0, 2 * MIB, "small"), (4 * MIB, 20 * MIB, "large")
    blocks = [
        (0, None, 100),
        (1024, None, 512),
        (4 * MIB, None, 3 * MIB),  # half a mebibyte to the next: it could not be split off
        (4 * MIB + 7 * MIB // 2, None, 2 * MIB),
    ]
    start = start_state([large, small], blocks)
    assert [[(block.bytes, block.requested) for block in segment.blocks] for segment in start.segments] == [
        [(512, 100), (512, None), (512, 512), (2 * MIB - 1536, None)],
        [(7 * MIB // 2, 3 * MIB), (2 * MIB, 2 * MIB), (29 * MIB // 2, None)],
    ]
