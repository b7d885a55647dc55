"""Builds the engine of a run from its frozen job and listing: model, adapter, masters, optimizer, feed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.adapter.attach import Adapter, attach, continue_from, initial_weights
from trainer.adapter.names import slots
from trainer.base.quantized import choose_products
from trainer.base.source import BaseSource
from trainer.config.job import Job, learning_rates, live_text
from trainer.dataset.picture import Picture
from trainer.dataset.sampling import generator
from trainer.training.acceleration.channels_last import Kernels, lay_out
from trainer.training.data.batches import BatchSchedule, Collator
from trainer.training.data.latent_cache import Cache
from trainer.training.device.device import DTYPES
from trainer.training.device.gradient_checkpointing import set_checkpointing
from trainer.training.loop import Engine
from trainer.training.objective import NoiseSchedule
from trainer.training.optim.lr_schedule import Segment, multiplier_over
from trainer.training.optim.master_weights import LossScaler, MasterWeights
from trainer.training.optim.optimizer import build_optimizer
from trainer.training.step import StepModels


@dataclass(frozen=True, slots=True)
class RunParts:
    """What exists before the model is loaded: everything that deals data."""

    source: BaseSource
    cache: Cache
    feed: BatchSchedule
    assembler: Collator
    device: torch.device


def build_parts(job: Job, pictures: Sequence[Picture], source: BaseSource, cache_folder: Path) -> RunParts:
    """The data side of a run; loads no weights."""
    device = torch.device(job.fit.device or "cpu")
    live = live_text(job)
    cache = Cache(cache_folder, source, job, device)
    feed = BatchSchedule(pictures, job, cache, live_text=live)
    return RunParts(source, cache, feed, Collator(job, source, cache, live_text=live), device)


def build_engine(job: Job, parts: RunParts, segments: Sequence[Segment], *, fresh: bool) -> Engine:
    """Loads the base, attaches the adapter and readies the optimizer, at step 0.

    With ``fresh`` the weights are those that a run starts from; else a checkpoint is to be put in, and the LoRA that
    the run once continued is not looked at again.
    """
    source, device = parts.source, parts.device
    dtype = DTYPES[job.fit.dtype or "fp32"]
    unet = source.load_unet(dtype, device, job.fit.quantise or "none")
    choose_products(unet, job.fit.products)
    encoders = tuple(source.load_text_encoders(dtype, device)) if live_text(job) else ()
    adapter, first = attach_adapter(job, source, unet, encoders, dtype, fresh=fresh)
    if job.fit.channels_last:
        lay_out(unet, Kernels.of(device))
    models = StepModels(source.family, unet, encoders, job.recipe.clip_skip, dtype)
    engine = put_together(job, parts, segments, models, adapter)
    engine.masters.load(first)  # in fp32: the working weights hold them rounded to the base's dtype
    return engine


def put_together(
    job: Job, parts: RunParts, segments: Sequence[Segment], models: StepModels, adapter: Adapter
) -> Engine:
    """What trains ``models``, whose adapter is attached: masters, optimizer and schedule, at step 0."""
    choice, dropouts = job.fit.checkpointing or "none", job.recipe.has_dropouts
    set_checkpointing(models.unet, models.text_encoders, choice, dropouts=dropouts)
    masters = MasterWeights(adapter.parameters)
    source, device = parts.source, parts.device
    return Engine(
        job=job,
        models=models,
        noise_schedule=NoiseSchedule.create(source.prediction, source.zero_terminal_snr).to(device, torch.float32),
        adapter=adapter,
        masters=masters,
        optimizer=build_optimizer(job.recipe.optimizer, groups(job, adapter, masters)),
        multiplier=multiplier_over(job.recipe.schedule, segments),
        feed=parts.feed,
        assembler=parts.assembler,
        device=device,
        scaler=LossScaler() if job.fit.dtype == "fp16" else None,
    )


def attach_adapter(
    job: Job,
    source: BaseSource,
    unet: torch.nn.Module,
    encoders: Sequence[torch.nn.Module],
    dtype: torch.dtype,
    *,
    fresh: bool,
) -> tuple[Adapter, dict[str, Tensor]]:
    """The adapter and, in fp32, the weights the run starts from: fresh ones, or those of the LoRA it continues."""

    def stream(name: str) -> np.random.Generator:
        return generator(job.recipe.seed, "adapter", sample=name)

    adapter = attach(source.family, unet, encoders, job.recipe, dtype=dtype, generator=stream)
    first = initial_weights(adapter, stream)
    if fresh and job.base.continue_from:
        table = slots(source.family, source.unet_config, source.text_configs)
        first = continue_from(Path(job.base.continue_from), source.family, table, adapter, first)
    return adapter, first


def groups(job: Job, adapter: Adapter, masters: MasterWeights) -> dict[str, tuple[float, list[torch.nn.Parameter]]]:
    """The optimizer's parameter groups: learning rate and masters of each trained part, in table order."""
    return {
        part: (rate, [master for key, master in masters.masters.items() if adapter.part_of[key] == part])
        for part, rate in learning_rates(job).items()
    }
