"""Replay a folder of allocator recordings through the model and report how many decisions match those of the GPU.

    python -m tests.benchmarks.replay_recordings FOLDER

Recordings are replayed allocation by allocation, and by the loop that forecasts use, which must give the same. A
decision is what an allocation requests from the driver (usually nothing), or what an emptied cache releases. Exits with
1 if a decision is wrong, a peak differs, or the two replays differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.recordings import Comparison, Recording, compare, compare_played, read_recording

MIB = 2**20


def main(folder: Path) -> int:
    """Print a line for each recording and one for all."""
    _say(f"{'recording':24} {'allocs':>7} {'segments':>8} {'decisions':>9} {'reserved MiB':>20} {'addresses':>9}")
    allocations = addresses = files = exact = 0
    for path in sorted(folder.glob("*.json.gz")):
        recording = read_recording(path)
        result, played = compare(recording), compare_played(recording)
        right = _is_right(recording, result) and _is_right(recording, played) and played.end == result.end
        opened = sum(event.kind == "segment_alloc" for event in recording.events)
        wrong = len(result.wrong) + len(played.wrong)
        decisions = f"{wrong} wrong" if wrong else "all"
        peaks = f"{recording.peak_reserved / MIB:.0f} / {result.peak_reserved / MIB:.0f}"
        share = result.same_address / max(result.allocations, 1)
        name = path.name.removesuffix(".json.gz")
        _say(f"{name:24} {result.allocations:7} {opened:8} {decisions:>9} {peaks:>20} {share:9.1%}")
        files, exact = files + 1, exact + right
        allocations, addresses = allocations + result.allocations, addresses + result.same_address
    share = addresses / max(allocations, 1)
    _say(f"{exact} of {files} exact; {allocations} allocations, {share:.2%} at the same address")
    return 0 if exact == files > 0 else 1


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _is_right(recording: Recording, result: Comparison) -> bool:
    return not result.wrong and (recording.peak_reserved, recording.peak_allocated, recording.retries) == (
        result.peak_reserved,
        recording.peak_allocated and result.peak_allocated,
        recording.retries if recording.retries is None else result.retries,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
