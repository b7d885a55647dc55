"""The training step, run by the loop and traced by forecasts: add noise, predict, loss, backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor

from trainer.adapter.attach import Adapter
from trainer.base.encoding import TextConditioning, encode_text
from trainer.base.families import TextEncoder
from trainer.base.streaming import WeightStream
from trainer.config.base import Family
from trainer.config.recipe import ObjectiveConfig
from trainer.training.objective import NoiseSchedule, huber_threshold, image_losses, timestep_weights


@dataclass(slots=True)
class MicroBatch:
    """Input of one forward and backward pass: B images of one bucket."""

    latents: Tensor
    """(B,4,h,w) fp32, with the VAE's scaling factor applied."""
    noise: Tensor
    """(B,4,h,w) fp32, with offset and multires noise included; the target is computed from it."""
    input_noise: Tensor | None
    """(B,4,h,w) fp32: the noise added to the input if it differs from ``noise`` (input perturbation), else None."""
    timesteps: Tensor
    """(B,) int64, 0 to 999."""
    text: TextConditioning | None
    """Captions encoded in advance; None if they are encoded in the step."""
    tokens: tuple[Tensor, ...] | None
    """Captions as token ids, int64 (B,n) per text encoder, if text encoders are trained; encoded in the step."""
    time_ids: Tensor | None
    """(B,6) fp32, SDXL only: original height and width, crop top and left, target height and width, in pixels."""
    mask: Tensor | None
    """(B,1,h,w) fp32: loss weight of each latent pixel; None if no image has a mask."""
    weights: Tensor
    """(B,) fp32: 1 / effective batch size, times the weights of the image and its folder."""
    token_weights: Tensor | None = None
    """(B,n) fp32: weight of each of ``tokens``; None without weighted captions or tokens."""
    prior: Tensor | None = None
    """(B,1,1,1) bool: images that learn what the base alone predicts; None if there are none in the job."""

    def to(self, device: torch.device, *, copy: bool = False) -> MicroBatch:
        """Return the batch on ``device``, in new memory if ``copy``; copies from pinned memory are asynchronous."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True, copy=copy))

    def pinned(self) -> MicroBatch:
        """Return the batch in pinned main memory, which a GPU can copy from asynchronously."""
        return self._with(lambda tensor: tensor.pin_memory())

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch, in the order of the fields."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self._with(note)
        return found

    def _with(self, moved: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a batch with every tensor passed through ``moved``, in the order of the fields."""

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
            token_weights=move(self.token_weights),
            prior=move(self.prior),
        )


@dataclass(frozen=True, slots=True)
class StepModels:
    """The models of a training step, with their adapters attached."""

    family: Family
    unet: UNet2DConditionModel
    text_encoders: tuple[TextEncoder, ...]
    """Text encoders; empty if all captions are encoded in advance."""
    clip_skip: int | None
    dtype: torch.dtype
    """Dtype that the UNet computes in; it cannot be read from quantized weights."""
    stream: WeightStream | None = None
    """Copies blocks of the UNet to the device when they are needed; None if all stay there."""
    adapter: Adapter | None = None
    """The adapter, which is switched off for the base's own prediction; None if that is never asked for."""


def training_step(
    models: StepModels,
    schedule: NoiseSchedule,
    objective: ObjectiveConfig,
    batch: MicroBatch,
    loss_scale: float | Tensor = 1.0,
) -> Tensor:
    """Run forward and backward; gradients are added to the working weights, scaled by ``loss_scale``.

    Returns the sum of the weighted losses without the scale, 0-dim, detached, fp32 or wider. Over the micro-batches of
    an effective batch these sums add up to its loss. Weights are applied in the order of sd-scripts: mask, mean over
    channels and pixels, image weight, timestep weight. Nothing is read from the device, no branch depends on data, and
    only one stream is used, so the function also runs on meta tensors.
    """
    preserved = _base_prediction(models, schedule, batch)
    prediction, target = _predict(models, schedule, batch)
    if batch.prior is not None and preserved is not None:
        target = torch.where(batch.prior, preserved, target)
    threshold = huber_threshold(schedule, objective, batch.timesteps)
    losses = image_losses(prediction, target, batch.mask, objective, threshold)
    loss = (losses * batch.weights * timestep_weights(schedule, objective, batch.timesteps)).sum()
    torch.autograd.backward(loss * loss_scale)
    if models.stream is not None:
        models.stream.release()
    return loss.detach()


@torch.no_grad()
def validation_loss(models: StepModels, schedule: NoiseSchedule, batch: MicroBatch) -> Tensor:
    """Return the plain squared error of each image (B,), fp32 or wider.

    Applies no weights and no mask, so that recipes can be compared.
    """
    prediction, target = _predict(models, schedule, batch)
    return image_losses(prediction, target, None, ObjectiveConfig())


@torch.no_grad()
def _base_prediction(models: StepModels, schedule: NoiseSchedule, batch: MicroBatch) -> Tensor | None:
    """Return what the base alone predicts (B,4,h,w), as a target for images that are to stay as they are.

    Prior preservation (Ruiz et al. 2023, DreamBooth) with the base's prediction in place of images that it made, as in
    OneTrainer. It runs for the whole micro-batch, so that time and memory do not depend on the images in it.
    """
    if batch.prior is None or models.adapter is None:
        return None
    with models.adapter.disabled():
        prediction, _ = _predict(models, schedule, batch)
    return prediction


def _predict(models: StepModels, schedule: NoiseSchedule, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the UNet's prediction and the target, each (B,4,h,w) in the target's dtype.

    Noise is added in fp32 and the sum is rounded once to the UNet's dtype; the prediction is widened before the loss.
    """
    text = _condition(models, batch)
    added = batch.noise if batch.input_noise is None else batch.input_noise
    noisy = schedule.add_noise(batch.latents, added, batch.timesteps)
    target = schedule.target(batch.latents, batch.noise, batch.timesteps)
    (prediction,) = models.unet(
        noisy.to(models.dtype),
        schedule.model_timesteps(batch.timesteps),
        encoder_hidden_states=text.hidden.to(models.dtype),
        added_cond_kwargs=_added_conditions(models, text, batch),
        return_dict=False,
    )
    return prediction.to(target.dtype), target


def _condition(models: StepModels, batch: MicroBatch) -> TextConditioning:
    """Return the captions' conditioning for the UNet; if the batch has tokens, run the text encoders on them."""
    if batch.tokens is not None:
        return encode_text(models.family, models.text_encoders, batch.tokens, models.clip_skip, batch.token_weights)
    if batch.text is None:
        raise ValueError("a micro-batch needs encoded captions or tokens")
    return batch.text


def _added_conditions(models: StepModels, text: TextConditioning, batch: MicroBatch) -> dict[str, Tensor] | None:
    """Return SDXL's additional conditions: the pooled caption and the image sizes; None for SD 1.5.

    The sizes stay fp32 until they are embedded: bf16 would round 1023 pixels to 1024.
    """
    if text.pooled is None or batch.time_ids is None:
        return None
    return {"text_embeds": text.pooled.to(models.dtype), "time_ids": batch.time_ids}
