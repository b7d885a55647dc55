"""The loss at fixed noise, against diffusers' scheduler and the UNet alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel

from tests.train.dataset.test_cache import prepared, quiet
from trainer.config.lr_schedule import Segment
from trainer.dataset.sampling import generator, micro_conditioning
from trainer.training.build import build_engine
from trainer.training.callbacks.validation import Validator


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_it_is_the_plain_squared_error_at_each_timestep(tmp_path: Path, micro_batch: int) -> None:
    settings = ("report.validation.timesteps=[50, 500, 950]", f"fit.micro_batch={micro_batch}")
    job, pictures, parts = prepared(tmp_path, (*settings, "recipe.objective.min_snr_gamma=5"))
    validator = Validator(pictures, job, parts.collator, parts.device)
    parts.cache.ensure_latents(validator.samples, quiet)
    parts.cache.ensure_texts([sample.caption for sample in validator.samples], quiet)
    engine = build_engine(job, parts, [Segment(0, 6)], fresh=True)
    seen: list[tuple[int, int]] = []
    measured = validator.measure(engine.models, engine.noise_schedule, lambda *progress: seen.append(progress))
    assert seen == [(done, 6) for done in range(1, 7)] and not measured.held_out

    unet = UNet2DConditionModel.from_pretrained(Path(job.base.model) / "unet")
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    for timestep in (50, 500, 950):
        losses = []
        for sample in validator.samples:
            latents = parts.cache.latents(sample)["mean"][None] * 0.13025
            stream = generator(job.recipe.seed, "validation", sample=sample.image.id, repeat=timestep)
            noise = torch.from_numpy(stream.standard_normal(tuple(latents.shape[1:]), dtype=np.float32))[None]
            text = parts.cache.text(sample.caption)
            conditions = {"text_embeds": text.pooled, "time_ids": torch.tensor([micro_conditioning(sample)])}
            with torch.no_grad():
                noisy = scheduler.add_noise(latents, noise, torch.tensor([timestep]))
                made = unet(noisy, timestep, text.hidden, added_cond_kwargs=conditions).sample
            losses.append((made - noise).square().mean().item())
        assert measured.per_timestep[timestep] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert measured.loss == pytest.approx(sum(measured.per_timestep.values()) / 3, rel=1e-9)


def test_held_out_pictures_alone_are_measured_where_there_are_any(tmp_path: Path) -> None:
    job, pictures, parts = prepared(tmp_path, ("dataset.validation_share=0.4",))
    held_out = {picture.id for picture in pictures if picture.kind == "validation"}
    validator = Validator(pictures, job, parts.collator, parts.device)
    assert validator.held_out and 0 < len(held_out) < 6
    assert {sample.image.id for sample in validator.samples} == held_out
