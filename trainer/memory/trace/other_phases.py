"""Trace every phase but the training step by running the trainer's own functions on meta tensors.

Each function returns the traces of its phase in order; they are replayed after those of :func:`load` or
:func:`quantise`. At the end of each trace the trainer returns freed memory to the driver
(trainer.training.device.offload.release_at). A trace contains each distinct operation once, in a stage such as
"encode 1024x768".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

from trainer.base.drawing import RenderSpec, decode_levels, draw_latents, make_sampler
from trainer.base.encoding import TextConditioning, encode_texts, posterior
from trainer.base.families import TextEncoder
from trainer.config.job import PromptConfig
from trainer.dataset.cache_keys import LATENT_SCALE, text_batch_size
from trainer.memory.trace.cuda_kernels import AttentionKernel, as_on_cuda, attention_kernel
from trainer.memory.trace.derive import join
from trainer.memory.trace.memory_trace import MemoryTrace, Storage
from trainer.memory.trace.meta_models import (
    META,
    bare_text_encoders,
    bare_vae,
    dtype_of,
    empty_engine,
    label_engine,
    lasting_tensors,
    micro_batch,
    place,
    traced_models,
)
from trainer.memory.trace.recorder import Times, Tracer, recording
from trainer.memory.trace.repeat import NotRepeatedError, repetition
from trainer.memory.trace.workload import Workload, sizes_of_parts
from trainer.training.callbacks.lora_export import export_mode, preview_mode
from trainer.training.callbacks.validation import losses_of_image
from trainer.training.device.device import DTYPES
from trainer.training.engine import Engine
from trainer.training.optim.optimizer import averaged_weights

Size = tuple[int, int]

# What samplers keep of earlier steps is as small as the latents, so the second step is like all later ones.
STEPS_DRAWN = 2
# The VAE attends with one head of width 512, which flash attention does not support; PyTorch falls back to this.
VAE_ATTENTION: AttentionKernel = "efficient"
# A phase that needs no more than what is already on the GPU, as a single moment that can be shown like other phases.
NOTHING = MemoryTrace("nothing", (Storage(0, "temporary", "", "save"),), np.array([0, ~0], dtype=np.int32), ())
ENCODERS = ("text_encoder", "text_encoder_2")


def load(workload: Workload) -> tuple[MemoryTrace, ...]:
    """Trace placing base, adapter and master weights tensor by tensor; return no traces for a quantized base."""
    return () if workload.fit.is_quantized else _repeated(workload, _loading)


def quantise(workload: Workload) -> tuple[MemoryTrace, ...]:
    """Trace loading a quantized base: each weight is copied to the GPU in 16 bits, then stored there in 8 or 4 bits."""
    return _repeated(workload, _loading) if workload.fit.is_quantized else ()


def cache_pictures(workload: Workload) -> tuple[MemoryTrace, ...]:
    """Trace placing the VAE, encoding one image of each shape and freeing the VAE, before the base is loaded.

    If the cache exceeds fit.cache_gigabytes, images and texts of later epochs are encoded between epochs, next to
    everything that training holds; the same traces are replayed there (RunSchedule.between_epochs). If a bf16 VAE
    returns infinite or NaN values for an image, the image is encoded again in fp32. Plans leave that out: bf16 has the
    range of fp32, so this happens only with damaged VAEs. Its cost is reported separately
    (trainer.memory.forecast.forecast.forecast_fp32_retry).
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
    """Trace placing the text encoders, encoding a batch and freeing the encoders, before the base is loaded.

    Returns no trace if text encoders are trained.
    """
    if workload.trained_texts:
        return ()
    encoders, dtype = bare_text_encoders(workload), dtype_of(workload)
    with recording(attention_kernel("auto", dtype)) as tracer:
        for part, encoder in zip(ENCODERS, encoders, strict=False):
            _place(tracer, part, encoder, dtype)
        with tracer.stage("texts"):
            _encode(workload, encoders, text_batch_size(workload.fit))
        del encoder, encoders  # the loop variable too, which would keep the last one alive
        return (tracer.cut("cache_texts"),)


def validate(workload: Workload) -> tuple[MemoryTrace, ...]:
    """Trace measuring the loss of one image of the largest shape at every validation timestep."""
    return _repeated(workload, _validate)


def _validate(workload: Workload, times: Times | None) -> tuple[MemoryTrace, ...]:
    engine = empty_engine(workload, times)
    width, height = size = (workload.validation_buckets or workload.buckets)[0].size
    stage, traces = f"validate {width}x{height}", []
    with recording(attention_kernel(workload.fit.attention, dtype_of(workload)), times) as tracer:
        label_engine(tracer, engine)
        tracer.cut("weights")
        with tracer.stage(stage), export_mode(engine):
            for count, parts in Counter(
                sizes_of_parts(workload.validation_timesteps, workload.fit.micro_batch or 1)
            ).items():
                batch = replace(micro_batch(workload, size, count), mask=None, input_noise=None)
                losses_of_image(engine.models, engine.noise_schedule, [batch], META)
                traces.append(_scale_work(tracer.cut("part"), {stage: parts}))
        traces.append(tracer.cut("end"))
    return (join("validate", traces),)


def preview(workload: Workload) -> tuple[MemoryTrace, ...]:
    """Trace generating previews: sampling, decoding with a temporarily placed VAE, and moving the UNet back.

    Of prompts that need the same memory, only one is sampled, in a few steps; its work is scaled up to all prompts
    and steps.
    """
    return _repeated(workload, _preview) if workload.previews else ()


def _preview(workload: Workload, times: Times | None) -> tuple[MemoryTrace, ...]:
    engine, vae = empty_engine(workload, times), bare_vae(workload)
    with recording(attention_kernel(workload.fit.attention, dtype_of(workload)), times) as tracer:
        label_engine(tracer, engine)
        weights = tracer.cut("weights")
        leaving = _offloaded_storages(engine, weights) if workload.fit.preview_offload else []
        with tracer.stage("save"), preview_mode(engine):
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
    """Return an empty trace: checkpoints are copied to main memory one tensor at a time and need no GPU memory."""
    return (NOTHING,)


def save(workload: Workload) -> tuple[MemoryTrace, ...]:
    """Trace computing Schedule-Free's averaged weights; with other optimizers, return an empty trace.

    Writing the files needs no GPU memory.
    """
    if not workload.recipe.optimizer.method.averages:  # spares the seconds that the engine takes
        return (NOTHING,)
    engine = empty_engine(workload)
    with recording("math") as tracer:
        label_engine(tracer, engine)
        tracer.cut("weights")
        with tracer.stage("save"), averaged_weights(engine.optimizer, engine.master_weights):
            pass
        trace = tracer.cut("save")
    return (trace,)


def _repeated(
    workload: Workload, trace: Callable[[Workload, Times | None], tuple[MemoryTrace, ...]]
) -> tuple[MemoryTrace, ...]:
    """Return the traces of a phase, if possible recorded on a UNet with few transformer blocks.

    Averages are computed and swapped in by operations on all weights at once, which cannot be repeated block by block.
    """
    averages = workload.recipe.optimizer.method.averages or workload.recipe.ema_decay
    with suppress(NotRepeatedError):
        if not averages and (short := repetition(workload)) is not None:
            return tuple(map(short.extended, trace(short.workload, short.times)))
    return trace(workload, None)


def _loading(workload: Workload, times: Times | None) -> tuple[MemoryTrace, ...]:
    return (traced_models(workload, times).loading,)


def _vae_dtype(workload: Workload) -> torch.dtype:
    return DTYPES[workload.fit.vae_dtype or "fp32"]


def _place(tracer: Tracer, part: str, model: nn.Module, dtype: torch.dtype) -> None:
    """Place and watch a model that is freed within its phase."""
    with tracer.stage("load"):
        place(model, dtype)
    for path, weight in lasting_tensors(model):
        tracer.label(weight, "weights", f"{part}.{path.rpartition('.')[0]}")
    tracer.watch(part, model)


def _shapes(workload: Workload) -> list[Size]:
    """Return every shape in which images are encoded, beginning with the largest shape to train on."""
    return list(dict.fromkeys(bucket.size for bucket in (*workload.buckets, *workload.validation_buckets)))


def _encode(workload: Workload, encoders: Sequence[TextEncoder], texts: int = 1) -> TextConditioning:
    recipe, blank = workload.recipe, [""] * texts
    weighted = workload.reads_weights
    return encode_texts(
        workload.family, encoders, blank, recipe.clip_skip, META, recipe.token_chunks, weighted=weighted
    )


def _distinct(prompts: Iterable[PromptConfig]) -> list[PromptConfig]:
    """Return one prompt of each group that needs the same memory."""
    return list({(p.width, p.height, p.sampler, p.guidance > 1.0): p for p in prompts}.values())


def _few(prompt: PromptConfig) -> PromptConfig:
    """Return the prompt in just enough steps to represent all steps."""
    return prompt.replaced(steps=min(prompt.steps, STEPS_DRAWN))


def _size(prompt: PromptConfig) -> Size:
    assert prompt.width and prompt.height  # the prompts of a workload have sizes
    return prompt.width, prompt.height


def _draw(tracer: Tracer, workload: Workload, engine: Engine, prompt: PromptConfig) -> Tensor:
    """Sample one prompt's latents in just enough steps to represent all steps, and return the latents."""
    width, height = _size(prompt)
    few = _few(prompt)
    sampler = make_sampler(prompt.sampler, workload.prediction, zero_terminal_snr=workload.zero_terminal_snr)
    with tracer.stage("texts"):
        positive, negative = _text(workload, engine), _text(workload, engine)
    with tracer.stage(f"draw {width}x{height}"):
        drawing = RenderSpec(few, width, height, positive, negative)
        return draw_latents(workload.family, engine.models.unet, sampler, drawing, lambda *_: None)


def _text(workload: Workload, engine: Engine) -> TextConditioning:
    """Return conditioning from trained text encoders, or else an uninitialized one on the CPU, as if from the cache."""
    if engine.models.text_encoders:
        return _encode(workload, engine.models.text_encoders)
    text = micro_batch(workload, (LATENT_SCALE, LATENT_SCALE), 1).text
    assert text is not None
    return text


def _decode(tracer: Tracer, workload: Workload, vae: AutoencoderKL, latents: Mapping[Size, Tensor]) -> None:
    """Decode one image of each size; writing files happens on the CPU and is left out."""
    with as_on_cuda(VAE_ATTENTION):
        for (width, height), drawn in latents.items():
            with tracer.stage(f"decode {width}x{height}"):
                decode_levels(vae, drawn, tiling=bool(workload.fit.vae_tiling))


def _offloaded_storages(engine: Engine, weights: MemoryTrace) -> list[Storage]:
    """Return the storages that offloading the UNet frees, in the order of trainer.training.device.offload.offloaded."""
    placed = {storage.name: storage for storage in weights.storages}
    names: dict[int, str] = {}
    for key, weight in engine.adapter.parameters.items():
        names.setdefault(weight.untyped_storage()._cdata, f"working.{key}")
    for path, parameter in engine.models.unet.named_parameters():
        names.setdefault(parameter.untyped_storage()._cdata, f"unet.{path}")
    parameters = engine.models.unet.parameters()
    leaving = dict.fromkeys(
        names[parameter.untyped_storage()._cdata] for parameter in parameters if parameter.untyped_storage().nbytes()
    )
    return [placed[name] for name in leaving]


def _append_deaths(trace: MemoryTrace, leaving: Sequence[Storage]) -> MemoryTrace:
    """Return the trace with ``leaving`` also freed at its end; earlier traces allocated these storages."""
    first = len(trace.storages)
    freed = np.arange(first, first + len(leaving), dtype=np.int32)
    return replace(trace, storages=(*trace.storages, *leaving), events=np.concatenate([trace.events, ~freed]))


def _prepend_births(trace: MemoryTrace, returning: Sequence[Storage]) -> MemoryTrace:
    """Return the trace with ``returning`` allocated at its beginning; earlier traces freed these storages."""
    births = np.arange(len(returning), dtype=np.int32)
    # Indices shift by the new storages; a free ~i becomes ~(i + n) = ~i - n.
    moved = np.where(trace.events < 0, trace.events - len(returning), trace.events + len(returning)).astype(np.int32)
    return replace(trace, storages=(*returning, *trace.storages), events=np.concatenate([births, moved]))


def _step_factors(prompts: Sequence[PromptConfig]) -> dict[str, float]:
    """Return, by stage, the number of actual steps per traced step."""
    every, traced = Counter[str](), Counter[str]()
    for prompt in prompts:
        every[f"draw {prompt.width}x{prompt.height}"] += prompt.evaluations
    for prompt in _distinct(prompts):
        traced[f"draw {prompt.width}x{prompt.height}"] += _few(prompt).evaluations
    # Texts are traced once per distinct prompt, but encoded for every prompt.
    texts = {"texts": len(prompts) / len(_distinct(prompts))}
    return {stage: steps / traced[stage] for stage, steps in every.items()} | texts


def _scale_work(trace: MemoryTrace, factors: Mapping[str, float]) -> MemoryTrace:
    """Return the trace with the operation counts of some stages multiplied by ``factors``."""
    work = (replace(item, count=round(item.count * factors.get(item.stage, 1))) for item in trace.work)
    return replace(trace, work=tuple(work))
