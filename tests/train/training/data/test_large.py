"""Memory for large datasets: it is bounded where it can be, and small for each image where it cannot."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.images import make_picture
from tests.support.tiny import tiny_base
from tests.train.memory.forecast.test_cache_shards import job_of
from trainer.base.source import BaseSource, open_base
from trainer.config.base import BaseConfig
from trainer.dataset.dataset import read_listing, write_listing
from trainer.dataset.image import ImageRecord
from trainer.training.data import batches
from trainer.training.data.batches import BatchSchedule
from trainer.training.data.latent_cache import Cache


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> BaseSource:
    base = tiny_base("sd15", tmp_path_factory.mktemp("bases"), depth=1)
    return open_base(BaseConfig(model=str(base), family="sd15"))


def images_of(count: int) -> list[ImageRecord]:
    return [make_picture(n, bucket=(64, 64), width=90, height=300, captions=(f"a {n}, b, c",)) for n in range(count)]


def schedule_of(count: int, source: BaseSource, folder: Path) -> BatchSchedule:
    job = job_of(100.0, images={"crop": "random"}, captions={"shuffle": True}, steps=2 * count)
    return BatchSchedule(images_of(count), job, Cache(folder, source, job, torch.device("cpu")), live_text=False)


def peak_of(work: Callable[[], object]) -> int:
    """Return the most bytes that ``work`` and its result allocate in Python."""
    tracemalloc.start()
    try:
        result = work()
        del result
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_listing_a_shard_takes_the_same_memory_for_any_number_of_images(
    source: BaseSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_SHARD_SAMPLES", 100)
    peaks = []
    for count in (400, 1600):
        schedule = schedule_of(count, source, tmp_path)
        schedule.batch(0)  # divides the epoch into batches, which takes memory for each image
        peaks.append(peak_of(lambda schedule=schedule: schedule._list_shard(0)))  # type: ignore[misc]
        shard, samples = schedule._list_shard(0)
        assert len(samples) == 2 * (shard.last + 1) == 100
    assert peaks[1] < 2 * peaks[0]  # some caches fill up; listing whole epochs would take four times as much


def test_an_epoch_takes_few_bytes_for_each_sample(source: BaseSource, tmp_path: Path) -> None:
    """Of 200,000 images, 40 MB; with all samples drawn it would be more than twice as much."""
    count = 2000
    schedule = schedule_of(count, source, tmp_path)
    assert peak_of(lambda: schedule._batches_of(0)) < 400 * count
    first = schedule._batches_of(0)
    tracemalloc.start()
    second = schedule._batches_of(1)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(first) == len(second) and held < 200 * count


def test_a_listing_is_written_and_read_line_by_line(tmp_path: Path) -> None:
    """Held together, the lines take several hundred bytes for each image more, and so do copies of equal values."""
    count, path = 3000, tmp_path / "dataset.jsonl"
    images = images_of(count)
    tracemalloc.start()
    write_listing(path, images)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written < 100 * count
    found: list[ImageRecord] = []
    assert peak_of(lambda: found.extend(read_listing(path))) < 900 * count
    assert found == images
    assert len({id(image.bucket) for image in found}) == 1
