"""Whether the disks can take what a run writes, known before anything is written. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.config.job import Job
from trainer.config.recipe import RecipeConfig
from trainer.dataset.portions import latent_bytes, text_bytes
from trainer.errors import RunError
from trainer.memory.course import Occasions
from trainer.memory.subject import Subject
from trainer.protocol.places import cache_folder, existing, free_bytes
from trainer.protocol.sizes import size

# Weights of a LoRA of rank 1 on each family's published UNet, by the kind of layer.
_WEIGHTS = {
    "sd15": {"attention": 199_296, "linear": 224_640, "conv": 626_880},
    "sdxl": {"attention": 1_451_520, "linear": 1_208_320, "conv": 414_400},
}
# As trainer.training.checkpoint keeps for events and logs: with less, no checkpoint is written.
_SPARE_BYTES = 64 << 20
_CHECKPOINT_BYTES = 4
_FILE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
_NAMED_BY = {"run.room": "with output.runs in the job", "cache.room": "in the environment variable IMPASTO_CACHE"}


def require_room(job: Job, subject: Subject, encoded: Occasions | None) -> None:
    """Raise RunError where a disk lacks room for what a run surely writes.

    ``job`` is resolved; ``encoded`` tells what goes into the cache, where that is known.
    """
    for error in lacking_room(job, subject, encoded):
        raise error


def lacking_room(job: Job, subject: Subject, encoded: Occasions | None) -> Iterator[RunError]:
    """Yield an error for each disk that lacks room for what a run surely writes; see `require_room`."""
    runs, cache = Path(job.output.runs), cache_folder()
    needs = [("run.room", runs, _run_bytes(job, subject) + _SPARE_BYTES, "LoRA files and checkpoints")]
    entries = _cache_bytes(subject, encoded) if encoded else 0
    try:
        if entries and existing(runs).stat().st_dev == existing(cache).stat().st_dev:
            what = "LoRA files, checkpoints, encoded pictures and captions"
            needs = [("run.room", runs, needs[0][2] + entries, what)]
        elif entries:
            needs.append(("cache.room", cache, entries + _SPARE_BYTES, "encoded pictures and captions"))
        for code, folder, need, what in needs:
            if (free := free_bytes(folder)) < need:
                yield _too_little(code, folder, free, need, what)
    except OSError:
        return  # a disk that is not there: `require_place` has the words


def _too_little(code: str, folder: Path, free: int, need: int, what: str) -> RunError:
    return RunError(
        code,
        f"The disk of {folder} has {size(free)} free, and this run writes at least {size(need)} there: {what}.",
        f"Make room on that disk, or name a folder on another one {_NAMED_BY[code]}.",
    )


def _run_bytes(job: Job, subject: Subject) -> int:
    """Bytes of the LoRA files and checkpoints, without what the optimizer remembers: at least that comes."""
    if not subject.has_published_unet:
        return 0  # a base of another size, whose layers are not counted here
    saving, steps = job.report.saving, job.recipe.steps or 1
    files = min(-(-steps // (saving.every_steps or steps)), saving.keep or steps)
    checkpoints = min(-(-steps // (saving.checkpoint_every or steps)), saving.checkpoint_keep)
    return _weights(subject) * (files * _FILE_BYTES[job.output.dtype] + checkpoints * _CHECKPOINT_BYTES)


def _weights(subject: Subject) -> int:
    """How many weights the LoRA has on the UNet."""
    recipe, counts = subject.recipe, _WEIGHTS[subject.family]
    if not recipe.learning_rate:
        return 0
    return sum(counts[kind] * _rank(recipe, kind) for kind in _kinds(recipe))


def _kinds(recipe: RecipeConfig) -> tuple[str, ...]:
    return {"attention": ("attention",), "linear": ("attention", "linear")}.get(
        recipe.layers, ("attention", "linear", "conv")
    )


def _rank(recipe: RecipeConfig, kind: str) -> int:
    return min(recipe.rank, recipe.conv_rank or recipe.rank) if kind == "conv" else recipe.rank


def _cache_bytes(subject: Subject, encoded: Occasions) -> int:
    """Bytes of what is encoded before the first step."""
    shown = sum(bucket.pictures for bucket in subject.buckets) or 1
    latents = sum(latent_bytes(bucket.size, masked=False) * bucket.pictures for bucket in subject.buckets) / shown
    widths = () if subject.trained_texts else (int(config["hidden_size"]) for config in subject.text_configs)
    return int(encoded.pictures * latents) + encoded.texts * text_bytes(subject.recipe.token_chunks, widths)
