"""Main memory that a phase needs beside the process itself: what passes through it on the way to the card or the disk.

Needs no torch. Tests hold these sums against what the functions they speak of take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainer.dataset.cache_keys import FLOAT_BYTES, latent_bytes, text_bytes, texts_at_once
from trainer.memory.trace.memory_trace import MemoryTrace, Storage
from trainer.memory.trace.workload import Workload
from trainer.protocol.forecast import ForecastPhase
from trainer.training.data.pipeline import MOST_KEPT, READERS

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Files hold 16 or 32 bits a number; which ones a base has is not known here.
STORED_BYTES = 4
# A photograph of 24 megapixels, as it is decoded, brought to sRGB, and cut to its bucket.
PICTURE_BYTES = 3 * 3 * 24_000_000
# Those that wait to be written, one more that comes meanwhile, and the one being written, as tensors and as its file.
RESULTS_WAITING = MOST_KEPT + 3
# Pictures cut ahead by each reader, the one that is encoded, and the one before, let go only when the next is there.
CROPS_WAITING = READERS + 2
# Of tensors on their way to a file: their copy from the card, its bytes tensor by tensor, and those in one piece.
COPIES_SAVED = 3


def host_bytes(
    phase: ForecastPhase, workload: Workload, traces: Sequence[MemoryTrace], living: Iterable[Storage]
) -> int:
    """Bytes of main memory that ``phase`` takes at most on a run that trains on a card.

    ``tapes`` are those of the phase, ``living`` what lives on the card when it begins.
    """
    match phase:
        case "load" | "quantise":
            return max(_staged(traces, workload.fit.dtype), _masters(_born(traces)))
        case "cache_pictures":
            return _staged(traces, workload.fit.vae_dtype) + PICTURE_BYTES + _pictures_waiting(workload)
        case "cache_texts":
            widths = (int(config["hidden_size"]) for config in workload.text_configs)
            waiting = RESULTS_WAITING * texts_at_once(workload.fit) * text_bytes(workload.recipe.token_chunks, widths)
            return _staged(traces, workload.fit.dtype) + waiting
        case "preview":
            # The UNet that waits outside is what is born again when all is drawn.
            waiting = sum(storage.bytes for storage in _born(traces[-1:]) if storage.name is not None)
            return _staged(traces[1:2], workload.fit.vae_dtype) + waiting
        case "checkpoint":
            kept = list(living)
            masters, state = _masters(kept), sum(storage.bytes for storage in kept if storage.kind == "optimizer")
            # The state's copy is there from the start; the masters' file is made first and kept for the second.
            return max(state + COPIES_SAVED * masters, masters + COPIES_SAVED * state)
        case "save":
            return COPIES_SAVED * _masters(living)
        case "first_step" | "train" | "validate":
            return 0


def _pictures_waiting(workload: Workload) -> int:
    """What the stages of encoding hold: pictures cut and ready, in fp32 with their masks, and latents to be written."""
    width, height = workload.buckets[0].size
    channels = 4 if workload.masks else 3
    waiting = RESULTS_WAITING * latent_bytes((width, height), masked=workload.masks)
    return CROPS_WAITING * channels * FLOAT_BYTES * width * height + waiting


def _staged(traces: Iterable[MemoryTrace], dtype: str | None) -> int:
    """The largest tensor on its way to the card: as the file has it, and rounded to ``dtype``."""
    kept = NUMBER_BYTES[dtype or "fp32"]
    largest = max(
        (s.bytes for s in _born(traces) if s.stage in ("load", "quantise") and s.kind != "workspace"), default=0
    )
    return largest // kept * (STORED_BYTES + (kept if kept < STORED_BYTES else 0))


def _masters(storages: Iterable[Storage]) -> int:
    return sum(storage.bytes for storage in storages if storage.name is not None and storage.name.startswith("master."))


def _born(traces: Iterable[MemoryTrace]) -> list[Storage]:
    return [trace.storages[event] for trace in traces for event in trace.events.tolist() if event >= 0]
