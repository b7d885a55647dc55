"""Tapes on disk come back as they were, damaged ones count as absent, and the folder stays within its bound."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.damage import damaged
from trainer.memory.trace.memory_trace import MemoryTrace, Storage, Work, summary_of
from trainer.memory.trace.store import STRAY_SECONDS, Archive, TraceStore, read, read_summaries, write, write_archive


def tape(seed: int = 0, count: int = 200) -> MemoryTrace:
    """A tape of every kind of event: births, deaths of its own and of others' storages, and what stays."""
    chance = random.Random(seed)
    kinds = ("weights", "adapter", "gradients", "optimizer", "activations", "temporary", "workspace")
    storages = tuple(
        Storage(
            bytes=chance.randrange(1, 2**36),
            kind=chance.choice(kinds),
            module=f"unet.up_blocks.{index % 4}.été",
            stage=chance.choice(("forward", "backward")),
            name=f"master {index}" if index % 3 == 0 else None,
        )
        for index in range(count)
    )
    born = [index for index in range(count) if index % 7]  # every seventh comes from an earlier tape
    dying = [~index for index in range(count) if index % 3 == 0]
    return MemoryTrace(
        name=f"micro {seed}",
        storages=storages,
        events=np.array(born + dying, dtype=np.int32),
        work=(Work("conv", "bfloat16", "forward", 2**50, 3 * 2**40, 7), Work("other", "float32", "", 0, 12, 1)),
    )


def equal(one: MemoryTrace, other: MemoryTrace) -> bool:
    same_events = one.events.dtype == other.events.dtype and np.array_equal(one.events, other.events)
    return same_events and (one.name, one.storages, one.work) == (other.name, other.storages, other.work)


def same(found: tuple[MemoryTrace, ...] | None, wanted: tuple[MemoryTrace, ...]) -> bool:
    return found is not None and len(found) == len(wanted) and all(map(equal, found, wanted))


def test_tapes_come_back_as_they_were(tmp_path: Path) -> None:
    tapes = (tape(1), tape(2, 1), MemoryTrace("empty", (), np.zeros(0, np.int32), ()))
    store = TraceStore(tmp_path / "a folder ü")
    assert store.load("absent") is None
    store.save("some key", tapes)
    assert same(store.load("some key"), tapes)
    assert [path.name for path in store.folder.iterdir()] == ["some key.npz"]


def test_outlines_are_those_of_the_tapes(tmp_path: Path) -> None:
    tapes = (tape(1), tape(2, 1), MemoryTrace("empty", (), np.zeros(0, np.int32), ()))
    write(tmp_path / "a.npz", tapes)
    assert read_summaries(tmp_path / "a.npz") == tuple(map(summary_of, tapes))
    store = TraceStore(tmp_path)
    assert store.summaries("a") == tuple(map(summary_of, tapes))
    assert store.summaries("b") is None


def test_equal_tapes_give_equal_files(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        write(tmp_path / name, [tape(5)])
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_repeated_layers_take_little_room(tmp_path: Path) -> None:
    layers = tape(3).storages * 100
    events = np.arange(len(layers), dtype=np.int32)
    write_archive(tmp_path / "a.npz", {"a": [MemoryTrace("", layers, np.concatenate([events, ~events]), ())]})
    assert (tmp_path / "a.npz").stat().st_size < len(layers)


def test_a_damaged_entry_is_a_miss_and_goes(tmp_path: Path) -> None:
    store, whole = TraceStore(tmp_path), (tape(1), tape(2))
    store.save("key", whole)
    path = tmp_path / "key.npz"
    sound = path.read_bytes()
    chance = random.Random(1)
    for _ in range(150):
        path.write_bytes(damaged(sound, chance))
        found = store.load("key")
        # Some bytes of an archive say nothing, such as dates: then all is as it was.
        assert same(found, whole) if found is not None else not path.exists()
    path.write_bytes(b"")
    assert store.load("key") is None


def test_what_is_absent_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may put it there at the same moment."""
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: pytest.fail("something was removed"))
    assert TraceStore(tmp_path).load("key") is None
    assert TraceStore(tmp_path).summaries("key") is None


def test_what_writers_left_that_were_killed_goes_with_time(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (f".impasto-{1:016x}.tmp", f".impasto-{2:016x}.tmp", "own.tmp"))
    for path in (old, new, other):
        path.write_bytes(b"half of it")
    hours_ago = time.time() - 2 * STRAY_SECONDS
    for path in (old, other):
        os.utime(path, (hours_ago, hours_ago))
    TraceStore(tmp_path).save("key", [tape(1)])
    assert {path.name for path in tmp_path.iterdir()} == {new.name, other.name, "key.npz"}


def test_entries_of_another_form_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "key.npz", [tape()])
    monkeypatch.setattr("trainer.memory.trace.store.FORM", 1000)
    assert read(tmp_path / "key.npz") is None


def test_shipped_tapes_come_first(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    write_archive(shipped / "one.npz", {"key": [tape(1)], "nothing": []})
    store = TraceStore(tmp_path / "own", shipped)
    assert (store.load("nothing"), store.summaries("nothing")) == ((), ())
    store.save("key", [tape(2)])
    assert same(store.load("key"), (tape(1),))
    assert store.summaries("key") == (summary_of(tape(1)),)
    (shipped / "one.npz").write_bytes(b"damaged")
    store = TraceStore(tmp_path / "own", shipped)
    assert same(store.load("key"), (tape(2),))
    assert store.summaries("key") == (summary_of(tape(2)),)
    assert (shipped / "one.npz").exists(), "what ships is left alone"


def test_every_entry_of_an_archive_is_as_it_was_put_in(tmp_path: Path) -> None:
    empty = MemoryTrace("empty", (), np.zeros(0, np.int32), ())
    entries = {"a": (tape(1), tape(2, 1)), "b": (empty,), "none": (), "c": (tape(1), tape(3, 300))}
    write_archive(tmp_path / "all.npz", entries)
    for keys in (("c", "a", "b", "none"), ("a",), ("none", "c")):  # in any order
        archive = Archive(tmp_path / "all.npz")
        for key in keys:
            assert key in archive
            assert archive.read_summaries(key) == tuple(map(summary_of, entries[key]))
            assert same(archive.read(key), entries[key])
        assert "other" not in archive
        assert archive.read("other") is None
    assert "a" not in Archive(tmp_path / "absent.npz")


def test_a_damaged_archive_gives_nothing_wrong(tmp_path: Path) -> None:
    entries = {"a": (tape(1), tape(2)), "b": (tape(3),)}
    path = tmp_path / "all.npz"
    write_archive(path, entries)
    sound, chance = path.read_bytes(), random.Random(2)
    for _ in range(150):
        path.write_bytes(damaged(sound, chance))
        archive = Archive(path)
        for key, whole in entries.items():
            assert (found := archive.read(key)) is None or same(found, whole)


def test_the_oldest_used_make_room(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    store.save("a", [tape(1)])
    size = (tmp_path / "a.npz").stat().st_size
    store.most_bytes = 3 * size + size // 2
    for key in ("b", "c"):
        store.save(key, [tape(1)])
    for age, key in enumerate(("c", "b", "a")):
        os.utime(tmp_path / f"{key}.npz", (1000 - age, 1000 - age))
    assert store.load("a") is not None  # used now, so b is the oldest
    store.save("d", [tape(1)])
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_the_newest_stays_even_when_it_is_too_large_alone(tmp_path: Path) -> None:
    store = TraceStore(tmp_path, most_bytes=10)
    store.save("a", [tape(1)])
    store.save("b", [tape(1)])
    assert [path.stem for path in tmp_path.iterdir()] == ["b"]
