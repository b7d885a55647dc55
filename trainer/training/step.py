"""The one training step: add noise, predict, loss, backward. The loop runs it, forecasts trace it, tests check it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor

from trainer.base.encoding import TextConditioning, encode_text
from trainer.base.families import TextEncoder
from trainer.config.base import Family
from trainer.config.recipe import ObjectiveConfig
from trainer.training.objective import NoiseSchedule, picture_losses, timestep_weights


@dataclass(slots=True)
class MicroBatch:
    """What one forward and backward works on: B pictures of one bucket."""

    latents: Tensor
    """(B,4,h,w) fp32, scaled as the UNet wants them."""
    noise: Tensor
    """(B,4,h,w) fp32, with offset and multires already in it; the target is made from it."""
    input_noise: Tensor | None
    """(B,4,h,w) fp32: the noise that the input gets when it differs from the target's (input perturbation)."""
    timesteps: Tensor
    """(B,) int64, 0 to 999."""
    text: TextConditioning | None
    """Captions encoded before; None when they are encoded in the step."""
    tokens: tuple[Tensor, ...] | None
    """Captions as token ids, int64 (B,n) for each text encoder: encoded in the step, so that encoders can learn."""
    time_ids: Tensor | None
    """(B,6) fp32, SDXL only: original height and width, crop top and left, target height and width, in pixels."""
    mask: Tensor | None
    """(B,1,h,w) fp32: how much each place counts."""
    weights: Tensor
    """(B,) fp32: 1 / effective batch, times the picture's and its folder's weight."""

    def to(self, device: torch.device, *, copy: bool = False) -> MicroBatch:
        """The same on ``device``, with ``copy`` in memory of its own; from pinned memory without waiting for it."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True, copy=copy))

    def pinned(self) -> MicroBatch:
        """The same in main memory that a card reads by itself."""
        return self._with(lambda tensor: tensor.pin_memory())

    def tensors(self) -> list[Tensor]:
        """All that it holds, in the order of the fields."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self._with(note)
        return found

    def _with(self, moved: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Every tensor moved, in the order of the fields."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else moved(tensor)

        text = self.text
        return MicroBatch(
            latents=moved(self.latents),
            noise=moved(self.noise),
            input_noise=move(self.input_noise),
            timesteps=moved(self.timesteps),
            text=text and TextConditioning(moved(text.hidden), move(text.pooled)),
            tokens=self.tokens and tuple(moved(tokens) for tokens in self.tokens),
            time_ids=move(self.time_ids),
            mask=move(self.mask),
            weights=moved(self.weights),
        )


@dataclass(frozen=True, slots=True)
class StepModels:
    """The models a step runs through, with their adapters in place."""

    family: Family
    unet: UNet2DConditionModel
    text_encoders: tuple[TextEncoder, ...]
    """Empty when all captions were encoded before."""
    clip_skip: int | None
    dtype: torch.dtype
    """The number format the UNet computes in; a quantised base cannot say it itself."""


def training_step(
    models: StepModels,
    schedule: NoiseSchedule,
    objective: ObjectiveConfig,
    batch: MicroBatch,
    loss_scale: float | Tensor = 1.0,
) -> Tensor:
    """One forward and backward: gradients add up in the working weights, scaled by ``loss_scale``.

    Returns the sum of the weighted losses without the scale, 0-dim, detached, fp32 or wider: over the micro-batches
    of an effective batch these add up to its loss. The order of weights is that of sd-scripts: mask, mean over
    channels and places, picture weight, timestep weight. Nothing is read from the device, no branch depends on data,
    and one stream is used, so the same function runs on meta tensors.
    """
    prediction, target = _predict(models, schedule, batch)
    losses = picture_losses(prediction, target, batch.mask, objective)
    loss = (losses * batch.weights * timestep_weights(schedule, objective, batch.timesteps)).sum()
    torch.autograd.backward(loss * loss_scale)
    return loss.detach()


@torch.no_grad()
def validation_loss(models: StepModels, schedule: NoiseSchedule, batch: MicroBatch) -> Tensor:
    """The plain squared error of each picture (B,), fp32 or wider: no weights, no mask, comparable between recipes."""
    prediction, target = _predict(models, schedule, batch)
    return picture_losses(prediction, target, None, ObjectiveConfig())


def _predict(models: StepModels, schedule: NoiseSchedule, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """What the UNet says of the noisy latents and what it should say, (B,4,h,w) each, in the target's dtype.

    Noise is added in fp32 and the sum rounded once to the UNet's dtype; its answer is widened before the loss.
    """
    text = _condition(models, batch)
    added = batch.noise if batch.input_noise is None else batch.input_noise
    noisy = schedule.add_noise(batch.latents, added, batch.timesteps)
    target = schedule.target(batch.latents, batch.noise, batch.timesteps)
    (prediction,) = models.unet(
        noisy.to(models.dtype),
        batch.timesteps,
        encoder_hidden_states=text.hidden.to(models.dtype),
        added_cond_kwargs=_added_conditions(models, text, batch),
        return_dict=False,
    )
    return prediction.to(target.dtype), target


def _condition(models: StepModels, batch: MicroBatch) -> TextConditioning:
    """The captions as the UNet reads them, through the live text encoders when there are tokens."""
    if batch.tokens is not None:
        return encode_text(models.family, models.text_encoders, batch.tokens, models.clip_skip)
    if batch.text is None:
        raise ValueError("a micro-batch needs encoded captions or tokens")
    return batch.text


def _added_conditions(models: StepModels, text: TextConditioning, batch: MicroBatch) -> dict[str, Tensor] | None:
    """SDXL's second input: the pooled caption and the picture's sizes.

    The sizes stay fp32 until they are embedded: bf16 would round 1023 pixels to 1024.
    """
    if text.pooled is None or batch.time_ids is None:
        return None
    return {"text_embeds": text.pooled.to(models.dtype), "time_ids": batch.time_ids}
