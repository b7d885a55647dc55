"""The training objective: noise schedule, target, loss and its weights, noise and timesteps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trainer.config.base import Prediction
from trainer.config.recipe import ObjectiveConfig

# Both families were trained with these betas, "scaled_linear": evenly spaced square roots (their scheduler configs).
BETA_START = 0.00085
BETA_END = 0.012
TIMESTEPS = 1000
# sd-scripts caps the SNR at this in some weights, so that the cleanest timesteps keep some weight.
HIGHEST_SNR = 1000.0


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """Tables of the shares of image and noise at each of the 1000 timesteps.

    x_t = signal[t] * latents + sigma[t] * noise, with signal = sqrt(alphas_cumprod), sigma = sqrt(1 - alphas_cumprod)
    and snr = (signal / sigma)^2 (Ho et al. 2020, eq. 4). With rectified flow, sigma rises in a straight line to 1 and
    signal = 1 - sigma (Liu et al. 2023). All tables have shape (1000,) and are computed in float64.
    """

    prediction: Prediction
    """What the base predicts: noise ("epsilon"), velocity ("v") or the flow from image to noise."""
    alphas_cumprod: Tensor
    snr: Tensor
    signal: Tensor
    sigma: Tensor

    @classmethod
    def create(cls, prediction: Prediction, zero_terminal_snr: bool) -> NoiseSchedule:
        """Return the schedule used by both families, in float64 on the CPU, rescaled if ``zero_terminal_snr``.

        The SNR is computed from the rescaled schedule. sd-scripts computes it before rescaling, so its loss weights do
        not match the noise that is added.
        """
        if prediction == "flow":
            sigma = torch.arange(1, TIMESTEPS + 1, dtype=torch.float64) / TIMESTEPS
            signal = 1.0 - sigma
            return cls(prediction, signal**2, (signal / sigma) ** 2, signal, sigma)
        alphas = alphas_cumprod(zero_terminal_snr)
        return cls(prediction, alphas, alphas / (1.0 - alphas), alphas.sqrt(), (1.0 - alphas).sqrt())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> NoiseSchedule:
        """Return the tables on ``device``; noisy latents, target and loss get ``dtype`` or a wider one."""
        tables = (self.alphas_cumprod, self.snr, self.signal, self.sigma)
        return NoiseSchedule(self.prediction, *(table.to(device, dtype) for table in tables))

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the noisy latents (B,4,h,w) at ``timesteps`` (B,), which are int64."""
        return _spread(self.signal[timesteps]) * latents + _spread(self.sigma[timesteps]) * noise

    def model_timesteps(self, timesteps: Tensor) -> Tensor:
        """Return the UNet's timestep input (B,): the timestep, or for flows 1000 times sigma, up to 1000."""
        return timesteps + 1 if self.prediction == "flow" else timesteps

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the training target (B,4,h,w): the noise, v = signal * noise - sigma * latents, or noise - latents.

        For v see Salimans and Ho 2022, section 4; for flows Esser et al. 2024, section 2.
        """
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "flow":
            return noise - latents
        return _spread(self.signal[timesteps]) * noise - _spread(self.sigma[timesteps]) * latents


def alphas_cumprod(zero_terminal_snr: bool) -> Tensor:
    """Return the share of the image's variance that is left at each timestep, (1000,) float64.

    With ``zero_terminal_snr``, its square root is shifted and scaled so that the last value is 0 and the first one is
    unchanged (Lin et al. 2023, "Common Diffusion Noise Schedules and Sample Steps are Flawed", algorithm 1).
    """
    betas = torch.linspace(math.sqrt(BETA_START), math.sqrt(BETA_END), TIMESTEPS, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1.0 - betas, dim=0)
    if not zero_terminal_snr:
        return alphas
    roots = alphas.sqrt()
    first, last = roots[0], roots[-1]
    return ((roots - last) * (first / (first - last))) ** 2


def mask_weights(masks: Tensor, objective: ObjectiveConfig) -> Tensor:
    """Return the loss weight of each latent pixel (B,1,h,w) from masks of the same shape: 0 is outside, 1 inside.

    Outside it is ``unmasked_weight``; gray values give weights in between. With ``normalize_masked_loss``, an image's
    weights are divided by their mean (OneTrainer, `masked_losses`), so that a small area counts as much as a whole
    image; an image with weight 0 everywhere keeps it.
    """
    floor = objective.unmasked_weight
    weights = masks.mul(1.0 - floor).add(floor)
    if objective.normalize_masked_loss:
        weights /= weights.mean(dim=(1, 2, 3), keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return weights


def image_losses(
    prediction: Tensor, target: Tensor, mask: Tensor | None, objective: ObjectiveConfig, threshold: float | Tensor = 1.0
) -> Tensor:
    """Return the loss of each image (B,): the mean error over channels, height and width.

    With the error d: mse: d^2; l1: |d|; huber: 2c (sqrt(d^2 + c^2) - c), which is d^2 far below c and 2c|d| far above;
    smooth_l1: the same divided by c; log_cosh: log(cosh(d)) (OneTrainer). huber and smooth_l1 are the smooth
    pseudo-Huber losses of sd-scripts (conditional_loss), and c is their ``threshold``, a number or (B,) from
    ``huber_threshold``. Losses of a mix are multiplied by their weights and added.
    ``mask`` (B,1,h,w) multiplies the errors before the mean, which is not divided by the mask's own mean
    (sd-scripts' apply_masked_loss): unless `mask_weights` normalizes it, an image that is half masked out counts half.
    """
    (name, weight), *others = objective.losses
    errors = _errors(name, prediction, target, threshold)
    if objective.loss_mix is not None:
        errors = weight * errors
    for name, weight in others:
        errors = errors + weight * _errors(name, prediction, target, threshold)
    if mask is not None:
        errors = errors * mask
    return errors.mean(dim=(1, 2, 3))


def _errors(loss: str, prediction: Tensor, target: Tensor, threshold: float | Tensor) -> Tensor:
    """Return one loss of each number (B,4,h,w)."""
    if loss == "mse":
        return F.mse_loss(prediction, target, reduction="none")
    if loss == "l1":
        return F.l1_loss(prediction, target, reduction="none")
    if loss == "log_cosh":
        # cosh itself overflows from an error of 89 in fp32.
        difference = prediction - target
        return difference + F.softplus(-2.0 * difference) - math.log(2.0)
    c = _spread(threshold) if isinstance(threshold, Tensor) else threshold
    errors = torch.sqrt((prediction - target) ** 2 + c * c) - c
    return (2.0 * c if loss == "huber" else 2.0) * errors


def huber_threshold(schedule: NoiseSchedule, objective: ObjectiveConfig, timesteps: Tensor) -> float | Tensor:
    """Return the error above which huber and smooth_l1 grow linearly, a number or one for each image (B,).

    As in sd-scripts' get_huber_threshold_if_needed, with c = ``huber_c`` and s = ``huber_scale``: constant: c s;
    exponential: c^(t / 1000) s; snr: c + (1 - c) / (1 + 1 / sqrt(SNR))^2, without s.
    """
    c, scale = objective.huber_c, objective.huber_scale or 1.0
    if objective.huber_schedule in (None, "constant") or not objective.has_threshold:
        return c * scale
    if objective.huber_schedule == "exponential":
        return torch.exp(timesteps.to(schedule.snr.dtype) * (math.log(c) / TIMESTEPS)) * scale
    # Pure noise has SNR 0, whose inverse root is infinite and gives c.
    return (1.0 - c) / (1.0 + torch.rsqrt(schedule.snr[timesteps])) ** 2 + c


def timestep_weights(schedule: NoiseSchedule, objective: ObjectiveConfig, timesteps: Tensor) -> Tensor:
    """Return each image's loss weight at its timestep (B,), in the schedule's dtype: the product of these weights.

    min-SNR with gamma g (Hang et al. 2023, section 3.4): min(snr, g) / snr for epsilon, min(snr, g) / (snr + 1) for v.
    P2 (Choi et al. 2022, "Perception Prioritized Training of Diffusion Models", k = 1): (1 + snr)^-gamma. For v, these
    are the paper's weights together with the scaled v loss; OneTrainer uses (2 + snr)^-gamma there.
    Scaled v loss: snr / (snr + 1), the weight of v's error in the error of the noise; only for v.
    v-like loss with weight w: 1 + w (snr + 1) / snr; only for epsilon.
    Debiased estimation (Yu et al. 2024; sd-scripts): 1 / sqrt(snr) for epsilon, 1 / (snr + 1) for v.
    As in sd-scripts, the last three use an SNR of at most 1000.
    Pure noise (zero terminal SNR, t = 999) has snr 0: min-SNR takes the limit of its formula there, 1 for epsilon and
    0 for v; debiased epsilon and the v-like loss, which have no limit, take the weight of t = 998.
    """
    snr = schedule.snr[timesteps]
    weights = torch.ones_like(snr)
    epsilon = schedule.prediction == "epsilon"
    if objective.min_snr_gamma is not None:
        gamma = objective.min_snr_gamma
        # min(snr, g) / snr is min(1, g / snr), which a zero does not turn into 0 / 0.
        weights = weights * (torch.clamp(gamma / snr, max=1.0) if epsilon else torch.clamp(snr, max=gamma) / (snr + 1))
    if objective.p2_gamma is not None:
        weights = weights * (1.0 + snr) ** -objective.p2_gamma
    if objective.scale_v_pred_loss and not epsilon:
        capped = snr.clamp(max=HIGHEST_SNR)
        weights = weights * (capped / (capped + 1.0))
    if objective.v_pred_like_loss and epsilon:
        positive = torch.where(snr > 0.0, snr.clamp(max=HIGHEST_SNR), schedule.snr[-2])
        weights = weights * (1.0 + objective.v_pred_like_loss * (positive + 1.0) / positive)
    if objective.debiased_estimation:
        capped = snr.clamp(max=HIGHEST_SNR)
        positive = torch.where(snr > 0.0, capped, schedule.snr[-2])
        weights = weights * (torch.rsqrt(positive) if epsilon else 1.0 / (capped + 1.0))
    return weights


def draw_noise(
    generator: np.random.Generator, latents: NDArray[np.float32], objective: ObjectiveConfig
) -> NDArray[np.float32]:
    """Return the noise for one image with ``latents`` (C,h,w), in their shape, fp32, from the image's own generator.

    It therefore does not depend on the batch. Plain normal noise is always drawn first, then the noise offset, one
    normal number per channel times the offset (Guttenberg 2023, "Diffusion with Offset Noise"), then multires noise.
    """
    noise = generator.standard_normal(latents.shape, dtype=np.float32)
    if objective.noise_offset:
        shift = generator.standard_normal((len(latents), 1, 1), dtype=np.float32)
        noise = noise + _noise_offset(generator, latents, objective) * shift
    if objective.multires_discount:
        noise = _add_coarser_noise(generator, noise, objective)
    return noise


def draw_timestep(generator: np.random.Generator, objective: ObjectiveConfig) -> int:
    """Return a random timestep from ``timestep_min`` to ``timestep_max``, inclusive.

    uniform: all are equally likely unless there is a timestep bias. logit_normal: the position in the range is the
    sigmoid of a normal number (Esser et al. 2024, section 3.1, with mean 0 and standard deviation 1). With a shift s,
    the position u becomes s u / (1 + (s - 1) u) (the same paper, section 5.3.2).
    """
    low, high = objective.timestep_min, objective.timestep_max
    if objective.timestep_bias is not None and objective.timesteps == "uniform":
        shares = _biased_timesteps(objective)
        # The last sum may be a little below 1, so a draw may lie above it.
        return min(high, low + int(np.searchsorted(shares, generator.random(), side="right")))
    shift = objective.timestep_shift or 1.0
    if objective.timesteps == "uniform":
        if shift == 1.0:
            return int(generator.integers(low, high, endpoint=True))
        share = generator.random()
    else:
        share = 1.0 / (1.0 + math.exp(-generator.standard_normal()))
    share = shift * share / (1.0 + (shift - 1.0) * share)
    return min(high, low + int(share * (high - low + 1)))


def _noise_offset(
    generator: np.random.Generator, latents: NDArray[np.float32], objective: ObjectiveConfig
) -> NDArray[np.float32]:
    """Return the strength of the noise offset in one image, a number or (C,1,1), as in sd-scripts' apply_noise_offset.

    With a random strength, it is uniform from 0 to ``noise_offset`` (in sd-scripts, drawn once for the batch). The
    adaptive scale times the absolute mean of each channel of the latents is added, and the sum is at least 0.
    """
    offset = np.float32(objective.noise_offset)
    if objective.noise_offset_random_strength:
        offset *= generator.random(dtype=np.float32)
    if not objective.adaptive_noise_scale:
        return np.asarray(offset)
    means = np.abs(latents.mean(axis=(1, 2), keepdims=True, dtype=np.float32))
    raised: NDArray[np.float32] = offset + np.float32(objective.adaptive_noise_scale) * means
    return raised.clip(min=np.float32(0.0))


@lru_cache(maxsize=64)  # folders may have their own ranges
def _biased_timesteps(objective: ObjectiveConfig) -> NDArray[np.float64]:
    """Return the cumulative probabilities of the timesteps from ``timestep_min`` on, as in diffusers' examples.

    Biased timesteps have ``timestep_bias_multiplier`` times the probability of the others (generate_timestep_weights
    in diffusers' train_text_to_image_sdxl.py).
    """
    timesteps = np.arange(objective.timestep_min, objective.timestep_max + 1)
    biased = objective.biased_timesteps
    is_biased = (timesteps >= biased.start) & (timesteps < biased.stop)
    weights = np.where(is_biased, objective.timestep_bias_multiplier or 2.0, 1.0)
    total: NDArray[np.float64] = np.cumsum(weights / weights.sum())
    return total


def _add_coarser_noise(
    generator: np.random.Generator, noise: NDArray[np.float32], objective: ObjectiveConfig
) -> NDArray[np.float32]:
    """Return ``noise`` plus multires (pyramid) noise as in sd-scripts (Whitaker 2023): level i is r^i times coarser.

    Level i has the weight discount^i. r is drawn from 2 to 4 for each level, level 0 is a second noise of full size,
    and the first level with a side of one pixel is the last. The sum is divided by its standard deviation, computed
    over the image (in sd-scripts, over the whole batch).
    """
    channels, height, width = noise.shape
    total = torch.from_numpy(noise)
    for level in range(objective.multires_iterations):
        shrink = (2.0 + 2.0 * generator.random()) ** level
        size = max(1, int(height / shrink)), max(1, int(width / shrink))
        coarse = torch.from_numpy(generator.standard_normal((1, channels, *size), dtype=np.float32))
        whole = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)[0]
        total = total + whole * objective.multires_discount**level
        if 1 in size:
            break
    result: NDArray[np.float32] = (total / total.std()).numpy()
    return result


def _spread(values: Tensor) -> Tensor:
    """Return per-image numbers (B,) in shape (B,1,1,1), which broadcasts over latents."""
    return values.view(-1, 1, 1, 1)
