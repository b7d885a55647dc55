"""No damaged cache changes a result: flip or cut any part of its file, and what it gives is what no cache gives.

Each cache says how it is filled and what is asked of it. A new one belongs in CACHES.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from app.core.models.search import ModelCache
from tests.support.images import PHOTOS
from tests.unit.memory.forecast.test_results import outcome
from tests.unit.memory.trace.test_store import same, tape
from trainer.dataset.decoders import inspect_images
from trainer.files import weights
from trainer.memory.forecast.results import ResultStore
from trainer.memory.trace.store import TraceStore
from trainer.protocol.row_store import RowStore, key_of
from trainer.training.data.latent_cache import EntryStore

PAST = 10**18
PLACES = 40
CUTS = (0, 1, 3, 8)

Ask = Callable[[], object]
Fill = Callable[[Path, pytest.MonkeyPatch], tuple[Path, Ask, Callable[[object], bool]]]
"""Fills a cache in a folder. Returns its file, what asks it, and whether an answer is right."""


def image(folder: Path, name: str = "a.png") -> Path:
    path = folder / name
    shutil.copy(PHOTOS / "page.png", path)
    os.utime(path, ns=(PAST, PAST))
    return path


def facts(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Ask, Callable[[object], bool]]:
    path = image(folder)
    sound = inspect_images([path], 100)[path]
    return folder / "cache" / "pictures.sqlite", lambda: inspect_images([path], 100)[path], lambda got: got == sound


def thumbnails(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Ask, Callable[[object], bool]]:
    file = folder / "thumbnails.sqlite"
    data, key = os.urandom(20_000), key_of(folder / "a.png", 1, 2, 3)

    def ask() -> object:
        store = RowStore(file, 1 << 20)
        found = store.get(key)
        if found is None:
            store.put(key, data)
            store.flush()
            assert store.get(key) == data, "it was not rebuilt"
        store.close()
        return found

    ask()
    return file, ask, lambda got: got in (None, data)


def hashes(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Ask, Callable[[object], bool]]:
    path = image(folder)
    sound = weights.sha256_file(path)
    return folder / "hashes.json", lambda: weights.sha256_file(path), lambda got: got == sound


def bases(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Ask, Callable[[object], bool]]:
    path = image(folder, "base.safetensors")
    file = folder / "models.json"

    def ask() -> object:
        known = ModelCache(file)
        told = known.describe(path)
        known.write([])
        return told, known.installations

    sound = ask()
    return file, ask, lambda got: got == sound


def encoded(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Ask, Callable[[object], bool]]:
    store, tensors = EntryStore(folder / "entries"), {"mean": torch.randn(1, 4, 8, 8), "std": torch.rand(4)}
    store.write("ab12", tensors)

    def right(got: object) -> bool:
        return got is None or (isinstance(got, dict) and all(torch.equal(got[name], tensors[name]) for name in tensors))

    return store.path("ab12"), lambda: store.read("ab12"), right


def traces(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Ask, Callable[[object], bool]]:
    store, tapes = TraceStore(folder / "traces"), (tape(1, 50),)
    store.save("key", tapes)
    return folder / "traces" / "key.npz", lambda: store.load("key"), lambda got: got is None or same(got, tapes)  # type: ignore[arg-type]


def outcomes(folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Ask, Callable[[object], bool]]:
    store, sound = ResultStore(folder / "outcomes"), outcome(3)
    store.save("key", sound)
    return folder / "outcomes" / "key.zip", lambda: store.load("key", brief=False), lambda got: got in (None, sound)


CACHES: dict[str, Fill] = {
    fill.__name__: fill for fill in (facts, thumbnails, hashes, bases, encoded, traces, outcomes)
}


def damages(sound: bytes) -> Iterator[tuple[str, bytes]]:
    used = [place for place, byte in enumerate(sound) if byte]  # much of a database is zeros that nothing reads
    for number in range(PLACES):
        place = used[len(used) * number // PLACES]
        for bit in (1, 0x80):
            yield f"bit {bit} of byte {place}", sound[:place] + bytes([sound[place] ^ bit]) + sound[place + 1 :]
    for eighths in CUTS:
        yield f"cut to {eighths}/8", sound[: len(sound) * eighths // 8 - (eighths == 8)]
    yield "zeros", bytes(len(sound))
    yield "other", b"version https://git-lfs.github.com/spec/v1\n" * 9


@pytest.mark.parametrize("name", CACHES)
def test_a_damaged_cache_gives_what_no_cache_gives(
    name: str, per_user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, ask, right = CACHES[name](per_user_folder, monkeypatch)
    sound = file.read_bytes()
    for what, data in damages(sound):
        for ending in ("-wal", "-shm"):
            file.with_name(file.name + ending).unlink(missing_ok=True)
        file.write_bytes(data)
        assert right(ask()), what
        assert right(ask()), f"{what}, the second time"
