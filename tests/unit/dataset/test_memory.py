"""A second check of unchanged pictures is quick; a changed one is looked at again; the memory may fail."""

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.images import PHOTOS, photograph
from trainer.dataset import inspection
from trainer.dataset.decoders import DecoderPool, Inspected, inspect_images
from trainer.dataset.inspection import ImageFacts, sha256_of
from trainer.errors import DatasetError

PAST = time.time_ns() - 10**12


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The pictures that were really opened, in the test's own list."""
    paths: list[Path] = []
    real = DecoderPool.inspect

    def watch(decoders: DecoderPool, unknown: Sequence[Path], max_megapixels: float) -> Iterator[Inspected]:
        paths.extend(unknown)
        return real(decoders, unknown, max_megapixels)

    monkeypatch.setattr(DecoderPool, "inspect", watch)
    return paths


def settled(path: Path, source: str = "chelsea.png", when: int = PAST) -> Path:
    shutil.copy(PHOTOS / source, path)
    os.utime(path, ns=(when, when))
    return path


def test_facts_of_a_photograph(tmp_path: Path) -> None:
    path = settled(tmp_path / "a.png")
    found = inspect_images([path], 100)[path]
    assert isinstance(found, ImageFacts)
    assert found.id == sha256_of(path)
    assert (found.width, found.height, found.format, found.profile) == (451, 300, "PNG", "good")
    assert not (found.rotated or found.animated or found.transparent)


def test_the_second_time_nothing_is_opened(tmp_path: Path, opened: list[Path]) -> None:
    paths = [settled(tmp_path / f"{number} ü.png") for number in range(3)]
    first = inspect_images(paths, 100)
    assert sorted(opened) == paths
    assert inspect_images(paths, 100) == first
    assert len(opened) == 3


def test_a_changed_picture_alone_is_opened_again(tmp_path: Path, opened: list[Path]) -> None:
    paths = [settled(tmp_path / f"{number}.png") for number in range(3)]
    before = inspect_images(paths, 100)
    opened.clear()
    settled(paths[1], "coffee.png")
    settled(paths[2], when=PAST + 1)
    after = inspect_images(paths, 100)
    assert sorted(opened) == paths[1:]
    assert (before[paths[1]] != after[paths[1]], before[paths[2]] == after[paths[2]]) == (True, True)


def test_a_picture_changed_just_now_is_not_trusted(
    tmp_path: Path, opened: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_SETTLED_NS", 3600 * 10**9)  # looking at it takes seconds on a busy machine
    path = settled(tmp_path / "a.png", when=time.time_ns())
    inspect_images([path], 100)
    inspect_images([path], 100)
    assert opened == [path, path]


def test_a_limit_lowered_later_still_holds(tmp_path: Path) -> None:
    path = settled(tmp_path / "a.png")
    assert isinstance(inspect_images([path], 100)[path], ImageFacts)
    error = inspect_images([path], 0.1)[path]
    assert isinstance(error, DatasetError)
    assert error.code == "image.too_large"


@pytest.mark.parametrize("damage", [b"", b"no database at all", b"SQLite format 3\0" + bytes(200)])
def test_a_damaged_memory_is_begun_anew(
    tmp_path: Path, per_user_folder: Path, opened: list[Path], damage: bytes
) -> None:
    path = settled(tmp_path / "a.png")
    database = per_user_folder / "cache" / "pictures.sqlite"
    database.parent.mkdir()
    database.write_bytes(damage)
    first = inspect_images([path], 100)
    assert inspect_images([path], 100) == first
    assert opened == [path]


def test_without_a_place_to_remember_all_still_works(tmp_path: Path, per_user_folder: Path, opened: list[Path]) -> None:
    (per_user_folder / "cache").write_text("a file in its place", encoding="utf-8")
    path = settled(tmp_path / "a.png")
    for _ in range(2):
        assert isinstance(inspect_images([path], 100)[path], ImageFacts)
    assert opened == [path, path]


def test_a_memory_that_fails_while_it_is_used_is_rebuilt(tmp_path: Path, per_user_folder: Path) -> None:
    path = settled(tmp_path / "a.png")
    facts = inspect_images([path], 100)[path]
    assert isinstance(facts, ImageFacts)
    state = (path.stat().st_size, PAST)
    with inspection.inspection_cache() as remembered:
        assert remembered.recall(path, state) == facts
        other = sqlite3.connect(per_user_folder / "cache" / "pictures.sqlite")
        other.execute("DROP TABLE entries")
        other.close()
        assert remembered.recall(path, state) is None
        remembered.keep(path, state, facts)
        assert remembered.recall(path, state) == facts


def test_progress_counts_every_file_once(tmp_path: Path) -> None:
    paths = [settled(tmp_path / f"{number}.png") for number in range(4)]
    inspect_images(paths[:2], 100)
    calls: list[tuple[int, int]] = []
    inspect_images([*paths, paths[0]], 100, lambda done, total: calls.append((done, total)))
    assert calls == [(3, 4), (4, 4)]


def test_a_small_jpeg_decode_finds_the_same_as_a_full_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    photograph("retina.jpg").save(path, quality=90)
    found = inspect_images([path], 100)[path]
    assert isinstance(found, ImageFacts)
    assert (found.width, found.height) == (1411, 1411)
