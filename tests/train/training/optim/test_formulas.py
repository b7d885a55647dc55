"""Steps of optimizers against their papers' equations, written out in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import bitsandbytes.functional
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support.optimizers import config_of, rate_of
from trainer.training.optim.optimizer import ParameterGroup, build_optimizer, set_learning_rates

STEPS = 9
SHAPES = ((6, 40), (3, 4, 3, 3))
Formula = Callable[[Any, list[Tensor], list[list[Tensor]], float], list[Tensor]]


def start() -> list[Tensor]:
    """Return weights that bf16 represents exactly, the second of zeros as in a new LoRA."""
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(SHAPES[0], generator=generator).bfloat16().double()
    return [first, torch.zeros(SHAPES[1], dtype=torch.float64)]


def gradients() -> list[list[Tensor]]:
    """Return the gradients of each step, with a common direction so that estimates of rates grow."""
    generator = torch.Generator().manual_seed(6)
    return [[(torch.randn(shape, generator=generator) * 0.1 + 0.2).double() for shape in SHAPES] for _ in range(STEPS)]


def came(config: Any, weights: list[Tensor], given: list[list[Tensor]], rate: float) -> list[Tensor]:
    """Luo et al. 2023, algorithm 2, with decoupled weight decay."""
    beta3 = config.beta3
    for place, weight in enumerate(weights):
        m = torch.zeros_like(weight)
        rows, columns, uncertain_rows, uncertain_columns = (0.0, 0.0, 0.0, 0.0)
        for gradient in (step[place] for step in given):
            square = gradient**2 + 1e-30
            rows = config.beta2 * rows + (1 - config.beta2) * square.mean(-1, keepdim=True)
            columns = config.beta2 * columns + (1 - config.beta2) * square.mean(-2, keepdim=True)
            update = gradient / (rows * columns / rows.mean(-2, keepdim=True)).sqrt()
            update = update / max(1.0, update.pow(2).mean().sqrt().item() / config.clip_threshold)
            m = config.beta1 * m + (1 - config.beta1) * update
            distance = (update - m) ** 2 + 1e-16
            uncertain_rows = beta3 * uncertain_rows + (1 - beta3) * distance.mean(-1, keepdim=True)
            uncertain_columns = beta3 * uncertain_columns + (1 - beta3) * distance.mean(-2, keepdim=True)
            unsure = (uncertain_rows * uncertain_columns / uncertain_rows.mean(-2, keepdim=True)).sqrt()
            weight = weight * (1 - rate * config.weight_decay) - rate * m / unsure
        weights[place] = weight
    return weights


def adam_mini(config: Any, weights: list[Tensor], given: list[list[Tensor]], rate: float) -> list[Tensor]:
    """Zhang et al. 2024, algorithm 1 with a whole matrix as a block: v is the average of its squared gradients."""
    for place, weight in enumerate(weights):
        m, v = torch.zeros_like(weight), 0.0
        for number, step in enumerate(given, start=1):
            m = config.beta1 * m + (1 - config.beta1) * step[place]
            v = config.beta2 * v + (1 - config.beta2) * step[place].pow(2).mean().item()
            size = math.sqrt(v / (1 - config.beta2**number)) + config.eps
            weight = weight * (1 - rate * config.weight_decay) - rate * m / (1 - config.beta1**number) / size
        weights[place] = weight
    return weights


def adopt(config: Any, weights: list[Tensor], given: list[list[Tensor]], rate: float) -> list[Tensor]:
    """Taniguchi et al. 2024, algorithm 2 with the clipping c_t = t^(1/4); the first step measures only."""
    for place, weight in enumerate(weights):
        m, v = torch.zeros_like(weight), given[0][place] ** 2
        weight = weight * (1 - rate * config.weight_decay)
        for number, step in enumerate(given[1:], start=2):
            gradient, limit = step[place], number**0.25
            weight = weight * (1 - rate * config.weight_decay)
            normed = (gradient / v.sqrt().clamp(min=config.eps)).clamp(-limit, limit)
            m = config.beta1 * m + (1 - config.beta1) * normed
            weight = weight - rate * m
            v = config.beta2 * v + (1 - config.beta2) * gradient**2
        weights[place] = weight
    return weights


def stable_adamw(config: Any, weights: list[Tensor], given: list[list[Tensor]], rate: float) -> list[Tensor]:
    """Wortsman et al. 2023, algorithm 2."""
    for place, weight in enumerate(weights):
        m, v = torch.zeros_like(weight), torch.zeros_like(weight)
        for number, step in enumerate(given, start=1):
            gradient = step[place]
            first, second = ((beta - beta**number) / (1 - beta**number) for beta in (config.beta1, config.beta2))
            m = first * m + (1 - first) * gradient
            v = second * v + (1 - second) * gradient**2
            size = (gradient**2 / v.clamp(min=config.eps**2)).mean().sqrt().item()
            slowed = rate / max(1.0, size)
            weight = weight * (1 - slowed * config.weight_decay) - slowed * m / (v.sqrt() + config.eps)
        weights[place] = weight
    return weights


def dadapt_adam(config: Any, weights: list[Tensor], given: list[list[Tensor]], rate: float) -> list[Tensor]:
    """Defazio and Mishchenko 2023, algorithm 4, with decoupled weight decay: all weights share d."""
    d, r, root = config.d0, 0.0, math.sqrt(config.beta2)
    m, v, s = ([torch.zeros_like(weight) for weight in weights] for _ in range(3))
    for step in given:
        scale = d * rate
        product = 0.0
        for place, gradient in enumerate(step):
            product += scale * (gradient * s[place] / (v[place].sqrt() + config.eps)).sum().item()
            m[place] = config.beta1 * m[place] + (1 - config.beta1) * scale * gradient
            v[place] = config.beta2 * v[place] + (1 - config.beta2) * gradient**2
            s[place] = root * s[place] + (1 - root) * scale * gradient
        r = root * r + (1 - root) * product
        d = max(d, r / ((1 - root) * sum(each.abs().sum().item() for each in s)))
        for place, weight in enumerate(weights):
            decayed = weight * (1 - scale * config.weight_decay)
            weights[place] = decayed - m[place] / (v[place].sqrt() + config.eps)
    assert d > 2 * config.d0
    return weights


def radam_schedulefree(config: Any, weights: list[Tensor], given: list[list[Tensor]], rate: float) -> list[Tensor]:
    """Defazio et al. 2024, equations 10 to 12, with the rectified rate of Liu et al. 2020, silent while it has none."""
    beta1, beta2 = config.beta1, config.beta2
    longest = 2 / (1 - beta2) - 1
    for place, weight in enumerate(weights):
        x = y = z = weight
        v, total, largest = torch.zeros_like(weight), 0.0, 0.0
        for number, step in enumerate(given, start=1):
            gradient, power = step[place], beta2**number
            v = beta2 * v + (1 - beta2) * gradient**2
            length = longest - 2 * number * power / (1 - power)
            if length <= 4:
                continue
            above, below = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
            pace = rate * math.sqrt(above / below)
            z = z - pace * (gradient / ((v / (1 - power)).sqrt() + config.eps) + config.weight_decay * y)
            largest = max(largest, pace)
            total += largest**2
            x = x + largest**2 / total * (z - x)
            y = (1 - beta1) * z + beta1 * x
        weights[place] = y
    return weights


def prodigy_plus(config: Any, weights: list[Tensor], given: list[list[Tensor]], rate: float) -> list[Tensor]:
    """Prodigy (Mishchenko and Defazio 2023, algorithm 3) on every 11th number, with Schedule-Free's averages.

    Updates are divided by the root of their root mean square if that is above 1, as the package does.
    """
    d, root, total, top = config.d0, math.sqrt(config.beta2), 0.0, 0.0
    x, y, z = (list(weights) for _ in range(3))
    v = [torch.zeros_like(weight) for weight in weights]
    s = [torch.zeros_like(weight).flatten()[::11] for weight in weights]
    for step in given:
        pace, above = d * rate, 0.0
        share = pace**2 / (total + pace**2)
        for place, gradient in enumerate(step):
            v[place] = config.beta2 * v[place] + (1 - config.beta2) * d**2 * gradient**2
            update = d * gradient / (v[place].sqrt() + d * config.eps)
            update = update / math.sqrt(max(1.0, update.pow(2).mean().sqrt().item()))
            sliced, moved = gradient.flatten()[::11], (weights[place] - z[place]).flatten()[::11]
            factor = d**2 / math.sqrt(config.d0)
            s[place] = root * s[place] + factor * sliced
            above += factor * (sliced * moved).sum().item()
            z[place] = z[place] - pace * (update + config.weight_decay * y[place])
            x[place] = x[place] + share * (z[place] - x[place])
            y[place] = (1 - config.beta1) * z[place] + config.beta1 * x[place]
        total += pace**2
        top = root * top + (above if d > config.d0 or above > 0 else 0.0)
        estimate = top / sum(each.abs().sum().item() for each in s)
        d = max(d, config.d_coef * min(estimate, d * 2**0.25))
    return y


CASES: dict[str, tuple[Formula, dict[str, Any]]] = {
    "came": (came, {"weight_decay": 0.1, "clip_threshold": 0.9, "beta2": 0.5, "beta3": 0.99}),
    "adam_mini": (adam_mini, {"weight_decay": 0.1}),
    "adam_mini8bit": (adam_mini, {"weight_decay": 0.1}),  # these weights are too small to be quantized
    "adopt": (adopt, {"weight_decay": 0.1, "beta2": 0.99}),
    "stableadamw": (stable_adamw, {"weight_decay": 0.1}),
    "dadapt_adam": (dadapt_adam, {"weight_decay": 0.1, "d0": 1e-4}),
    "radam_schedulefree": (radam_schedulefree, {"weight_decay": 0.1}),
    "prodigy_plus_schedulefree": (prodigy_plus, {"weight_decay": 0.1, "factored": False, "d0": 1e-3}),
}
# These keep sums in fp32 or bf16 whatever the weights are, so that float64 weights agree to fp32's rounding only.
SUMS_IN_FP32 = {"adam_mini", "dadapt_adam", "prodigy_plus_schedulefree"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_formula(name: str, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    formula, arguments = CASES[name]
    config, rate = config_of(name, **arguments), 10 * rate_of(name) if rate_of(name) < 1 else 1.0
    weights = [Parameter(weight.to(dtype)) for weight in start()]
    optimizer = build_optimizer(config, [ParameterGroup("unet", rate, weights)])
    for step in gradients():
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient.to(dtype)
        set_learning_rates(optimizer, 1.0)
        optimizer.step()
    limit = 1e-10 if dtype == torch.float64 and name not in SUMS_IN_FP32 else 5e-6
    for weight, begun, wanted in zip(weights, start(), formula(config, start(), gradients(), rate), strict=True):
        assert (wanted - begun).abs().max() > 100 * limit
        torch.testing.assert_close(weight.detach().double(), wanted, rtol=0, atol=limit)
    if dtype == torch.float32:  # as master weights are
        assert capsys.readouterr().out == ""  # some libraries print by themselves; --json output must stay clean


def nearest_codes(numbers: Tensor) -> Tensor:
    """Return fp32 numbers rounded to the nearest of the 256 codes times the largest of each 256, in float64."""
    code = bitsandbytes.functional.create_dynamic_map(signed=True).double()
    blocks = numbers.double().reshape(-1, 256)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    places = ((blocks / scales.clamp(min=1e-300)).unsqueeze(-1) - code).abs().argmin(dim=-1)
    return (code[places] * scales).reshape(numbers.shape)


def test_large_momentum_is_adam_mini_with_momentum_rounded_to_eight_bits() -> None:
    config, rate = config_of("adam_mini8bit", weight_decay=0.1), 1e-2
    generator = torch.Generator().manual_seed(8)
    begun = torch.randn(64, 128, generator=generator)
    weight, expected = Parameter(begun.clone()), begun.double()
    optimizer = build_optimizer(config, [ParameterGroup("unet", rate, [weight])])
    m, v = torch.zeros_like(expected), 0.0
    for step in range(1, 6):
        gradient = torch.randn(64, 128, generator=generator) * 0.1 + 0.05
        weight.grad = gradient
        optimizer.step()
        g = gradient.double()
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g.pow(2).mean().item()
        update = m / (1 - config.beta1**step) / (math.sqrt(v / (1 - config.beta2**step)) + config.eps)
        expected = expected * (1 - rate * config.weight_decay) - rate * update
        m = nearest_codes(m)
        # A number in the middle between two codes may be rounded to the other one: one step of 1/100 of the largest.
        assert (weight.detach().double() - expected).norm() < 1e-5 * expected.norm()
        expected = weight.detach().double()
    assert (weight - begun).abs().max() > 1e-2
