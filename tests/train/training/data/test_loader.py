"""Prefetched micro-batches: the same ones for any number of threads and batches, and none that is not cached."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.cpu_steps import tensors_of
from tests.train.dataset.test_cache import SHUFFLED, prepared
from trainer.dataset.sampling import Sample
from trainer.errors import ResumableError
from trainer.training.build import RunParts
from trainer.training.data.batches import Collator
from trainer.training.data.loader import PrefetchCollator
from trainer.training.step import MicroBatch

CPU = torch.device("cpu")
STEPS = 6


def quiet(phase: str, done: int, total: int) -> None:
    """Ignore progress."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> RunParts:
    """Return a run of six steps, two per epoch, with one or more micro-batches each."""
    _, _, parts = prepared(tmp_path_factory.mktemp("ahead"), SHUFFLED)
    parts.batches.prepare(0, [], [], quiet, lambda cached: None)
    return parts


class Turn:
    """Requests micro-batches as the training loop does, and records which thread built each of them."""

    def __init__(
        self, parts: RunParts, monkeypatch: pytest.MonkeyPatch, device: torch.device = CPU, **sizes: int | None
    ) -> None:
        self.parts = parts
        self.step = 0
        collator = Collator(
            parts.batches.job.replaced(fit=parts.batches.job.fit.replaced(**sizes)),
            parts.source,
            parts.cache,
            live_text=parts.collator.live_text,
        )
        self.loader = PrefetchCollator(collator, parts.batches, device, lambda: self.step)
        self.made: list[Sequence[Sample]] = []
        assemble = Collator.assemble

        def noted(assembler: Collator, samples: Sequence[Sample], batch_size: int) -> MicroBatch:
            assert threading.current_thread() is not threading.main_thread()
            self.made.append(samples)
            return assemble(assembler, samples, batch_size)

        monkeypatch.setattr(Collator, "assemble", noted)
        self.plain: Callable[[Sequence[Sample], int], MicroBatch] = partial(assemble, parts.collator)

    def all_made(self) -> list[Sequence[Sample]]:
        """Return what was built, once the threads have nothing left to do."""
        while self.loader.pool.first is not None:
            self.loader.pool.take()
        self.loader.close()
        return self.made

    def take_step(self) -> Iterator[tuple[MicroBatch, MicroBatch]]:
        """Yield each micro-batch of a step, and the same one built in this thread."""
        batch = self.parts.batches.batch(self.step)
        for part in self.parts.batches.split(batch):
            yield self.loader.assemble(part, len(batch)), self.plain(part, len(batch))
        self.step += 1


def assert_same(one: MicroBatch, other: MicroBatch) -> None:
    for first, second in zip(tensors_of(one), tensors_of(other), strict=True):
        assert torch.equal(first, second)


def requested(parts: RunParts, steps: int) -> list[Sequence[Sample]]:
    return [part for step in range(steps) for part in parts.batches.split(parts.batches.batch(step))]


@pytest.mark.parametrize(("workers", "batches"), [(None, None), (1, 1), (1, 5), (2, 3), (5, 9), (5, 2)])
def test_each_micro_batch_is_built_once_with_the_same_bits(
    parts: RunParts, monkeypatch: pytest.MonkeyPatch, workers: int | None, batches: int | None
) -> None:
    turn = Turn(parts, monkeypatch, loader_workers=workers, prefetch_batches=batches)
    for _ in range(STEPS):
        for prefetched, now in turn.take_step():
            assert_same(prefetched, now)
    made = turn.all_made()
    assert len(made) == len(requested(parts, STEPS)) and all(part in made for part in requested(parts, STEPS))


def test_as_many_are_built_in_advance_as_the_job_sets(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(parts, monkeypatch, loader_workers=1, prefetch_batches=4)
    first = parts.batches.batch(0)
    turn.loader.assemble(parts.batches.split(first)[0], len(first))
    assert turn.all_made() == requested(parts, STEPS)[:5]  # one thread builds them in order


def test_another_micro_batch_size_discards_what_was_started(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(parts, monkeypatch)
    for _ in turn.take_step():
        pass
    job = parts.batches.job
    monkeypatch.setattr(parts.batches, "job", job.replaced(fit=job.fit.replaced(micro_batch=1)))
    for prefetched, now in turn.take_step():
        assert len(prefetched.weights) == 1
        assert_same(prefetched, now)


def test_batches_of_other_encodings_are_discarded(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may change how images are encoded between two steps; its entries then have other keys."""
    turn = Turn(parts, monkeypatch, loader_workers=1, prefetch_batches=1)
    for _ in turn.take_step():
        pass
    following = parts.batches.split(parts.batches.batch(1))[0]
    wait([turn.loader.pool._pending[0][1]])
    job = parts.batches.job
    monkeypatch.setattr(parts.batches, "job", job.replaced(fit=job.fit.replaced(vae_encode_tiling=True)))
    turn.loader.assemble(following, len(parts.batches.batch(1)))
    assert turn.all_made().count(following) == 2


def test_what_is_not_cached_yet_is_not_started(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(parts, monkeypatch, loader_workers=2, prefetch_batches=8)
    monkeypatch.setattr(parts.batches, "holds", lambda step: parts.batches.epoch_of(step) == 0)
    while parts.batches.epoch_of(turn.step) == 0:
        for _ in turn.take_step():
            pass
    assert turn.loader.pool.first is None and len(turn.all_made()) == len(requested(parts, turn.step))


def test_an_error_names_the_image_and_is_raised_when_the_batch_is_requested(
    parts: RunParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Turn(parts, monkeypatch, loader_workers=2, prefetch_batches=4)
    first, second = requested(parts, 1)[:2]
    entry = parts.cache.latent_store.path(parts.cache.image_key(second[0]))
    content = entry.read_bytes()
    entry.unlink()
    try:
        turn.loader.assemble(first, 3)
        with pytest.raises(ResumableError, match=second[0].image.path.name) as raised:
            turn.loader.assemble(second, 3)
    finally:
        entry.write_bytes(content)
    assert raised.value.code == "cache.damaged"
    assert_same(turn.loader.assemble(second, 3), turn.plain(second, 3))  # a repeated step reads it again


def test_a_failing_disk_is_named_with_image_and_reason(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(parts, monkeypatch)
    samples = requested(parts, 1)[0]
    for store, owner in ((parts.cache.texts, "caption of "), (parts.cache.latent_store, "latents of ")):

        def fail(key: str) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(store, "read", fail)
        with pytest.raises(ResumableError, match=f"{owner}{samples[0].image.path.name}.*Input/output error") as raised:
            turn.loader.assemble(samples, 3)
        assert raised.value.code == "cache.unreadable"


def test_for_a_gpu_every_tensor_is_pinned(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    turn = Turn(parts, monkeypatch, torch.device("cuda"))
    turn.step = STEPS - 1
    samples = requested(parts, STEPS)[-1]  # nothing follows the last one
    micro = turn.loader.assemble(samples, 3)
    assert {id(tensor) for tensor in tensors_of(micro)} == {id(tensor) for tensor in pinned}
    assert_same(micro, turn.plain(samples, 3))


def test_without_memory_to_pin_the_batch_is_pageable(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Tensor, "pin_memory", refuse)
    turn = Turn(parts, monkeypatch, torch.device("cuda"))
    for prefetched, now in turn.take_step():
        assert_same(prefetched, now)
