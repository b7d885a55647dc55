"""What a micro-batch holds, put together once more from the cache, the streams and the formulas alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.jobs import photographs
from tests.train.dataset.test_cache import prepared, quiet
from trainer.base.encoding import tokenize
from trainer.config.job import Job, PromptConfig
from trainer.dataset.sampling import Purpose, Sample, draw_sample, generator, micro_conditioning, plain_sample
from trainer.training.build import RunParts
from trainer.training.callbacks.preview import Previewer
from trainer.training.step import MicroBatch

SCALING = 0.13025  # SDXL's VAE
SETTINGS = (
    "dataset.masks=files",
    "recipe.objective.input_perturbation=0.1",
    "recipe.objective.prior_weight=0.25",
    "recipe.objective.unmasked_weight=0.2",
    "recipe.images.buckets=false",
    "recipe.images.crop=random",
)


def prepare(folder: Path, *more: str) -> tuple[Job, list[Sample], RunParts]:
    """Two training pictures, one with a mask, that count half, and one for regularization: all in one bucket."""
    photographs(folder / "pictures", count=2)
    photographs(folder / "others", count=1)
    Image.linear_gradient("L").resize((96, 96)).save(folder / "pictures" / "astronaut-masklabel.png")
    folders = [f"path='{folder / 'pictures'}', trigger='sks', weight=0.5", f"path='{folder / 'others'}'"]
    listed = f"dataset.folders=[{{{folders[0]}}}, {{{folders[1]}, kind='regularization'}}]"
    job, pictures, parts = prepared(folder, (listed, *SETTINGS, *more))
    samples = [draw_sample(picture, job.recipe, epoch=3, repeat=1) for picture in pictures]
    parts.cache.ensure_latents([*samples, *(plain_sample(picture, job.recipe) for picture in pictures)], quiet)
    parts.cache.ensure_texts([text for sample in samples for text in (sample.caption,)], quiet)
    return job, samples, parts


def numbers(job: Job, sample: Sample, purpose: Purpose) -> torch.Tensor:
    stream = generator(job.recipe.seed, purpose, epoch=3, sample=sample.image.id, repeat=1)
    return torch.from_numpy(stream.standard_normal((4, 8, 8), dtype=np.float32))


def one(batch: MicroBatch, place: int) -> dict[str, torch.Tensor]:
    """A picture of a micro-batch."""
    assert batch.input_noise is not None and batch.time_ids is not None and batch.mask is not None
    return {
        "latents": batch.latents[place],
        "noise": batch.noise[place],
        "input_noise": batch.input_noise[place],
        "timestep": batch.timesteps[place],
        "time_ids": batch.time_ids[place],
        "mask": batch.mask[place],
        "weight": batch.weights[place],
    }


def test_each_picture_is_drawn_from_its_own_streams(tmp_path: Path) -> None:
    job, samples, parts = prepare(tmp_path)
    assert sorted(sample.image.kind for sample in samples) == ["regularization", "train", "train"]
    batch = parts.collator.assemble(samples, 8)
    whole = torch.ones(1, 8, 8)
    for place, sample in enumerate(samples):
        entry = parts.cache.latents(sample)
        noise = numbers(job, sample, "noise")
        stream = generator(job.recipe.seed, "timestep", epoch=3, sample=sample.image.id, repeat=1)
        weight = 0.25 if sample.image.kind == "regularization" else 0.5
        expected = {
            "latents": (entry["mean"] + entry["std"] * numbers(job, sample, "posterior")) * SCALING,
            "noise": noise,
            "input_noise": noise + 0.1 * numbers(job, sample, "perturbation"),
            "timestep": torch.tensor(int(stream.integers(0, 1000))),
            "time_ids": torch.tensor(micro_conditioning(sample), dtype=torch.float32),
            "mask": 0.2 + 0.8 * entry.get("mask", whole),
            "weight": torch.tensor(weight / 8),
        }
        found = one(batch, place)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=f"{key} of {sample.image.path}")
        assert batch.text is not None and batch.text.pooled is not None
        text = parts.cache.text(sample.caption)
        assert torch.equal(batch.text.hidden[place], text.hidden[0]) and text.pooled is not None
        assert torch.equal(batch.text.pooled[place], text.pooled[0])
    assert batch.tokens is None


def test_timesteps_are_drawn_from_the_range_of_the_folder(tmp_path: Path) -> None:
    """The images of one micro-batch may have different ranges; the weight of a timestep does not know them."""
    job, samples, parts = prepare(
        tmp_path,
        "recipe.objective.timestep_max=799",
        "dataset.folders.0.timestep_max=99",
        "dataset.folders.1.timestep_min=700",
    )
    ranges = {"train": (0, 100), "regularization": (700, 800)}
    showings = [replace(sample, repeat=repeat) for sample in samples for repeat in range(40)]
    batch = parts.collator.assemble(showings, 8)
    expected = [
        int(
            generator(job.recipe.seed, "timestep", epoch=3, sample=one.image.id, repeat=one.repeat).integers(
                *ranges[one.image.kind]
            )
        )
        for one in showings
    ]
    assert batch.timesteps.tolist() == expected
    assert min(expected) < 20 and max(expected) > 780


def test_strengths_of_noise_belong_to_each_picture(tmp_path: Path) -> None:
    """The offset follows the picture's own latents; random strengths come after the noise from the same stream."""
    strengths = ("noise_offset=0.1", "adaptive_noise_scale=0.5", "input_perturbation_random_strength=true")
    job, samples, parts = prepare(tmp_path, *(f"recipe.objective.{strength}" for strength in strengths))
    batch = parts.collator.assemble(samples, 8)
    assert batch.input_noise is not None
    for place, sample in enumerate(samples):
        stream = generator(job.recipe.seed, "noise", epoch=3, sample=sample.image.id, repeat=1)
        plain, shift = (stream.standard_normal(shape, dtype=np.float32) for shape in ((4, 8, 8), (4, 1, 1)))
        offset = 0.1 + 0.5 * batch.latents[place].mean(dim=(1, 2), keepdim=True).abs().numpy()
        np.testing.assert_allclose(batch.noise[place].numpy(), plain + offset * shift, atol=1e-5)
        stream = generator(job.recipe.seed, "perturbation", epoch=3, sample=sample.image.id, repeat=1)
        extra = stream.standard_normal((4, 8, 8), dtype=np.float32)
        strength = 0.1 * stream.random(dtype=np.float32)
        added = (batch.input_noise[place] - batch.noise[place]).numpy()
        np.testing.assert_allclose(added, strength * extra, atol=1e-6)


def test_a_mask_is_left_out_as_often_as_asked(tmp_path: Path) -> None:
    settings = ("recipe.objective.unmasked_probability=0.3", "recipe.objective.normalize_masked_loss=true")
    job, samples, parts = prepare(tmp_path, *settings, "recipe.images.crop=center")
    (masked,) = (sample for sample in samples if sample.image.mask_path)
    showings = [replace(masked, repeat=repeat) for repeat in range(100)]
    batch = parts.collator.assemble(showings, 100)
    assert batch.mask is not None
    weights = 0.2 + 0.8 * parts.cache.latents(masked)["mask"]
    kept = weights / weights.mean()
    left_out = []
    for place, one in enumerate(showings):
        stream = generator(job.recipe.seed, "mask", epoch=3, sample=one.image.id, repeat=one.repeat)
        left_out.append(stream.random() < 0.3)
        torch.testing.assert_close(batch.mask[place], torch.ones(1, 8, 8) if left_out[-1] else kept)
    assert 15 < sum(left_out) < 45
    alone = parts.collator.assemble([showings[left_out.index(True)]], 1)
    assert alone.mask is not None and bool((alone.mask == 1).all()), "as forecasts assume it"


def test_a_mask_is_the_mean_of_what_a_latent_pixel_covers(tmp_path: Path) -> None:
    _, samples, parts = prepare(tmp_path, "recipe.images.crop=center")
    (masked,) = (sample for sample in samples if sample.image.mask_path)
    with Image.open(tmp_path / "pictures" / "astronaut-masklabel.png") as mask:
        small = np.asarray(mask.resize((64, 64), Image.Resampling.BOX), np.float32) / 255
    expected = torch.from_numpy(small.reshape(8, 8, 8, 8).mean(axis=(1, 3)))
    torch.testing.assert_close(parts.cache.latents(masked)["mask"][0], expected, rtol=1e-5, atol=1e-5)
    assert all("mask" not in parts.cache.latents(sample) for sample in samples if sample is not masked)


def test_live_text_encoders_get_tokens(tmp_path: Path) -> None:
    _, samples, parts = prepare(tmp_path, "recipe.text_encoder.learning_rate=1e-4")
    batch = parts.collator.assemble(samples, 3)
    assert batch.text is None and batch.tokens is not None
    expected = tokenize("sdxl", [sample.caption for sample in samples])
    assert all(torch.equal(found, wanted) for found, wanted in zip(batch.tokens, expected, strict=True))


def test_weighted_captions_reach_the_encoders_and_the_cache(tmp_path: Path) -> None:
    on = "recipe.weighted_captions=true"
    _, samples, parts = prepare(tmp_path, on, "recipe.text_encoder.learning_rate=1e-4")
    captions = [f"a (cat:1.5), {number}" for number in range(len(samples))]
    weighted = [replace(sample, caption=caption) for sample, caption in zip(samples, captions, strict=True)]
    for batch in (parts.collator.assemble(weighted, 3), parts.collator.assemble_fixed(weighted[0], [100])):
        assert batch.tokens is not None and batch.token_weights is not None
        expected = tokenize("sdxl", [f"a cat, {number}" for number in range(len(batch.weights))])
        assert all(torch.equal(found, wanted) for found, wanted in zip(batch.tokens, expected, strict=True))
        row = torch.tensor([1.0, 1.0, 1.5, *[1.0] * 74])
        assert torch.equal(batch.token_weights, row.expand(len(batch.weights), 77))


def test_weighted_captions_are_cached_apart_from_others(tmp_path: Path) -> None:
    job, _, parts = prepare(tmp_path, "recipe.weighted_captions=true")
    texts = ["a cat, sitting", "a (cat:1.5), sitting", "a cat, sitting:1.5"]
    off = replace(parts.cache.entries, job=job.replaced(recipe=job.recipe.replaced(weighted_captions=None)))
    assert [parts.cache.text_key(text) == off.text_key(text) for text in texts] == [True, False, True]
    parts.cache.ensure_texts(texts, quiet)
    plain, weighted = (parts.cache.text(text).hidden[0] for text in texts[:2])
    expected = plain.clone()
    expected[2] *= 1.5
    torch.testing.assert_close(weighted, expected, rtol=1e-6, atol=1e-6)


def test_previews_read_weights_whatever_the_captions_do(tmp_path: Path) -> None:
    """Embeddings times the weights of their tokens, by hand, from the cache and from loaded encoders."""
    job, _, parts = prepare(tmp_path)
    typed, plain = r"saber \(fate\), a (cat:1.5)", "saber (fate), a cat"
    prompts = [{"prompt": typed, "weights": True}, {"prompt": typed}, {"prompt": plain}]
    previews = job.report.previews.replaced(prompts=tuple(PromptConfig(**prompt) for prompt in prompts))
    job = job.replaced(report=job.report.replaced(previews=previews))
    texts = Previewer(job, parts.source, parts.cache, tmp_path).texts()
    parts.cache.ensure_texts(texts, quiet)
    weighted, _, as_text, _, unweighted, _ = (parts.cache.text(text).hidden[0] for text in texts)
    expected = unweighted.clone()
    expected[tokenize("sdxl", [plain])[0][0].tolist().index(tokenize("sdxl", ["cat"])[0][0, 1])] *= 1.5
    torch.testing.assert_close(weighted, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(as_text, expected, rtol=1e-2)
    encoders = parts.source.load_text_encoders(torch.float32, parts.device)
    torch.testing.assert_close(parts.cache.encode_now(encoders, texts[:1]).hidden[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("live", [False, True])
def test_what_validation_measures_is_always_the_same(tmp_path: Path, live: bool) -> None:
    rate = "1e-4" if live else "0.0"
    job, samples, parts = prepare(tmp_path, f"recipe.text_encoder.learning_rate={rate}")
    sample = plain_sample(samples[0].image, job.recipe)
    batch = parts.collator.assemble_fixed(sample, [100, 700])
    assert (batch.text is None) == live == (batch.tokens is not None)
    assert batch.input_noise is None and batch.mask is None and batch.timesteps.tolist() == [100, 700]
    for place, timestep in enumerate((100, 700)):
        torch.testing.assert_close(batch.latents[place], parts.cache.latents(sample)["mean"] * SCALING)
        stream = generator(job.recipe.seed, "validation", sample=sample.image.id, repeat=timestep)
        assert np.array_equal(batch.noise[place].numpy(), stream.standard_normal((4, 8, 8), dtype=np.float32))
    alone = parts.collator.assemble_fixed(sample, [700])
    assert torch.equal(alone.noise[0], batch.noise[1]) and torch.equal(alone.latents[0], batch.latents[1])
