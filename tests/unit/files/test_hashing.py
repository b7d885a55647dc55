"""SHA-256 of files, and the memory of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from trainer.files.weights import remember_sha256, sha256_file
from trainer.protocol import places


def read_calls(path: Path) -> tuple[str, int]:
    """Return the digest, and how often progress was told: never when nothing was read."""
    calls: list[tuple[int, int]] = []
    return sha256_file(path, lambda done, total: calls.append((done, total))), len(calls)


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "größe.bin"
    path.write_bytes(b"one" * 3_000_000)
    first, calls = read_calls(path)
    assert first == hashlib.sha256(b"one" * 3_000_000).hexdigest()
    assert calls == 3
    assert read_calls(path) == (first, 0)
    path.write_bytes(b"two" * 3_000_000)
    os.utime(path, ns=(1, 1))
    second, calls = read_calls(path)
    assert second == hashlib.sha256(b"two" * 3_000_000).hexdigest()
    assert calls == 3


def test_a_damaged_memory_costs_a_reading_no_more(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")
    for damage in ("", "[1, 2]", "{"):
        places.home().mkdir(parents=True, exist_ok=True)
        (places.home() / "hashes.json").write_text(damage, encoding="utf-8")
        assert sha256_file(path) == hashlib.sha256(b"x").hexdigest()


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"x")
    monkeypatch.setenv("IMPASTO_HOME", str(blocked / "below"))
    assert sha256_file(blocked) == hashlib.sha256(b"x").hexdigest()


def test_a_hash_known_from_writing_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")
    remember_sha256(path, "f" * 64)
    assert read_calls(path) == ("f" * 64, 0)
