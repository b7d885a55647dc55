"""Every sampler of previews reaches what a perfect model knows, and draws the same image from the same seed."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import SemLock
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor
from tqdm.auto import tqdm
from tqdm.std import TqdmDefaultWriteLock

from tests.support.tiny import tiny_configs
from trainer.base.drawing import SCHEDULERS, make_pipeline, make_sampler
from trainer.config.job import PromptConfig
from trainer.config.methods import SAMPLERS
from trainer.training.objective import alphas_cumprod

STOCHASTIC = {"euler_a", "dpmpp_2m_sde_karras", "lcm"}
BASES = [("epsilon", False), ("v", False), ("v", True)]
Model = Callable[[Tensor, float, float], Tensor]
"""The noise in x = signal * image + sigma * noise, from x, signal and sigma."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        yield


def draw(name: str, steps: int, model: Model, prediction: Any = "epsilon", zero: bool = False, seed: int = 0) -> Tensor:
    """Sample with a model that knows the noise; the shares of image and noise are from our own float64 table."""
    sampler = make_sampler(name, prediction, zero_terminal_snr=zero)
    sampler.set_timesteps(steps)
    assert len(sampler.timesteps) == PromptConfig(prompt="", sampler=name, steps=steps).evaluations
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, 4, 16, 16, generator=generator, dtype=torch.float64) * sampler.init_noise_sigma
    table = alphas_cumprod(zero)
    more = {"generator": generator} if "generator" in inspect.signature(sampler.step).parameters else {}
    for timestep in sampler.timesteps:
        noisy = sampler.scale_model_input(latents, timestep).double()
        # Samplers with timesteps between two of the table's interpolate sigma / signal in its logarithm or linearly.
        share = float(np.interp(float(timestep), np.arange(1000), table))
        signal, sigma = math.sqrt(max(share, 2.0**-24)), math.sqrt(1.0 - max(share, 2.0**-24))
        noise = model(noisy, signal, sigma)
        output = noise if prediction == "epsilon" else (noise - sigma * noisy) / signal
        latents = sampler.step(output, timestep, latents, return_dict=False, **more)[0].double()
    return latents


def known_image(value: float) -> Model:
    return lambda noisy, signal, sigma: (noisy - signal * value) / sigma


def test_every_sampler_of_jobs_is_there() -> None:
    assert set(SCHEDULERS) == set(SAMPLERS)


@pytest.mark.parametrize(("prediction", "zero_terminal_snr"), BASES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_known_image_is_reached(name: str, prediction: str, zero_terminal_snr: bool) -> None:
    found = draw(name, 20, known_image(0.7), prediction, zero_terminal_snr)
    rest = 0.15 if name == "ddim" else 0.05  # DDIM ends at timestep 0, where 0.029 of the noise is left
    torch.testing.assert_close(found, torch.full_like(found, 0.7), rtol=0.0, atol=rest)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "lcm"])
def test_images_of_a_known_spread_are_drawn(name: str) -> None:
    """For images N(0, 0.5^2), the noise to expect is sigma x / (sigma^2 + signal^2 0.25); LCM draws in other steps."""
    spread = 0.5
    found = draw(name, 100, lambda noisy, signal, sigma: sigma * noisy / (sigma**2 + (signal * spread) ** 2))
    assert float(found.std()) == pytest.approx(spread, rel=0.06)


@pytest.mark.parametrize("name", SAMPLERS)
def test_seeds_decide_what_is_drawn(name: str) -> None:
    model: Model = lambda noisy, signal, sigma: 0.8 * noisy  # noqa: E731
    first, again, other = (draw(name, 6, model, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["dpmpp_2m_karras", "dpmpp_2m_sde_karras"])
def test_karras_sigmas_are_their_formula(name: str) -> None:
    """Karras et al. 2022, eq. 5 with rho = 7, between the schedule's own extremes."""
    sampler = make_sampler(name, "epsilon", zero_terminal_snr=False)
    sampler.set_timesteps(10)
    shares = alphas_cumprod(False).numpy()
    low, high = (math.sqrt((1 - share) / share) for share in (shares[0], shares[-1]))
    ramp = np.linspace(0, 1, 10)
    expected = (high ** (1 / 7) + ramp * (low ** (1 / 7) - high ** (1 / 7))) ** 7
    np.testing.assert_allclose(sampler.sigmas.numpy()[:-1], expected, rtol=1e-4)


def test_heun_has_the_noise_of_eulers_schedule_down_to_pure_noise() -> None:
    """diffusers' Euler rescales the betas itself; its Heun gets them from us."""
    euler, heun = (make_sampler(name, "v", zero_terminal_snr=True) for name in ("euler", "heun"))
    torch.testing.assert_close(heun.alphas_cumprod, euler.alphas_cumprod, rtol=1e-4, atol=1e-9)


def test_lcm_takes_more_steps_than_its_solver() -> None:
    found = draw("lcm", 60, known_image(0.3))
    torch.testing.assert_close(found, torch.full_like(found, 0.3), rtol=0.0, atol=0.05)


@pytest.mark.parametrize("steps", [1, 50, 60, 101, 149, 501, 1000])
def test_lcm_starts_at_pure_noise_for_any_number_of_steps(steps: int) -> None:
    sampler = make_sampler("lcm", "epsilon", zero_terminal_snr=False)
    sampler.set_timesteps(steps)
    assert int(sampler.timesteps[0]) == 999


def test_without_an_image_at_the_end_of_noise_karras_wastes_no_steps_on_it() -> None:
    """The noise levels of a base with zero terminal SNR go up to 4096, where nothing can be seen."""
    sampler = make_sampler("dpmpp_2m_karras", "v", zero_terminal_snr=True)
    sampler.set_timesteps(20)
    assert int((sampler.sigmas > 14.7).sum()) <= 3
    usual = make_sampler("dpmpp_2m_karras", "epsilon", zero_terminal_snr=False)
    usual.set_timesteps(20)
    plain = make_sampler("dpmpp_2m", "epsilon", zero_terminal_snr=False)
    plain.set_timesteps(20)
    assert not torch.allclose(usual.sigmas, plain.sigmas)


def test_previews_create_no_semaphore(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed cannot remove its semaphores, and Python would warn about them."""

    def create(*_: object, **__: object) -> None:
        raise AssertionError("a semaphore was created")

    for kind in (tqdm, *tqdm.__bases__):
        monkeypatch.delattr(kind, "_lock", raising=False)
    monkeypatch.delattr(TqdmDefaultWriteLock, "mp_lock", raising=False)
    monkeypatch.setattr(SemLock, "__init__", create)
    unet = UNet2DConditionModel.from_config(tiny_configs("sd15")["unet"])
    pipeline = make_pipeline("sd15", unet, make_sampler("euler", "epsilon", zero_terminal_snr=False))
    with pipeline.progress_bar(total=2) as bar:
        bar.update()
