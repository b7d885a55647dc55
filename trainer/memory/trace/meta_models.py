"""Build a workload's models without weights on the meta device, and the engine that would train them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import bitsandbytes.functional
import numpy as np
import torch
from bitsandbytes.nn.modules import Int8Params, Linear8bitLt, Params4bit
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import no_init_weights
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from trainer.adapter.attach import Adapter, attach, models_by_part
from trainer.adapter.names import Slot
from trainer.base.encoding import TextConditioning
from trainer.base.families import FAMILIES, TextEncoder
from trainer.base.quantized import quantize_linears, set_int8_directions
from trainer.base.source import BaseSource, empty_clip_model, empty_diffusers_model
from trainer.base.streaming import StreamedWeight, WeightStream, make_stream
from trainer.base.weights import Placer, StoredTensor, place_weights
from trainer.config.base import BaseConfig
from trainer.config.job import DatasetConfig, FolderConfig, Job
from trainer.config.lr_schedule import Segment
from trainer.dataset.cache_keys import LATENT_SCALE
from trainer.memory.trace.memory_trace import MemoryTrace
from trainer.memory.trace.recorder import Times, Tracer, recording
from trainer.memory.trace.workload import Workload
from trainer.protocol.forecast import load_phase
from trainer.training.build import RunParts, assemble_engine
from trainer.training.device.device import DTYPES
from trainer.training.engine import Engine
from trainer.training.step import MicroBatch, StepModels

META = torch.device("meta")
_SOURCE = "the base"  # how an error about a config names its source

Placed = TypeVar("Placed", bound=nn.Module)


class BareUnet(NamedTuple):
    """UNet before its weights are placed."""

    unet: UNet2DConditionModel
    placer: Placer | None
    """Function that places weights that are quantized or streamed; None if there are none."""
    stream: WeightStream | None
    """Stream of the UNet's blocks; None if none are streamed."""


@no_init_weights()  # initializing weights that do not exist would be a quarter of the build time
def bare_unet(workload: Workload, device: torch.device = META) -> BareUnet:
    """Return the UNet before its weights are placed, with its stream and the placer that quantizes or streams them."""
    unet: UNet2DConditionModel = empty_diffusers_model(UNet2DConditionModel, workload.unet_config, _SOURCE)
    stream, kind, placer = make_stream(unet, workload.fit.stream, device), workload.fit.quantize, None
    if kind is not None and kind != "none":
        placer = quantize_linears(unet, kind, dtype_of(workload), device)
        set_int8_directions(unet, workload.fit.products)
    return BareUnet(unet, stream.placer(placer) if stream else placer, stream)


@no_init_weights()
def bare_text_encoders(workload: Workload) -> list[TextEncoder]:
    """Return the text encoders before their weights are placed."""
    facts = FAMILIES[workload.family].text_encoders
    return [
        empty_clip_model(fact.model_class, config, _SOURCE)
        for fact, config in zip(facts, workload.text_configs, strict=True)
    ]


@no_init_weights()
def bare_vae(workload: Workload) -> AutoencoderKL:
    """Return the VAE before its weights are placed."""
    vae: AutoencoderKL = empty_diffusers_model(AutoencoderKL, workload.vae_config, _SOURCE)
    return vae


def place(
    model: Placed,
    dtype: torch.dtype,
    placer: Placer | None = None,
    on_read: Callable[[str], None] = lambda _: None,
) -> Placed:
    """Place a model's weights as loading does, and return the model; the source tensors are never read or written.

    ``on_read`` is called with the path of each weight before the weight is placed.
    """

    def read(name: str, shape: torch.Size) -> Tensor:
        on_read(name)
        return torch.empty(shape, dtype=dtype)

    stored = {
        name: StoredTensor(weight, partial(read, name, weight.shape)) for name, weight in model.named_parameters()
    }
    place_weights(model, stored, source=_SOURCE, dtype=dtype, device=META, placer=placer)
    return model


def dtype_of(workload: Workload) -> torch.dtype:
    """Return the dtype that the base computes in."""
    return DTYPES[workload.fit.dtype or "fp32"]


@dataclass(frozen=True, slots=True)
class TracedModels:
    """Models without weights, and how loading places them."""

    unet: UNet2DConditionModel
    stream: WeightStream | None
    encoders: Sequence[TextEncoder]
    adapter: Adapter
    loading: MemoryTrace
    """Trace of placing everything that stays for the run, in the order of build_engine."""


def empty_engine(workload: Workload, times: Times | None = None) -> Engine:
    """Return the engine as a run builds it at step 0, on models without weights and without data.

    It uses the models of `traced_models`, so only one engine of equal workloads may be in use at a time.
    """
    models = traced_models(workload, times)
    for weight in models.adapter.parameters.values():
        weight.grad = None  # may be left by a trace that was interrupted
    return _engine_of(workload, models.unet, models.stream, models.encoders, models.adapter, META)


def engine_of_keys(workload: Workload, traced: Engine, keys: Sequence[tuple[str, str, int]]) -> Engine:
    """Return an engine for more weights than ``traced`` has, each like one of its weights; its models lack them.

    ``keys`` contains the key of each weight, that of the weight in ``traced``, and a number, in order; weights of equal
    numbers share memory if the traced ones do.
    """
    known = traced.adapter
    made: dict[tuple[int, int], Tensor] = {}
    weights: dict[str, nn.Parameter] = {}
    for key, source, number in keys:
        weight = known.parameters[source]
        storage = weight.untyped_storage()
        whole = made.setdefault(
            (storage._cdata, number),
            torch.empty(storage.nbytes() // weight.itemsize, dtype=weight.dtype, device=weight.device),
        )
        weights[key] = nn.Parameter(
            whole.as_strided(weight.shape, weight.stride(), weight.storage_offset()), weight.requires_grad
        )
    adapter = replace(
        known,
        parameters=weights,
        zero_keys={key for key, source, _ in keys if source in known.zero_keys},
        rate_factor_of={key: known.rate_factor_of[source] for key, source, _ in keys if source in known.rate_factor_of},
        part_of={key: known.part_of[source] for key, source, _ in keys if source in known.part_of},
        slots=tuple(_slots_of_keys(known, keys)),
    )
    models = traced.models
    return _engine_of(workload, models.unet, models.stream, models.text_encoders, adapter, META)


def _slots_of_keys(known: Adapter, keys: Sequence[tuple[str, str, int]]) -> Iterator[Slot]:
    """Yield the layers of weights that are like those of known layers."""
    by_down = {slot.down: slot for slot in known.slots}
    for key, source, _ in keys:
        if source in by_down:
            yield replace(by_down[source], kohya=key.partition(".")[0])


def traced_models(workload: Workload, times: Times | None = None) -> TracedModels:
    """Return the workload's models and the trace of loading them, in which operations count ``times``; see `Tracer`.

    The latest `KEPT_MODELS` are kept (50 MB of main memory each) and reused for equal workloads, because attaching the
    adapter to SDXL with PEFT takes longer than tracing a micro-batch.
    """
    key = workload.key("load"), times is not None
    if key not in _latest:
        while len(_latest) >= KEPT_MODELS:
            del _latest[next(iter(_latest))]
        _latest[key] = _build(workload, times)
    return _latest[key]


KEPT_MODELS = 3
"""Number of models to keep: a search switches between unquantized, streamed and 8-bit bases."""
_latest: dict[tuple[str, bool], TracedModels] = {}
"""The latest models, by the workload's key for loading and whether they stand for larger ones; the oldest first."""


def _build(workload: Workload, times: Times | None) -> TracedModels:
    (unet, placer, stream), dtype = bare_unet(workload), dtype_of(workload)
    encoders = bare_text_encoders(workload) if workload.trained_texts else []
    name = load_phase(workload.fit.quantize)
    with recording("math", times) as tracer:
        if stream:
            stream.on_freed = partial(_record_move_to_host, tracer)
        with tracer.stage(name):
            place(unet, dtype, placer, lambda path: setattr(tracer, "placing", f"unet.{path}"))
            tracer.placing = ""
        with tracer.stage("load"):
            for encoder in encoders:
                place(encoder, dtype)
            with _disable_current_modes():  # PEFT creates its layers on the meta device first, on a GPU as well
                engine = engine_around(workload, unet, encoders, stream=stream)
            label_engine(tracer, engine)
        return TracedModels(unet, stream, encoders, engine.adapter, tracer.cut(name))


def _record_move_to_host(tracer: Tracer, weight: StreamedWeight) -> None:
    """Record that a weight leaves the GPU after it was placed; its copy is the only one in a load trace."""
    tracer.record_free(weight.parameter)
    tracer.record_copy(weight.bytes)


def engine_around(
    workload: Workload,
    unet: UNet2DConditionModel,
    encoders: Sequence[TextEncoder],
    device: torch.device = META,
    stream: WeightStream | None = None,
) -> Engine:
    """Return the engine that trains these models."""
    return _engine_of(workload, unet, stream, encoders, _attached(workload, unet, encoders), device)


@no_init_weights()
def _attached(workload: Workload, unet: UNet2DConditionModel, encoders: Sequence[TextEncoder]) -> Adapter:
    return attach(
        workload.family,
        unet,
        encoders,
        workload.recipe,
        dtype=dtype_of(workload),
        generator=lambda _: np.random.default_rng(0),
    )


def _engine_of(
    workload: Workload,
    unet: UNet2DConditionModel,
    stream: WeightStream | None,
    encoders: Sequence[TextEncoder],
    adapter: Adapter,
    device: torch.device,
) -> Engine:
    job = job_of(workload)
    # A workload has all that is asked of a source here; there is nothing to cache, batch or collate.
    nothing = cast(Any, None)
    parts = RunParts(cast(BaseSource, workload), cache=nothing, batches=nothing, collator=nothing, device=device)
    models = StepModels(
        workload.family, unet, tuple(encoders), workload.recipe.clip_skip, dtype_of(workload), stream, adapter
    )
    engine = assemble_engine(job, parts, [Segment(0, job.recipe.steps or 1)], models, adapter)
    if device == META:
        allow_first_step(engine.optimizer)
    if workload.after_stops:
        engine.follow_stops(max(workload.recipe.stops.values(), default=0))
    return engine


def allow_first_step(optimizer: Optimizer) -> None:
    """Let a fused Adam take its first step on meta tensors, on which it refuses to create its state.

    A hook creates the state instead, in the same order; tests/train/memory/trace/test_train_step.py compares the result
    with real steps.
    """

    def make_state(*_: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"] if group.get("fused") else ():
                if weight.grad is not None and not optimizer.state[weight]:
                    step = torch.zeros((), device=weight.device)
                    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
                    optimizer.state[weight] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    optimizer.register_step_pre_hook(make_state)


def label_engine(tracer: Tracer, engine: Engine) -> dict[str, str]:
    """Label all permanent tensors of an engine in the order in which they are placed, and watch its models.

    Returns the module of each adapter weight by key.
    """
    modules: dict[str, str] = {}
    working = {id(weight): key for key, weight in engine.adapter.parameters.items()}
    streamed = _follow_stream(tracer, engine)
    for part, model in models_by_part(engine.models.unet, engine.models.text_encoders).items():
        for path, weight in lasting_tensors(model):
            if id(weight) in working:
                modules[working[id(weight)]] = f"{part}.{path.removesuffix('.weight')}"
            elif id(weight) not in streamed:
                tracer.label(weight, "weights", f"{part}.{path.rpartition('.')[0]}", f"{part}.{path}")
        tracer.watch(part, model)
    label_masters(tracer, engine, modules)
    schedule = engine.noise_schedule
    for name in ("alphas_cumprod", "snr", "signal", "sigma"):
        tracer.label(getattr(schedule, name), "weights", "noise_schedule", f"noise_schedule.{name}")
    return modules


def label_masters(tracer: Tracer, engine: Engine, modules: Mapping[str, str]) -> None:
    """Label the adapter's weights; ``modules`` contains the module of each by key."""
    for key, weight in engine.adapter.parameters.items():
        tracer.label(weight, "adapter", modules[key], f"working.{key}")
    for key, master in engine.master_weights.masters.items():
        tracer.label(master, "adapter", modules[key], f"master.{key}")
    for key, average in engine.ema.weights.items() if engine.ema else ():
        tracer.label(average, "adapter", modules[key], f"ema.{key}")
    for key in engine.adapter.zero_keys & engine.master_weights.masters.keys():
        tracer.mark_zero(engine.master_weights.masters[key])


def _follow_stream(tracer: Tracer, engine: Engine) -> frozenset[int]:
    """Record when streamed weights enter and leave the GPU; return the ids of their parameters."""
    stream = engine.models.stream
    if stream is None:
        return frozenset()
    paths = {id(parameter): f"unet.{path}" for path, parameter in engine.models.unet.named_parameters()}

    def on_allocated(weight: StreamedWeight) -> None:
        path = paths[id(weight.parameter)]
        tracer.label(weight.parameter, "weights", path.rpartition(".")[0], path)
        tracer.record_copy(weight.bytes)

    stream.on_allocated, stream.on_freed = on_allocated, lambda weight: tracer.record_free(weight.parameter)
    return frozenset(id(weight.parameter) for weight in stream.weights)


def lasting_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, each followed by bitsandbytes' state for it, then buffers, all with their paths."""
    for path, parameter in model.named_parameters():
        yield path, parameter
        if isinstance(parameter, Int8Params):
            # The layer takes over the parameter's scales at its first use.
            layer = cast(Linear8bitLt, model.get_submodule(path.rpartition(".")[0]))
            yield f"{path}.scale", cast(Tensor, layer.state.SCB if parameter.SCB is None else parameter.SCB)
        if isinstance(parameter, Params4bit) and parameter.quant_state is not None:
            state: bitsandbytes.functional.QuantState = parameter.quant_state
            yield f"{path}.absmax", state.absmax
            yield f"{path}.code", state.code
            yield f"{path}.offset", state.offset
            yield f"{path}.state2.absmax", state.state2.absmax
            yield f"{path}.state2.code", state.state2.code
    yield from model.named_buffers()


def micro_batch(workload: Workload, bucket: tuple[int, int], images: int) -> MicroBatch:
    """Return an uninitialized micro-batch on the CPU, shaped like the collator's, for a (width, height) ``bucket``."""
    width, height = (side // LATENT_SCALE for side in bucket)
    latents = torch.empty(images, 4, height, width)
    chunks, dtype, config = workload.recipe.token_chunks, dtype_of(workload), workload.unet_config
    pooled = None
    if workload.family == "sdxl":
        wide = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        pooled = torch.empty(images, wide, dtype=dtype)
    text = TextConditioning(torch.empty(images, chunks + 2, config["cross_attention_dim"], dtype=dtype), pooled)
    ids = torch.zeros(images, chunks // 75 * 77, dtype=torch.int64)
    live = workload.trained_texts
    return MicroBatch(
        latents=latents,
        noise=latents.clone(),
        input_noise=latents.clone() if workload.recipe.objective.input_perturbation else None,
        timesteps=torch.zeros(images, dtype=torch.int64),
        text=None if live else text,
        tokens=tuple(ids.clone() for _ in workload.text_configs) if live else None,
        time_ids=torch.empty(images, 6) if workload.family == "sdxl" else None,
        mask=latents[:, :1].clone() if workload.masks else None,
        weights=torch.ones(images),
        token_weights=torch.ones(ids.shape) if live and workload.recipe.weighted_captions else None,
        prior=torch.ones(images, 1, 1, 1, dtype=torch.bool) if workload.recipe.objective.prior_prediction else None,
    )


def job_of(workload: Workload) -> Job:
    """Return a minimal job with the workload's recipe and fit."""
    return Job(
        name="forecast",
        base=BaseConfig(model="base", family=workload.family),
        dataset=DatasetConfig(folders=(FolderConfig(path="pictures"),)),
        recipe=workload.recipe,
        fit=workload.fit,
    )
