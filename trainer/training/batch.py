"""From cached samples to the tensors of one micro-batch: all chance is drawn here, on the CPU, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.base.source import BaseSource
from trainer.base.text import TextConditioning, tokenise
from trainer.base.vae import scale_latents
from trainer.config.job import Job
from trainer.dataset.randomness import Purpose, generator
from trainer.dataset.sampling import Sample, micro_conditioning
from trainer.training.cache import Cache
from trainer.training.objective import draw_noise, draw_timestep
from trainer.training.step import MicroBatch


class Assembler:
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
