"""The objective against diffusers' scheduler, sd-scripts' formulas in float64, and statistics of what is drawn."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.schedulers.scheduling_ddpm import rescale_zero_terminal_snr
from pydantic import ValidationError
from torch import Tensor

from trainer.config.recipe import ObjectiveConfig
from trainer.training.objective import (
    NoiseSchedule,
    alphas_cumprod,
    draw_noise,
    draw_timestep,
    huber_threshold,
    image_losses,
    mask_weights,
    timestep_weights,
)

ALL = torch.arange(1000)


def ddpm(prediction: str, zero_terminal_snr: bool) -> DDPMScheduler:
    return DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        num_train_timesteps=1000,
        prediction_type="epsilon" if prediction == "epsilon" else "v_prediction",
        rescale_betas_zero_snr=zero_terminal_snr,
    )


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def independent_snr(zero_terminal_snr: bool) -> np.ndarray:
    """The SNR in float64 by numpy, the rescaling by diffusers' function on float64 betas."""
    betas = np.linspace(math.sqrt(0.00085), math.sqrt(0.012), 1000) ** 2
    if zero_terminal_snr:
        betas = rescale_zero_terminal_snr(torch.from_numpy(betas)).numpy()
    alphas = np.cumprod(1.0 - betas)
    return alphas / (1.0 - alphas)


@pytest.mark.parametrize("zero_terminal_snr", [False, True])
def test_alphas_are_those_of_diffusers(zero_terminal_snr: bool) -> None:
    """The fp32 values of diffusers are off by 3e-6 after 1000 products."""
    ours = alphas_cumprod(zero_terminal_snr)
    assert ours.dtype == torch.float64
    theirs = ddpm("epsilon", zero_terminal_snr).alphas_cumprod
    torch.testing.assert_close(ours, theirs.double(), rtol=0.0, atol=5e-6)
    assert (ours[-1] == 0.0) == zero_terminal_snr
    assert ours[0].item() == pytest.approx(1.0 - 0.00085, abs=1e-12)
    snr = NoiseSchedule.create("v", zero_terminal_snr).snr
    np.testing.assert_allclose(snr.numpy(), independent_snr(zero_terminal_snr), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("zero_terminal_snr", [False, True])
def test_noise_and_velocity_are_those_of_diffusers(zero_terminal_snr: bool) -> None:
    scheduler = ddpm("v", zero_terminal_snr)
    schedule = NoiseSchedule.create("v", zero_terminal_snr).to("cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(6, 4, 5, 7, generator=generator) for _ in range(2))
    timesteps = torch.tensor([0, 1, 250, 500, 998, 999])
    close = {"rtol": 1e-5, "atol": 2e-5}
    torch.testing.assert_close(
        schedule.add_noise(latents, noise, timesteps), scheduler.add_noise(latents, noise, timesteps), **close
    )
    torch.testing.assert_close(
        schedule.target(latents, noise, timesteps), scheduler.get_velocity(latents, noise, timesteps), **close
    )
    epsilon = NoiseSchedule.create("epsilon", zero_terminal_snr)
    assert epsilon.target(latents, noise, timesteps) is noise


@pytest.mark.parametrize("zero_terminal_snr", [False, True])
def test_min_snr_weights(zero_terminal_snr: bool) -> None:
    snr = independent_snr(zero_terminal_snr)
    objective = ObjectiveConfig(min_snr_gamma=5.0)
    velocity = timestep_weights(NoiseSchedule.create("v", zero_terminal_snr), objective, ALL)
    np.testing.assert_allclose(velocity.numpy(), np.minimum(snr, 5.0) / (snr + 1.0), rtol=1e-9)
    epsilon = timestep_weights(NoiseSchedule.create("epsilon", zero_terminal_snr), objective, ALL)
    known = snr > 0.0
    np.testing.assert_allclose(epsilon.numpy()[known], np.minimum(snr, 5.0)[known] / snr[known], rtol=1e-9)
    assert epsilon[-1] == 1.0  # the limit at pure noise


@pytest.mark.parametrize("zero_terminal_snr", [False, True])
def test_debiased_weights(zero_terminal_snr: bool) -> None:
    snr = np.minimum(independent_snr(zero_terminal_snr), 1000.0)
    objective = ObjectiveConfig(debiased_estimation=True)
    velocity = timestep_weights(NoiseSchedule.create("v", zero_terminal_snr), objective, ALL)
    np.testing.assert_allclose(velocity.numpy(), 1.0 / (snr + 1.0), rtol=1e-6)
    epsilon = timestep_weights(NoiseSchedule.create("epsilon", zero_terminal_snr), objective, ALL)
    known = snr > 0.0
    np.testing.assert_allclose(epsilon.numpy()[known], 1.0 / np.sqrt(snr[known]), rtol=1e-6)
    assert epsilon[0] == pytest.approx(1.0 / math.sqrt(1000.0))
    if zero_terminal_snr:
        assert epsilon[-1] == epsilon[-2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_weights_are_finite_everywhere_and_one_by_default(prediction: str, dtype: torch.dtype) -> None:
    schedule = NoiseSchedule.create(prediction, True).to("cpu", dtype)
    for objective in (ObjectiveConfig(min_snr_gamma=5.0), ObjectiveConfig(debiased_estimation=True)):
        weights = timestep_weights(schedule, objective, ALL)
        assert weights.dtype == dtype
        assert weights.isfinite().all()
    assert torch.equal(timestep_weights(schedule, ObjectiveConfig(), ALL), torch.ones(1000, dtype=dtype))


def onetrainers_masked_losses(losses: Tensor, mask: Tensor, unmasked_weight: float, normalize: bool) -> Tensor:
    """OneTrainer's modules/util/loss/masked_loss.py at 23df3832."""
    clamped_mask = torch.clamp(mask, unmasked_weight, 1)
    losses = losses * clamped_mask
    return losses / clamped_mask.mean(dim=(1, 2, 3), keepdim=True) if normalize else losses


@pytest.mark.parametrize("normalize", [None, True])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_masked_losses_are_those_of_onetrainer(floor: float, normalize: bool | None) -> None:
    """Where masks are black and white; between, ours are blended instead of clamped."""
    generator = np.random.default_rng(3)
    prediction, target = (torch.from_numpy(generator.standard_normal((3, 4, 5, 7))) for _ in range(2))
    mask = torch.from_numpy((generator.random((3, 1, 5, 7)) < [[[[0.1]]], [[[0.5]]], [[[1.0]]]]).astype(np.float64))
    objective = ObjectiveConfig(unmasked_weight=floor, normalize_masked_loss=normalize)
    found = image_losses(prediction, target, mask_weights(mask, objective), objective)
    expected = onetrainers_masked_losses((prediction - target) ** 2, mask, floor, bool(normalize))
    torch.testing.assert_close(found, expected.mean(dim=(1, 2, 3)), rtol=1e-10, atol=0)


def test_gray_masks_are_blended_and_black_ones_count_for_nothing() -> None:
    gray = torch.tensor([[0.0, 0.25, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64).view(2, 1, 1, 3)
    weights = mask_weights(gray, ObjectiveConfig(unmasked_weight=0.2))
    expected = torch.tensor([[0.2, 0.4, 1.0], [0.2, 0.2, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(weights[:, 0, 0], expected, rtol=1e-10, atol=0)
    for dtype in (torch.float32, torch.float64):
        objective = ObjectiveConfig(unmasked_weight=0.0, normalize_masked_loss=True)
        found = mask_weights(gray.to(dtype), objective)[:, 0, 0]
        torch.testing.assert_close(found, torch.tensor([[0.0, 0.6, 2.4], [0.0] * 3], dtype=dtype))


def test_losses_and_masks_are_their_formulas() -> None:
    generator = np.random.default_rng(3)
    prediction, target = (generator.standard_normal((3, 4, 5, 7)) for _ in range(2))
    mask = generator.random((3, 1, 5, 7))
    square = (prediction - target) ** 2
    smooth = 2 * (np.sqrt(square + 0.3**2) - 0.3)
    difference = np.abs(prediction - target)
    formulas = {"mse": square, "l1": difference, "huber": 0.3 * smooth, "smooth_l1": smooth}
    formulas["log_cosh"] = np.log(np.cosh(difference))
    assert set(formulas) == set(get_args(ObjectiveConfig.model_fields["loss"].annotation))
    for loss, errors in formulas.items():
        objective = ObjectiveConfig(loss=loss)
        tensors = torch.from_numpy(prediction), torch.from_numpy(target)
        plain = image_losses(*tensors, None, objective, 0.3)
        masked = image_losses(*tensors, torch.from_numpy(mask), objective, 0.3)
        np.testing.assert_allclose(plain.numpy(), errors.mean(axis=(1, 2, 3)), rtol=1e-12)
        np.testing.assert_allclose(masked.numpy(), (errors * mask).mean(axis=(1, 2, 3)), rtol=1e-12)


def test_a_mix_is_the_weighted_sum_of_its_losses() -> None:
    generator = np.random.default_rng(5)
    prediction, target = (generator.standard_normal((2, 4, 3, 5)) for _ in range(2))
    difference = prediction - target
    smooth = 2 * (np.sqrt(difference**2 + 0.3**2) - 0.3)
    expected = 0.5 * difference**2 + 2.0 * np.abs(difference) + 0.25 * 0.3 * smooth
    objective = ObjectiveConfig(loss_mix="mse:0.5, l1:2,huber:0.25")
    assert objective.has_threshold
    found = image_losses(torch.from_numpy(prediction), torch.from_numpy(target), None, objective, 0.3)
    np.testing.assert_allclose(found.numpy(), expected.mean(axis=(1, 2, 3)), rtol=1e-12)
    halved = image_losses(
        torch.from_numpy(prediction), torch.from_numpy(target), None, ObjectiveConfig(loss_mix="mse:0.5")
    )
    np.testing.assert_allclose(halved.numpy(), 0.5 * (difference**2).mean(axis=(1, 2, 3)), rtol=1e-12)


@pytest.mark.parametrize("mix", ["", "mse", "mse:0", "mse:101", "mse:nan", "mse:1,mse:2", "l3:1", "mse:1:2", "mse=1"])
def test_mixes_that_are_none_are_refused(mix: str) -> None:
    with pytest.raises(ValidationError, match=r"write loss:weight pairs such as mse:0\.8,l1:0\.2"):
        ObjectiveConfig(loss_mix=mix)


@pytest.mark.parametrize("loss", ["huber", "smooth_l1"])
@pytest.mark.parametrize("zero_terminal_snr", [False, True])
def test_huber_schedules_are_those_of_sd_scripts(loss: str, zero_terminal_snr: bool) -> None:
    """Its three formulas, written out with numpy in float64, at every timestep, and their effect on the loss."""
    snr, c, scale = independent_snr(zero_terminal_snr), 0.2, 1.5
    with np.errstate(divide="ignore"):
        by_snr = (1 - c) / (1 + 1 / np.sqrt(snr)) ** 2 + c
    expected = {
        "constant": np.full(1000, c * scale),
        "exponential": np.exp(-(-math.log(c) / 1000) * np.arange(1000)) * scale,
        "snr": by_snr,
    }
    schedule = NoiseSchedule.create("epsilon", zero_terminal_snr)
    difference = np.random.default_rng(4).standard_normal((1000, 1, 2, 2))
    for name, thresholds in expected.items():
        objective = ObjectiveConfig(loss=loss, huber_schedule=name, huber_c=c, huber_scale=scale)
        found = huber_threshold(schedule, objective, ALL)
        np.testing.assert_allclose(np.broadcast_to(found, 1000), thresholds, rtol=1e-9)
        spread = thresholds[:, None, None, None]
        errors = 2 * (np.sqrt(difference**2 + spread**2) - spread) * (spread if loss == "huber" else 1.0)
        losses = image_losses(torch.from_numpy(difference), torch.zeros(1, dtype=torch.float64), None, objective, found)
        np.testing.assert_allclose(losses.numpy(), errors.mean(axis=(1, 2, 3)), rtol=1e-9)


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("weight", ["min_snr_gamma", "debiased_estimation", "p2_gamma"])
@pytest.mark.parametrize("loss", get_args(ObjectiveConfig.model_fields["loss"].annotation))
def test_no_loss_or_weight_is_read_by_the_host(loss: str, weight: str, prediction: str) -> None:
    """On meta tensors, which have no values, any read fails."""
    schedule = NoiseSchedule.create(prediction, False).to("meta", torch.float32)
    shape = (2, 4, 8, 8)
    values, timesteps = torch.empty(shape, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    for way in ("constant", "exponential", "snr"):
        more = {weight: True if weight == "debiased_estimation" else 1.0}
        objective = ObjectiveConfig(loss=loss, huber_schedule=way, scale_v_pred_loss=True, v_pred_like_loss=0.5, **more)
        threshold = huber_threshold(schedule, objective, timesteps)
        losses = image_losses(values, values, None, objective, threshold) * timestep_weights(
            schedule, objective, timesteps
        )
        assert (losses.shape, losses.dtype, losses.device.type) == ((2,), torch.float32, "meta")


@pytest.mark.parametrize("loss", ["l1", "huber", "smooth_l1", "log_cosh"])
def test_gradients_of_losses_are_their_slopes(loss: str) -> None:
    generator = torch.Generator().manual_seed(11)
    prediction, target = (torch.randn(2, 1, 2, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    objective, thresholds = ObjectiveConfig(loss=loss), torch.tensor([0.1, 0.7], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda found: image_losses(found, target, None, objective, thresholds), prediction.requires_grad_()
    )


@pytest.mark.parametrize("zero_terminal_snr", [False, True])
def test_v_loss_scaling_and_p2_weights(zero_terminal_snr: bool) -> None:
    """As sd-scripts' scale_v_prediction_loss_like_noise_prediction and add_v_prediction_like_loss, and P2's paper."""
    snr = independent_snr(zero_terminal_snr)
    capped = np.minimum(snr, 1000.0)
    scale = capped / (capped + 1.0)
    velocity, epsilon = (NoiseSchedule.create(prediction, zero_terminal_snr) for prediction in ("v", "epsilon"))
    known = snr > 0.0

    scaled = ObjectiveConfig(scale_v_pred_loss=True)
    np.testing.assert_allclose(timestep_weights(velocity, scaled, ALL).numpy(), scale, rtol=1e-9)
    assert torch.equal(timestep_weights(epsilon, scaled, ALL), torch.ones(1000, dtype=torch.float64))

    added = ObjectiveConfig(v_pred_like_loss=0.3)
    found = timestep_weights(epsilon, added, ALL).numpy()
    np.testing.assert_allclose(found[known], 1.0 + 0.3 / scale[known], rtol=1e-9)
    assert np.isfinite(found).all()
    assert torch.equal(timestep_weights(velocity, added, ALL), torch.ones(1000, dtype=torch.float64))

    p2 = ObjectiveConfig(p2_gamma=0.5)
    for schedule in (velocity, epsilon):
        np.testing.assert_allclose(timestep_weights(schedule, p2, ALL).numpy(), 1 / np.sqrt(1 + snr), rtol=1e-9)
    # Several weights multiply, in sd-scripts one after the other.
    both = ObjectiveConfig(min_snr_gamma=5.0, scale_v_pred_loss=True)
    expected = np.minimum(snr, 5.0) / (snr + 1.0) * scale
    np.testing.assert_allclose(timestep_weights(velocity, both, ALL).numpy(), expected, rtol=1e-9)


def test_noise_is_plain_first_and_belongs_to_the_picture() -> None:
    latents = zeros(4, 24, 16)
    shape = latents.shape
    plain = draw_noise(np.random.default_rng(5), latents, ObjectiveConfig())
    assert plain.dtype == np.float32
    assert plain.shape == shape
    np.testing.assert_array_equal(plain, np.random.default_rng(5).standard_normal(shape, dtype=np.float32))
    shifted = draw_noise(np.random.default_rng(5), latents, ObjectiveConfig(noise_offset=0.1))
    difference = shifted - plain
    assert difference.dtype == np.float32
    np.testing.assert_allclose(difference, np.broadcast_to(difference[:, :1, :1], shape), atol=1e-6)
    assert len(np.unique(difference[:, 0, 0])) == 4
    np.testing.assert_array_equal(
        draw_noise(np.random.default_rng(5), latents, ObjectiveConfig(multires_discount=0.3)),
        draw_noise(np.random.default_rng(5), latents, ObjectiveConfig(multires_discount=0.3)),
    )


def test_noise_offset_has_the_stated_strength() -> None:
    generator = np.random.default_rng(6)
    objective = ObjectiveConfig(noise_offset=0.5)
    means = [draw_noise(generator, zeros(4, 16, 16), objective).mean(axis=(1, 2)) for _ in range(500)]
    # The mean of a channel is the offset's number plus the mean of 256 others.
    assert np.std(means) == pytest.approx(math.sqrt(0.5**2 + 1 / 256), rel=0.05)


def test_random_and_adaptive_noise_offsets_are_those_of_sd_scripts() -> None:
    """apply_noise_offset of sd-scripts, written out: |channel mean| times the scale is added, and the sum cut at 0."""
    latents = np.random.default_rng(12).standard_normal((4, 16, 8), dtype=np.float32)
    latents += np.array([1.0, -1.0, 0.5, -0.5], np.float32)[:, None, None]
    shares = []
    for scale in (None, 0.1, -0.2):
        objective = ObjectiveConfig(noise_offset=0.2, noise_offset_random_strength=True, adaptive_noise_scale=scale)
        for seed in range(50):
            generator = np.random.default_rng(seed)
            plain = generator.standard_normal(latents.shape, dtype=np.float32)
            shift = generator.standard_normal((4, 1, 1), dtype=np.float32)
            share = generator.random(dtype=np.float32)
            shares.append(share)
            means = np.abs(latents.mean(axis=(1, 2), dtype=np.float64))[:, None, None]
            expected = plain + np.maximum(0.2 * share + (scale or 0.0) * means, 0.0) * shift
            found = draw_noise(np.random.default_rng(seed), latents, objective)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, atol=1e-6)
    assert 0.4 < np.mean(shares) < 0.6


def test_multires_noise_has_unit_variance_and_its_share_of_coarse_noise() -> None:
    generator = np.random.default_rng(7)
    objective = ObjectiveConfig(multires_discount=0.8)
    draws = [draw_noise(generator, zeros(4, 48, 32), objective) for _ in range(200)]
    assert draws[0].dtype == np.float32
    assert all(draw.std(ddof=1) == pytest.approx(1.0, abs=1e-5) for draw in draws)
    neighbors = np.mean([(draw[:, :, 1:] * draw[:, :, :-1]).mean() for draw in draws])
    # White: 0. Here levels 0, 1, 2 and 3 (sizes 1, r, r^2, r^3) weigh 1 + 1, 0.64, 0.41 and 0.26 of the variance.
    assert 0.15 < neighbors < 0.45


def test_multires_noise_against_a_second_implementation() -> None:
    """Bilinear enlargement written out with numpy, half-pixel centers, edges held."""

    def axis_weights(small: int, large: int) -> np.ndarray:
        places = np.clip((np.arange(large) + 0.5) * small / large - 0.5, 0.0, None)
        lower = np.minimum(places.astype(int), small - 1)
        upper = np.minimum(lower + 1, small - 1)
        weights = np.zeros((large, small))
        np.add.at(weights, (np.arange(large), lower), 1.0 - (places - lower))
        np.add.at(weights, (np.arange(large), upper), places - lower)
        return weights

    objective = ObjectiveConfig(multires_discount=0.5, multires_iterations=3)
    generator = np.random.default_rng(8)
    total = generator.standard_normal((4, 40, 24), dtype=np.float32).astype(np.float64)
    for level in range(3):
        shrink = (2.0 + 2.0 * generator.random()) ** level
        height, width = max(1, int(40 / shrink)), max(1, int(24 / shrink))
        coarse = generator.standard_normal((1, 4, height, width), dtype=np.float32)[0]
        total += 0.5**level * (axis_weights(height, 40) @ coarse @ axis_weights(width, 24).T)
    expected = total / total.std(ddof=1)
    ours = draw_noise(np.random.default_rng(8), zeros(4, 40, 24), objective)
    np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_timesteps_fill_their_range_evenly() -> None:
    generator = np.random.default_rng(9)
    objective = ObjectiveConfig(timestep_min=10, timestep_max=19)
    drawn = [draw_timestep(generator, objective) for _ in range(10_000)]
    assert set(drawn) == set(range(10, 20))
    assert isinstance(drawn[0], int)
    counts = np.bincount(drawn)[10:]
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 27.9  # chi-squared, 9 degrees of freedom, p = 0.001
    assert draw_timestep(generator, ObjectiveConfig(timestep_min=7, timestep_max=7)) == 7


def test_logit_normal_timesteps_prefer_the_middle() -> None:
    generator = np.random.default_rng(10)
    objective = ObjectiveConfig(timesteps="logit_normal")
    drawn = np.array([draw_timestep(generator, objective) for _ in range(20_000)])
    assert drawn.min() >= 0
    assert drawn.max() <= 999
    # The quartiles of the sigmoid of a normal number: sigmoid(-0.6745), 1/2, sigmoid(0.6745).
    assert np.quantile(drawn / 1000.0, [0.25, 0.5, 0.75]) == pytest.approx([0.3375, 0.5, 0.6625], abs=0.01)
    edges = ObjectiveConfig(timesteps="logit_normal", timestep_min=998)
    assert {draw_timestep(generator, edges) for _ in range(200)} == {998, 999}


BIASES = [
    ({"timestep_bias": "earlier", "timestep_bias_portion": 0.3}, range(300)),
    ({"timestep_bias": "later", "timestep_bias_portion": 0.1, "timestep_max": 499}, range(450, 500)),
    (
        {"timestep_bias": "range", "timestep_bias_begin": 200, "timestep_bias_end": 500, "timestep_min": 300},
        range(300, 500),
    ),
]


@pytest.mark.parametrize(("settings", "biased"), BIASES)
def test_timestep_bias_is_that_of_diffusers(settings: dict[str, object], biased: range) -> None:
    """Biased timesteps come ``multiplier`` times as often, as torch.multinomial draws by diffusers' weights."""
    objective = ObjectiveConfig(timestep_bias_multiplier=4.0, **settings)
    low, high = objective.timestep_min, objective.timestep_max
    weights = np.array([4.0 if timestep in biased else 1.0 for timestep in range(low, high + 1)])
    generator, count = np.random.default_rng(13), 40_000
    drawn = np.bincount([draw_timestep(generator, objective) for _ in range(count)], minlength=1000)
    assert drawn[:low].sum() == drawn[high + 1 :].sum() == 0
    expected = count * weights / weights.sum()
    degrees = len(weights) - 1
    chi_squared = ((drawn[low : high + 1] - expected) ** 2 / expected).sum()
    assert abs(chi_squared - degrees) < 4.0 * math.sqrt(2.0 * degrees)
