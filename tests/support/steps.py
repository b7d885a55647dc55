"""Micro-batches of random latents, captions and sizes for the tiny bases, and the adapter's gradient as one vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.loras import Models
from trainer.adapter.attach import Adapter
from trainer.base.encoding import TextConditioning
from trainer.config.base import Family
from trainer.training.step import MicroBatch, StepModels

WIDTHS = {"sd15": 32, "sdxl": 64}
POOLED = 32


def step_models(models: Models, *, live_text: bool = True, adapter: Adapter | None = None) -> StepModels:
    """Return what a step runs through, in the dtype of the models."""
    encoders = tuple(models.text_encoders) if live_text else ()
    return StepModels(models.family, models.unet, encoders, None, models.unet.dtype, adapter=adapter)


def make_batch(
    family: Family,
    timesteps: Sequence[int],
    *,
    dtype: torch.dtype = torch.float64,
    size: tuple[int, int] = (8, 8),
    live_text: bool = True,
    extras: bool = True,
    effective_batch: int = 0,
    seed: int = 0,
) -> MicroBatch:
    """Return a micro-batch of one image per timestep; with ``extras`` also mask, perturbed input, weights."""
    count = len(timesteps)
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=stream, dtype=torch.float64).to(dtype)

    noise = normal(count, 4, *size)
    weights = torch.arange(1, count + 1) / 2.0 if extras else torch.ones(count)
    tokens = torch.randint(1000, 40_000, (count, 77), generator=stream)
    tokens[:, 0], tokens[:, 30:] = 49_406, 49_407
    hidden, pooled = normal(count, 77, WIDTHS[family]), normal(count, POOLED)
    sizes = torch.randint(0, 1024, (count, 6), generator=stream).float()
    return MicroBatch(
        latents=normal(count, 4, *size),
        noise=noise,
        input_noise=noise + 0.1 * normal(count, 4, *size) if extras else None,
        timesteps=torch.tensor(timesteps),
        text=None if live_text else TextConditioning(hidden, pooled if family == "sdxl" else None),
        tokens=(tokens,) * (2 if family == "sdxl" else 1) if live_text else None,
        time_ids=sizes if family == "sdxl" else None,
        mask=torch.rand(count, 1, *size, generator=stream) if extras else None,
        weights=weights / (effective_batch or count),
    )


def pictures_of(batch: MicroBatch, chosen: slice) -> MicroBatch:
    """Return some images of a micro-batch, with their weights in it."""

    def cut(value: object) -> object:
        if isinstance(value, TextConditioning):
            return TextConditioning(value.hidden[chosen], None if value.pooled is None else value.pooled[chosen])
        if isinstance(value, tuple):
            return tuple(tensor[chosen] for tensor in value)
        return value[chosen] if isinstance(value, Tensor) else value

    return MicroBatch(**{field.name: cut(getattr(batch, field.name)) for field in dataclasses.fields(batch)})


def take_gradient(adapter: Adapter) -> Tensor:
    """Return and clear all gradients of the working weights as one float64 vector in slot order (zeros if none)."""
    gradients = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in adapter.parameters.values()
    ]
    for weight in adapter.parameters.values():
        weight.grad = None
    return torch.cat([gradient.double().flatten() for gradient in gradients])


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the second."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())
