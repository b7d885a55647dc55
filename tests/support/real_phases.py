"""The phases of a run on a real device with random weights, through the trainer's own functions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

from trainer.adapter.export import export_lora
from trainer.base.drawing import RenderSpec, decode_levels, draw_latents, make_sampler
from trainer.base.encoding import TextConditioning, encode_texts, posterior
from trainer.base.families import TextEncoder
from trainer.base.weights import Placer, StoredTensor, place_weights
from trainer.dataset.cache_keys import LATENT_SCALE, text_batch_size
from trainer.memory.trace.meta_models import (
    bare_text_encoders,
    bare_unet,
    bare_vae,
    dtype_of,
    engine_around,
    micro_batch,
)
from trainer.memory.trace.workload import Workload
from trainer.training import checkpoint
from trainer.training.acceleration.cuda_graphs import make_graphs
from trainer.training.callbacks.checkpoints import capture
from trainer.training.callbacks.lora_export import export_mode, preview_mode
from trainer.training.callbacks.validation import losses_of_image
from trainer.training.device.device import DTYPES, attention_kernels
from trainer.training.device.offload import empty_cache, offloaded
from trainer.training.engine import Engine
from trainer.training.optim.master_weights import measure
from trainer.training.optim.optimizer import averaged_weights, set_learning_rates
from trainer.training.step import MicroBatch

Size = tuple[int, int]
_Model = TypeVar("_Model", bound=nn.Module)

# Weights repeat a pool of random numbers: generating one for each takes half a minute for SDXL.
POOL = 1 << 20
_POOLS = {dtype: (torch.randn(POOL) * 0.02).to(dtype) for dtype in DTYPES.values()}


class RealRun:
    """Phases in the order in which a run has them; each is optional except :meth:`load`, which training needs.

    A phase should allocate and free what trainer.training.run.session.Attempt does with cached images and captions.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload = workload
        self.device = device
        self.engine: Engine | None = None
        self.graph_notices: list[str] = []
        """What the trainer reported about CUDA graphs that it did not record."""

    def cache_pictures(self) -> None:
        """Encode an image of each shape with the VAE, then release the VAE."""
        vae = self._vae()
        with attention_kernels("auto", self.device, vae.dtype):
            tiled = bool(self.workload.fit.vae_encode_tiling)
            for width, height in dict.fromkeys(
                bucket.size for bucket in (*self.workload.buckets, *self.workload.validation_buckets)
            ):
                posterior(vae, torch.rand(1, 3, height, width), tiled=tiled)
        del vae
        empty_cache(self.device)

    def cache_texts(self) -> None:
        """Encode one batch of captions, then release the text encoders; do nothing if they are trained."""
        if not self.workload.trained_texts:
            self._encode(self._text_encoders(), text_batch_size(self.workload.fit))
            empty_cache(self.device)

    def load(self) -> None:
        """Load base, adapter and master weights."""
        unet, placer, stream = bare_unet(self.workload, self.device)
        self._placed(unet, dtype_of(self.workload), placer)
        encoders = self._text_encoders() if self.workload.trained_texts else []
        # Text encoders stop later, in the first step after a resume or in a later one.
        workload = replace(self.workload, after_stops=False)
        self.engine = engine_around(workload, unet, encoders, self.device, stream)
        self.engine.graphs = make_graphs(
            self.workload.fit, self.device, lambda _, sentence: self.graph_notices.append(sentence)
        )
        empty_cache(self.device)

    def train(self, bucket: Size, pictures: int, micro_batches: int = 1, steps: int = 2) -> None:
        """Run optimizer steps on random micro-batches of ``pictures`` images."""
        engine = self._loaded()
        if self.workload.after_stops:
            engine.follow_stops(max(self.workload.recipe.stops.values()))
        with self._attention():
            for _ in range(steps):
                self._step(engine, bucket, pictures, micro_batches)

    def validate(self) -> None:
        """Validate on one image of the largest shape, at every timestep."""
        engine, workload = self._loaded(), self.workload
        most, timesteps = workload.fit.micro_batch or 1, workload.validation_timesteps
        size = (workload.validation_buckets or workload.buckets)[0].size
        counts = [min(most, timesteps - done) for done in range(0, timesteps, most)]
        # One after the other, as the trainer assembles them.
        batches = (replace(self._batch(size, count), mask=None, input_noise=None) for count in counts)
        with self._attention(), export_mode(engine):
            losses_of_image(engine.models, engine.noise_schedule, batches, self.device)

    def preview(self) -> None:
        """Render every prompt, then load the VAE, decode the images and release the VAE."""
        engine = self._loaded()
        with self._attention(), preview_mode(engine):
            latents = [self._draw(engine, index) for index in range(len(self.workload.previews))]
            with offloaded(engine.models.unet) if self.workload.fit.preview_offload else nullcontext():
                empty_cache(self.device)
                vae = self._vae()
                with attention_kernels("auto", self.device, vae.dtype):
                    for drawn in latents:
                        decode_levels(vae, drawn, tiling=bool(self.workload.fit.vae_tiling))
                del vae
                empty_cache(self.device)

    def checkpoint(self) -> None:
        """Write a checkpoint into a temporary folder."""
        with TemporaryDirectory() as folder:
            checkpoint.save_checkpoint(Path(folder), capture(self._loaded(), []))

    def save(self) -> None:
        """Export the LoRA into a temporary folder."""
        engine = self._loaded()
        with TemporaryDirectory() as folder, averaged_weights(engine.optimizer, engine.master_weights):
            for weight in engine.master_weights.masters.values():
                weight.detach().nan_to_num_()  # random weights may diverge, and export refuses NaN
            path = Path(folder) / "lora.safetensors"
            export_lora(path, engine.master_weights.masters, engine.adapter, {})

    def _step(self, engine: Engine, bucket: Size, pictures: int, micro_batches: int) -> None:
        """Run a step as trainer.training.engine.Engine.train_step, but accept overflows (random weights)."""
        set_learning_rates(engine.optimizer, 1.0)
        total = torch.zeros((), device=self.device)
        for _ in range(micro_batches):
            engine.accumulate_gradients(self._batch(bucket, pictures), total)
        measure(total, engine.master_weights, engine.loss_scale).tolist()
        engine.optimizer_step(1.0, 1.0)

    def _loaded(self) -> Engine:
        assert self.engine is not None, "load() comes first"
        return self.engine

    def _attention(self) -> Any:
        return attention_kernels(self.workload.fit.attention or "auto", self.device, dtype_of(self.workload))

    def _batch(self, bucket: Size, pictures: int) -> MicroBatch:
        batch = micro_batch(self.workload, bucket, pictures)
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor) and value.is_floating_point():
                value.normal_()
        return batch

    def _draw(self, engine: Engine, index: int) -> Tensor:
        workload, prompt = self.workload, self.workload.previews[index]
        sampler = make_sampler(prompt.sampler, workload.prediction, zero_terminal_snr=workload.zero_terminal_snr)
        positive, negative = self._text(engine), self._text(engine)
        drawing = RenderSpec(prompt, prompt.width or 0, prompt.height or 0, positive, negative)
        return draw_latents(workload.family, engine.models.unet, sampler, drawing, lambda *_: None)

    def _text(self, engine: Engine) -> TextConditioning:
        if engine.models.text_encoders:
            return self._encode(engine.models.text_encoders)
        text = self._batch((LATENT_SCALE, LATENT_SCALE), 1).text
        assert text is not None
        return text

    def _encode(self, encoders: Any, texts: int = 1) -> TextConditioning:
        recipe, family = self.workload.recipe, self.workload.family
        shape = recipe.clip_skip, self.device, recipe.token_chunks
        return encode_texts(family, encoders, [""] * texts, *shape, weighted=bool(recipe.weighted_captions))

    def _vae(self) -> AutoencoderKL:
        return self._placed(bare_vae(self.workload), DTYPES[self.workload.fit.vae_dtype or "fp32"])

    def _text_encoders(self) -> list[TextEncoder]:
        return [self._placed(encoder, dtype_of(self.workload)) for encoder in bare_text_encoders(self.workload)]

    def _placed(self, model: _Model, dtype: torch.dtype, placer: Placer | None = None) -> _Model:
        stored: Mapping[str, StoredTensor] = {
            name: StoredTensor(weight, partial(_random, weight.shape, dtype))
            for name, weight in model.named_parameters()
        }
        place_weights(model, stored, source="random", dtype=dtype, device=self.device, placer=placer)
        return model


def _random(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return values as small as trained weights, in newly allocated memory as after reading a file."""
    flat = torch.empty(shape.numel(), dtype=dtype)
    for start in range(0, flat.numel(), POOL):
        part = flat[start : start + POOL]
        part.copy_(_POOLS[dtype][: part.numel()])
    return flat.view(shape)
