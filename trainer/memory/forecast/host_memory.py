"""Estimate the main memory that a phase needs for data on its way to the GPU or the disk.

Does not require torch. Tests compare these sums with the memory that the functions actually use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainer.dataset.cache_keys import FLOAT_BYTES, latent_bytes, max_prefetched, text_batch_size, text_bytes
from trainer.memory.trace.memory_trace import MemoryTrace, Storage
from trainer.memory.trace.workload import Workload
from trainer.protocol.forecast import ForecastPhase
from trainer.training.data.pipeline import MAX_PENDING_WRITES, READER_THREADS

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Bytes per number in a base's file. It may have 16 or 32 bits, which is not known here, so this is the larger.
STORED_BYTES = 4
# A 24-megapixel photo in three copies: decoded, converted to sRGB, and cropped to its bucket.
IMAGE_BYTES = 3 * 3 * 24_000_000
# Results waiting to be written, one that arrives during a write, and the one being written (as tensors and file).
RESULTS_WAITING = MAX_PENDING_WRITES + 3
# Besides an image prepared by each reader: the one being encoded, and the one before, freed after the next arrives.
CROPS_WAITING = 2
# Copies of tensors on their way to a file: from the GPU, as bytes of each tensor, and as bytes of the whole file.
COPIES_SAVED = 3


def host_bytes(
    phase: ForecastPhase, workload: Workload, traces: Sequence[MemoryTrace], living: Iterable[Storage]
) -> int:
    """Return the peak bytes of main memory that ``phase`` uses in a run on a GPU.

    ``traces`` are the phase's traces; ``living`` are the storages on the GPU when it begins.
    """
    match phase:
        case "load" | "quantise":
            return max(_staged(traces, workload.fit.dtype), _masters(_born(traces)))
        case "cache_pictures":
            return _staged(traces, workload.fit.vae_dtype) + IMAGE_BYTES + _images_waiting(workload)
        case "cache_texts":
            widths = (int(config["hidden_size"]) for config in workload.text_configs)
            tokens = workload.of_part("cache_texts").recipe.token_chunks
            waiting = RESULTS_WAITING * text_batch_size(workload.fit) * text_bytes(tokens, widths)
            return _staged(traces, workload.fit.dtype) + waiting
        case "preview":
            # An offloaded UNet is what is allocated again after all prompts are drawn.
            waiting = sum(storage.bytes for storage in _born(traces[-1:]) if storage.name is not None)
            return _staged(traces[1:2], workload.fit.vae_dtype) + waiting
        case "checkpoint":
            kept = list(living)
            masters, state = _masters(kept), sum(storage.bytes for storage in kept if storage.kind == "optimizer")
            average = sum(storage.bytes for storage in kept if (storage.name or "").startswith("ema."))
            # The state's copy exists from the start; the files are made in this order and kept until all are written.
            return max(
                state + COPIES_SAVED * masters,
                state + masters + COPIES_SAVED * average,
                masters + average + COPIES_SAVED * state,
            )
        case "save":
            return COPIES_SAVED * _masters(living)
        case "first_step" | "train":
            return _prefetched(workload)
        case "validate":
            return 0


def streamed_bytes(load: Iterable[MemoryTrace]) -> int:
    """Return the bytes of weights that stay in main memory after loading, because they are streamed to the GPU."""
    return sum(work.bytes * work.count for trace in load for work in trace.work if work.kind == "copy")


def _images_waiting(workload: Workload) -> int:
    """Return the bytes of data waiting in the encoding pipeline: fp32 images with masks, and unwritten latents."""
    width, height = workload.buckets[0].size
    channels = 4 if workload.masks else 3
    waiting = RESULTS_WAITING * latent_bytes((width, height), masked=workload.masks)
    crops = (workload.fit.loader_workers or READER_THREADS) + CROPS_WAITING
    return crops * channels * FLOAT_BYTES * width * height + waiting


def _prefetched(workload: Workload) -> int:
    """Return the bytes of micro-batches in pinned memory, for which PyTorch rounds sizes up to powers of two."""
    fit, (width, height) = workload.fit, workload.buckets[0].size
    images = fit.micro_batch or 1
    latents = images * latent_bytes((width, height), masked=False) // 2
    widths = (int(config["hidden_size"]) for config in workload.text_configs)
    tokens = max(shape[2] for shape in workload.shapes)
    text = 0 if workload.trained_texts else images * text_bytes(tokens, widths)
    # Latents, noise, perturbed noise or masks, and texts; those built in advance and the one in use.
    return (max_prefetched(fit.prefetch_batches, images) + 1) * (3 * _rounded(latents) + _rounded(text))


def _rounded(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0


def _staged(traces: Iterable[MemoryTrace], dtype: str | None) -> int:
    """Return the bytes of main memory for loading the largest tensor: one copy as in the file, one in ``dtype``."""
    kept = NUMBER_BYTES[dtype or "fp32"]
    largest = max(
        (s.bytes for s in _born(traces) if s.stage in ("load", "quantise") and s.kind != "workspace"), default=0
    )
    return largest // kept * (STORED_BYTES + (kept if kept < STORED_BYTES else 0))


def _masters(storages: Iterable[Storage]) -> int:
    return sum(storage.bytes for storage in storages if storage.name is not None and storage.name.startswith("master."))


def _born(traces: Iterable[MemoryTrace]) -> list[Storage]:
    return [trace.storages[event] for trace in traces for event in trace.events.tolist() if event >= 0]
