"""The input of each optimizer step: the schedule of effective batches, cache shards and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from trainer.base.encoding import TextConditioning, scale_latents, token_weights, tokenize
from trainer.base.source import BaseSource
from trainer.config.job import Job
from trainer.config.schema import require_value
from trainer.dataset.cache_keys import GIGABYTE, MAX_SHARD_SAMPLES, encoding_settings, latent_bytes, text_bytes
from trainer.dataset.image import ImageRecord, image_recipe
from trainer.dataset.sampling import (
    EpochBatches,
    Purpose,
    Sample,
    generator,
    micro_batches,
    micro_conditioning,
    steps_per_epoch,
)
from trainer.files.tokens import PromptText
from trainer.protocol.events import CachingSpeed, OnPhase
from trainer.training.data.latent_cache import Cache
from trainer.training.objective import draw_noise, draw_timestep, mask_weights
from trainer.training.step import MicroBatch

RECENT_BATCHES = 64
"""Effective batches whose drawn samples are kept: those that are prefetched and the last ones."""


@dataclass(frozen=True, slots=True)
class CacheShard:
    """Range of consecutive steps, counted from 0, whose cached images and texts are on disk at the same time."""

    first: int
    last: int
    form: tuple[object, ...]
    """Encoding settings of the shard; if the plan changes them, the shard is encoded again."""


class BatchSchedule:
    """The effective batch of each step of a run; it depends only on the frozen listing and job."""

    def __init__(self, images: Sequence[ImageRecord], job: Job, cache: Cache, *, live_text: bool) -> None:
        self.images = tuple(images)
        self.job = job
        self.cache = cache
        self.live_text = live_text
        self.steps_per_epoch = steps_per_epoch(self.images, job.recipe)
        self.prepared: CacheShard | None = None
        # Bytes of one text. Counted for each distinct sample, although samples with equal captions share an entry.
        widths = (int(config["hidden_size"]) for config in cache.source.text_configs)
        self._text_bytes = 0 if live_text else text_bytes(job.recipe.token_chunks, widths)
        # Every step requests the current epoch at least once; other epochs are requested only to list a shard.
        self._epoch = lru_cache(maxsize=2)(self._batches_of)
        # Each batch is used several times: to prefetch it, for its step, and by callbacks after the step.
        self.batch = lru_cache(maxsize=RECENT_BATCHES)(self._draw_batch)

    def _batches_of(self, epoch: int) -> EpochBatches:
        return EpochBatches(self.images, self.job.recipe, epoch)

    def epoch_of(self, step: int) -> int:
        """Return the epoch (from 0) of optimizer step ``step`` (from 0)."""
        return step // self.steps_per_epoch

    def _draw_batch(self, step: int) -> tuple[Sample, ...]:
        """Return the effective batch of optimizer step ``step`` (from 0)."""
        return self._epoch(self.epoch_of(step))[step % self.steps_per_epoch]

    def split(self, batch: tuple[Sample, ...]) -> list[tuple[Sample, ...]]:
        """Return the batch split into micro-batches of one shape each."""
        return micro_batches(batch, require_value(self.job.fit.micro_batch))

    def prepare(
        self,
        step: int,
        extra_texts: Sequence[str | PromptText],
        extra_samples: Sequence[Sample],
        on_phase: OnPhase,
        report: Callable[[CachingSpeed], object],
    ) -> bool:
        """Encode the cache shard that ``step`` needs; return False if it is already encoded.

        ``report`` is called with the speed of each kind of encoding.
        """
        if self.holds(step):
            return False
        shard, samples = self._list_shard(step)
        samples += extra_samples
        texts = dict.fromkeys([*(sample.caption for sample in samples), *extra_texts])
        self.cache.make_room(samples, texts, self._limit, self._text_bytes)
        if cached := self.cache.ensure_latents(samples, lambda *amount: on_phase("cache_pictures", *amount)):
            report(cached)
        if not self.live_text and (
            cached := self.cache.ensure_texts(texts, lambda *amount: on_phase("cache_texts", *amount))
        ):
            report(cached)
        self.prepared = shard
        return True

    def holds(self, step: int) -> bool:
        """Return whether the data for ``step`` is cached with the encoding settings of the plan in force."""
        shard = self.prepared
        if shard is None or shard.form != encoding_settings(self.job.fit):
            return False
        return shard.first <= step <= shard.last

    @property
    def _limit(self) -> float:
        """Return the bytes on disk that the entries of a run may take."""
        return (self.job.fit.cache_gigabytes or float("inf")) * GIGABYTE

    def _list_shard(self, first: int) -> tuple[CacheShard, list[Sample]]:
        """Return a shard of as many steps from ``first`` as the limits allow, and the distinct samples in it.

        It ends with an epoch, unless the first epoch alone is above a limit; then it ends with the last step that is
        not. One step is always included, because it could not run without its data.
        """
        last = require_value(self.job.recipe.steps) - 1
        distinct: dict[tuple[str, str], Sample] = {}
        size, showings, end = 0.0, 0, first
        for step in range(first, last + 1):
            begins = step > first and step % self.steps_per_epoch == 0
            if begins:
                end, complete = step, len(distinct)
            new = self._new_samples(step, distinct)
            size += sum(latent_bytes(s.image.bucket, masked=s.image.mask != "none") for s in new.values())
            size += len(new) * self._text_bytes
            showings += len(self.batch(step))
            if step > first and (size > self._limit or showings > MAX_SHARD_SAMPLES):
                if end == first:
                    end, complete = step, len(distinct)
                return self._shard(first, end - 1), list(distinct.values())[:complete]
            distinct |= new
        return self._shard(first, last), list(distinct.values())

    def _new_samples(self, step: int, known: Container[tuple[str, str]]) -> dict[tuple[str, str], Sample]:
        """Return the samples of a step whose image and caption are not among the ``known`` ones, by these."""
        keys = {(self.cache.image_key(sample), sample.caption): sample for sample in self.batch(step)}
        return {key: sample for key, sample in keys.items() if key not in known}

    def _shard(self, first: int, last: int) -> CacheShard:
        return CacheShard(first, last, encoding_settings(self.job.fit))


class Collator:
    """Builds a run's micro-batches."""

    def __init__(self, job: Job, source: BaseSource, cache: Cache, *, live_text: bool) -> None:
        self.job = job
        self.source = source
        self.cache = cache
        self.live_text = live_text

    def stream(self, sample: Sample, purpose: Purpose) -> np.random.Generator:
        """Return the random number generator for one use of an image and one purpose, such as noise."""
        return generator(
            self.job.recipe.seed, purpose, epoch=sample.epoch, sample=sample.image.stream, repeat=sample.repeat
        )

    def assemble(self, samples: Sequence[Sample], batch_size: int) -> MicroBatch:
        """Return a CPU micro-batch of ``samples`` (one shape); ``batch_size`` is the size of the effective batch."""
        objective = self.job.recipe.objective
        entries = [self.cache.latents(sample) for sample in samples]
        latents = [self._draw_latents(sample, entry) for sample, entry in zip(samples, entries, strict=True)]
        drawn = zip(samples, latents, strict=True)
        noise = [draw_noise(self.stream(sample, "noise"), image.numpy(), objective) for sample, image in drawn]
        timesteps = [self._draw_timestep(sample) for sample in samples]
        return MicroBatch(
            latents=torch.stack(latents),
            noise=torch.from_numpy(np.stack(noise)),
            input_noise=self._perturbed(samples, noise),
            timesteps=torch.tensor(timesteps, dtype=torch.int64),
            text=self._text(samples),
            tokens=self._tokens(samples),
            token_weights=self._token_weights(samples),
            time_ids=self._time_ids(samples),
            mask=self._mask(samples, entries),
            weights=torch.tensor([self._weight(sample) / batch_size for sample in samples], dtype=torch.float32),
            prior=self._prior(samples),
        )

    def assemble_fixed(self, sample: Sample, timesteps: Sequence[int]) -> MicroBatch:
        """Return a micro-batch with one image at several timesteps, for validation; it is the same every time.

        The latents are the mean of their posterior, the noise depends only on image and timestep, and there is no mask.
        """
        latents = scale_latents(self.source.vae_config, self.cache.latents(sample)["mean"])
        seed, shape, samples = self.job.recipe.seed, tuple(latents.shape), [sample] * len(timesteps)
        streams = (generator(seed, "validation", sample=sample.image.stream, repeat=timestep) for timestep in timesteps)
        noise = [stream.standard_normal(shape, dtype=np.float32) for stream in streams]
        return MicroBatch(
            latents=torch.stack([latents] * len(timesteps)),
            noise=torch.from_numpy(np.stack(noise)),
            input_noise=None,
            timesteps=torch.tensor(timesteps, dtype=torch.int64),
            text=self._text(samples),
            tokens=self._tokens(samples),
            token_weights=self._token_weights(samples),
            time_ids=self._time_ids(samples),
            mask=None,
            weights=torch.ones(len(timesteps)),
        )

    def _text(self, samples: Sequence[Sample]) -> TextConditioning | None:
        if self.live_text:
            return None
        return join_texts([self.cache.text(s.caption, f"the caption of {s.image.path.name}") for s in samples])

    def _draw_timestep(self, sample: Sample) -> int:
        return draw_timestep(self.stream(sample, "timestep"), image_recipe(sample.image, self.job.recipe).objective)

    def _draw_latents(self, sample: Sample, entry: dict[str, Tensor]) -> Tensor:
        """Return a sample of the latent posterior, with the VAE's scaling factor applied."""
        noise = self.stream(sample, "posterior").standard_normal(tuple(entry["mean"].shape), dtype=np.float32)
        drawn = entry["mean"] + entry["std"] * torch.from_numpy(noise)
        return scale_latents(self.source.vae_config, drawn)

    def _perturbed(self, samples: Sequence[Sample], noise: Sequence[np.ndarray]) -> Tensor | None:
        """Return the noise to add to the input for input perturbation (Ning et al. 2023), or None if it is off."""
        if not self.job.recipe.objective.input_perturbation:
            return None
        perturbed = [self._perturbed_image(sample, base) for sample, base in zip(samples, noise, strict=True)]
        return torch.from_numpy(np.stack(perturbed))

    def _perturbed_image(self, sample: Sample, noise: np.ndarray) -> np.ndarray:
        """Return an image's noise plus the extra noise, whose strength may be uniform from 0 to the perturbation.

        sd-scripts draws the strength once for the batch.
        """
        objective = self.job.recipe.objective
        # From a stream of its own: switching perturbation on or off changes no other random number of the run.
        stream = self.stream(sample, "perturbation")
        strength, extra = (
            np.float32(objective.input_perturbation),
            stream.standard_normal(noise.shape, dtype=np.float32),
        )
        if objective.input_perturbation_random_strength:
            strength *= stream.random(dtype=np.float32)
        perturbed: np.ndarray = noise + strength * extra
        return perturbed

    def _tokens(self, samples: Sequence[Sample]) -> tuple[Tensor, ...] | None:
        if not self.live_text:
            return None
        captions = [sample.caption for sample in samples]
        weighted = bool(self.job.recipe.weighted_captions)
        return tuple(tokenize(self.source.family, captions, samples[0].tokens, weighted=weighted))

    def _token_weights(self, samples: Sequence[Sample]) -> Tensor | None:
        if not self.live_text or not self.job.recipe.weighted_captions:
            return None
        return token_weights([sample.caption for sample in samples], samples[0].tokens)

    def _time_ids(self, samples: Sequence[Sample]) -> Tensor | None:
        if self.source.family != "sdxl":
            return None
        return torch.tensor([micro_conditioning(sample) for sample in samples], dtype=torch.float32)

    def _mask(self, samples: Sequence[Sample], entries: Sequence[dict[str, Tensor]]) -> Tensor | None:
        """Return the loss weights of the latent pixels; None if no image has a mask, even one that is left out here."""
        if not any("mask" in entry for entry in entries):
            return None
        # Images without a mask get the full weight everywhere.
        whole = torch.ones_like(entries[0]["mean"][:1])
        drawn = zip(samples, entries, strict=True)
        masks = [whole if self._leaves_mask_out(sample) else entry.get("mask", whole) for sample, entry in drawn]
        return mask_weights(torch.stack(masks), self.job.recipe.objective)

    def _leaves_mask_out(self, sample: Sample) -> bool:
        """Return whether a sample is trained as if it had no mask, which is drawn from a stream of its own."""
        share = self.job.recipe.objective.unmasked_probability or 0.0
        return bool(share and self.stream(sample, "mask").random() < share)

    def _prior(self, samples: Sequence[Sample]) -> Tensor | None:
        """Return which images are to keep the base's prediction, (B,1,1,1) bool; None if the setting is off."""
        if not self.job.recipe.objective.prior_prediction:
            return None
        return torch.tensor([sample.image.kind == "regularization" for sample in samples]).view(-1, 1, 1, 1)

    def _weight(self, sample: Sample) -> float:
        prior = self.job.recipe.objective.prior_weight if sample.image.kind == "regularization" else 1.0
        return sample.image.weight * prior


def join_texts(texts: Sequence[TextConditioning]) -> TextConditioning:
    """Concatenate encoded texts into one batch."""
    pooled = [text.pooled for text in texts if text.pooled is not None]
    return TextConditioning(torch.cat([text.hidden for text in texts]), torch.cat(pooled) if pooled else None)
