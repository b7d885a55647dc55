"""Memory snapshots of whole runs, read with PyTorch's own functions."""

from __future__ import annotations

import pickle
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.emulated_gpu.machine import EmulatedGpu
from tests.emulated_gpu.test_training import LARGE_STEP, events

# What the viewer's own unpickler reads (torch/utils/viz/MemoryViz.js).
READABLE = """
PROTO APPEND APPENDS LIST TUPLE NEWFALSE NEWTRUE NONE BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST FRAME LONG1
LONG_BINGET MARK MEMOIZE BINPUT LONG_BINPUT SETITEMS SETITEM DICT SHORT_BINUNICODE BINUNICODE STOP EMPTY_TUPLE TUPLE1
TUPLE2 TUPLE3 BINFLOAT
"""
# Folders of this computer as they would begin: an absolute path on Linux with at least two levels.
ABSOLUTE = re.compile(rb"(?<![\w.>-])/(?:home|root|usr|tmp|work|opt|var|mnt)/")


def read(file: Path) -> dict[str, Any]:
    """Return a snapshot after checking that the viewer can read it and that it names no folder of this computer."""
    raw = file.read_bytes()
    assert {code.name for code, _, _ in pickletools.genops(raw)} <= set(READABLE.split())
    assert not ABSOLUTE.findall(raw)
    snapshot: dict[str, Any] = pickle.loads(raw)
    return snapshot


def categories(snapshot: dict[str, Any]) -> set[str]:
    """Return the phases in which memory was allocated."""
    return {event["category"] for event in snapshot["device_traces"][0]}


def test_snapshots_show_each_phase_and_the_shortage(emulated_gpu: EmulatedGpu, tiny_job: Callable[..., Path]) -> None:
    from torch.cuda import _memory_viz

    job = tiny_job("sd15")
    text = job.read_text(encoding="utf-8")
    job.write_text(text[: text.index("[recipe]")] + LARGE_STEP, encoding="utf-8")
    run = job.parent / "runs" / "test"
    emulated_gpu.fill_when(run / "events.jsonl", "cache_texts", leave_mib=45)
    done = emulated_gpu.trainer("train", job, "--memory-snapshot")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Wrote the memory snapshot memory-snapshot-first-steps.pickle" in done.stdout

    loaded = read(run / "memory-snapshot-load.pickle")
    assert categories(loaded) == {"unknown", "cache_pictures", "cache_texts", "load"}
    marks = [mark["name"] for mark in loaded["external_annotations"] if mark["stage"] == "START"]
    assert marks[:3] == ["cache_pictures", "cache_texts", "load"]
    stacks = {frame["filename"] for event in loaded["device_traces"][0] for frame in event.get("frames", ())}
    assert "trainer/base/weights.py" in stacks
    assert "torch/nn/modules/conv.py" in stacks

    first = read(run / "memory-snapshot-first-steps.pickle")
    assert {"first_step", "train", "unknown"} <= categories(first)
    counted = max(event["allocated"] for event in events(run) if event["type"] == "phase_memory")
    # A trace has the sizes that were requested; PyTorch's counters have those of the blocks.
    assert 0.98 * counted < highest(first["device_traces"][0]) <= counted

    shortage = read(run / "memory-snapshot-out-of-memory.pickle")
    (exhausted,) = [event for event in shortage["device_traces"][0] if event["action"] == "oom"][-1:]
    assert exhausted["category"] == "first_step"

    end = read(run / "memory-snapshot-end.pickle")
    assert "pickle" in _memory_viz.trace_plot(end)
    assert "total_allocated" in _memory_viz.segsum(end)


def highest(trace: list[dict[str, Any]]) -> int:
    """Return the most bytes that were requested at once, in a trace that begins on an empty GPU."""
    live = most = 0
    for event in trace:
        live += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        most = max(most, live)
    return most
