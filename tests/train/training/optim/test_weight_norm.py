"""Each layer's LoRA is held below a norm as by sd-scripts; LoRA+ and blocks change learning rates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.train.dataset.test_cache import prepared, quiet, showings
from trainer.config.lr_schedule import Segment
from trainer.training.build import build_engine
from trainer.training.engine import Engine
from trainer.training.optim.weight_norm import WeightNormLimit

LIMIT = 0.5


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Engine:
    job, images, parts = prepared(tmp_path, request.param)
    samples = list(showings(job, images, 3))
    parts.cache.ensure_latents(samples, quiet)
    parts.cache.ensure_texts([sample.caption for sample in samples], quiet)
    return build_engine(job, parts, [Segment(0, 6)], fresh=True)


def scaled_down(down: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Both matrices after sd-scripts' apply_max_norm_regularization, which makes the whole change of the weight."""
    change = F.conv2d(down.permute(1, 0, 2, 3), up).permute(1, 0, 2, 3) if down.ndim == 4 else up @ down
    norm = (change * scale).norm().clamp(min=LIMIT / 2)
    ratio = torch.clamp(norm, max=LIMIT) / norm
    return down * ratio**0.5, up * ratio**0.5


@pytest.mark.parametrize(
    "engine", [("recipe.layers=all", "recipe.rank=3", "recipe.alpha=2.0", "recipe.conv_rank=2")], indirect=True
)
def test_layers_above_the_limit_come_down_to_it_and_others_stay(engine: Engine) -> None:
    generator = torch.Generator().manual_seed(3)
    masters = engine.master_weights
    for number, slot in enumerate(engine.adapter.slots):
        for key in (slot.down, slot.up):
            shape = masters.masters[key].shape
            # From far below to far above the limit.
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.02 * 1.3 ** (number % 20)
            masters.masters[key] = torch.nn.Parameter(values)
    wanted = {}
    for slot in engine.adapter.slots:
        scale = engine.adapter.alpha[slot.kohya] / engine.adapter.rank[slot.kohya]
        down, up = masters.masters[slot.down].detach(), masters.masters[slot.up].detach()
        wanted[slot.down], wanted[slot.up] = scaled_down(down, up, scale)
    changed = [key for key, value in wanted.items() if not torch.equal(value, masters.masters[key])]
    assert 0 < len(changed) < len(wanted)
    limit = WeightNormLimit.create(LIMIT, engine.adapter, masters)
    assert limit is not None
    limit.apply()
    for key, value in wanted.items():
        torch.testing.assert_close(masters.masters[key].detach(), value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "engine", [("recipe.max_weight_norm=1e-4", "recipe.learning_rate=0.01", "recipe.schedule.warmup=0")], indirect=True
)
def test_the_limit_holds_after_every_step(engine: Engine) -> None:
    for _ in range(3):
        assert engine.train_step().skipped is None
    adapter = engine.adapter
    masters = {key: master.detach() for key, master in engine.master_weights.masters.items()}
    norms = [
        float((masters[slot.up].flatten(1) @ masters[slot.down].flatten(1)).norm())
        * adapter.alpha[slot.kohya]
        / adapter.rank[slot.kohya]
        for slot in adapter.slots
    ]
    assert max(norms) == pytest.approx(1e-4, rel=1e-4)
    for key, working in engine.master_weights.working.items():
        torch.testing.assert_close(working.detach(), masters[key].to(working.dtype), rtol=0, atol=0)


@pytest.mark.parametrize(
    "engine",
    [
        (
            "recipe.lora_plus_ratio=8.0",
            "recipe.learning_rate=0.001",
            "recipe.text_encoder.learning_rate=0.0002",
            'recipe.blocks=[{match = "unet.mid_block.*", rate_factor = 0.25}]',
        )
    ],
    indirect=True,
)
def test_lora_plus_and_blocks_multiply_the_rates_of_parts(engine: Engine) -> None:
    """The first step of Adam is the rate times the sign of the gradient, whatever its size."""
    engine.forward_backward(engine.batches.batch(0))
    masters = engine.master_weights.masters
    # Rates of a step far in: the warm-up of the fixture's job would make the first one 0.
    before = {key: master.detach().clone() for key, master in masters.items()}
    gradients = {key: master.grad.clone() for key, master in masters.items() if master.grad is not None}
    for group in engine.optimizer.param_groups:
        group["lr"], group["weight_decay"] = group["base_lr"], 0.0
    engine.optimizer.step()
    ups = {slot.up for slot in engine.adapter.slots}
    assert {engine.adapter.part_of[key] for key in gradients} == {"unet", "text_encoder"}
    assert any("middle_block" in key for key in gradients)
    for key, gradient in gradients.items():
        rate = (0.001 if engine.adapter.part_of[key] == "unet" else 0.0002) * (8.0 if key in ups else 1.0)
        rate *= 0.25 if "middle_block" in key else 1.0
        clear = gradient.abs() > 1e-5  # far above Adam's epsilon
        moved = (before[key] - masters[key].detach())[clear]
        torch.testing.assert_close(moved, rate * gradient[clear].sign(), rtol=2e-2, atol=0)


@pytest.mark.parametrize(
    "engine", [("recipe.lora_plus_ratio=8.0", "recipe.learning_rate=0.001", "recipe.schedule.warmup=0")], indirect=True
)
def test_the_rate_in_events_is_that_of_the_recipe(engine: Engine) -> None:
    assert engine.train_step().learning_rates == {"unet": 0.001}
