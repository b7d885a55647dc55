"""Rectified flow: noisy latents, target, timesteps and previews, against diffusers' own scheduler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from tests.support.jobs import photographs, write_job
from tests.support.loras import Models, random_weights
from tests.support.steps import make_batch, step_models
from tests.support.tiny import tiny_base
from trainer.base.drawing import FLOW_SHIFT, make_sampler
from trainer.config.load import load_job
from trainer.config.recipe import ObjectiveConfig
from trainer.config.resolve import Machine, resolve_job
from trainer.errors import BaseModelError, JobError
from trainer.files.statements import predicted
from trainer.protocol import events
from trainer.training.objective import NoiseSchedule, draw_timestep
from trainer.training.run.start import start
from trainer.training.step import training_step


def flow() -> NoiseSchedule:
    return NoiseSchedule.create("flow", zero_terminal_snr=False)


def test_latents_are_noised_as_by_diffusers() -> None:
    stream = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(4, 4, 8, 8, generator=stream, dtype=torch.float64) for _ in range(2))
    timesteps = torch.tensor([0, 3, 500, 999])
    theirs = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000)
    inputs = flow().model_timesteps(timesteps)
    expected = theirs.scale_noise(latents, inputs.float(), noise)
    torch.testing.assert_close(flow().add_noise(latents, noise, timesteps), expected, rtol=1e-6, atol=1e-6)
    # At the last timestep there is only noise, and the model's input says so.
    assert torch.equal(flow().add_noise(latents, noise, timesteps)[3], noise[3])
    assert inputs.tolist() == [1, 4, 501, 1000]


def test_the_target_is_the_derivative_of_the_noisy_latents() -> None:
    stream = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(1, 4, 2, 2, generator=stream, dtype=torch.float64) for _ in range(2))
    at = [flow().add_noise(latents, noise, torch.tensor([timestep])) for timestep in (400, 401)]
    slope = (at[1] - at[0]) * 1000
    target = flow().target(latents, noise, torch.tensor([400]))
    torch.testing.assert_close(target, slope, rtol=1e-10, atol=1e-10)


def test_the_unet_receives_a_thousand_times_sigma() -> None:
    models = Models.copies("sdxl")
    random_weights(models.attach())
    seen: list[torch.Tensor] = []
    models.unet.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    schedule = flow().to("cpu", torch.float64)
    batch = make_batch("sdxl", (0, 998), extras=False)
    loss = training_step(step_models(models), schedule, ObjectiveConfig(), batch)
    assert seen[0].tolist() == [1, 999]
    assert loss.isfinite()


@pytest.mark.parametrize("shift", [1.0, 3.0, 0.5])
@pytest.mark.parametrize("distribution", ["uniform", "logit_normal"])
def test_shifted_timesteps_have_the_distribution_of_the_formula(distribution: str, shift: float) -> None:
    """Quantiles of s u / (1 + (s - 1) u), for u uniform or the sigmoid of a normal number."""
    objective = ObjectiveConfig(timesteps=distribution, timestep_shift=shift)  # type: ignore[arg-type]
    stream = np.random.default_rng(0)
    drawn = np.array([draw_timestep(stream, objective) for _ in range(20_000)]) / 1000
    u = np.random.default_rng(1).random(200_000)
    if distribution == "logit_normal":
        u = 1 / (1 + np.exp(-np.random.default_rng(1).standard_normal(200_000)))
    shares = (0.1, 0.5, 0.9)
    expected = shift * np.quantile(u, shares) / (1 + (shift - 1) * np.quantile(u, shares))
    assert np.quantile(drawn, shares) == pytest.approx(expected, abs=0.015)


def test_timesteps_without_a_shift_are_those_of_before() -> None:
    for distribution in ("uniform", "logit_normal"):
        plain, shifted = (
            ObjectiveConfig.model_validate({"timesteps": distribution, "timestep_shift": shift})
            for shift in (None, 1.0)
        )
        for seed in range(50):
            drawn = [draw_timestep(np.random.default_rng(seed), objective) for objective in (plain, shifted)]
            assert drawn[0] == drawn[1]


def test_a_perfect_model_leads_from_noise_to_the_image() -> None:
    """For one image, noise - latents along the way is the same everywhere, so that Euler's steps are exact."""
    sampler = make_sampler("euler", "flow", zero_terminal_snr=False)
    stream = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(1, 4, 8, 8, generator=stream) for _ in range(2))
    sampler.set_timesteps(7)
    assert sampler.config.shift == FLOW_SHIFT
    x = noise * sampler.init_noise_sigma
    for timestep in sampler.timesteps:
        x = sampler.step(noise - latents, timestep, sampler.scale_model_input(x, timestep), return_dict=False)[0]
    torch.testing.assert_close(x, latents, rtol=1e-5, atol=1e-5)


def test_other_samplers_and_weights_by_snr_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(BaseModelError, match='only "euler" follows'):
        make_sampler("heun", "flow", zero_terminal_snr=False)
    folder = tmp_path_factory.mktemp("flow")
    job = load_job(
        write_job(folder / "job", folder / "base", folder / "images"),
        ("base.prediction=flow", "recipe.objective.min_snr_gamma=5", "report.previews.prompts.0.sampler=ddim"),
    )
    with pytest.raises(JobError) as caught:
        resolve_job(
            job,
            family="sdxl",
            prediction="flow",
            zero_terminal_snr=False,
            samples_per_epoch=6,
            machine=Machine("cpu", None, None, bf16=True, cores=2),
        )
    problems = "\n".join(caught.value.problems)
    assert "recipe.objective.min_snr_gamma: cannot be used with a base that predicts a flow" in problems
    assert 'report.previews.prompts.0.sampler: must be "euler"' in problems


@pytest.mark.parametrize("word", ["flow", "rectified_flow", "flow_matching"])
def test_bases_that_state_it_are_known(word: str) -> None:
    assert predicted(word) == "flow"


def test_a_run_trains_validates_and_previews(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("flow run")
    photographs(folder / "images")
    base = tiny_base("sdxl", folder / "base")
    job = write_job(folder / "job", base, folder / "images")
    seen: list[events.Event] = []
    settings = ("base.prediction=flow", "recipe.objective.timestep_shift=2.5", "recipe.steps=3")
    assert start(job, settings, seen.append) == 0
    assert [event.step for event in seen if isinstance(event, events.Preview)] == [0, 3]
    assert any(isinstance(event, events.Validation) for event in seen)
