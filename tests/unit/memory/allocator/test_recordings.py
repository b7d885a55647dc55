"""The model against recordings of the real allocator: every segment it takes or returns, every address, every peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.recordings import (
    Comparison,
    Recording,
    compare,
    compare_played,
    read_recording,
    recording_of,
    start_state,
    write_recording,
)
from trainer.memory.allocator import allocator
from trainer.memory.allocator.allocator import MIB
from trainer.memory.allocator.blocks import PoolName
from trainer.memory.allocator.settings import AllocatorSettings

FOLDER = ROOT / "tests" / "golden" / "allocator"
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


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_loop_that_forecasts_go_through_does_what_single_calls_do(name: str) -> None:
    recording = RECORDINGS[name]
    single, played = compare(recording), compare_played(recording)
    assert played.wrong == []
    assert played.end == single.end
    assert played.allocations == single.allocations
    assert (played.peak_reserved, played.peak_allocated) == (single.peak_reserved, single.peak_allocated)


def test_the_recordings_show_what_they_are_there_for() -> None:
    assert opened(RECORDINGS["growing"]) == 7
    assert opened(RECORDINGS["emptied"]) == 471
    assert sum(event.kind == "segment_free" for event in RECORDINGS["emptied"].events) == 287


def with_fault(monkeypatch: pytest.MonkeyPatch, constant: str, value: object) -> dict[str, Comparison]:
    monkeypatch.setattr(allocator, constant, value)
    results = {name: compare(recording) for name, recording in RECORDINGS.items()}
    for name, recording in RECORDINGS.items():
        assert bool(compare_played(recording).wrong) == bool(results[name].wrong)
    return results


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
    class Unsplit(allocator.Pool):
        def __init__(self, name: PoolName, least_rest: int, page: int) -> None:
            super().__init__(name, least_rest if name == "small" else 2**40, page)

    results = with_fault(monkeypatch, "Pool", Unsplit)
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


# From snapshots as torch.cuda.memory._snapshot() gives them


def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": 1, "frames": []}


def segment(address: int, kind: str, *blocks: tuple[int, int, str]) -> dict[str, object]:
    parts = [{"size": size, "requested_size": asked, "state": state, "frames": []} for size, asked, state in blocks]
    total = sum(size for size, _, _ in blocks)
    return {"device": 0, "address": address, "total_size": total, "segment_type": kind, "stream": 0, "blocks": parts}


BASE = 0x7F0000000000
BEFORE: dict[str, Any] = {
    "segments": [segment(BASE, "large", (4 * MIB, 4 * MIB - 9, "active_allocated"), (16 * MIB, 0, "inactive"))],
    "device_traces": [[]],
}
AFTER: dict[str, Any] = {
    "segments": [
        segment(BASE, "large", (20 * MIB, 0, "inactive")),
        segment(BASE + 64 * MIB, "small", (1024, 1000, "active_allocated"), (2 * MIB - 1024, 0, "inactive")),
    ],
    "device_traces": [
        [
            entry("segment_alloc", BASE + 32 * MIB, 18 * MIB),
            entry("alloc", BASE + 32 * MIB, 17 * MIB),
            entry("free_requested", BASE + 32 * MIB, 17 * MIB),
            entry("free_completed", BASE + 32 * MIB, 17 * MIB),
            entry("free_requested", BASE, 4 * MIB - 9),
            entry("free_completed", BASE, 4 * MIB - 9),
            entry("snapshot", 0, 0),
            # 40 are not allowed: both free segments go, then the small one comes.
            entry("segment_free", BASE + 32 * MIB, 18 * MIB),
            entry("segment_free", BASE, 20 * MIB),
            entry("segment_alloc", BASE + 64 * MIB, 2 * MIB),
            entry("alloc", BASE + 64 * MIB, 1000),
            {"action": "oom", "device_free": 5, "size": 50 * MIB, "stream": 0},
        ]
    ],
}
CAPPED = AllocatorSettings(capacity=39 * MIB)
PEAKS = {"peak_reserved": 38 * MIB, "peak_allocated": 22 * MIB, "retries": 2}


def after_without_large() -> dict[str, Any]:
    return {**AFTER, "segments": [AFTER["segments"][1]]}


def test_a_snapshot_becomes_a_recording_that_the_model_replays(tmp_path: Path) -> None:
    path = tmp_path / "made.json.gz"
    write_recording(path, recording_of(BEFORE, after_without_large(), CAPPED, PEAKS))
    recording = read_recording(path)
    assert [event.kind for event in recording.events][:4] == ["segment_alloc", "alloc", "free", "free"]
    assert recording.events[0] == ("segment_alloc", 32 * MIB, 18 * MIB)
    assert recording.settings == CAPPED
    assert recording.start.segments[0].blocks[0].requested == 4 * MIB - 9
    for result in (compare_played(recording), compare(recording)):
        assert result.wrong == []
        assert (result.peak_reserved, result.peak_allocated, result.retries) == (38 * MIB, 22 * MIB, 2)
    assert result.same_address == result.allocations == 2


def test_a_history_that_begins_late_or_has_two_streams_is_refused() -> None:
    late = {**AFTER, "segments": BEFORE["segments"]}
    with pytest.raises(ValueError, match="does not lead"):
        recording_of(BEFORE, late, CAPPED, PEAKS)
    two = {**after_without_large(), "device_traces": [[*AFTER["device_traces"][0], entry("alloc", BASE, 5, stream=7)]]}
    with pytest.raises(ValueError, match="2 streams"):
        recording_of(BEFORE, two, CAPPED, PEAKS)


def test_settings_told_as_text_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "made.json.gz"
    made = recording_of(BEFORE, after_without_large(), CAPPED, PEAKS)
    write_recording(path, {**made, "settings": "max_split_size_mb:64"})
    assert read_recording(path).settings == AllocatorSettings(max_split_size=64 * MIB)
    several = AllocatorSettings(roundup_power2_divisions=(0, 2))
    write_recording(path, recording_of(BEFORE, after_without_large(), several, PEAKS))
    assert read_recording(path).settings == several


def test_expandable_segments_are_compared_by_what_is_mapped(tmp_path: Path) -> None:
    large, small = BASE, BASE + 2**40
    events = [
        entry("segment_map", large, 20 * MIB),
        entry("alloc", large, 15 * MIB),
        entry("segment_map", small, 2 * MIB),
        entry("alloc", small, 10),
        entry("segment_map", large + 20 * MIB, 20 * MIB),
        entry("alloc", large + 15 * MIB, 22 * MIB),
        entry("free_completed", large + 15 * MIB, 22 * MIB),
        entry("segment_unmap", large + 20 * MIB, 20 * MIB),
        entry("free_completed", large, 15 * MIB),
        entry("free_completed", small, 10),
    ]
    settings = AllocatorSettings(expandable=True)
    peaks = {"peak_reserved": 42 * MIB, "peak_allocated": 37 * MIB + 512, "retries": 0}
    empty: dict[str, Any] = {"segments": [], "device_traces": [[]]}
    path = tmp_path / "made.json.gz"
    write_recording(path, recording_of(empty, {"segments": [], "device_traces": [events]}, settings, peaks))
    result = compare(read_recording(path))
    assert result.wrong == []
    assert (result.peak_reserved, result.peak_allocated) == (42 * MIB, 37 * MIB + 512)
    assert result.same_address == result.allocations == 3
    wrong = [entry("segment_map", large, 40 * MIB), *events[1:4], *events[5:]]
    write_recording(path, recording_of(empty, {"segments": [], "device_traces": [wrong]}, settings, peaks))
    assert compare(read_recording(path)).wrong
