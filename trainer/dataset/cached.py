"""Under which names encoded pictures and captions lie in the shared cache, and which of a job's lie there. No torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.job import Job
from trainer.dataset.sampling import Sample

# Raised when what an entry holds changes, so that entries of older programs are never read.
FORM = 1
# With one text most cards are done with each operation before the host asks for the next; see decision 23.
TEXTS_AT_ONCE = 8


def texts_at_once(fit: FitConfig) -> int:
    """How many texts go through the encoders together; one where runs repeat, as others beside it change its bits."""
    return 1 if fit.deterministic else TEXTS_AT_ONCE


def content_key(*parts: object) -> str:
    """SHA-256 over the JSON of ``parts``: equal content gives the same key on every machine."""
    return hashlib.sha256(json.dumps([FORM, *parts], ensure_ascii=False).encode("utf-8")).hexdigest()


def entry_path(folder: Path, key: str) -> Path:
    """Where the entry ``key`` lies; two letters of the key make the subfolder, so that no folder grows huge."""
    return folder / key[:2] / f"{key}.safetensors"


@dataclass(frozen=True)
class Cached:
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
        """The key of a sample's latents: picture and mask bytes, crop, bucket, flip, background, VAE and its dtype."""
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
