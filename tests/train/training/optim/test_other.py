"""Optimizers by their names in a registry: each keeps what training relies on, and nothing else can be named."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from typing import Any

import adv_optm
import pytest
import torch
from pydantic import ValidationError
from pytorch_optimizer.optimizer import OPTIMIZERS as PYTORCH_OPTIMIZER
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.cpu_steps import cpu_engine, tiny_workload
from trainer.config.optimizers.others import OTHERS, REFUSED, OtherConfig
from trainer.errors import RunError
from trainer.training.optim.optimizer import ParameterGroup, build_optimizer, pack_state, unpack_state

CLASSES = {**PYTORCH_OPTIMIZER, **{name.lower(): getattr(adv_optm, name) for name in adv_optm.__all__}}
# Both factors of LoRAs, convolutions, magnitudes of DoRA, rotations, and a factor of LoKr.
SHAPES = ((16, 64), (64, 16), (16, 8, 3, 3), (32, 16, 1, 1), (1, 64), (4, 8, 8), (2, 2))
FIRST = 3
"""Weights of the first of two groups."""


def weights_of(device: str = "cpu") -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    weights = [Parameter((torch.randn(shape, generator=generator) * 0.02).to(device)) for shape in SHAPES]
    with torch.no_grad():
        weights[1].zero_()
    return weights


def build(config: OtherConfig, weights: list[Parameter], first: float = 1e-3, second: float = 1e-3) -> Any:
    groups = [("unet", first, weights[:FIRST]), ("text_encoder", second, weights[FIRST:])]
    return build_optimizer(config, [ParameterGroup(*group) for group in groups])


def take(optimizer: Any, weights: list[Parameter], steps: Iterable[int], *, missing: int | None = None) -> None:
    """Take steps as the engine does: the generator is seeded for each, because some optimizers draw from it."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for place, weight in enumerate(weights):
            gradient = torch.randn(weight.shape, generator=generator) * 0.1
            weight.grad = None if place == missing else gradient
        torch.manual_seed(step)
        optimizer.step()
        for weight in weights:
            weight.grad = None


def are_equal(one: list[Parameter], other: list[Parameter]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


class Reads(TorchDispatchMode):
    """Answers 1 to each number that is read from a meta tensor, as memory traces do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


def test_the_table_has_every_optimizer_of_both_libraries() -> None:
    assert OTHERS.keys() | REFUSED.keys() == CLASSES.keys()
    assert not OTHERS.keys() & REFUSED.keys()
    for name, found in OTHERS.items():
        assert set(found.arguments) <= set(inspect.signature(CLASSES[name]).parameters), name


# Kron's products take half a minute on a CPU.
QUICK = [pytest.param(name, marks=pytest.mark.slow) if name == "kron" else name for name in OTHERS]


@pytest.mark.parametrize("name", QUICK)
def test_each_keeps_what_training_relies_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = OtherConfig(optimizer=name)
    with torch.random.fork_rng():
        whole = weights_of()
        optimizer = build(config, whole)
        assert not optimizer.state, "a forecast expects state to be allocated in the first step"
        take(optimizer, whole, range(12))
        tensors, data = pack_state(optimizer)
        resumed = [Parameter(weight.detach().clone()) for weight in whole]
        again = build(config, resumed)
        unpack_state(again, load(save(tensors)), json.loads(json.dumps(data)))
        for each, weights in ((optimizer, whole), (again, resumed)):
            take(each, weights, range(12, 25))
        assert all(are_equal(whole, resumed)), "resumed"
        assert not any(are_equal(whole, weights_of())), "every weight moved"

        still = weights_of()
        take(build(config, still, 0.0, 0.0), still, range(2))
        assert all(are_equal(still, weights_of())), "a rate of 0"
        faster = weights_of()
        take(build(config, faster, 1e-3, 2e-3), faster, range(25))
        assert not any(are_equal(faster, whole)[FIRST:]), "a group's own rate"
        without = weights_of()
        take(build(config, without), without, range(2), missing=1)
        assert are_equal(without, weights_of())[1], "a weight without gradient"

        empty = weights_of("meta")
        traced = build(config, empty)
        with Reads():
            for weight in empty:
                weight.grad = torch.empty_like(weight)
            traced.step()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", QUICK)
def test_state_is_what_the_table_says(name: str) -> None:
    config = OtherConfig(optimizer=name)
    weights = [Parameter(torch.randn(16, 640)), Parameter(torch.zeros(640, 16))]
    optimizer = build_optimizer(config, [ParameterGroup("unet", 1e-3, weights)])
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    measured = sum(tensor.nbytes for tensor in pack_state(optimizer)[0].values()) / (2 * 16 * 640)
    assert measured == pytest.approx(OTHERS[name].state, rel=0.01, abs=0.02)


def test_arguments_reach_the_class() -> None:
    """Our steps with arguments are those of the library's own class with the same."""
    ours, theirs = weights_of(), weights_of()
    take(build(OtherConfig(optimizer="lamb", args={"betas": [0.8, 0.9], "weight_decay": 0.5}), ours), ours, range(5))
    take(PYTORCH_OPTIMIZER["lamb"](theirs, lr=1e-3, betas=(0.8, 0.9), weight_decay=0.5), theirs, range(5))
    assert all(are_equal(ours, theirs))


def test_a_step_of_sign_sgd_is_its_formula() -> None:
    """Bernstein et al. 2018 with momentum, as the class computes it: w - lr · sign(m)."""
    weight = Parameter(torch.tensor([1.0, 2.0, 3.0]))
    config = OtherConfig(optimizer="signsgd", args={"momentum": 0.5})
    optimizer = build_optimizer(config, [ParameterGroup("unet", 0.25, [weight])])
    gradients = (torch.tensor([1.0, -2.0, 4.0]), torch.tensor([-3.0, 1.0, 1.0]))
    momentum: Tensor = torch.zeros(3)
    expected = weight.detach().clone()
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
        momentum = 0.5 * momentum + 0.5 * gradient
        expected -= 0.25 * momentum.sign()
    assert torch.equal(weight, expected)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"optimizer": "lam"}, "unknown name (did you mean lamb?)"),
        ({"optimizer": "os.system"}, "unknown name"),
        ({"optimizer": "adamw"}, 'adamw has a name of its own: set name = "adamw" instead'),
        ({"optimizer": "prodigy"}, "prodigy finds or ignores the learning rate"),
        ({"optimizer": "lamb", "args": {"weight_dcay": 0.1}}, "(did you mean weight_decay?); lamb has betas, weight"),
        ({"optimizer": "lamb", "args": {"lr": 0.1}}, "unknown name"),
        ({"optimizer": "lamb", "args": {"eps": float("nan")}}, "must be a number, true, false"),
        ({"optimizer": "lamb", "args": {"betas": [0.9] * 11}}, "must be a number, true, false"),
        ({"optimizer": "lamb", "args": {"betas": {"a": 1}}}, "must be a number, true, false"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(stated: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        OtherConfig.model_validate(stated)
    assert expected in str(caught.value)


def test_values_that_the_class_refuses_are_reported() -> None:
    config = OtherConfig(optimizer="lamb", args={"betas": [2.0, 0.9]})
    with pytest.raises(RunError, match=r"Could not create the optimizer lamb: .*"):
        build(config, weights_of())


def test_random_draws_depend_only_on_seed_and_step() -> None:
    """Alice draws its projections: two engines, with generators in different states, take the same step."""
    recipe = {"optimizer": {"name": "other", "optimizer": "alice"}, "layers": "attention"}
    stepped = []
    for state in (1, 2):
        engine = cpu_engine(tiny_workload("sd15", recipe))
        draw = torch.Generator().manual_seed(7)
        for master in engine.master_weights.masters.values():
            master.grad = torch.randn(master.shape, generator=draw)
        with torch.random.fork_rng():
            torch.manual_seed(state)
            assert engine.optimizer_step(1.0, 1.0) is None
        stepped.append([master.detach().clone() for master in engine.master_weights.masters.values()])
    assert all(torch.equal(one, other) for one, other in zip(*stepped, strict=True))
