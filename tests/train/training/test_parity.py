"""Loss and gradient of the step against an assembly of its own from diffusers' scheduler, models and plain autograd."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.schedulers.scheduling_ddpm import rescale_zero_terminal_snr
from torch import Tensor

from tests.support.loras import Models, random_weights
from tests.support.steps import distance, make_batch, pictures_of, step_models, take_gradient
from trainer.adapter.attach import Adapter
from trainer.config.base import Family, Prediction
from trainer.config.recipe import ObjectiveConfig
from trainer.training.device.gradient_checkpointing import set_checkpointing
from trainer.training.objective import NoiseSchedule
from trainer.training.optim.master_weights import MasterWeights
from trainer.training.step import MicroBatch, training_step, validation_loss

FAMILIES: tuple[Family, ...] = ("sd15", "sdxl")
LIMITS = {torch.float64: 1e-10, torch.float32: 5e-6}
OBJECTIVES = {
    "mse": ObjectiveConfig(),
    "huber": ObjectiveConfig(loss="huber", huber_c=0.2),
    "smooth l1 by snr": ObjectiveConfig(loss="smooth_l1", huber_schedule="snr", v_pred_like_loss=0.5),
    "l1, scaled": ObjectiveConfig(loss="l1", scale_v_pred_loss=True),
    "min_snr": ObjectiveConfig(min_snr_gamma=5.0),
    "debiased_estimation": ObjectiveConfig(debiased_estimation=True),
}
SCHEDULES: dict[str, tuple[Prediction, bool]] = {
    "epsilon": ("epsilon", False),
    "v": ("v", False),
    "v zero terminal": ("v", True),
    "epsilon zero terminal": ("epsilon", True),
}
# Every objective with either prediction, and the rescaled schedules; test_objective.py tests weights at all timesteps.
PAIRS = [(schedule, objective) for schedule in ("epsilon", "v") for objective in OBJECTIVES]
PAIRS += [("v zero terminal", "min_snr"), ("v zero terminal", "debiased_estimation"), ("epsilon zero terminal", "mse")]

Material = tuple[Models, Adapter]


@pytest.fixture(scope="module", params=[(family, dtype) for family in FAMILIES for dtype in LIMITS], ids=str)
def material(request: pytest.FixtureRequest) -> Material:
    family, dtype = request.param
    models = Models.copies(family, dtype)
    adapter = models.attach()
    random_weights(adapter)
    return models, adapter


def scheduler_of_diffusers(prediction: Prediction, zero_terminal_snr: bool, dtype: torch.dtype) -> DDPMScheduler:
    """Return diffusers' training scheduler; for float64, its fp32 table is replaced by the same formula in float64."""
    scheduler = DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="epsilon" if prediction == "epsilon" else "v_prediction",
        rescale_betas_zero_snr=zero_terminal_snr,
    )
    if dtype == torch.float64:
        betas = torch.from_numpy(np.linspace(math.sqrt(0.00085), math.sqrt(0.012), 1000) ** 2)
        betas = rescale_zero_terminal_snr(betas) if zero_terminal_snr else betas
        scheduler.alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
    return scheduler


def conditions(models: Models, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor] | None]:
    """Hidden states and SDXL's added conditions, from cached text or from the text encoders themselves."""
    if batch.text is not None:
        hidden, pooled = batch.text.hidden, batch.text.pooled
    elif models.family == "sd15":
        return models.text_encoders[0](batch.tokens[0]).last_hidden_state, None
    else:
        pairs = zip(models.text_encoders, batch.tokens, strict=True)
        outputs = [encoder(tokens, output_hidden_states=True) for encoder, tokens in pairs]
        hidden = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        pooled = outputs[1].text_embeds
    return hidden, None if pooled is None else {"text_embeds": pooled, "time_ids": batch.time_ids}


def reference_loss(
    models: Models, scheduler: DDPMScheduler, objective: ObjectiveConfig, batch: MicroBatch, *, plain: bool = False
) -> Tensor:
    """The weighted losses (B,), picture by picture, in the order of sd-scripts."""
    hidden, added = conditions(models, batch)
    input_noise = batch.noise if batch.input_noise is None else batch.input_noise
    noisy = scheduler.add_noise(batch.latents, input_noise, batch.timesteps)
    predicted = models.unet(noisy, batch.timesteps, hidden, added_cond_kwargs=added).sample
    epsilon = scheduler.config.prediction_type == "epsilon"
    wanted = batch.noise if epsilon else scheduler.get_velocity(batch.latents, batch.noise, batch.timesteps)
    losses = []
    for index, timestep in enumerate(batch.timesteps.tolist()):
        error = predicted[index] - wanted[index]
        alpha = scheduler.alphas_cumprod[timestep].double()
        snr = float(alpha / (1 - alpha))
        if objective.loss == "huber":
            c = objective.huber_c
            error = 2 * c * ((error**2 + c**2).sqrt() - c)
        elif objective.loss == "smooth_l1":
            c = (1 - objective.huber_c) / (1 + snr**-0.5) ** 2 + objective.huber_c
            error = 2 * ((error**2 + c**2).sqrt() - c)
        elif objective.loss == "l1":
            error = error.abs()
        else:
            error = error**2
        if plain:
            losses.append(error.mean())
            continue
        masked = error if batch.mask is None else error * batch.mask[index]
        weight = float(batch.weights[index])
        if objective.min_snr_gamma is not None:
            weight *= min(snr, objective.min_snr_gamma) / (snr if epsilon else snr + 1)
        scale = min(snr, 1000) / (min(snr, 1000) + 1)
        if objective.scale_v_pred_loss and not epsilon:
            weight *= scale
        if objective.v_pred_like_loss and epsilon:
            weight *= 1 + objective.v_pred_like_loss / scale
        if objective.debiased_estimation:
            weight *= 1 / math.sqrt(min(snr, 1000)) if epsilon else 1 / (min(snr, 1000) + 1)
        losses.append(masked.mean() * weight)
    return torch.stack(losses)


def plain_gradient(loss: Tensor, adapter: Adapter) -> Tensor:
    """What autograd gives for every working weight, as one vector; SDXL does not read the encoders' last layer."""
    weights = list(adapter.parameters.values())
    gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.double().flatten() for gradient in gradients])


def chosen_timesteps(schedule: str) -> Sequence[int]:
    """Both ends and the middle; pure noise has no SNR that epsilon's weights could be compared at."""
    return (0, 321, 950) if schedule == "epsilon zero terminal" else (0, 321, 999)


@pytest.mark.parametrize(("schedule", "objective"), PAIRS)
def test_loss_and_gradient_are_those_of_diffusers(material: Material, schedule: str, objective: str) -> None:
    models, adapter = material
    dtype = models.unet.dtype
    prediction, zero_terminal_snr = SCHEDULES[schedule]
    config = OBJECTIVES[objective]
    batch = make_batch(models.family, chosen_timesteps(schedule), dtype=dtype)

    scheduler = scheduler_of_diffusers(prediction, zero_terminal_snr, dtype)
    expected = reference_loss(models, scheduler, config, batch).sum()
    expected_gradient = plain_gradient(expected, adapter)

    noise_schedule = NoiseSchedule.create(prediction, zero_terminal_snr).to("cpu", dtype)
    loss = training_step(step_models(models), noise_schedule, config, batch)
    gradient = take_gradient(adapter)

    assert loss.dtype == dtype
    assert not loss.requires_grad
    assert expected_gradient.norm() > 0
    assert distance(loss, expected.detach()) < LIMITS[dtype]
    assert distance(gradient, expected_gradient) < LIMITS[dtype]


def test_cached_text_and_no_extras(material: Material) -> None:
    models, adapter = material
    dtype = models.unet.dtype
    batch = make_batch(models.family, (5, 700), dtype=dtype, live_text=False, extras=False)
    expected = reference_loss(models, scheduler_of_diffusers("epsilon", False, dtype), ObjectiveConfig(), batch).sum()
    expected_gradient = plain_gradient(expected, adapter)
    schedule = NoiseSchedule.create("epsilon", False).to("cpu", dtype)
    loss = training_step(step_models(models, live_text=False), schedule, ObjectiveConfig(), batch)
    encoders = [weight for key, weight in adapter.parameters.items() if adapter.part_of[key] != "unet"]
    assert all(weight.grad is None for weight in encoders)
    assert distance(loss, expected.detach()) < LIMITS[dtype]
    assert distance(take_gradient(adapter), expected_gradient) < LIMITS[dtype]


def test_validation_loss_is_the_plain_error(material: Material) -> None:
    models, adapter = material
    dtype = models.unet.dtype
    batch = make_batch(models.family, (100, 900), dtype=dtype)
    expected = reference_loss(
        models, scheduler_of_diffusers("v", False, dtype), ObjectiveConfig(), batch, plain=True
    ).detach()
    losses = validation_loss(step_models(models), NoiseSchedule.create("v", False).to("cpu", dtype), batch)
    assert losses.shape == (2,)
    assert not losses.requires_grad
    assert distance(losses, expected) < LIMITS[dtype]
    assert all(parameter.grad is None for parameter in adapter.parameters.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_do_not_change_what_is_learned(family: Family) -> None:
    """Four pictures at once, one by one, and two buckets of two: the same concatenated gradient."""
    models = Models.copies(family)
    adapter = models.attach()
    random_weights(adapter)
    objective = ObjectiveConfig(min_snr_gamma=5.0)
    schedule = NoiseSchedule.create("epsilon", False).to("cpu", torch.float64)

    def learn(parts: list[MicroBatch]) -> tuple[Tensor, Tensor]:
        masters = MasterWeights(adapter.parameters)
        loss = torch.zeros((), dtype=torch.float64)
        for part in parts:
            loss += training_step(step_models(models), schedule, objective, part)
            masters.accumulate()
        return loss, torch.cat([gradient.flatten() for gradient in masters.gradients()])

    whole = make_batch(family, (3, 250, 600, 990))
    together = learn([whole])
    apart = learn([pictures_of(whole, slice(index, index + 1)) for index in range(4)])
    assert distance(apart[0], together[0]) < 1e-10
    assert distance(apart[1], together[1]) < 1e-10

    squares = make_batch(family, (3, 250), effective_batch=4)
    wide = make_batch(family, (600, 990), size=(8, 16), effective_batch=4, seed=1)
    by_bucket = learn([squares, wide])
    singles = [pictures_of(bucket, slice(index, index + 1)) for bucket in (squares, wide) for index in range(2)]
    one_by_one = learn(singles)
    assert distance(one_by_one[0], by_bucket[0]) < 1e-10
    assert distance(one_by_one[1], by_bucket[1]) < 1e-10


@pytest.mark.parametrize("choice", ["full", ("down_blocks.1", "mid_block"), ("up_blocks.0",)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_changes_no_bit_of_the_gradient(family: Family, choice: str | tuple[str, ...]) -> None:
    models = Models.copies(family, torch.float32)
    adapter = models.attach()
    random_weights(adapter)
    schedule = NoiseSchedule.create("v", False).to("cpu", torch.float32)
    batch = make_batch(family, (100, 900), dtype=torch.float32)

    def learn() -> tuple[Tensor, Tensor]:
        loss = training_step(step_models(models), schedule, ObjectiveConfig(), batch)
        return loss, take_gradient(adapter)

    plain = learn()
    set_checkpointing(models.unet, models.text_encoders, choice, dropouts=False)
    checkpointed = learn()
    assert torch.equal(checkpointed[0], plain[0])
    assert torch.equal(checkpointed[1], plain[1])
