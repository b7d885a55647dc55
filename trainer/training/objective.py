"""The training objective: noise schedule, target, loss and its weights, noise and timesteps."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
# sd-scripts caps the SNR at this in debiased estimation, so that the cleanest timesteps keep some weight.
MOST_DEBIASED_SNR = 1000.0


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """Tables of the shares of image and noise at each of the 1000 timesteps.

    x_t = signal[t] * latents + sigma[t] * noise, with signal = sqrt(alphas_cumprod), sigma = sqrt(1 - alphas_cumprod)
    and snr = (signal / sigma)^2 (Ho et al. 2020, eq. 4). All tables have shape (1000,) and are computed in float64.
    """

    prediction: Prediction
    """What the base predicts: noise ("epsilon") or velocity."""
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
        alphas = alphas_cumprod(zero_terminal_snr)
        return cls(prediction, alphas, alphas / (1.0 - alphas), alphas.sqrt(), (1.0 - alphas).sqrt())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> NoiseSchedule:
        """Return the tables on ``device``; noisy latents, target and loss get ``dtype`` or a wider one."""
        tables = (self.alphas_cumprod, self.snr, self.signal, self.sigma)
        return NoiseSchedule(self.prediction, *(table.to(device, dtype) for table in tables))

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the noisy latents (B,4,h,w) at ``timesteps`` (B,), which are int64."""
        return _spread(self.signal[timesteps]) * latents + _spread(self.sigma[timesteps]) * noise

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the training target (B,4,h,w): the noise, or v = signal * noise - sigma * latents.

        For v see Salimans and Ho 2022, section 4.
        """
        if self.prediction == "epsilon":
            return noise
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


def image_losses(prediction: Tensor, target: Tensor, mask: Tensor | None, objective: ObjectiveConfig) -> Tensor:
    """Return the loss of each image (B,): the mean error over channels, height and width.

    mse: d^2. huber: 2c (sqrt(d^2 + c^2) - c) with c = ``huber_c``, the smooth pseudo-Huber loss of sd-scripts
    (loss_type huber with the schedule constant): d^2 for errors far below c, 2c|d| far above.
    ``mask`` (B,1,h,w) multiplies the errors before the mean, which is not divided by the mask's own mean
    (sd-scripts' apply_masked_loss): an image that is half masked out counts half.
    """
    if objective.loss == "huber":
        c = objective.huber_c
        errors = 2.0 * c * (torch.sqrt((prediction - target) ** 2 + c * c) - c)
    else:
        errors = F.mse_loss(prediction, target, reduction="none")
    if mask is not None:
        errors = errors * mask
    return errors.mean(dim=(1, 2, 3))


def timestep_weights(schedule: NoiseSchedule, objective: ObjectiveConfig, timesteps: Tensor) -> Tensor:
    """Return each image's loss weight at its timestep (B,), in the schedule's dtype.

    min-SNR with gamma g (Hang et al. 2023, section 3.4): min(snr, g) / snr for epsilon, min(snr, g) / (snr + 1) for v.
    Debiased estimation (Yu et al. 2024; sd-scripts): 1 / sqrt(snr) for epsilon, 1 / (snr + 1) for v, snr at most 1000.
    Pure noise (zero terminal SNR, t = 999) has snr 0: min-SNR takes the limit of its formula there, 1 for epsilon and
    0 for v; debiased epsilon, which has no limit, takes the weight of t = 998.
    """
    snr = schedule.snr[timesteps]
    weights = torch.ones_like(snr)
    epsilon = schedule.prediction == "epsilon"
    if objective.min_snr_gamma is not None:
        gamma = objective.min_snr_gamma
        # min(snr, g) / snr is min(1, g / snr), which a zero does not turn into 0 / 0.
        weights = weights * (torch.clamp(gamma / snr, max=1.0) if epsilon else torch.clamp(snr, max=gamma) / (snr + 1))
    if objective.debiased_estimation:
        capped = snr.clamp(max=MOST_DEBIASED_SNR)
        positive = torch.where(snr > 0.0, capped, schedule.snr[-2])
        weights = weights * (torch.rsqrt(positive) if epsilon else 1.0 / (capped + 1.0))
    return weights


def draw_noise(
    generator: np.random.Generator, shape: tuple[int, ...], objective: ObjectiveConfig
) -> NDArray[np.float32]:
    """Return the noise for one image, ``shape`` (C,h,w) fp32, from the image's own random number generator.

    It therefore does not depend on the batch. Plain normal noise is always drawn first, then the noise offset, one
    normal number per channel times the offset (Guttenberg 2023, "Diffusion with Offset Noise"), then multires noise.
    """
    noise = generator.standard_normal(shape, dtype=np.float32)
    if objective.noise_offset:
        shift = generator.standard_normal((shape[0], 1, 1), dtype=np.float32)
        noise = noise + np.float32(objective.noise_offset) * shift
    if objective.multires_discount:
        noise = _add_coarser_noise(generator, noise, objective)
    return noise


def draw_timestep(generator: np.random.Generator, objective: ObjectiveConfig) -> int:
    """Return a random timestep from ``timestep_min`` to ``timestep_max``, inclusive.

    uniform: all are equally likely. logit_normal: the position in the range is the sigmoid of a normal number (Esser et
    al. 2024, section 3.1, with mean 0 and standard deviation 1).
    """
    low, high = objective.timestep_min, objective.timestep_max
    if objective.timesteps == "uniform":
        return int(generator.integers(low, high, endpoint=True))
    share = 1.0 / (1.0 + math.exp(-generator.standard_normal()))
    return min(high, low + int(share * (high - low + 1)))


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
