"""Disk cache of latents and text embeddings, keyed by content and verified when read."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from trainer.base.encoding import TextConditioning, encode_latents, encode_texts
from trainer.base.families import TextEncoder
from trainer.base.source import BaseSource
from trainer.config.job import Job
from trainer.dataset.cache_keys import LATENT_SCALE, CacheKeys, entry_path, latent_bytes, text_batch_size
from trainer.dataset.image import ImageRecord
from trainer.dataset.pixels import crop_pixels
from trainer.dataset.sampling import Sample, as_prompt_text, padded_tokens
from trainer.errors import DatasetError, ResumableError
from trainer.files.tokens import PromptText
from trainer.protocol import events, files
from trainer.protocol.places import is_disk_full
from trainer.protocol.reading import open_file, reason_of
from trainer.training.checkpoint import disk_full
from trainer.training.data.pipeline import MemoryLimiter, Pipeline, PipelineSpeed, in_advance
from trainer.training.device.device import DTYPES, attention_kernels
from trainer.training.device.offload import release_at, trim_host_memory
from trainer.training.device.out_of_memory import is_out_of_memory

MOST_NAMED = 5
# Pixels decoded at once: one large photo, which is what the main memory forecast assumes, or several smaller images.
PIXELS_AT_ONCE = 24_000_000
# The memory of images larger than this is returned to the system immediately.
LARGE_PIXELS = PIXELS_AT_ONCE // 8

OnProgress = Callable[[int, int], None]
Floats = npt.NDArray[np.float32]


def digest(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of CPU ``tensors``, independent of their order."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def require_unchanged(images: Iterable[ImageRecord], check: Callable[[], object] = lambda: None) -> None:
    """Raise DatasetError if image or mask files are missing or differ from the listing.

    Reads every file and calls ``check`` before each; ``check`` may raise to interrupt.
    """
    stated = {(image.path, image.id) for image in images}  # an image may have a record for each resolution
    stated |= {(image.mask_path, image.mask_id) for image in images if image.mask_path and image.mask_id}

    def is_changed(path: Path, sha256: str) -> bool:
        check()
        return not path.is_file() or file_digest(path) != sha256

    changed = sorted(path for path, sha256 in stated if is_changed(path, sha256))
    if changed:
        names = ", ".join(str(path) for path in changed[:MOST_NAMED]) + (" ..." if len(changed) > MOST_NAMED else "")
        count = "1 file has" if len(changed) == 1 else f"{len(changed)} files have"
        raise DatasetError(
            "dataset.changed",
            f"Could not cache the dataset: {count} changed or disappeared since the run started ({names}).",
            "Restore the files, or start a new run.",
        )


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with open_file(path, "image") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class EntryStore:
    """A folder of content-addressed safetensors files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: set[bytes] = set()  # as bytes, half as large as hex strings
        self.written_bytes = 0
        """Size of the entries that this process wrote and has not deleted."""

    def path(self, key: str) -> Path:
        """Return the path of the entry ``key``."""
        return entry_path(self.folder, key)

    def write(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Write an entry atomically, with the digest of its content in the header.

        It is not synced to disk: an entry damaged by a power failure is found by its digest and encoded again. Raises
        ResumableError if the disk is full, and OSError for other failures.
        """
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        target = self.path(key)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            content = safetensors.torch.save(tensors, {"impasto.digest": digest(tensors)})
            files.write_bytes(target, content, durable=False)
        except OSError as error:
            if is_disk_full(error):  # often not the same disk as the run's
                raise disk_full(self.folder, "it filled up while caching") from error
            raise
        if not self.has_written(key):
            self._written.add(bytes.fromhex(key))
            self.written_bytes += len(content)

    def has_written(self, key: str) -> bool:
        """Return whether this process wrote the entry and has not deleted it."""
        return bytes.fromhex(key) in self._written

    def drop_written(self, keep: Container[str], amount: float) -> int:
        """Delete ``amount`` bytes of the entries that this process wrote, if there are as many besides ``keep``.

        Returns the number of bytes deleted.
        """
        freed = 0
        for short in list(self._written):
            if freed >= amount:
                break
            if (key := short.hex()) in keep:
                continue
            with suppress(OSError):  # deleted by the user, or open in another process, which Windows refuses
                freed += self.path(key).stat().st_size
                self.path(key).unlink()
            self._written.remove(short)
        self.written_bytes -= freed
        return freed

    def read(self, key: str) -> dict[str, Tensor] | None:
        """Return the entry's tensors on the CPU, or None if it is missing or damaged.

        Raises OSError if the disk fails or does not allow reading.
        """
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                stated = (file.metadata() or {}).get("impasto.digest")
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors if digest(tensors) == stated else None
        except Exception as error:
            # Neither means that the entry is damaged. The run recovers from missing memory.
            if is_out_of_memory(error) or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError)):
                raise
            return None  # a damaged entry can raise anything; it is encoded again

    def is_valid(self, key: str) -> bool:
        """Return whether the entry exists and is undamaged; mark it as used, or delete it if it is damaged."""
        path = self.path(key)
        try:
            entry = self.read(key)
        except OSError:  # such as a bad sector: the entry is written again
            entry = None
        if entry is None:
            path.unlink(missing_ok=True)
            return False
        # The modification time records the last use, because access times are not reliable on any system.
        with suppress(OSError):  # the cache may be read-only
            os.utime(path)
        return True


class Cache:
    """The cache of a run: latents from the base's VAE, and text embeddings from its text encoders."""

    def __init__(self, folder: Path, source: BaseSource, job: Job, device: torch.device) -> None:
        self.entries = CacheKeys(folder, job, source.family, source.vae_hash, source.text_hash)
        self.latent_store, self.texts = EntryStore(self.entries.latents), EntryStore(self.entries.texts)
        self.source = source
        self.device = device

    @property
    def job(self) -> Job:
        """Return the job with the fit settings in force, which determine the encodings and their keys."""
        return self.entries.job

    @job.setter
    def job(self, job: Job) -> None:
        self.entries = dataclasses.replace(self.entries, job=job)

    def image_key(self, sample: Sample) -> str:
        """Return the key of a sample's latents."""
        return self.entries.image_key(sample)

    def text_key(self, text: str | PromptText) -> str:
        """Return the key of a text's embeddings."""
        return self.entries.text_key(text)

    def ensure_latents(self, samples: Iterable[Sample], progress: OnProgress) -> events.CachingSpeed | None:
        """Encode missing and damaged latents; the VAE is loaded only if there are any, and freed afterwards.

        Images are encoded one at a time, so that none affects another's rounding. In the background, the next images
        are decoded and the last latents are written. ``progress`` receives the number of entries on disk. Returns the
        speed, or None if nothing was missing.
        """
        wanted = {self.image_key(sample): sample for sample in samples}
        missing = self._missing(self.latent_store, wanted)
        cached = len(wanted) - len(missing)
        progress(cached, len(wanted))
        if not missing:
            return None
        require_unchanged({wanted[key].image for key in missing}, self.source.check)
        # Largest first, so that every later shape reuses the memory cached for the first; forecasts assume this too. In
        # dataset order, encoding at 1024 reserved 6.6 GiB instead of 3.7.
        missing.sort(key=lambda key: _by_size(wanted[key]))
        pace = self._encode_images(missing, wanted, lambda done: progress(cached + done, len(wanted)))
        release_at("cache_pictures", self.device)
        return _cached("cache_pictures", pace)

    def _missing(self, store: EntryStore, wanted: Iterable[str]) -> list[str]:
        """Return the keys of missing and damaged entries; reads every entry in threads, which can be interrupted."""

        def names() -> Iterator[str]:
            for key in wanted:
                self.source.check()
                yield key

        workers = self.job.fit.loader_workers
        checked = in_advance(store.is_valid, names(), workers, describe=lambda key: str(store.path(key)))
        with closing(checked):
            return [key for key, valid in checked if not valid]

    def _encode_images(
        self, missing: Sequence[str], samples: Mapping[str, Sample], on_written: Callable[[int], object]
    ) -> PipelineSpeed:
        dtype = DTYPES[self.job.fit.vae_dtype or "fp32"]
        vae, tiled = self.source.load_vae(dtype, self.device), bool(self.job.fit.vae_encode_tiling)
        limiter = MemoryLimiter(PIXELS_AT_ONCE)

        def crop(key: str) -> tuple[Floats, Floats | None]:
            image = samples[key].image
            pixels = image.width * image.height
            with limiter.hold(pixels):
                crop = self._crop(samples[key])
                if pixels > LARGE_PIXELS:  # otherwise each reader thread would keep the memory of the largest image
                    trim_host_memory()
                return crop

        pipeline = Pipeline(
            crop,
            lambda inputs: _encode_image(vae, *inputs, tiled=tiled),
            self.latent_store.write,
            self.job.fit.loader_workers,
            lambda key: samples[key].image.path.name,
            self.source.check,
        )
        # A kernel that the job sets for the UNet may not support the VAE's single wide head.
        with attention_kernels("auto", self.device, dtype):
            return pipeline.run(missing, on_written)

    def _crop(self, sample: Sample) -> tuple[Floats, Floats | None]:
        """Return the VAE's input for a sample, and the sample's mask or None.

        The input has shape (1, 3, height, width) and values from -1 to 1; the mask has shape (height, width) and values
        from 0 to 1.
        """
        dataset = self.job.dataset
        pixels, mask = crop_pixels(sample, dataset.background, dataset.max_megapixels)
        # As in diffusers' VaeImageProcessor. The planes are made contiguous (NCHW): convolutions on a GPU would
        # otherwise keep the channels-last order of the file, and every normalization would copy the tensor twice.
        planes = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)
        planes /= np.float32(127.5)
        planes -= np.float32(1)
        return planes, mask

    def make_room(
        self, samples: Iterable[Sample], texts: Iterable[str | PromptText], limit: float, text_size: int
    ) -> None:
        """Delete entries that this process wrote until those of ``samples`` and ``texts`` fit in ``limit`` bytes.

        ``text_size`` is the size of one text. Nothing is deleted that is needed for them or that other processes wrote.
        """
        images = {
            self.image_key(sample): latent_bytes(sample.image.bucket, masked=sample.image.mask != "none")
            for sample in samples
        }
        needed = ((self.latent_store, images), (self.texts, {self.text_key(text): text_size for text in texts}))
        excess = -limit
        for store, sizes in needed:
            new = sum(size for key, size in sizes.items() if not store.has_written(key))
            excess += store.written_bytes + new
        for store, sizes in needed:
            excess -= store.drop_written(sizes, excess)

    def ensure_texts(self, texts: Iterable[str | PromptText], progress: OnProgress) -> events.CachingSpeed | None:
        """Encode texts whose embeddings are missing or damaged, several at once unless the run is deterministic.

        While texts are encoded, the previous ones are written in the background. Otherwise works like `ensure_latents`.
        """
        wanted = {self.text_key(text): text for text in texts}
        missing = self._missing(self.texts, wanted)
        cached = len(wanted) - len(missing)
        progress(cached, len(wanted))
        if not missing:
            return None
        pace = self._encode_texts(missing, wanted, lambda done: progress(cached + done, len(wanted)))
        release_at("cache_texts", self.device)
        return _cached("cache_texts", pace)

    def _encode_texts(
        self, missing: Sequence[str], texts: Mapping[str, str | PromptText], on_written: Callable[[int], object]
    ) -> PipelineSpeed:
        dtype = DTYPES[self.job.fit.dtype or "fp32"]
        encoders = self.source.load_text_encoders(dtype, self.device)
        groups = self._text_groups(missing, texts)

        def encode(keys: Sequence[str]) -> list[dict[str, Tensor]]:
            return _each_text(self.encode_now(encoders, [texts[key] for key in keys]))

        def write(keys: Sequence[str], encoded: Sequence[dict[str, Tensor]]) -> None:
            for key, tensors in zip(keys, encoded, strict=True):
                self.texts.write(key, tensors)

        done = list(accumulate(len(group) for group in groups))
        pipeline = Pipeline(list, encode, write)
        with attention_kernels("auto", self.device, dtype):  # the same kernel before the first step and between epochs
            return pipeline.run(groups, lambda count: on_written(done[count - 1])).of_parts(len(missing))

    def _text_groups(self, missing: Sequence[str], texts: Mapping[str, str | PromptText]) -> list[list[str]]:
        """Return the keys of texts to encode at once, the longest first, like images.

        Those of one group have the same length and are all read with weights, or all without.
        """
        alike: defaultdict[tuple[int, bool], list[str]] = defaultdict(list)
        for key in missing:
            text, recipe = texts[key], self.job.recipe
            alike[padded_tokens(text, recipe), as_prompt_text(text, recipe).weighted].append(key)
        size = text_batch_size(self.job.fit)
        return [group for _, keys in sorted(alike.items(), reverse=True) for group in _groups(keys, size)]

    def encode_now(
        self, encoders: Sequence[TextEncoder], texts: Sequence[str | PromptText], tokens: int | None = None
    ) -> TextConditioning:
        """Encode ``texts`` with loaded encoders, without the cache, and return the embeddings.

        They are padded to ``tokens``, or to the length of the longest of them. All are read with weights if the first
        one is.
        """
        recipe = self.job.recipe
        tokens = tokens or max(padded_tokens(text, recipe) for text in texts)
        read = [as_prompt_text(text, recipe) for text in texts]
        words, weighted = [each.text for each in read], read[0].weighted
        return encode_texts(
            self.source.family, encoders, words, recipe.clip_skip, self.device, tokens, weighted=weighted
        )

    def latents(self, sample: Sample) -> dict[str, Tensor]:
        """Return ``mean`` and ``std`` of a sample's posterior, and its ``mask`` if it has one.

        ``mean`` and ``std`` are fp32 of shape (4, h/8, w/8), not scaled; ``mask`` has shape (1, h/8, w/8).
        """
        return self._entry(self.latent_store, self.image_key(sample), f"the latents of {sample.image.path.name}")

    def text(self, text: str | PromptText, owner: str = "a text") -> TextConditioning:
        """Return a text's embeddings as a batch of one, on the CPU; errors name its ``owner``."""
        entry = self._entry(self.texts, self.text_key(text), f"the embeddings of {owner}")
        pooled = entry.get("pooled")
        return TextConditioning(entry["hidden"][None], None if pooled is None else pooled[None])

    def _entry(self, store: EntryStore, key: str, what: str) -> dict[str, Tensor]:
        try:
            entry = store.read(key)
        except OSError as error:  # such as a lost network drive, which does not mean that the entry is damaged
            raise ResumableError(
                "cache.unreadable",
                f"Could not read {what} from the cache: {store.path(key)}: {reason_of(error)}.",
                "Check the disk or network drive with the cache, then resume the run.",
            ) from error
        if entry is None:
            raise ResumableError(
                "cache.damaged",
                f"Could not read {what} from the cache: {store.path(key)} is missing or damaged.",
                "Resume the run; damaged entries are encoded again. If it happens again, check the disk.",
            )
        return entry


def _by_size(sample: Sample) -> tuple[int, int]:
    width, height = sample.image.bucket
    return -width * height, width


def _encode_image(vae: AutoencoderKL, image: Floats, mask: Floats | None, *, tiled: bool) -> dict[str, Tensor]:
    mean, std = encode_latents(vae, torch.from_numpy(image), tiled=tiled)
    tensors = {"mean": mean[0].cpu(), "std": std[0].cpu()}
    if mask is not None:
        full = torch.from_numpy(mask)[None, None].float()
        tensors["mask"] = torch.nn.functional.avg_pool2d(full, LATENT_SCALE)[0]
    return tensors


def _groups(keys: list[str], size: int) -> list[list[str]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def _each_text(encoded: TextConditioning) -> list[dict[str, Tensor]]:
    """Return each text's tensors on the CPU; all texts are copied from the device in one transfer."""
    parts = {"hidden": encoded.hidden}
    if encoded.pooled is not None:
        parts["pooled"] = encoded.pooled
    moved = {name: tensor.cpu() for name, tensor in parts.items()}
    return [{name: tensor[row] for name, tensor in moved.items()} for row in range(len(encoded.hidden))]


def _cached(phase: Literal["cache_pictures", "cache_texts"], pace: PipelineSpeed) -> events.CachingSpeed:
    decode = pace.ready if phase == "cache_pictures" else None
    return events.CachingSpeed(phase, pace.count, pace.seconds, decode=decode, encode=pace.compute, write=pace.keep)
