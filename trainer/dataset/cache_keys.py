"""Under which names encoded pictures and captions lie in the shared cache, and which of a job's lie there. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.config.base import Family
from trainer.config.fit import TEXTS_AT_ONCE, FitConfig
from trainer.config.job import Job
from trainer.dataset.sampling import Sample

# Raised when what an entry holds changes, so that entries of older programs are never read.
FORM = 1
GIGABYTE = 1e9
FLOAT_BYTES = 4
LATENT_SCALE = 8
# Listing a showing takes about 0.1 ms: a portion that nothing else bounds is listed within some ten seconds.
MOST_SHOWINGS = 100_000


def texts_at_once(fit: FitConfig) -> int:
    """Return how many texts are encoded together: 1 where runs repeat exactly, as others change a text's bits."""
    return 1 if fit.deterministic else fit.text_encoder_batch_size or TEXTS_AT_ONCE


def encoding_form(fit: FitConfig) -> tuple[object, ...]:
    """Return what of a fit decides under which keys images and texts are cached."""
    return fit.vae_dtype, bool(fit.vae_encode_tiling), texts_at_once(fit)


def content_key(*parts: object) -> str:
    """SHA-256 over the JSON of ``parts``: equal content gives the same key on every machine."""
    return hashlib.sha256(json.dumps([FORM, *parts], ensure_ascii=False).encode("utf-8")).hexdigest()


def entry_path(folder: Path, key: str) -> Path:
    """Where the entry ``key`` lies; two letters of the key make the subfolder, so that no folder grows huge."""
    return folder / key[:2] / f"{key}.safetensors"


@dataclass(frozen=True)
class CacheKeys:
    """The entries of a resolved job in the cache under ``folder``; the hashes are those of its VAE and encoders."""

    folder: Path
    job: Job
    family: Family
    vae_hash: str
    text_hash: str

    @property
    def pictures(self) -> Path:
        """The folder of latents."""
        return self.folder / "pictures"

    @property
    def texts(self) -> Path:
        """The folder of embeddings."""
        return self.folder / "texts"

    def picture_key(self, sample: Sample) -> str:
        """Return the key of a sample's latents.

        Over image and mask bytes, crop, bucket, flip, background, VAE and its dtype, and whether it encodes in tiles.
        """
        picture = sample.picture
        return content_key(
            "picture",
            picture.id,
            picture.mask,
            picture.mask_id,
            sample.window,
            picture.bucket,
            sample.flip,
            self.job.dataset.background.lower(),
            self.vae_hash,
            self.job.fit.vae_dtype,
            *(["tiled"] if self.job.fit.vae_encode_tiling else []),
        )

    def text_key(self, text: str) -> str:
        """The key of a text's embeddings: the words, the encoders, clip skip, chunks and dtype.

        And how many are encoded at once, where that is more than one: what repeats bit for bit takes none of those.
        """
        recipe, at_once = self.job.recipe, texts_at_once(self.job.fit)
        return content_key(
            "text",
            text,
            self.family,
            self.text_hash,
            recipe.clip_skip,
            recipe.token_chunks,
            self.job.fit.dtype,
            *([at_once] if at_once > 1 else []),
        )

    def has_picture(self, sample: Sample) -> bool:
        """Whether there is an entry; whether it is sound is seen when it is read."""
        return entry_path(self.pictures, self.picture_key(sample)).is_file()

    def has_text(self, text: str) -> bool:
        """Whether there is an entry; whether it is sound is seen when it is read."""
        return entry_path(self.texts, self.text_key(text)).is_file()


def text_bytes(token_chunks: int, widths: Iterable[int]) -> int:
    """Bytes that a cached caption takes at most, with encoders of these hidden sizes: fp32."""
    return (token_chunks + 2) * sum(widths) * FLOAT_BYTES


def latent_bytes(bucket: tuple[int, int], *, masked: bool) -> int:
    """Return the bytes that cached latents of a bucket (width, height) take.

    Mean and deviation have 4 channels each, a mask has one; all in fp32 and at the size of the latents.
    """
    width, height = bucket
    return (2 * 4 + masked) * (width // LATENT_SCALE) * (height // LATENT_SCALE) * FLOAT_BYTES
