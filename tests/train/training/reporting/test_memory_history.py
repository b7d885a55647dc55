"""What a memory snapshot shows and leaves out; whole snapshots are tested on the emulated GPU."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer
from trainer.protocol import events
from trainer.protocol.run_directory import RunDirectory
from trainer.training.reporting.memory_history import (
    MemoryHistory,
    relative_file,
    start_history,
    with_categories,
    without_paths,
)
from trainer.training.reporting.reporter import Reporter

LIBRARY = Path(sysconfig.get_path("purelib"))
PROGRAM = Path(trainer.__file__).parent


def mark(name: str, stage: str, time: int) -> dict[str, Any]:
    return {"name": name, "stage": stage, "time_us": time, "device": 0}


def alloc(time: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": "alloc", "addr": time, "size": 512, "time_us": time, "frames": list(frames)}


def frame(file: object, line: int = 1) -> dict[str, Any]:
    return {"filename": str(file), "line": line, "name": "work"}


def snapshot(*trace: dict[str, Any], marks: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"segments": [], "device_traces": [list(trace), []], "external_annotations": marks or []}


def test_events_have_the_phase_in_which_they_happened_as_category() -> None:
    marks = [
        mark("load", "START", 10),
        mark("load", "END", 20),
        mark("train", "START", 20),
        mark("Optimizer.step#AdamW.step", "START", 30),
        mark("Optimizer.step#AdamW.step", "END", 40),
        mark("train", "END", 50),
    ]
    found = with_categories(snapshot(*map(alloc, (5, 10, 19, 20, 35, 45, 60)), marks=marks))
    assert [event["category"] for event in found["device_traces"][0]] == [
        "unknown", "load", "load", "train", "train", "train", "unknown",
    ]  # fmt: skip


def test_a_snapshot_within_phases_still_has_the_category_that_the_viewer_needs() -> None:
    found = with_categories(snapshot(alloc(15), alloc(16), marks=[mark("load", "START", 10)]))
    assert [event["category"] for event in found["device_traces"][0]] == ["unknown", "load"]


def test_stacks_name_no_folder_of_this_computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    shared = frame(LIBRARY / "torch" / "nn" / "functional.py")
    frames = (shared, frame(PROGRAM / "training" / "step.py", 7), frame(Path.home() / "plans" / "secret.py"))
    frames += (frame(tmp_path / "site-packages" / "peft" / "layer.py"),)
    segment = {"frames": [frame("/opt/x/other.py")], "blocks": [{"frames": [shared]}]}
    found = without_paths({**snapshot(alloc(1, *frames), alloc(2, *frames)), "segments": [segment]})
    names = ["torch/nn/functional.py", "trainer/training/step.py", "secret.py", "peft/layer.py"]
    first, second = found["device_traces"][0]
    assert [each["filename"] for each in first["frames"]] == names
    assert second["frames"] is first["frames"]  # pickled once
    assert segment["frames"][0]["filename"] == "other.py"
    assert [each["filename"] for each in segment["blocks"][0]["frames"]] == names[:1]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (r"C:\venv\Lib\site-packages\torch\x.py", "torch/x.py"),
        (r"C:\Users\Zoë\x.py", "x.py"),
        ("<frozen runpy>", "<frozen runpy>"),
    ],
)
def test_files_of_windows_are_named_in_the_same_way(file: str, expected: str) -> None:
    assert relative_file(file, ("C:/venv/Lib/site-packages/",)) == expected


def test_a_run_on_the_cpu_says_that_there_is_nothing_to_record(tmp_path: Path) -> None:
    written: list[events.Event] = []
    assert start_history(RunDirectory(tmp_path), torch.device("cpu"), Reporter(written.append)) is None
    (notice,) = written
    assert isinstance(notice, events.Notice)
    assert "no memory snapshot" in notice.sentence
    assert "CPU" in notice.sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "taken", "reason"),
    [
        ("gone", snapshot(alloc(1)), "No such file or directory"),
        (".", MemoryError(), "there is not enough main memory"),
        (".", RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors"), "unspecified launch failure"),
    ],
)
def test_a_snapshot_that_cannot_be_saved_is_reported_and_does_not_end_the_run(
    folder: str, taken: object, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take() -> object:
        if isinstance(taken, Exception):
            raise taken
        return taken

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", take)
    written: list[events.Event] = []
    MemoryHistory(RunDirectory(tmp_path / folder), Reporter(written.append)).save("out-of-memory")
    (notice,) = written
    assert isinstance(notice, events.Notice)
    assert notice.sentence.startswith("Could not write the memory snapshot memory-snapshot-out-of-memory.pickle: ")
    assert reason.lower() in notice.sentence.lower()
    assert list(tmp_path.iterdir()) == []
