"""Traces every phase but the training step: the trainer's own functions run on tensors without memory.

Each function returns the tapes of its phase in order, to be played on what :func:`load` or :func:`quantise` left. At
the end of each tape the trainer gives freed memory back to the driver (trainer.training.device.offload.release). A
tape holds each different thing once; its stage says what it was, such as "encode 1024x768".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from trainer.base.drawing import RenderSpec, decode_levels, draw_latents, make_sampler
from trainer.base.encoding import TextConditioning, encode_words, posterior
from trainer.base.families import TextEncoder
from trainer.config.job import PromptConfig
from trainer.config.optimizer import ScheduleFreeConfig
from trainer.dataset.cache_keys import LATENT_SCALE, texts_at_once
from trainer.memory.trace.cuda_kernels import AttentionKernel, as_on_cuda, attention_kernel
from trainer.memory.trace.derive import joined
from trainer.memory.trace.memory_trace import MemoryTrace, Storage
from trainer.memory.trace.meta_models import (
    META,
    bare_text_encoders,
    bare_unet,
    bare_vae,
    dtype_of,
    empty_engine,
    engine_around,
    know_engine,
    lasting_tensors,
    micro_batch,
    place,
)
from trainer.memory.trace.recorder import Tracer, recording
from trainer.memory.trace.workload import Workload, sizes_of_parts
from trainer.training.callbacks.lora_export import as_exported
from trainer.training.callbacks.validation import losses_of_picture
from trainer.training.device.device import DTYPES
from trainer.training.loop import Engine
from trainer.training.optim.optimizer import averaged_weights

Size = tuple[int, int]

# What samplers keep of earlier steps is as small as the latents: the second step is like all that come after.
STEPS_DRAWN = 2
# The VAE attends with one head of 512 numbers, which flash attention does not do; PyTorch falls back to this.
VAE_ATTENTION: AttentionKernel = "efficient"
# A phase in which the card only holds what it holds: one moment, to be looked at like those of other phases.
NOTHING = MemoryTrace("nothing", (Storage(0, "temporary", "", "save"),), np.array([0, ~0], dtype=np.int32), ())
ENCODERS = ("text_encoder", "text_encoder_2")


def load(workload: Workload) -> tuple[MemoryTrace, ...]:
    """Base, adapter and masters as they are placed, tensor by tensor; no tape where the base is quantised meanwhile."""
    return () if _quantised(workload) else (_load_trace(workload, "load"),)


def quantise(workload: Workload) -> tuple[MemoryTrace, ...]:
    """What :func:`load` is for a quantised base: each weight comes in 16 bits and stays in 8 or 4."""
    return (_load_trace(workload, "quantise"),) if _quantised(workload) else ()


def cache_pictures(workload: Workload) -> tuple[MemoryTrace, ...]:
    """The VAE placed, a picture of each shape encoded, the VAE gone; before the base is loaded.

    Past fit.cache_gigabytes later epochs' pictures and texts are encoded between epochs, beside all that training
    holds: the same tapes are played there once more (Course.between_epochs). A picture that a bf16 VAE turns
    infinite or NaN is encoded again in fp32: no part of a plan, for bf16 reaches as far as fp32, so only damaged VAEs
    do that; what it would take is told beside one (trainer.memory.forecast.encoding_again).
    """
    vae = bare_vae(workload)
    with recording(VAE_ATTENTION) as tracer:
        _place(tracer, "vae", vae, _vae_dtype(workload))
        for width, height in _shapes(workload):
            with tracer.stage(f"encode {width}x{height}"):
                posterior(vae, torch.empty(1, 3, height, width), tiled=bool(workload.fit.vae_encode_tiling))
        del vae
        return (tracer.cut("cache_pictures"),)


def cache_texts(workload: Workload) -> tuple[MemoryTrace, ...]:
    """The text encoders placed, as many texts encoded as go through them at once, the encoders gone.

    Before the base is loaded; none where they learn.
    """
    if workload.trained_texts:
        return ()
    encoders, dtype = bare_text_encoders(workload), dtype_of(workload)
    with recording(attention_kernel("auto", dtype)) as tracer:
        for part, encoder in zip(ENCODERS, encoders, strict=False):
            _place(tracer, part, encoder, dtype)
        with tracer.stage("texts"):
            _encode(workload, encoders, texts_at_once(workload.fit))
        del encoder, encoders
        return (tracer.cut("cache_texts"),)


def validate(workload: Workload) -> tuple[MemoryTrace, ...]:
    """One picture of the largest shape measured at every timestep."""
    engine = empty_engine(workload)
    width, height = size = (workload.validation_buckets or workload.buckets)[0].size
    stage, traces = f"validate {width}x{height}", []
    with recording(attention_kernel(workload.fit.attention, dtype_of(workload))) as tracer:
        know_engine(tracer, engine)
        tracer.cut("weights")
        with tracer.stage(stage), as_exported(engine):
            for count, times in Counter(
                sizes_of_parts(workload.validation_timesteps, workload.fit.micro_batch or 1)
            ).items():
                batch = replace(micro_batch(workload, size, count), mask=None, input_noise=None)
                losses_of_picture(engine.models, engine.noise_schedule, [batch], META)
                traces.append(_scale_work(tracer.cut("part"), {stage: times}))
        traces.append(tracer.cut("end"))
    return (joined("validate", traces),)


def preview(workload: Workload) -> tuple[MemoryTrace, ...]:
    """The prompts drawn; the VAE placed, the pictures decoded, the VAE gone; the end, in which the UNet returns.

    Of prompts that differ in words or seed alone one is drawn, and of many steps a few; the work is that of all.
    """
    if not workload.previews:
        return ()
    engine, vae = empty_engine(workload), bare_vae(workload)
    with recording(attention_kernel(workload.fit.attention, dtype_of(workload))) as tracer:
        know_engine(tracer, engine)
        weights = tracer.cut("weights")
        leaving = _offloaded_storages(engine, weights) if workload.fit.preview_offload else []
        with tracer.stage("save"), as_exported(engine):
            latents = {_size(p): _draw(tracer, workload, engine, p) for p in _distinct(workload.previews)}
            drawn = tracer.cut("draw")
            _place(tracer, "vae", vae, _vae_dtype(workload))
            _decode(tracer, workload, vae, latents)
            del vae
            decoded = tracer.cut("decode")
            latents.clear()
        ended = tracer.cut("end")
    drawn = _scale_work(drawn, _step_factors(workload.previews))
    decoded = _scale_work(decoded, Counter(f"decode {p.width}x{p.height}" for p in workload.previews))
    return _append_deaths(drawn, leaving), decoded, _prepend_births(ended, leaving)


def checkpoint(workload: Workload) -> tuple[MemoryTrace, ...]:
    """Nothing on the card: what is kept is copied to main memory tensor by tensor."""
    return (NOTHING,)


def save(workload: Workload) -> tuple[MemoryTrace, ...]:
    """The averaged weights of Schedule-Free; else nothing, as for :func:`checkpoint`: files are made on the CPU."""
    if not isinstance(workload.recipe.optimizer, ScheduleFreeConfig):  # what there is to see takes seconds to build
        return (NOTHING,)
    engine = empty_engine(workload)
    with recording("math") as tracer:
        know_engine(tracer, engine)
        tracer.cut("weights")
        with tracer.stage("save"), averaged_weights(engine.optimizer, engine.masters):
            pass
        trace = tracer.cut("save")
    return (trace,)


def _quantised(workload: Workload) -> bool:
    return workload.fit.quantise not in (None, "none")


def _vae_dtype(workload: Workload) -> torch.dtype:
    return DTYPES[workload.fit.vae_dtype or "fp32"]


def _load_trace(workload: Workload, name: str) -> MemoryTrace:
    """Everything that stays for the run, in the order in which build_engine places it."""
    (unet, placer), dtype = bare_unet(workload), dtype_of(workload)
    encoders = bare_text_encoders(workload) if workload.trained_texts else []
    with recording("math") as tracer:
        with tracer.stage(name):
            place(unet, dtype, placer)
        with tracer.stage("load"):
            for encoder in encoders:
                place(encoder, dtype)
            with _disable_current_modes():  # PEFT makes its layers on the meta device first, on a card too
                engine = engine_around(workload, unet, encoders)
            know_engine(tracer, engine)
        return tracer.cut(name)


def _place(tracer: Tracer, part: str, model: nn.Module, dtype: torch.dtype) -> None:
    """Places a model that goes again within its phase."""
    with tracer.stage("load"):
        place(model, dtype)
    for path, weight in lasting_tensors(model):
        tracer.know(weight, "weights", f"{part}.{path.rpartition('.')[0]}")
    tracer.watch(part, model)


def _shapes(workload: Workload) -> list[Size]:
    """Every shape that pictures are encoded in, the one with the most pixels first."""
    return list(dict.fromkeys(bucket.size for bucket in (*workload.buckets, *workload.validation_buckets)))


def _encode(workload: Workload, encoders: Sequence[TextEncoder], texts: int = 1) -> TextConditioning:
    recipe = workload.recipe
    return encode_words(workload.family, encoders, [""] * texts, recipe.clip_skip, META, recipe.token_chunks)


def _distinct(prompts: Iterable[PromptConfig]) -> list[PromptConfig]:
    """One of those that take the same memory."""
    return list({(p.width, p.height, p.sampler, p.guidance > 1.0): p for p in prompts}.values())


def _size(prompt: PromptConfig) -> Size:
    assert prompt.width and prompt.height  # a subject's prompts have their sizes
    return prompt.width, prompt.height


def _draw(tracer: Tracer, workload: Workload, engine: Engine, prompt: PromptConfig) -> Tensor:
    """The latents of one prompt, drawn in as few steps as show all of them."""
    width, height = _size(prompt)
    few = prompt.changed(steps=min(prompt.steps, STEPS_DRAWN))
    sampler = make_sampler(prompt.sampler, workload.prediction, zero_terminal_snr=workload.zero_terminal_snr)
    with tracer.stage("texts"):
        positive, negative = _text(workload, engine), _text(workload, engine)
    with tracer.stage(f"draw {width}x{height}"):
        drawing = RenderSpec(few, width, height, positive, negative)
        return draw_latents(workload.family, engine.models.unet, sampler, drawing, lambda *_: None)


def _text(workload: Workload, engine: Engine) -> TextConditioning:
    """A text from encoders that learn, else from the cache, on the CPU."""
    if engine.models.text_encoders:
        return _encode(workload, engine.models.text_encoders)
    text = micro_batch(workload, (LATENT_SCALE, LATENT_SCALE), 1).text
    assert text is not None
    return text


def _decode(tracer: Tracer, workload: Workload, vae: AutoencoderKL, latents: Mapping[Size, Tensor]) -> None:
    """A picture of each size; making a file of it, on the CPU, is left out."""
    with as_on_cuda(VAE_ATTENTION):
        for (width, height), drawn in latents.items():
            with tracer.stage(f"decode {width}x{height}"):
                decode_levels(vae, drawn, tiling=bool(workload.fit.vae_tiling))


def _offloaded_storages(engine: Engine, weights: MemoryTrace) -> list[Storage]:
    """What trainer.training.device.offload.away empties, in its order: each storage once, some hold several weights."""
    placed = {storage.name: storage for storage in weights.storages}
    names: dict[int, str] = {}
    for key, weight in engine.adapter.parameters.items():
        names.setdefault(weight.untyped_storage()._cdata, f"working.{key}")
    for path, parameter in engine.models.unet.named_parameters():
        names.setdefault(parameter.untyped_storage()._cdata, f"unet.{path}")
    parameters = engine.models.unet.parameters()
    leaving = dict.fromkeys(names[parameter.untyped_storage()._cdata] for parameter in parameters)
    return [placed[name] for name in leaving]


def _append_deaths(trace: MemoryTrace, leaving: Sequence[Storage]) -> MemoryTrace:
    """The tape, at whose end storages of earlier tapes are given back."""
    first = len(trace.storages)
    deaths = ~np.arange(first, first + len(leaving), dtype=np.int32)
    return replace(trace, storages=(*trace.storages, *leaving), events=np.concatenate([trace.events, deaths]))


def _prepend_births(trace: MemoryTrace, returning: Sequence[Storage]) -> MemoryTrace:
    """The tape, at whose beginning storages that were given back are taken again."""
    births = np.arange(len(returning), dtype=np.int32)
    moved = np.where(trace.events < 0, trace.events - len(returning), trace.events + len(returning)).astype(np.int32)
    return replace(trace, storages=(*returning, *trace.storages), events=np.concatenate([births, moved]))


def _step_factors(prompts: Sequence[PromptConfig]) -> dict[str, float]:
    """How many times as many steps there are in all as were traced, by stage."""
    every, traced = Counter[str](), Counter[str]()
    for prompt in prompts:
        every[f"draw {prompt.width}x{prompt.height}"] += prompt.steps
    for prompt in _distinct(prompts):
        traced[f"draw {prompt.width}x{prompt.height}"] += min(prompt.steps, STEPS_DRAWN)
    texts = {"texts": len(prompts) / len(_distinct(prompts))}
    return {stage: steps / traced[stage] for stage, steps in every.items()} | texts


def _scale_work(trace: MemoryTrace, factors: Mapping[str, float]) -> MemoryTrace:
    """The tape with the work of some stages done so many times."""
    work = (replace(item, count=round(item.count * factors.get(item.stage, 1))) for item in trace.work)
    return replace(trace, work=tuple(work))
