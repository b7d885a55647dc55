"""Keys of cached latents and caption embeddings in the shared cache. Does not import torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.config.base import Family
from trainer.config.fit import DEFAULT_TEXT_BATCH, FitConfig
from trainer.config.job import Job
from trainer.dataset.sampling import Sample, as_prompt_text, padded_tokens
from trainer.files.tokens import PromptText, has_weights

# Increase when the content of entries changes, so that entries of older versions are never read.
FORMAT_VERSION = 1
GIGABYTE = 1e9
FLOAT_BYTES = 4
LATENT_SCALE = 8
# Listing a sample takes about 0.1 ms, so a shard without another limit is listed within about ten seconds.
MAX_SHARD_SAMPLES = 100_000
# Micro-batches that are loaded in advance have at most this many images together: 40 MB at SDXL's 1024 pixels.
MAX_PREFETCHED_IMAGES = 32


def text_batch_size(fit: FitConfig) -> int:
    """Return the number of captions encoded at once: 1 in deterministic runs, since the batch size changes rounding."""
    return 1 if fit.deterministic else fit.text_encoder_batch_size or DEFAULT_TEXT_BATCH


def encoding_settings(fit: FitConfig) -> tuple[object, ...]:
    """Return the fit settings that the cache keys of images and captions depend on."""
    return fit.vae_dtype, bool(fit.vae_encode_tiling), text_batch_size(fit)


def max_prefetched(stated: int | None, micro_batch: int) -> int:
    """Return the maximum number of micro-batches in advance: what the job states, or up to a limit."""
    return stated or max(2, MAX_PREFETCHED_IMAGES // micro_batch)


def content_key(*parts: object) -> str:
    """Return the SHA-256 of ``parts`` as JSON, so equal content has the same key on every machine."""
    return hashlib.sha256(json.dumps([FORMAT_VERSION, *parts], ensure_ascii=False).encode("utf-8")).hexdigest()


def entry_path(folder: Path, key: str) -> Path:
    """Return the path of an entry, in a subfolder named after its key's first two letters to keep folders small."""
    return folder / key[:2] / f"{key}.safetensors"


@dataclass(frozen=True)
class CacheKeys:
    """Cache keys of a resolved job's images and captions; their entries are in ``folder``."""

    folder: Path
    job: Job
    family: Family
    vae_hash: str
    text_hash: str

    @property
    def latents(self) -> Path:
        """Return the folder for latents."""
        return self.folder / "pictures"

    @property
    def texts(self) -> Path:
        """Return the folder for caption embeddings."""
        return self.folder / "texts"

    def image_key(self, sample: Sample) -> str:
        """Return the cache key of a sample's latents.

        It depends on the image and mask bytes, on what was drawn for its pixels, and on background, VAE, VAE dtype and
        encoder tiling.
        """
        image = sample.image
        return content_key(
            "picture",
            image.id,
            image.mask,
            image.mask_id,
            *sample.pixels,
            self.job.dataset.background.lower(),
            self.vae_hash,
            self.job.fit.vae_dtype,
            *(["tiled"] if self.job.fit.vae_encode_tiling else []),
        )

    def text_key(self, text: str | PromptText) -> str:
        """Return the cache key of a caption, based on text, text encoders, clip skip, padded length and dtype.

        A batch size above 1 is part of the key because batching changes rounding; deterministic runs never use such
        entries.
        """
        recipe, at_once = self.job.recipe, text_batch_size(self.job.fit)
        words, weighted = as_prompt_text(text, recipe)
        return content_key(
            "text",
            words,
            self.family,
            self.text_hash,
            recipe.clip_skip,
            padded_tokens(text, recipe),
            self.job.fit.dtype,
            *([at_once] if at_once > 1 else []),
            *(["weighted"] if weighted and has_weights(words) else []),
        )

    def has_image(self, sample: Sample) -> bool:
        """Return whether a sample's entry exists; it is validated only when it is read."""
        return entry_path(self.latents, self.image_key(sample)).is_file()

    def has_text(self, text: str | PromptText) -> bool:
        """Return whether a caption's entry exists; it is validated only when it is read."""
        return entry_path(self.texts, self.text_key(text)).is_file()


def text_bytes(token_chunks: int, widths: Iterable[int]) -> int:
    """Return the maximum size in bytes of a cached caption (fp32) for text encoders with these hidden sizes."""
    return (token_chunks + 2) * sum(widths) * FLOAT_BYTES


def latent_bytes(bucket: tuple[int, int], *, masked: bool) -> int:
    """Return the size in bytes of an image's cached latents, with its mask if ``masked``, for a (width, height) bucket.

    Mean and standard deviation have 4 channels each, and a mask has 1; all are fp32 at latent size.
    """
    width, height = bucket
    return (2 * 4 + masked) * (width // LATENT_SCALE) * (height // LATENT_SCALE) * FLOAT_BYTES
