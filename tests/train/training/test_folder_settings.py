"""Folders with settings and resolutions of their own: what is cached, what a step learns, and runs that are killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor

from tests.support.jobs import photographs, write_job
from tests.support.loras import Models, random_weights
from tests.support.steps import distance, step_models, take_gradient
from tests.support.tiny import tiny_base
from tests.train.dataset.test_cache import pixels_by_pillow, prepared, quiet
from tests.train.training.run.test_run import Killed, Watcher, kill_at, run_of, same_lora, train
from trainer.config.load import load_job
from trainer.config.recipe import ObjectiveConfig
from trainer.dataset.dataset import read_dataset, read_listing
from trainer.dataset.sampling import EpochBatches, Sample, micro_batches
from trainer.training.build import RunParts
from trainer.training.objective import NoiseSchedule
from trainer.training.run.resume import resume
from trainer.training.run.start import start
from trainer.training.step import training_step


def folders(root: Path, first: str, second: str = "repeats=1") -> str:
    """Return the setting of two folders of three photographs each, with these keys; one image has a mask."""
    for number in range(2):
        photographs(root / f"folder {number}", 3 + 3 * number)
    for name in ("astronaut.png", "chelsea.jpg", "coffee.webp"):
        (root / "folder 1" / name).unlink(missing_ok=True)
    Image.linear_gradient("L").resize((96, 96)).save(root / "folder 0" / "astronaut-masklabel.png")
    listed = [f"{{path='{root / f'folder {number}'}', {keys}}}" for number, keys in enumerate((first, second))]
    return f"dataset.folders=[{', '.join(listed)}]"


RULES = (
    "repeats=2, resolutions=[64, 128], captions={shuffle=true, tag_dropout=0.3}, images={flip=true}",
    "timestep_max=300, captions={dropout=0.3, prefix='photo of'}, images={crop='random'}",
)


def test_an_image_is_encoded_at_each_resolution_of_its_folder(tmp_path: Path) -> None:
    """Against Pillow and the VAE of diffusers; the mask against the mean of what a latent pixel covers."""
    job, images, parts = prepared(tmp_path, (folders(tmp_path, "resolutions=[64, 96]"),))
    assert len(images) == 9
    samples = [sample for batch in EpochBatches(images, job.recipe, 0) for sample in batch]
    parts.cache.ensure_latents(samples, quiet)
    vae = AutoencoderKL.from_pretrained(Path(job.base.model) / "vae")
    for sample in samples:
        latents, (width, height) = parts.cache.latents(sample), sample.image.bucket
        assert latents["mean"].shape == (4, height // 8, width // 8)
        expected = vae.encode(pixels_by_pillow(sample)).latent_dist
        torch.testing.assert_close(latents["mean"], expected.mean[0], rtol=1e-5, atol=1e-5)
    masked = [sample for sample in samples if sample.image.mask_path]
    assert sorted(sample.image.bucket for sample in masked) == [(64, 64), (96, 96)]
    for sample in masked:
        side = sample.image.bucket[0]
        mask = Image.linear_gradient("L").resize((96, 96)).resize((side, side), Image.Resampling.BOX)
        rows = torch.from_numpy(np.asarray(mask, np.float32)).reshape(side // 8, 8, side // 8, 8) / 255
        torch.testing.assert_close(parts.cache.latents(sample)["mask"][0], rows.mean(dim=(1, 3)), rtol=0, atol=0.01)


def gradient(models: Models, parts: RunParts, micro: Sequence[Sequence[Sample]], size: int) -> Tensor:
    """The gradient in float64 of an effective batch of this size in these micro-batches."""
    adapter = models.attach()
    random_weights(adapter)
    for samples in micro:
        batch = parts.collator.assemble(samples, size)._with(
            lambda tensor: tensor.double() if tensor.is_floating_point() else tensor
        )
        schedule = NoiseSchedule.create("epsilon", False).to("cpu", torch.float64)
        training_step(step_models(models, live_text=False), schedule, ObjectiveConfig(), batch)
    return take_gradient(adapter)


def test_micro_batches_change_no_gradient_of_mixed_resolutions(tmp_path: Path) -> None:
    settings = (folders(tmp_path, *RULES), "recipe.effective_batch=15")
    job, images, parts = prepared(tmp_path, settings, "sd15")
    (batch,) = EpochBatches(images, job.recipe, 0)
    parts.cache.ensure_latents(batch, quiet)
    parts.cache.ensure_texts([sample.caption for sample in batch], quiet)
    assert len({sample.image.bucket for sample in batch}) > 3
    single = gradient(Models.copies("sd15"), parts, micro_batches(batch, 1), len(batch))
    for size in (2, 4):
        together = gradient(Models.copies("sd15"), parts, micro_batches(batch, size), len(batch))
        assert distance(together, single) < 1e-10


def test_a_killed_run_with_folder_settings_resumes_exactly(tmp_path: Path) -> None:
    """Its job file and folders are gone when it is resumed: the listing holds the settings, the cache the images."""
    base = tiny_base("sd15", tmp_path / "bases", depth=1)
    settings = [
        folders(tmp_path, *RULES),
        "recipe.images={bucket_step=16}",  # without limits, which follow from each resolution
        "report.previews.prompts=[]",
    ]
    whole = train(write_job(tmp_path / "a", base, tmp_path / "folder 0"), settings)
    job = write_job(tmp_path / "b", base, tmp_path / "folder 0")
    with pytest.raises(Killed):
        start(job, settings, Watcher(kill_at(3)))
    run = run_of(job)
    listed, written = read_listing(run.listing), load_job(job, settings)
    assert listed == read_dataset(written.dataset, written.recipe).images
    assert len(listed) == 9
    job.unlink()
    for number in range(2):
        (tmp_path / f"folder {number}").rename(tmp_path / f"moved {number}")
    assert resume(run, Watcher()) == 0
    assert same_lora(whole, run.output / "test.safetensors")
