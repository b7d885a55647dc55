"""Optimizers: every state survives saving bit for bit, rates are set from outside, averages come and go exactly."""

import json
import math
from importlib.metadata import version
from typing import get_args

import bitsandbytes
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load, save
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.cpu_steps import tiny_workload
from tests.support.optimizers import ARGUMENTS, NAMES, config_of, other_arguments, rate_of
from trainer.config.optimizers.kinds import OPTIMIZERS, AdafactorConfig, AdamWConfig, OptimizerConfig
from trainer.config.optimizers.others import OtherConfig
from trainer.config.optimizers.section import OptimizerSection
from trainer.config.recipe import RecipeConfig
from trainer.errors import RunError
from trainer.memory.trace.meta_models import empty_engine
from trainer.training.optim.factories import make_optimizer
from trainer.training.optim.master_weights import MasterWeights
from trainer.training.optim.optimizer import (
    ParameterGroup,
    averaged_weights,
    build_optimizer,
    pack_state,
    set_learning_rates,
    unpack_state,
)

CONFIGS: dict[str, OptimizerSection] = {
    **{name: config_of(name, **ARGUMENTS.get(name, {})) for name in NAMES},
    "adafactor": AdafactorConfig(),
    "adafactor with all modes": AdafactorConfig(
        relative_step=True, scale_parameter=True, warmup_init=True, beta1=0.9, weight_decay=0.01
    ),
}
EIGHT_BIT = ("adamw8bit", "paged_adamw8bit", "lion8bit", "adam_mini8bit")


def make_weights() -> list[Parameter]:
    """Two matrices large enough for 8-bit state, the second of zeros like a fresh `up`, one small, one convolution.

    The last never gets a gradient, as the last layer of SDXL's first text encoder does not.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = [(64, 64), (16, 320), (8, 8), (16, 4, 3, 3), (4, 4)]
    weights = [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    weights[1].data.zero_()
    return weights


def in_parts(weights: list[Parameter], unet: float, text_encoder: float) -> list[ParameterGroup]:
    return [ParameterGroup("unet", unet, weights[:2]), ParameterGroup("text_encoder", text_encoder, weights[2:])]


def build(name: str, weights: list[Parameter]) -> torch.optim.Optimizer:
    rate = rate_of(CONFIGS[name].name)
    return build_optimizer(CONFIGS[name], in_parts(weights, rate, rate))


def take_steps(optimizer: torch.optim.Optimizer, weights: list[Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for weight in weights[:4]:
            weight.grad = torch.randn(weight.shape, generator=generator) * 0.1 + 0.2
        set_learning_rates(optimizer, 1.0 - step / 20)
        optimizer.step()


def through_files(
    packed: tuple[dict[str, torch.Tensor], dict[str, object]],
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """What a checkpoint does to it."""
    tensors, data = packed
    return load(save(tensors)), json.loads(json.dumps(data))


def flat(optimizer: torch.optim.Optimizer) -> list[tuple[object, ...]]:
    """Everything in the optimizer with its exact type, in an order that can be compared."""

    def plain(value: object) -> object:
        if isinstance(value, torch.Tensor):
            bits = value.detach().reshape(-1).view(torch.uint8).numpy(force=True)
            return (str(value.dtype), tuple(value.shape), bits.tobytes())
        return (type(value).__name__, value)

    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = [
        (number, key, plain(value))
        for number, weight in enumerate(weights)
        for key, value in sorted(optimizer.state[weight].items())
    ]
    groups = [
        (number, key, plain(value))
        for number, group in enumerate(optimizer.param_groups)
        for key, value in sorted(group.items())
        if key != "params"
    ]
    return states + groups


@pytest.mark.parametrize("name", CONFIGS)
def test_state_survives_saving_bit_for_bit(name: str) -> None:
    undisturbed = make_weights()
    optimizer = build(name, undisturbed)
    take_steps(optimizer, undisturbed, range(6))

    first = make_weights()
    before = build(name, first)
    take_steps(before, first, range(3))
    packed = through_files(pack_state(before))
    resumed = [Parameter(weight.detach().clone()) for weight in first]
    after = build(name, resumed)
    unpack_state(after, *packed)
    assert flat(after) == flat(before)
    take_steps(after, resumed, range(3, 6))

    for whole, half in zip(undisturbed, resumed, strict=True):
        assert torch.equal(whole, half)
    assert flat(after) == flat(optimizer)


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_large_weights_have_eight_bit_state_and_one_quantization_map(name: str) -> None:
    weights = make_weights()
    optimizer = build(name, weights)
    take_steps(optimizer, weights, range(1))
    kinds = [optimizer.state[weight]["state1"].dtype for weight in weights[:4]]
    assert kinds == [torch.uint8, torch.uint8, torch.float32, torch.float32]
    tensors, _ = pack_state(optimizer)
    assert [key for key in tensors if "qmap1" in key] == ["0.qmap1"]

    other = make_weights()
    restored = build(name, other)
    unpack_state(restored, *through_files(pack_state(optimizer)))
    assert restored.state[other[0]]["qmap1"] is restored.state[other[1]]["qmap1"]


def test_packed_state_does_not_change_with_later_steps() -> None:
    weights = make_weights()
    optimizer = build("adamw", weights)
    take_steps(optimizer, weights, range(1))
    tensors, _ = pack_state(optimizer)
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    take_steps(optimizer, weights, range(1, 2))
    assert all(torch.equal(tensors[key], before[key]) for key in before)


def test_state_of_another_optimizer_is_refused() -> None:
    weights = make_weights()
    optimizer = build("adamw", weights)
    take_steps(optimizer, weights, range(1))
    with pytest.raises(RunError, match="AdamW with 5 weights, the job has Prodigy with 5"):
        unpack_state(build("prodigy", weights), *pack_state(optimizer))
    with pytest.raises(RunError, match="with 5 weights, the job has AdamW with 2"):
        unpack_state(build_optimizer(AdamWConfig(), [ParameterGroup("unet", 1.0, weights[:2])]), *pack_state(optimizer))


@pytest.mark.parametrize("name", NAMES)
def test_arguments_reach_the_library(name: str) -> None:
    config = config_of(name, **other_arguments(name))
    assert all(
        getattr(config, key) != field.default for key, field in type(config).model_fields.items() if key != "name"
    )
    rate = rate_of(name)
    optimizer = build_optimizer(config, in_parts(make_weights(), rate, rate))
    found = {**vars(optimizer), **optimizer.param_groups[0]}
    if isinstance(config, OtherConfig):
        assert type(optimizer).__name__ == "Lamb" and (found["betas"], found["weight_decay"]) == ((0.8, 0.9), 0.02)
        return
    # Libraries call some otherwise, as in presets from LoRA files; an estimate that starts at d0 is d.
    theirs = {ours: word for word, ours in config.method.argument_names.items()}
    words = {key: word if (word := theirs.get(key, key)) in found else key for key, _ in config if key != "name"}
    expected = {word: getattr(config, key) for key, word in words.items()}
    if expected.pop("rate_per_part", None):
        assert type(optimizer).__name__.endswith("ByPart")
    if "d0" in expected and "d0" not in found:
        found["d0"] = found["d"]
    if "betas" in found:
        betas = [key for key in ("beta1", "beta2", "beta3") if key in expected]
        assert found["betas"] == tuple(expected.pop(key) for key in betas)
    assert {key: found[key] for key in expected} == expected
    modes = {"adamw": "fused", "schedulefree": "foreach", "prodigy": "decouple", "dadapt_adam": "weight_decouple"}
    assert config.name not in modes or found[modes[config.name]]
    assert found["lr"] == (None if config.ignores_rates else rate)


def test_steps_equal_the_libraries_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Our groups and rates lead to what the plain library does with the same numbers."""
    ours, theirs = make_weights(), make_weights()
    take_steps(build("adamw8bit", ours), ours, range(3))
    plain = bitsandbytes.optim.AdamW8bit(theirs, lr=1e-3, weight_decay=0.01)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 + step)
        for weight in theirs[:4]:
            weight.grad = torch.randn(weight.shape, generator=generator) * 0.1 + 0.2
        plain.param_groups[0]["lr"] = 1e-3 * (1.0 - step / 20)
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    build("prodigy", ours)
    assert capsys.readouterr().out == ""  # Prodigy prints by itself; --json output must stay clean


def adamw_over_lists(weights: list[Parameter]) -> torch.optim.Optimizer:
    """AdamW as runs had it before it was fused."""
    table = [
        {"params": part, "part": name, "lr": 1e-3, "base_lr": 1e-3}
        for name, part in (("unet", weights[:2]), ("text_encoder", weights[2:]))
    ]
    return torch.optim.AdamW(table, foreach=True)


def test_adamw_is_its_formula_to_rounding() -> None:
    """Loshchilov and Hutter 2019, algorithm 2, in float64; torch's other way of computing it is no nearer."""
    fused, lists, exact = make_weights(), make_weights(), [weight.detach().double() for weight in make_weights()]
    config = AdamWConfig()
    take_steps(build("adamw", fused), fused, range(8))
    take_steps(adamw_over_lists(lists), lists, range(8))
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in exact]
    for step in range(8):
        rate = 1e-3 * (1.0 - step / 20)
        generator = torch.Generator().manual_seed(100 + step)
        for weight, (first, second) in zip(exact[:4], moments[:4], strict=True):
            gradient = (torch.randn(weight.shape, generator=generator) * 0.1 + 0.2).double()
            first.mul_(config.beta1).add_((1 - config.beta1) * gradient)
            second.mul_(config.beta2).add_((1 - config.beta2) * gradient**2)
            unbiased = second / (1 - config.beta2 ** (step + 1))
            move = first / (1 - config.beta1 ** (step + 1)) / (unbiased.sqrt() + config.eps)
            weight.sub_(rate * (move + config.weight_decay * weight))
    for one, other, wanted in zip(fused, lists, exact, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_a_run_that_began_before_adamw_was_fused_goes_on_with_the_same_bits() -> None:
    """Its checkpoints say so, and so do those that it writes from then on."""
    undisturbed = make_weights()
    optimizer = adamw_over_lists(undisturbed)
    take_steps(optimizer, undisturbed, range(6))

    first = make_weights()
    before = adamw_over_lists(first)
    take_steps(before, first, range(3))
    resumed = [Parameter(weight.detach().clone()) for weight in first]
    after = build("adamw", resumed)
    unpack_state(after, *through_files(pack_state(before)))
    take_steps(after, resumed, range(3, 6))
    assert all(torch.equal(whole, half) for whole, half in zip(undisturbed, resumed, strict=True))
    assert flat(after) == flat(optimizer)


@pytest.mark.parametrize("fused", [True, False])
def test_step_counters_lie_where_the_library_reads_them(fused: bool) -> None:
    weights = make_weights()
    optimizer = build("adamw", weights) if fused else adamw_over_lists(weights)
    take_steps(optimizer, weights, range(1))
    elsewhere = [Parameter(weight.to("meta")) for weight in weights]
    resumed = build("adamw", elsewhere)
    unpack_state(resumed, *through_files(pack_state(optimizer)))
    state = resumed.state[elsewhere[0]]
    assert state["exp_avg"].is_meta
    assert state["step"].is_meta == fused


def test_masters_lie_as_a_fused_optimizer_wants_them() -> None:
    """On a card it refuses unlike strides of weights, gradients and moments; gradients and loaded moments are plain."""
    encoders = {"text_encoder": {"learning_rate": 1e-4}, "text_encoder_2": {"learning_rate": 1e-4}}
    engine = empty_engine(tiny_workload("sdxl", {"layers": "all", **encoders}))
    assert {master.ndim for master in engine.master_weights.masters.values()} == {2, 4}
    for master in engine.master_weights.masters.values():
        assert master.stride() == torch.empty(master.shape).stride()


def test_rates_are_the_base_rates_times_the_multiplier() -> None:
    weights = make_weights()
    optimizer = build_optimizer(AdamWConfig(), in_parts(weights, 1e-3, 1e-4))
    assert set_learning_rates(optimizer, 0.5) == {"unet": 5e-4, "text_encoder": 5e-5}
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 5e-5]
    assert set_learning_rates(optimizer, 0.25) == {"unet": 2.5e-4, "text_encoder": 2.5e-5}


def test_prodigy_reports_what_it_found_and_rests_at_zero() -> None:
    weights = make_weights()
    optimizer = build("prodigy", weights)
    assert set_learning_rates(optimizer, 1.0) == {"unet": 1e-6, "text_encoder": 1e-6}
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    set_learning_rates(optimizer, 0.0)
    optimizer.step()
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))
    take_steps(optimizer, weights, range(4))
    rates = set_learning_rates(optimizer, 1.0)
    assert rates["unet"] == optimizer.param_groups[0]["d"] > 1e-6


def test_adafactor_says_its_relative_step() -> None:
    weights = make_weights()
    optimizer = build("adafactor with all modes", weights)
    assert set_learning_rates(optimizer, 1.0)["unet"] == pytest.approx(1e-6)
    take_steps(optimizer, weights, range(3))
    assert set_learning_rates(optimizer, 1.0)["unet"] == pytest.approx(4e-6)
    assert optimizer.param_groups[0]["lr"] is None
    plain = build_optimizer(AdafactorConfig(relative_step=True), [ParameterGroup("unet", 1e-3, weights)])
    assert set_learning_rates(plain, 0.1)["unet"] == 1e-2
    take_steps(plain, weights, range(1))
    plain.state[weights[0]]["step"] = 40_000
    assert set_learning_rates(plain, 0.1)["unet"] == pytest.approx(1 / math.sqrt(40_001))


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (
            {"optimizer": {"name": "prodigy"}, "learning_rate": 1.0, "text_encoder": {"learning_rate": 0.5}},
            "learning_rate: must be equal for UNet and text encoders",
        ),
        ({"optimizer": {"name": "adafactor", "warmup_init": True}}, "warmup_init: requires relative_step = true"),
        ({"optimizer": {"name": "schedulefree", "beta1": 0.0}}, "beta1: must be above 0"),
    ],
)
def test_what_a_library_would_refuse_the_job_refuses(recipe: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        RecipeConfig.model_validate(recipe)


@pytest.mark.parametrize("name", [name for name in NAMES if OPTIMIZERS[name].method.averages])
def test_schedule_free_average_comes_and_goes_exactly(name: str) -> None:
    working = {f"w{index}": Parameter(weight.detach().bfloat16()) for index, weight in enumerate(make_weights())}
    masters = MasterWeights(working)
    trained = list(masters.masters.values())
    optimizer = build_optimizer(config_of(name), [ParameterGroup("unet", max(rate_of(name), 1e-2), trained)])
    take_steps(optimizer, trained, range(9))
    masters.refresh()
    former = [weight.detach().clone() for weight in trained]
    state = flat(optimizer)

    # y = (1 - beta) z + beta x, so the average x can be had from what the optimizer holds.
    expected = [(y.double() - 0.1 * optimizer.state[y]["z"].double()) / 0.9 for y in trained[:4]]
    with averaged_weights(optimizer, masters):
        for weight, average in zip(trained[:4], expected, strict=True):
            torch.testing.assert_close(weight.double(), average, rtol=1e-5, atol=1e-6)
        assert not torch.equal(trained[0], former[0])
        for key, copy in working.items():
            assert torch.equal(copy, masters.masters[key].bfloat16())
    assert all(torch.equal(weight, old) for weight, old in zip(trained, former, strict=True))
    for key, copy in working.items():
        assert torch.equal(copy, masters.masters[key].bfloat16())
    assert flat(optimizer) == state

    with pytest.raises(ZeroDivisionError), averaged_weights(optimizer, masters):
        _ = 1 / 0
    assert all(torch.equal(weight, old) for weight, old in zip(trained, former, strict=True))
    take_steps(optimizer, trained, range(9, 10))


def test_other_optimizers_have_no_average() -> None:
    weights = make_weights()
    masters = MasterWeights({"w": weights[0]})
    optimizer = build_optimizer(AdamWConfig(), [ParameterGroup("unet", 1e-2, list(masters.masters.values()))])
    take_steps(optimizer, list(masters.masters.values()), range(2))
    former = masters.masters["w"].detach().clone()
    with averaged_weights(optimizer, masters):
        assert torch.equal(masters.masters["w"], former)


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a value."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CONFIGS)
def test_host_reads_are_those_named(name: str) -> None:
    """Four weights, second step."""
    weights = make_weights()
    optimizer = build(name, weights)
    take_steps(optimizer, weights, range(1))
    for weight in weights[:4]:
        weight.grad = torch.ones_like(weight)
    with HostReads() as mode:
        optimizer.step()
    if name == "adafactor with all modes":
        assert mode.count == 7  # the weight that began as zeros is too small for its size to count
    else:
        per_weight, per_group, per_step = CONFIGS[name].method.reads
        assert mode.count == 4 * per_weight + 2 * per_group + per_step


def test_every_optimizer_has_a_config_a_factory_and_a_library() -> None:
    assert set(OPTIMIZERS.values()) == set(get_args(OptimizerConfig))
    for name, kind in OPTIMIZERS.items():
        assert (config_of(name).name, kind.model_fields["name"].default) == (name, name)
        assert make_optimizer.dispatch(kind) is not make_optimizer.dispatch(object)
        assert version(kind.method.library)
        arguments = set(kind.method.class_defaults) | set(kind.method.argument_names.values())
        assert arguments <= set(kind.model_fields)


@pytest.mark.parametrize("name", ["prodigy", "dadapt_adam"])
def test_a_rate_per_part_is_that_of_an_optimizer_for_each_part(name: str) -> None:
    """Gradients of the second part are much smaller, so that its own rate is another than the common one."""

    def gradients(weights: list[Parameter], step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        for number, weight in enumerate(weights[:4]):
            weight.grad = (torch.randn(weight.shape, generator=generator) * 0.1 + 0.2) * (1.0 if number < 2 else 1e-3)

    config = config_of(name, **ARGUMENTS[name], rate_per_part=True)
    together, apart = make_weights(), make_weights()
    optimizer = build_optimizer(config, in_parts(together, 1.0, 0.5))
    plain = config_of(name, **ARGUMENTS[name])
    alone = [build_optimizer(plain, [group]) for group in in_parts(apart, 1.0, 0.5)]
    for step in range(8):
        gradients(together, step)
        rates = set_learning_rates(optimizer, 1.0)
        optimizer.step()
        gradients(apart, step)
        assert set_learning_rates(alone[0], 1.0) | set_learning_rates(alone[1], 1.0) == rates
        for each in alone:
            each.step()
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))
    assert rates["text_encoder"] != pytest.approx(0.5 * rates["unet"], rel=0.1)  # as a common rate would be

    resumed = build_optimizer(config, in_parts(make_weights(), 1.0, 0.5))
    unpack_state(resumed, *through_files(pack_state(optimizer)))
    assert flat(resumed) == flat(optimizer)


def test_rates_may_differ_only_if_one_is_found_for_each_part() -> None:
    stated = {"learning_rate": 1.0, "text_encoder": {"learning_rate": 0.5}, "schedule": {"kind": "constant"}}
    with pytest.raises(ValidationError, match=r"set optimizer\.rate_per_part = true"):
        RecipeConfig.model_validate({**stated, "optimizer": {"name": "prodigy"}})
    recipe = RecipeConfig.model_validate({**stated, "optimizer": {"name": "prodigy", "rate_per_part": True}})
    assert not recipe.optimizer.needs_one_rate
