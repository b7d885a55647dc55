"""Images that keep what the base predicts: targets, gradients, and a base that is really without its adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.loras import EVERYTHING, Models
from tests.support.steps import make_batch, step_models, take_gradient
from trainer.adapter.attach import attach
from trainer.config.base import Family
from trainer.config.recipe import ObjectiveConfig, RecipeConfig
from trainer.dataset.sampling import generator
from trainer.training.objective import NoiseSchedule
from trainer.training.step import MicroBatch, StepModels, _predict, training_step

OBJECTIVE = ObjectiveConfig(prior_prediction=True)


def noise_schedule() -> NoiseSchedule:
    return NoiseSchedule.create("epsilon", False).to("cpu", torch.float64)


def adapted(family: Family, kind: str, *, lean: bool) -> tuple[Models, StepModels]:
    """A base with an adapter whose weights are all random, in text encoders too."""
    models = Models.copies(family)
    recipe = RecipeConfig.model_validate({**EVERYTHING.model_dump(), "adapter": kind})
    adapter = attach(
        family,
        models.unet,
        models.text_encoders,
        recipe,
        dtype=torch.float64,
        generator=lambda name: generator(0, "adapter", sample=name),
        lean=lean,
    )
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in adapter.parameters.values():
            weight += 0.2 * torch.randn(weight.shape, generator=stream, dtype=weight.dtype)
    return models, step_models(models, adapter=adapter)


def batch_of(family: Family, prior: list[bool]) -> MicroBatch:
    batch = make_batch(family, (120, 730, 410), extras=False)
    return replace(batch, prior=torch.tensor(prior).view(-1, 1, 1, 1))


@pytest.mark.parametrize(
    ("family", "kind", "lean"),
    [("sd15", "lora", True), ("sdxl", "lora", True), ("sd15", "lora", False), ("sd15", "tlora", True),
     ("sdxl", "dora", True), ("sd15", "lokr", True), ("sd15", "oft", True)],
)  # fmt: skip
def test_prior_images_are_drawn_to_an_untouched_copy_of_the_base(family: Family, kind: str, lean: bool) -> None:
    _, stepped = adapted(family, kind, lean=lean)
    batch, schedule = batch_of(family, [True, False, True]), noise_schedule()
    loss = training_step(stepped, schedule, OBJECTIVE, batch)
    assert stepped.adapter is not None
    found = take_gradient(stepped.adapter)

    with torch.no_grad():
        wanted, _ = _predict(step_models(Models.copies(family)), schedule, batch)
    prediction, noise = _predict(stepped, schedule, batch)
    target = torch.stack([wanted[0], noise[1], wanted[2]])
    losses: Tensor = (prediction - target).square().mean(dim=(1, 2, 3))
    expected = (losses * batch.weights).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    expected.backward()
    gradient = take_gradient(stepped.adapter)
    assert (found - gradient).norm() < 1e-10 * gradient.norm()
    assert not torch.equal(wanted[0], prediction[0].detach())


def test_images_without_prior_learn_as_without_the_setting() -> None:
    _, stepped = adapted("sd15", "lora", lean=True)
    assert stepped.adapter is not None
    batch = batch_of("sd15", [False, False, False])
    losses = [training_step(stepped, noise_schedule(), OBJECTIVE, batch)]
    gradients = [take_gradient(stepped.adapter)]
    losses.append(training_step(stepped, noise_schedule(), ObjectiveConfig(), replace(batch, prior=None)))
    gradients.append(take_gradient(stepped.adapter))
    assert torch.equal(*losses)
    assert torch.equal(*gradients)
