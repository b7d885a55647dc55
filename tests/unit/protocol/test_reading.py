"""Opening files that others may have written: what it allows, what it costs."""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from trainer.protocol.reading import open_file, read_bytes


@pytest.mark.skipif(sys.platform == "win32", reason="a file with a hole takes its whole size there")
def test_the_largest_optimizer_is_not_too_large_to_be_read(tmp_path: Path) -> None:
    """At rank 256 AdamW's file for SDXL has 5.2 GiB; the limit was 4, and the first checkpoint ended the run."""
    path = tmp_path / "optimizer.safetensors"
    with path.open("wb") as file:
        file.truncate(24 << 30)  # rank 1024, the highest
    open_file(path, "part").close()


def test_reading_takes_no_more_memory_than_the_file_has(tmp_path: Path) -> None:
    """Python allocates all that read() is asked for, and Windows refuses 4 GiB that it does not have."""
    path = tmp_path / "state.json"
    path.write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert read_bytes(path, "part") == b"x" * 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(sys.platform == "win32", reason="there a scanner may hold a file for a moment")
def test_an_unreadable_file_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took two seconds for each, in a dataset half an hour for a thousand."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"a")

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(PermissionError):
        open_file(path, "text")
    assert slept == []
