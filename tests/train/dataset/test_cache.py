"""Caches hold what the pipelines compute, follow content alone, and heal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageCms, ImageOps

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.base.encoding import encode_latents
from trainer.base.source import open_base
from trainer.config.base import Family
from trainer.config.job import Job
from trainer.config.load import load_job
from trainer.config.resolve import resolve_job
from trainer.dataset.cache_keys import latent_bytes
from trainer.dataset.dataset import read_dataset
from trainer.dataset.image import ImageRecord
from trainer.dataset.pixels import crop_pixels
from trainer.dataset.sampling import EpochBatches, Sample
from trainer.errors import DatasetError, ResumableError
from trainer.memory.forecast.host_memory import IMAGE_BYTES
from trainer.training.build import RunParts, build_parts
from trainer.training.data import latent_cache
from trainer.training.data.latent_cache import Cache
from trainer.training.device.device import this_machine
from trainer.training.reporting.reporter import Interrupted

SHUFFLED = (
    "recipe.captions.shuffle=true",
    "recipe.captions.tag_dropout=0.3",
    "recipe.captions.dropout=0.2",
    "recipe.images.crop=random",
    "recipe.images.flip=true",
)


def prepared(
    folder: Path, settings: tuple[str, ...] = (), family: Family = "sdxl"
) -> tuple[Job, tuple[ImageRecord, ...], RunParts]:
    base = tiny_base(family, folder / "bases")
    pictures = folder / "pictures"
    job = load_job(write_job(folder, base, pictures if pictures.exists() else photographs(pictures)), settings)
    source = open_base(job.base)
    frozen = resolve_job(
        job,
        family=family,
        prediction="epsilon",
        zero_terminal_snr=False,
        samples_per_epoch=6,
        machine=this_machine("cpu"),
    )
    listed = read_dataset(frozen.dataset, frozen.recipe).images
    return frozen, listed, build_parts(frozen, listed, source, folder / "cache")


def showings(job: Job, pictures: tuple[ImageRecord, ...], epochs: int) -> Iterator[Sample]:
    for epoch in range(epochs):
        for batch in EpochBatches(pictures, job.recipe, epoch):
            yield from batch


def quiet(done: int, total: int) -> None:
    """Progress that nobody watches."""


def test_cached_equals_uncached_with_random_crops_shuffle_and_dropout(tmp_path: Path) -> None:
    """Against Pillow and the VAE of diffusers, and the text encoders without the cache."""
    job, pictures, parts = prepared(tmp_path, SHUFFLED)
    samples = list(showings(job, pictures, 2))
    parts.cache.ensure_latents(samples, quiet)
    parts.cache.ensure_texts([sample.caption for sample in samples], quiet)
    vae = AutoencoderKL.from_pretrained(Path(job.base.model) / "vae")
    encoders = parts.source.load_text_encoders(torch.float32, "cpu")
    assert len({sample.caption for sample in samples}) > len(pictures)  # it does shuffle
    for sample in samples:
        latents, text = parts.cache.latents(sample), parts.cache.text(sample.caption)
        expected = vae.encode(pixels_by_pillow(sample)).latent_dist
        torch.testing.assert_close(latents["mean"], expected.mean[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(latents["std"], expected.std[0], rtol=1e-5, atol=1e-5)
        fresh = parts.cache.encode_now(encoders, [sample.caption])
        torch.testing.assert_close(text.hidden, fresh.hidden, rtol=1e-5, atol=1e-5)
        assert text.pooled is not None and fresh.pooled is not None
        torch.testing.assert_close(text.pooled, fresh.pooled, rtol=1e-5, atol=1e-5)


def pixels_by_pillow(sample: Sample) -> torch.Tensor:
    left, top, width, height = sample.window
    with Image.open(sample.image.path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
        if profile := image.info.get("icc_profile"):  # the rocket's photographer left one
            source = ImageCms.ImageCmsProfile(BytesIO(profile))
            upright = ImageCms.profileToProfile(upright, source, ImageCms.createProfile("sRGB"))
    box = (left, top, left + width, top + height)
    resized = upright.resize(sample.image.bucket, Image.Resampling.LANCZOS, box=box)
    values = np.asarray(ImageOps.mirror(resized) if sample.flip else resized, dtype=np.float32) / 127.5 - 1
    return torch.from_numpy(values).permute(2, 0, 1)[None]


def test_texts_at_once_are_those_of_each_by_itself(tmp_path: Path) -> None:
    """But for rounding; progress and pace count texts, the last group, which is not full, too."""
    job, _, parts = prepared(tmp_path, ("recipe.token_chunks=150",))
    texts = [f"picture {n}, " + "many words, " * n * 3 for n in range(21)]
    told: list[tuple[int, int]] = []
    encoders = parts.source.load_text_encoders(torch.float32, "cpu")
    cache = cache_of(job.replaced(fit=job.fit.replaced(deterministic=False, text_encoder_batch_size=8)), parts)
    cache.ensure_texts(texts[:2], quiet)
    cached = cache.ensure_texts(texts, lambda *amount: told.append(amount))
    assert cached is not None and cached.count == 19 and cached.encode >= cached.count / cached.seconds
    assert told == [(done, 21) for done in (2, 10, 14, 21)], "texts of one length at once, the longest first"
    for text in texts:
        kept, alone = cache.text(text), cache.encode_now(encoders, [text])
        torch.testing.assert_close(kept.hidden, alone.hidden, rtol=1e-5, atol=1e-5)
        assert kept.pooled is not None and alone.pooled is not None
        torch.testing.assert_close(kept.pooled, alone.pooled, rtol=1e-5, atol=1e-5)
    assert len({cache.text(text).hidden.numpy().tobytes() for text in texts}) == 21
    # Nothing of these serves a run that is to repeat bit for bit, nor the other way round.
    exact = parts.cache.ensure_texts(texts, quiet)
    assert exact is not None and exact.count == 21


def cache_of(job: Job, parts: RunParts) -> Cache:
    """For another job on the same base, in the same folder."""
    return Cache(parts.cache.entries.folder, parts.source, job, torch.device("cpu"))


def test_a_text_is_encoded_by_itself_where_runs_repeat(tmp_path: Path) -> None:
    """Bit for bit; the CPU always does."""
    job, _, parts = prepared(tmp_path)
    assert job.fit.deterministic
    texts = [f"picture {n}" for n in range(5)]
    parts.cache.ensure_texts(texts, quiet)
    encoders = parts.source.load_text_encoders(torch.float32, "cpu")
    assert all(
        torch.equal(parts.cache.text(text).hidden, parts.cache.encode_now(encoders, [text]).hidden) for text in texts
    )


def test_entries_are_those_of_each_picture_by_itself_bit_for_bit(tmp_path: Path) -> None:
    """However many are decoded and written meanwhile, and however they are brought to the VAE."""
    job, pictures, parts = prepared(tmp_path, SHUFFLED)
    samples = list(showings(job, pictures, 1))
    cached = parts.cache.ensure_latents(samples, quiet)
    assert cached is not None and cached.count == len(samples) and cached.decode
    vae = parts.source.load_vae(torch.float32, torch.device("cpu"))
    for sample in samples:
        pixels, _ = crop_pixels(sample, job.dataset.background, job.dataset.max_megapixels)
        image = torch.tensor(pixels).permute(2, 0, 1)[None].float().div_(127.5).sub_(1.0)
        mean, std = encode_latents(vae, image)
        latents = parts.cache.latents(sample)
        assert torch.equal(latents["mean"], mean[0]) and torch.equal(latents["std"], std[0])
    assert parts.cache.ensure_latents(samples, quiet) is None


def test_the_vae_is_shown_planes_as_the_forecast_traces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, pictures, parts = prepared(tmp_path)
    shown: list[torch.Tensor] = []

    def watched(vae: Any, image: torch.Tensor, *, tiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        shown.append(image)
        return encode_latents(vae, image, tiled=tiled)

    monkeypatch.setattr(latent_cache, "encode_latents", watched)
    parts.cache.ensure_latents([next(showings(job, pictures, 1))], quiet)
    (image,) = shown
    assert image.is_contiguous() and image.dtype == torch.float32 and image.shape[:2] == (1, 3)
    assert -1 <= image.min() < image.max() <= 1


def test_what_was_encoded_before_an_order_to_end_is_kept(tmp_path: Path) -> None:
    job, pictures, parts = prepared(tmp_path)
    samples = list(showings(job, pictures, 1))

    def ordered(done: int, total: int) -> None:
        if done == 2:
            raise Interrupted("pause")

    with pytest.raises(Interrupted):
        parts.cache.ensure_latents(samples, ordered)
    there = sum(parts.cache.latent_store.is_valid(parts.cache.image_key(sample)) for sample in samples)
    again = parts.cache.ensure_latents(samples, quiet)
    assert there >= 2 and (again.count if again else 0) == len(samples) - there


def test_one_photograph_is_decoded_at_a_time_where_the_forecast_counts_on_it() -> None:
    assert latent_cache.PIXELS_AT_ONCE * 9 == IMAGE_BYTES


def test_the_memory_of_large_pictures_is_given_back_before_the_next_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, pictures, parts = prepared(tmp_path)
    samples = list(showings(job, pictures, 1))
    sizes = sorted(sample.image.width * sample.image.height for sample in samples)
    trimmed: list[int] = []
    monkeypatch.setattr(latent_cache, "trim_host_memory", lambda: trimmed.append(1))
    monkeypatch.setattr(latent_cache, "LARGE_PIXELS", sizes[-1] - 1)
    parts.cache.ensure_latents(samples, quiet)
    assert len(trimmed) == sizes.count(sizes[-1])


def test_only_a_changed_picture_is_encoded_again(tmp_path: Path) -> None:
    """An entry written anew is another file on the disk, whatever its time."""
    job, pictures, parts = prepared(tmp_path)
    told: list[tuple[int, int]] = []
    parts.cache.ensure_latents(showings(job, pictures, 1), lambda done, total: told.append((done, total)))
    count = len(pictures)
    assert told == [(done, count) for done in range(count + 1)]
    before = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*.safetensors")}
    photo = tmp_path / "pictures" / "astronaut.png"
    with Image.open(photo) as image:
        ImageOps.invert(image.convert("RGB")).save(photo)
    job, pictures, parts = prepared(tmp_path)
    told.clear()
    parts.cache.ensure_latents(showings(job, pictures, 1), lambda done, total: told.append((done, total)))
    assert told == [(count - 1, count), (count, count)]
    after = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert len(after) == len(before) + 1 and before.items() <= after.items()


@pytest.mark.parametrize(
    "setting",
    [
        "recipe.resolution=96",
        "recipe.images.flip=true",
        "dataset.background='#102030'",
        "fit.vae_dtype=bf16",
        "fit.vae_encode_tiling=true",
    ],
)
def test_another_setting_never_reads_a_stale_picture(tmp_path: Path, setting: str) -> None:
    job, pictures, parts = prepared(tmp_path)
    keys = {parts.cache.image_key(sample) for sample in showings(job, pictures, 4)}
    job, pictures, parts = prepared(tmp_path, (setting,))
    others = {parts.cache.image_key(sample) for sample in showings(job, pictures, 4)}
    assert (keys < others) if "flip" in setting else keys.isdisjoint(others)


@pytest.mark.parametrize("setting", ["recipe.token_chunks=150", "fit.dtype=bf16"])
def test_another_setting_never_reads_a_stale_text(tmp_path: Path, setting: str) -> None:
    _, _, parts = prepared(tmp_path)
    _, _, others = prepared(tmp_path, (setting,))
    text = "a cat " * 40
    assert parts.cache.text_key(text) != others.cache.text_key(text)


def test_texts_of_one_length_are_shared_by_jobs_with_other_limits(tmp_path: Path) -> None:
    keys = []
    for settings in ((), ("recipe.token_chunks=150",), ("recipe.token_chunks=150", "recipe.caption_padding=limit")):
        _, _, parts = prepared(tmp_path, settings)
        parts.cache.ensure_texts(["a cat"], quiet)
        keys.append(parts.cache.text_key("a cat"))
        assert parts.cache.text("a cat").hidden.shape[1] == (152 if "limit" in str(settings) else 77)
    assert keys[0] == keys[1] != keys[2]


def test_a_damaged_entry_is_noticed_when_read_and_made_anew_when_prepared(tmp_path: Path) -> None:
    job, pictures, parts = prepared(tmp_path)
    sample = next(showings(job, pictures, 1))
    parts.cache.ensure_latents([sample], quiet)
    good = parts.cache.latents(sample)
    path = parts.cache.latent_store.path(parts.cache.image_key(sample))
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ResumableError) as noticed:
        parts.cache.latents(sample)
    assert noticed.value.code == "cache.damaged"
    parts.cache.ensure_latents([sample], quiet)
    assert torch.equal(parts.cache.latents(sample)["mean"], good["mean"])


def test_a_picture_that_changed_since_the_listing_is_refused_by_name(tmp_path: Path) -> None:
    job, pictures, parts = prepared(tmp_path)
    photo = tmp_path / "pictures" / "camera.png"
    photo.write_bytes((tmp_path / "pictures" / "astronaut.png").read_bytes())
    with pytest.raises(DatasetError) as refused:
        parts.cache.ensure_latents(showings(job, pictures, 1), quiet)
    assert refused.value.code == "dataset.changed" and "camera.png" in refused.value.sentence


def test_whatever_shows_in_an_entry_is_in_its_key(tmp_path: Path) -> None:
    job, pictures, parts = prepared(tmp_path)
    sample = next(showings(job, pictures, 1))
    picture = sample.image
    others = [
        replace(sample, flip=not sample.flip),
        replace(sample, window=(1, 0, *sample.window[2:])),
        *(
            replace(sample, image=replace(picture, **{field: value}))
            for field, value in {"id": "0" * 64, "bucket": (32, 128), "mask": "file", "mask_id": "1" * 64}.items()
        ),
    ]
    keys = {parts.cache.image_key(one) for one in [sample, *others]}
    assert len(keys) == 7
    # What names the showing and its caption does not show.
    assert parts.cache.image_key(replace(sample, epoch=9, repeat=9, caption="")) in keys


def test_clip_skip_is_in_the_key_of_a_text(tmp_path: Path) -> None:
    _, _, parts = prepared(tmp_path)
    job = parts.cache.job
    skipping = job.replaced(recipe=job.recipe.replaced(clip_skip=2))
    others = Cache(tmp_path, parts.source, skipping, parts.device)
    assert parts.cache.text_key("a cat") != others.text_key("a cat") != others.text_key("a dog")


def test_a_mask_that_changed_since_the_listing_is_refused_by_name(tmp_path: Path) -> None:
    photographs(tmp_path / "pictures", count=1)
    mask = tmp_path / "pictures" / "astronaut-masklabel.png"
    Image.new("L", (96, 96), 200).save(mask)
    job, pictures, parts = prepared(tmp_path, ("dataset.masks=files",))
    Image.new("L", (96, 96), 100).save(mask)
    with pytest.raises(DatasetError, match="astronaut-masklabel") as refused:
        parts.cache.ensure_latents(showings(job, pictures, 1), quiet)
    assert refused.value.code == "dataset.changed"


def test_what_is_cached_needs_its_picture_no_more(tmp_path: Path) -> None:
    """A run trains from its caches alone: pictures may be moved or edited meanwhile."""
    job, pictures, parts = prepared(tmp_path)
    samples = list(showings(job, pictures, 1))
    parts.cache.ensure_latents(samples[1:], quiet)
    for sample in samples[1:]:
        sample.image.path.unlink()
    parts.cache.ensure_latents(samples, quiet)
    assert parts.cache.latents(samples[1])["mean"].shape[0] == 4


def test_room_is_made_only_of_what_this_process_wrote(tmp_path: Path) -> None:
    job, pictures, parts = prepared(tmp_path)
    first, second, third = list(showings(job, pictures, 1))[:3]
    parts.cache.ensure_latents([first], quiet)
    again = Cache(tmp_path / "cache", parts.source, job, parts.device)
    again.ensure_latents([first, second, third], quiet)
    again.make_room([third], [], 0, 0)
    held = [again.latent_store.path(again.image_key(sample)).exists() for sample in (first, second, third)]
    assert held == [True, False, True]


def test_only_as_much_is_deleted_as_the_limit_demands(tmp_path: Path) -> None:
    job, pictures, parts = prepared(tmp_path)
    samples = list(showings(job, pictures, 1))[:4]
    sizes = {sample.caption: latent_bytes(sample.image.bucket, masked=False) for sample in samples}
    parts.cache.ensure_latents(samples[:3], quiet)
    written = parts.cache.latent_store.written_bytes
    assert written == sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.safetensors"))

    def held() -> int:
        return sum(parts.cache.latent_store.path(parts.cache.image_key(sample)).exists() for sample in samples[:3])

    parts.cache.make_room(samples[3:], [], written + sizes[samples[3].caption], 0)
    assert held() == 3
    parts.cache.make_room(samples[3:], ["a text"], written + sizes[samples[3].caption], 1)
    assert held() == 2
    parts.cache.make_room(samples[3:], [], 0, 0)
    assert held() == 0 and parts.cache.latent_store.written_bytes == 0
