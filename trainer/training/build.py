"""Building a run's engine: models, adapter, master weights, optimizer and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.adapter.attach import Adapter, attach, initial_weights
from trainer.adapter.continuing import continue_from
from trainer.adapter.names import slots
from trainer.base.quantized import set_int8_directions
from trainer.base.source import BaseSource
from trainer.base.streaming import make_stream
from trainer.config.base import Part
from trainer.config.job import Job, learning_rates, trains_text_encoder
from trainer.config.lr_schedule import Segment, multiplier_over
from trainer.dataset.image import ImageRecord
from trainer.dataset.sampling import generator
from trainer.training.acceleration.channels_last import Kernels, convert_to_channels_last
from trainer.training.data.batches import BatchSchedule, Collator
from trainer.training.data.latent_cache import Cache
from trainer.training.device.device import DTYPES
from trainer.training.engine import Engine
from trainer.training.objective import NoiseSchedule
from trainer.training.optim.ema import WeightAverage
from trainer.training.optim.master_weights import LossScaler, MasterWeights
from trainer.training.optim.optimizer import ParameterGroup, build_optimizer
from trainer.training.optim.text_encoder_stops import TextEncoderStops
from trainer.training.optim.weight_norm import WeightNormLimit
from trainer.training.step import StepModels


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts of a run that exist before the models are loaded: base, cache and batches."""

    source: BaseSource
    cache: Cache
    batches: BatchSchedule
    collator: Collator
    device: torch.device


def build_parts(job: Job, images: Sequence[ImageRecord], source: BaseSource, cache_folder: Path) -> RunParts:
    """Return the base, cache and batches of a run without loading any weights."""
    device = torch.device(job.fit.device or "cpu")
    live = trains_text_encoder(job)
    cache = Cache(cache_folder, source, job, device)
    feed = BatchSchedule(images, job, cache, live_text=live)
    return RunParts(source, cache, feed, Collator(job, source, cache, live_text=live), device)


def build_engine(job: Job, parts: RunParts, segments: Sequence[Segment], *, fresh: bool) -> Engine:
    """Load the base, attach the adapter, build the optimizer, and return the engine at step 0.

    With ``fresh`` the adapter gets the weights that the run starts from. Otherwise the caller restores a checkpoint
    next, so a LoRA that the run started from is not read again.
    """
    source, device = parts.source, parts.device
    dtype = DTYPES[job.fit.dtype or "fp32"]
    unet = source.empty_unet()
    stream = make_stream(unet, job.fit.stream, device)
    source.fill_unet(unet, dtype, device, job.fit.quantize or "none", stream)
    set_int8_directions(unet, job.fit.products)
    encoders = tuple(source.load_text_encoders(dtype, device)) if trains_text_encoder(job) else ()
    adapter, first = attach_adapter(job, source, unet, encoders, dtype, fresh=fresh)
    if job.fit.channels_last and not stream:
        convert_to_channels_last(unet, Kernels.of(device))
    models = StepModels(source.family, unet, encoders, job.recipe.clip_skip, dtype, stream, adapter)
    engine = assemble_engine(job, parts, segments, models, adapter)
    engine.master_weights.load(first)  # in fp32; the working weights are rounded to the base's dtype
    if engine.ema is not None:
        engine.ema.load(first)
    return engine


def assemble_engine(
    job: Job, parts: RunParts, segments: Sequence[Segment], models: StepModels, adapter: Adapter
) -> Engine:
    """Return an engine at step 0 for ``models`` that have the adapter attached."""
    masters = MasterWeights(adapter.parameters)
    source, device = parts.source, parts.device
    optimizer = build_optimizer(job.recipe.optimizer, parameter_groups(job, adapter, masters))
    engine = Engine(
        job=job,
        models=models,
        noise_schedule=NoiseSchedule.create(source.prediction, source.zero_terminal_snr).to(device, torch.float32),
        adapter=adapter,
        master_weights=masters,
        optimizer=optimizer,
        multiplier=multiplier_over(job.recipe.schedule, segments),
        batches=parts.batches,
        collator=parts.collator,
        device=device,
        norm_limit=WeightNormLimit.create(job.recipe.max_weight_norm, adapter, masters),
        ema=WeightAverage.create(job.recipe.ema_decay, masters),
        stops=TextEncoderStops.create(job.recipe, adapter, masters, optimizer),
        scaler=LossScaler() if job.fit.dtype == "fp16" else None,
    )
    engine.apply_checkpointing()
    return engine


def attach_adapter(
    job: Job,
    source: BaseSource,
    unet: torch.nn.Module,
    encoders: Sequence[torch.nn.Module],
    dtype: torch.dtype,
    *,
    fresh: bool,
) -> tuple[Adapter, dict[str, Tensor]]:
    """Attach an adapter; return it and its initial fp32 weights, which are new or from the LoRA to continue.

    On models without weights, only those from the LoRA are returned.
    """

    def stream(name: str) -> np.random.Generator:
        return generator(job.recipe.seed, "adapter", sample=name)

    adapter = attach(source.family, unet, encoders, job.recipe, dtype=dtype, generator=stream)
    on_meta = any(parameter.is_meta for parameter in adapter.parameters.values())
    first = {} if on_meta else initial_weights(adapter, stream)  # DoRA's depend on the base's weights
    if fresh and job.base.continue_from:
        table = slots(source.family, source.unet_config, source.text_configs)
        first = continue_from(Path(job.base.continue_from), job.recipe, source.family, table, adapter, first)
    return adapter, first


def parameter_groups(job: Job, adapter: Adapter, masters: MasterWeights) -> list[ParameterGroup]:
    """Return the optimizer's parameter groups: the master weights of each part, by learning rate.

    With LoRA+, the up matrices learn faster (Hayou et al. 2024, "LoRA+: Efficient Low Rank Adaptation of Large Models",
    equation 4).
    """
    ratio = job.recipe.lora_plus_ratio or 1.0
    ups = {slot.up for slot in adapter.slots}  # only LoRAs and DoRAs, the others allow no ratio
    rates = learning_rates(job)
    groups: dict[tuple[Part, float], list[torch.nn.Parameter]] = {(part, rate): [] for part, rate in rates.items()}
    for key, master in masters.masters.items():
        part = adapter.part_of[key]
        rate = rates[part] * adapter.rate_factor_of[key] * (ratio if key in ups else 1.0)
        groups.setdefault((part, rate), []).append(master)
    return [ParameterGroup(part, rate, weights) for (part, rate), weights in groups.items() if weights]
