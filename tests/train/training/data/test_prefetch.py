"""Micro-batches put together ahead: the same ones, in another thread, and none that is not known or not cached."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.cpu_steps import tensors_of
from tests.train.dataset.test_cache import SHUFFLED, prepared
from trainer.dataset.cache_keys import encoding_settings
from trainer.dataset.sampling import Sample
from trainer.errors import ResumableError
from trainer.training.build import RunParts
from trainer.training.data.batches import CacheShard, Collator, PrefetchCollator
from trainer.training.step import MicroBatch

CPU = torch.device("cpu")
STEPS = 6


def quiet(phase: str, done: int, total: int) -> None:
    """Says nothing."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> RunParts:
    """Six steps, two an epoch, of a micro-batch of two pictures and one of one, or other ones where shapes differ."""
    _, _, parts = prepared(tmp_path_factory.mktemp("ahead"), SHUFFLED)
    parts.batches.prepare(0, [], [], quiet, lambda cached: None)
    return parts


class Turn:
    """Asks for micro-batches as the loop does, and notes which thread put each together."""

    def __init__(self, parts: RunParts, monkeypatch: pytest.MonkeyPatch, device: torch.device = CPU) -> None:
        self.parts = parts
        self.step = 0
        self.ahead = PrefetchCollator(parts.collator, parts.batches, device, lambda: self.step)
        self.made: list[tuple[bool, Sequence[Sample]]] = []
        """Whether by the thread, and of what."""
        assemble = Collator.assemble

        def noted(assembler: Collator, samples: Sequence[Sample], batch_size: int) -> MicroBatch:
            self.made.append((threading.current_thread() is not threading.main_thread(), samples))
            return assemble(assembler, samples, batch_size)

        monkeypatch.setattr(Collator, "assemble", noted)
        self.plain: Callable[[Sequence[Sample], int], MicroBatch] = partial(assemble, parts.collator)

    def all_made(self) -> list[tuple[bool, Sequence[Sample]]]:
        """``made``, when the thread has nothing left to do."""
        self.ahead._worker.shutdown(wait=True)
        return self.made

    def take_step(self) -> Iterator[tuple[MicroBatch, MicroBatch]]:
        """Each micro-batch of a step, and the same made now."""
        batch = self.parts.batches.batch(self.step)
        for part in self.parts.batches.split(batch):
            yield self.ahead.assemble(part, len(batch)), self.plain(part, len(batch))
        self.step += 1


def assert_same(one: MicroBatch, other: MicroBatch) -> None:
    for first, second in zip(tensors_of(one), tensors_of(other), strict=True):
        assert torch.equal(first, second)


def test_all_but_the_first_are_made_ahead_and_are_those_that_would_be_made_now(
    parts: RunParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Turn(parts, monkeypatch)
    for _ in range(STEPS):
        for ahead, now in turn.take_step():
            assert_same(ahead, now)
    asked = [part for step in range(STEPS) for part in parts.batches.split(parts.batches.batch(step))]
    assert turn.all_made() == [(place > 0, part) for place, part in enumerate(asked)]  # and nothing after the last


def test_another_micro_batch_size_leaves_what_was_begun(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(parts, monkeypatch)
    for _ in turn.take_step():
        pass
    job = parts.batches.job
    monkeypatch.setattr(parts.batches, "job", job.replaced(fit=job.fit.replaced(micro_batch=1)))
    for ahead, now in turn.take_step():
        assert len(ahead.weights) == 1
        assert_same(ahead, now)


def test_what_is_not_cached_yet_is_not_begun(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(parts, monkeypatch)
    monkeypatch.setattr(parts.batches, "prepared", CacheShard(0, 0, encoding_settings(parts.batches.job.fit)))
    while parts.batches.epoch_of(turn.step) == 0:
        for _ in turn.take_step():
            pass
    assert [samples for _, samples in turn.all_made()] == [
        part for step in range(turn.step) for part in parts.batches.split(parts.batches.batch(step))
    ]


def test_what_fails_ahead_is_told_when_it_is_asked_for(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(parts, monkeypatch)
    first, second = parts.batches.split(parts.batches.batch(0))[:2]
    entry = parts.cache.latent_store.path(parts.cache.image_key(second[0]))
    content = entry.read_bytes()
    entry.unlink()
    try:
        turn.ahead.assemble(first, 3)
        with pytest.raises(ResumableError) as raised:
            turn.ahead.assemble(second, 3)
    finally:
        entry.write_bytes(content)
    assert raised.value.code == "cache.damaged"
    turn.ahead.assemble(second, 3)  # the run goes on from there


def test_for_a_card_every_tensor_is_pinned(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    turn = Turn(parts, monkeypatch, torch.device("cuda"))
    samples = parts.batches.split(parts.batches.batch(STEPS - 1))[-1]  # after the last nothing is begun
    turn.step = STEPS - 1
    micro = turn.ahead.assemble(samples, 3)
    assert {id(tensor) for tensor in tensors_of(micro)} == {id(tensor) for tensor in pinned}
    assert_same(micro, turn.plain(samples, 3))


def test_where_nothing_more_can_be_pinned_the_run_goes_on(parts: RunParts, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Tensor, "pin_memory", refuse)
    turn = Turn(parts, monkeypatch, torch.device("cuda"))
    for ahead, now in turn.take_step():
        assert_same(ahead, now)
