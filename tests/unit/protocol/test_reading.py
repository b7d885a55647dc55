"""Opening files that others may have written: what it allows, what it costs."""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from trainer.protocol.reading import UnusableFileError, open_file, parse_yaml, read_bytes


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


def test_yaml_is_read_as_texts() -> None:
    """Not as YAML types: 1e3, no and 2026-01-01 are names of folders as likely as anything else."""
    text = "a:\n  b: no\n  c: 1e3\n  d: |\n    x\n    y\n  e: >-\n    one\n    line\nf: [2026-01-01, 'it''s']\n"
    assert parse_yaml(text) == {
        "a": {"b": "no", "c": "1e3", "d": "x\ny\n", "e": "one line"},
        "f": ["2026-01-01", "it's"],
    }


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "content"),  # a billion laughs begins so
        ("[" * 65 + "]" * 65, "depth"),
        ("a:\n  b: [1\nc: 2\n", "syntax"),
        ("a: \x00", "syntax"),
        ("a: !!python/object/apply:os.system [ls]\n  x", "syntax"),
    ],
)
def test_yaml_that_could_harm_is_refused(text: str, code: str) -> None:
    with pytest.raises(UnusableFileError) as refused:
        parse_yaml(text, "x.yaml")
    assert refused.value.code == f"file.{code}"


def test_a_tag_in_yaml_makes_no_object() -> None:
    assert parse_yaml("a: !!python/object/apply:os.getcwd []") == {"a": []}
