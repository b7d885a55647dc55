"""What each optimizer step trains on: the effective batches in order, and their cached data in portions of epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from trainer.base.encoding import TextConditioning, scale_latents, tokenise
from trainer.base.source import BaseSource
from trainer.config.job import Job
from trainer.config.schema import stated
from trainer.dataset.cache_keys import GIGABYTE, MOST_SHOWINGS, encoding_form, latent_bytes, text_bytes
from trainer.dataset.picture import Picture
from trainer.dataset.sampling import (
    Purpose,
    Sample,
    epoch_batches,
    generator,
    micro_batches,
    micro_conditioning,
    steps_per_epoch,
)
from trainer.protocol.events import CachingSpeed, OnPhase
from trainer.training.data.latent_cache import Cache
from trainer.training.objective import draw_noise, draw_timestep
from trainer.training.step import MicroBatch


@dataclass(frozen=True, slots=True)
class CacheShard:
    """Consecutive epochs whose cached pictures and texts lie on disk together."""

    first: int
    last: int
    form: tuple[object, ...]
    """How they were encoded; under another plan they are encoded again."""


class BatchSchedule:
    """Deals the effective batches of a run; a pure function of the frozen listing and job."""

    def __init__(self, pictures: Sequence[Picture], job: Job, cache: Cache, *, live_text: bool) -> None:
        self.pictures = tuple(pictures)
        self.job = job
        self.cache = cache
        self.live_text = live_text
        self.steps_per_epoch = steps_per_epoch(self.pictures, job.recipe)
        self.prepared: CacheShard | None = None
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
        tell: Callable[[CachingSpeed], object],
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

    def _list_portion(self, first: int) -> tuple[CacheShard, list[Sample]]:
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
                return CacheShard(first, epoch - 1, form), list(distinct.values())
            distinct |= fresh
        return CacheShard(first, last_epoch, form), list(distinct.values())


class Collator:
    """Builds micro-batches for one run."""

    def __init__(self, job: Job, source: BaseSource, cache: Cache, *, live_text: bool) -> None:
        self.job = job
        self.source = source
        self.cache = cache
        self.live_text = live_text

    def stream(self, sample: Sample, purpose: Purpose) -> np.random.Generator:
        """The random stream of one showing of one picture for one purpose."""
        return generator(
            self.job.recipe.seed, purpose, epoch=sample.epoch, sample=sample.picture.id, repeat=sample.repeat
        )

    def assemble(self, samples: Sequence[Sample], batch_size: int) -> MicroBatch:
        """A micro-batch of ``samples`` (one bucket) out of an effective batch of ``batch_size``, on the CPU."""
        objective = self.job.recipe.objective
        entries = [self.cache.latents(sample) for sample in samples]
        latents = [self._draw_latents(sample, entry) for sample, entry in zip(samples, entries, strict=True)]
        shape = tuple(latents[0].shape)
        noise = [draw_noise(self.stream(sample, "noise"), shape, objective) for sample in samples]
        timesteps = [draw_timestep(self.stream(sample, "timestep"), objective) for sample in samples]
        return MicroBatch(
            latents=torch.stack(latents),
            noise=torch.from_numpy(np.stack(noise)),
            input_noise=self._perturbed(samples, noise),
            timesteps=torch.tensor(timesteps, dtype=torch.int64),
            text=self._text(samples),
            tokens=self._tokens(samples),
            time_ids=self._time_ids(samples),
            mask=self._mask(entries),
            weights=torch.tensor([self._weight(sample) / batch_size for sample in samples], dtype=torch.float32),
        )

    def assemble_fixed(self, sample: Sample, timesteps: Sequence[int]) -> MicroBatch:
        """One picture at some timesteps, for validation: nothing in it changes from one showing to the next.

        The latents are the middle of their posterior, the noise is fixed by picture and timestep; no mask.
        """
        latents = scale_latents(self.source.vae_config, self.cache.latents(sample)["mean"])
        seed, shape, samples = self.job.recipe.seed, tuple(latents.shape), [sample] * len(timesteps)
        streams = (generator(seed, "validation", sample=sample.picture.id, repeat=timestep) for timestep in timesteps)
        noise = [stream.standard_normal(shape, dtype=np.float32) for stream in streams]
        return MicroBatch(
            latents=torch.stack([latents] * len(timesteps)),
            noise=torch.from_numpy(np.stack(noise)),
            input_noise=None,
            timesteps=torch.tensor(timesteps, dtype=torch.int64),
            text=self._text(samples),
            tokens=self._tokens(samples),
            time_ids=self._time_ids(samples),
            mask=None,
            weights=torch.ones(len(timesteps)),
        )

    def _text(self, samples: Sequence[Sample]) -> TextConditioning | None:
        return None if self.live_text else join_texts([self.cache.text(sample.caption) for sample in samples])

    def _draw_latents(self, sample: Sample, entry: dict[str, Tensor]) -> Tensor:
        """A draw from the latent posterior, scaled as the UNet wants it."""
        chance = self.stream(sample, "posterior").standard_normal(tuple(entry["mean"].shape), dtype=np.float32)
        drawn = entry["mean"] + entry["std"] * torch.from_numpy(chance)
        return scale_latents(self.source.vae_config, drawn)

    def _perturbed(self, samples: Sequence[Sample], noise: Sequence[np.ndarray]) -> Tensor | None:
        """Noise for the input only: a little more than in the target (input perturbation, Ning et al. 2023)."""
        strength = np.float32(self.job.recipe.objective.input_perturbation)
        if not strength:
            return None
        more = [
            base + strength * self.stream(sample, "perturbation").standard_normal(base.shape, dtype=np.float32)
            for sample, base in zip(samples, noise, strict=True)
        ]
        return torch.from_numpy(np.stack(more))

    def _tokens(self, samples: Sequence[Sample]) -> tuple[Tensor, ...] | None:
        if not self.live_text:
            return None
        captions = [sample.caption for sample in samples]
        return tuple(tokenise(self.source.family, captions, self.job.recipe.token_chunks))

    def _time_ids(self, samples: Sequence[Sample]) -> Tensor | None:
        if self.source.family != "sdxl":
            return None
        return torch.tensor([micro_conditioning(sample) for sample in samples], dtype=torch.float32)

    def _mask(self, entries: Sequence[dict[str, Tensor]]) -> Tensor | None:
        """Loss weights per latent pixel: 1 inside a mask, ``unmasked_weight`` outside, between where it is grey."""
        if not any("mask" in entry for entry in entries):
            return None
        floor = self.job.recipe.objective.unmasked_weight
        whole = torch.ones_like(entries[0]["mean"][:1])
        masks = [entry.get("mask", whole) for entry in entries]
        return torch.stack(masks).mul(1.0 - floor).add(floor)

    def _weight(self, sample: Sample) -> float:
        prior = self.job.recipe.objective.prior_weight if sample.picture.kind == "regularisation" else 1.0
        return sample.picture.weight * prior


def join_texts(texts: Sequence[TextConditioning]) -> TextConditioning:
    """Single texts as one batch."""
    pooled = [text.pooled for text in texts if text.pooled is not None]
    return TextConditioning(torch.cat([text.hidden for text in texts]), torch.cat(pooled) if pooled else None)


class PrefetchCollator(Collator):
    """An assembler that begins with the next micro-batch of the run when it is asked for one.

    Reading and checking what is cached, and drawing noise, take some milliseconds a picture at SDXL's size, in which a
    card between two steps would have nothing to do. What is in a micro-batch is a function of its samples alone, so
    it does not matter when it is made. One is held at a time; for a card in pinned memory, so that the copy to it is
    not waited for. What fails in the thread is raised when that micro-batch is asked for.
    """

    def __init__(self, assembler: Collator, feed: BatchSchedule, device: torch.device, step: Callable[[], int]) -> None:
        """``step`` tells how many optimizer steps are done."""
        super().__init__(assembler.job, assembler.source, assembler.cache, live_text=assembler.live_text)
        self.feed = feed
        self.device = device
        self.step = step
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="assembler")
        self._begun: tuple[Sequence[Sample], int, Future[MicroBatch]] | None = None

    def assemble(self, samples: Sequence[Sample], batch_size: int) -> MicroBatch:
        """See Assembler; what was begun and is not what is asked for (the plan has changed) is left."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[:2] == (samples, batch_size):
            micro = begun[2].result()
        else:
            micro = self._assemble(samples, batch_size)
        self._begin(samples)
        return micro

    def _assemble(self, samples: Sequence[Sample], batch_size: int) -> MicroBatch:
        micro = super().assemble(samples, batch_size)
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # the system pins no more: then the copy to the card is waited for
                return micro.pinned()
        return micro

    def _begin(self, samples: Sequence[Sample]) -> None:
        """Begins with what follows after ``samples``, if that is known and cached."""
        following = self._following(samples)
        if following is not None:
            self._begun = (*following, self._worker.submit(self._assemble, *following))

    def _following(self, samples: Sequence[Sample]) -> tuple[Sequence[Sample], int] | None:
        step = self.step()
        batch = self.feed.batch(step)
        parts = self.feed.split(batch)
        later = parts[parts.index(tuple(samples)) + 1 :]
        if later:
            return later[0], len(batch)
        if step + 1 >= (self.job.recipe.steps or 0) or not self.feed.holds(step + 1):
            return None
        batch = self.feed.batch(step + 1)
        return self.feed.split(batch)[0], len(batch)
