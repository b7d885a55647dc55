"""What each optimizer step trains on: the effective batches in order, and their cached data in portions of epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from trainer.config.job import Job
from trainer.config.model import stated
from trainer.dataset.cached import encoding_form
from trainer.dataset.picture import Picture
from trainer.dataset.portions import GIGABYTE, MOST_SHOWINGS, latent_bytes, text_bytes
from trainer.dataset.sampling import Sample, epoch_batches, micro_batches, steps_per_epoch
from trainer.protocol.events import Cached, OnPhase
from trainer.training.cache import Cache


@dataclass(frozen=True, slots=True)
class Portion:
    """Consecutive epochs whose cached pictures and texts lie on disk together."""

    first: int
    last: int
    form: tuple[object, ...]
    """How they were encoded; under another plan they are encoded again."""


class Feed:
    """Deals the effective batches of a run; a pure function of the frozen listing and job."""

    def __init__(self, pictures: Sequence[Picture], job: Job, cache: Cache, *, live_text: bool) -> None:
        self.pictures = tuple(pictures)
        self.job = job
        self.cache = cache
        self.live_text = live_text
        self.steps_per_epoch = steps_per_epoch(self.pictures, job.recipe)
        self.prepared: Portion | None = None
        # Counted for every showing that differs.
        widths = (int(config["hidden_size"]) for config in cache.source.text_configs)
        self._text_bytes = 0 if live_text else text_bytes(job.recipe.token_chunks, widths)
        # One epoch is asked for many times in a row; its neighbour once, when a portion is listed.
        self._epoch = lru_cache(maxsize=2)(self._deal)

    def _deal(self, epoch: int) -> list[tuple[Sample, ...]]:
        return epoch_batches(self.pictures, self.job.recipe, epoch)

    def epoch_of(self, step: int) -> int:
        """The epoch (from 0) that optimizer step ``step`` (from 0) belongs to."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> tuple[Sample, ...]:
        """The effective batch of optimizer step ``step`` (from 0)."""
        return self._epoch(self.epoch_of(step))[step % self.steps_per_epoch]

    def split(self, batch: tuple[Sample, ...]) -> list[tuple[Sample, ...]]:
        """The batch as same-bucket micro-batches."""
        return micro_batches(batch, stated(self.job.fit.micro_batch))

    def prepare(
        self,
        step: int,
        extra_texts: Sequence[str],
        extra_samples: Sequence[Sample],
        on_phase: OnPhase,
        tell: Callable[[Cached], object],
    ) -> bool:
        """Encodes what the portion around ``step`` needs, unless that is done already; returns whether it was not."""
        if self.holds(step):
            return False
        portion, samples = self._list_portion(self.epoch_of(step))
        samples += extra_samples
        texts = dict.fromkeys([*(sample.caption for sample in samples), *extra_texts])
        if self.prepared is not None:
            self.cache.drop_all_but(samples, texts)
        if cached := self.cache.ensure_pictures(samples, lambda *amount: on_phase("cache_pictures", *amount)):
            tell(cached)
        if not self.live_text and (
            cached := self.cache.ensure_texts(texts, lambda *amount: on_phase("cache_texts", *amount))
        ):
            tell(cached)
        self.prepared = portion
        return True

    def holds(self, step: int) -> bool:
        """Return whether what ``step`` needs is encoded as the plan in force has it."""
        portion = self.prepared
        if portion is None or portion.form != encoding_form(self.job.fit):
            return False
        return portion.first <= self.epoch_of(step) <= portion.last

    def _list_portion(self, first: int) -> tuple[Portion, list[Sample]]:
        """The epochs from ``first`` on that fit the disk limit, at least one, with their distinct samples."""
        limit = (self.job.fit.cache_gigabytes or float("inf")) * GIGABYTE
        last_epoch = self.epoch_of(stated(self.job.recipe.steps) - 1)
        distinct: dict[tuple[str, str], Sample] = {}
        form = encoding_form(self.job.fit)
        size, showings = 0.0, 0
        for epoch in range(first, last_epoch + 1):
            fresh = {
                key: sample
                for batch in self._epoch(epoch)
                for sample in batch
                if (key := (self.cache.picture_key(sample), sample.caption)) not in distinct
            }
            pictures = [sample.picture for sample in fresh.values()]
            size += sum(latent_bytes(one.bucket, masked=one.mask != "none") + self._text_bytes for one in pictures)
            showings += sum(map(len, self._epoch(epoch)))
            if epoch > first and (size > limit or showings > MOST_SHOWINGS):
                return Portion(first, epoch - 1, form), list(distinct.values())
            distinct |= fresh
        return Portion(first, last_epoch, form), list(distinct.values())
