"""Products in int8 over frozen int8 weights: both directions against float64, what is rounded, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trainer.base import quantized
from trainer.base.quantized import (
    Directions,
    FrozenInt8Linear,
    input_gradient,
    int8_directions,
    quantize_linears,
    quantize_rows,
    quantized_linear,
    set_int8_directions,
)
from trainer.config.fit import ALL_LAYERS, MIN_INT8_ROWS, Int8LayerConfig

INPUTS, OUTPUTS, ROWS = 64, 96, 40
BOTH = Directions(MIN_INT8_ROWS, MIN_INT8_ROWS)
FORMATS = {torch.float32: 1e-5, torch.bfloat16: 3 * 2**-8, torch.float16: 3 * 2**-11}
"""By how much a result may be off beside what rounding to int8 costs, as a share of it."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Whole numbers that int8 holds, the largest of each row 127."""
    found = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed))
    found[..., 0] = 127
    return found


def weights() -> tuple[Tensor, Tensor, Tensor]:
    """A weight in int8, a scale a row, and in float64 what they stand for; the rows differ as much as real ones do."""
    weight, scales = whole(OUTPUTS, INPUTS, seed=1).to(torch.int8), normal(OUTPUTS, seed=2).exp() / 10
    return weight, scales, weight.double() * scales.double().unsqueeze(1) / 127


def inputs(kind: str, width: int, dtype: torch.dtype) -> Tensor:
    x = normal(2, ROWS // 2, width, seed=3)
    if kind == "outliers":
        x[..., 5] *= 20
        x[0, 3] *= 100
    return x.to(dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_nothing_is_lost_where_nothing_has_to_be_rounded(bias: bool) -> None:
    """Sums of integers are exact, whatever the order; only the scaling rounds, in fp32."""
    weight, scales, values = weights()
    added = normal(OUTPUTS, seed=4) if bias else None
    x = whole(ROWS, INPUTS).float()
    expected = x.double() @ values.t() + (0 if added is None else added.double())
    torch.testing.assert_close(quantized.int8_linear(x, weight, scales, added).double(), expected, rtol=1e-6, atol=1e-4)
    above = whole(ROWS, OUTPUTS).float() / scales  # with the rows' scales in it, it is whole
    expected = above.double() @ values
    torch.testing.assert_close(
        quantized.int8_input_gradient(above, weight, scales).double(), expected, rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_product_is_off_by_no_more_than_rounding_can_be(dtype: torch.dtype, kind: str) -> None:
    """Each number of a row by half a 127th of its largest, so that outliers cost the others their digits."""
    weight, scales, values = weights()
    x = inputs(kind, INPUTS, dtype)
    expected = x.double() @ values.t()
    bound = x.double().abs().amax(-1, keepdim=True) / 254 * values.abs().sum(1)
    found = quantized.int8_linear(x, weight, scales, None)
    assert found.dtype == dtype and found.shape == expected.shape
    off = (found.double() - expected).abs()
    assert (off <= 1.001 * bound + FORMATS[dtype] * expected.abs()).all()
    assert off.max() > 0.05 * bound.max()  # or nothing was rounded, or the bound says nothing


@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_gradient_is_off_by_no_more_than_rounding_can_be(dtype: torch.dtype, kind: str) -> None:
    weight, scales, values = weights()
    above = inputs(kind, OUTPUTS, dtype)
    expected = above.double() @ values
    largest = (above.double() * scales.double()).abs().amax(-1, keepdim=True)
    bound = largest / 254 * (weight.double().abs() / 127).sum(0)
    # In 16 bits the gradient is rounded once more, when the scales are multiplied in.
    sums = (above.double().abs() @ values.abs()) * FORMATS[dtype]
    found = quantized.int8_input_gradient(above, weight, scales)
    assert found.dtype == dtype and found.shape == expected.shape
    off = (found.double() - expected).abs()
    assert (off <= 1.01 * bound + sums).all()
    assert off.max() > 0.05 * bound.max()


def test_scales_that_fp16_cannot_hold_between_are_held() -> None:
    """A result of 3 with rows of weights as small as 1e-6, and a gradient of 1e-3: both far from 0 and infinity."""
    weight = whole(OUTPUTS, INPUTS, seed=1).to(torch.int8)
    scales = torch.full((OUTPUTS,), 1e-6)
    x = (normal(ROWS, INPUTS) * 6e4).clamp(-6e4, 6e4).half()
    expected = x.double() @ (weight.double() * 1e-6 / 127).t()
    assert (quantized.int8_linear(x, weight, scales, None).double() - expected).norm() < 0.02 * expected.norm()
    above = (normal(ROWS, OUTPUTS) * 1e3).half()
    expected = above.double() @ (weight.double() * 1e-6 / 127)
    assert (quantized.int8_input_gradient(above, weight, scales).double() - expected).norm() < 0.02 * expected.norm()


def test_rows_are_rounded_half_to_even_by_their_own_largest_number() -> None:
    rows = torch.tensor([[127.0, -127.0, 0.5, 1.5, -0.5, -2.5, 126.5, 0.0], [0.0] * 8, [1e-30] * 8])
    found, worth = quantize_rows(rows)
    assert found.tolist() == [[127, -127, 0, 2, 0, -2, 126, 0], [0] * 8, [127] * 8]
    assert (worth * 127**2).flatten().tolist() == pytest.approx([127.0, 0.0, 1e-30])
    found, worth = quantize_rows(torch.tensor([[2.67e36, -1.335e36, 2e34], [2.69e36, -1.345e36, 2e34]]))
    assert found.tolist() == [[127, -64, 1], [0, -64, 1]] and worth.isfinite().all()
    x = inputs("outliers", INPUTS, torch.bfloat16).flatten(0, 1)
    found, worth = quantize_rows(x.t().contiguous().t())
    assert torch.equal(found, (x.double() / worth.double() / 127).round().to(torch.int8))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_spoils_its_row_and_no_other(broken: float) -> None:
    """Else a run would go on as if nothing had happened (trainer.training.device.out_of_memory)."""
    weight, scales, _ = weights()
    x, above = inputs("normal", INPUTS, torch.bfloat16), inputs("normal", OUTPUTS, torch.bfloat16)
    x[1, 2, 3] = above[1, 2, 3] = broken
    for found in (
        quantized.int8_linear(x, weight, scales, None),
        quantized.int8_input_gradient(above, weight, scales),
    ):
        spoilt = ~found.isfinite()
        assert spoilt[1, 2].all()
        spoilt[1, 2] = False
        assert not spoilt.any()


@pytest.mark.parametrize("forward", [None, MIN_INT8_ROWS])
@pytest.mark.parametrize("backward", [None, MIN_INT8_ROWS])
def test_each_direction_stays_as_it_was_where_rows_are_too_few(forward: int | None, backward: int | None) -> None:
    weight, scales, _ = weights()
    directions = Directions(forward, backward)
    for count in (MIN_INT8_ROWS - 1, MIN_INT8_ROWS):
        x, above = normal(1, count, INPUTS), normal(1, count, OUTPUTS)
        usual = quantized_linear(x, weight, scales, None), input_gradient(above, weight, scales)
        found = quantized_linear(x, weight, scales, None, directions), input_gradient(above, weight, scales, directions)
        for one, other, least in zip(found, usual, (forward, backward), strict=True):
            assert torch.equal(one, other) == (least is None or count < least)


def test_the_first_entry_of_a_size_holds_and_sizes_that_cards_refuse_stay() -> None:
    products = (Int8LayerConfig(inputs=64, forward=32), Int8LayerConfig(outputs=96, backward=17), *ALL_LAYERS)
    assert int8_directions(64, 96, products) == Directions(32, None)
    assert int8_directions(8, 96, products) == Directions(None, 17)
    assert int8_directions(8, 8, products) == BOTH
    assert int8_directions(8, 8, products[:2]) == quantized.NEVER
    for size in ((63, 96), (64, 100)):
        assert int8_directions(*size, ALL_LAYERS) == quantized.NEVER


def frozen(products: tuple[Int8LayerConfig, ...], dtype: torch.dtype, *, bias: bool = True) -> FrozenInt8Linear:
    """A layer as a base of `fit.quantize = "int8_products"` has it."""
    model = nn.ModuleDict({"transformer_blocks": nn.ModuleDict({"layer": nn.Linear(INPUTS, OUTPUTS, bias=bias)})})
    place = quantize_linears(model, "int8_products", dtype, torch.device("cpu"))
    set_int8_directions(model, products)
    layer: Any = model.get_submodule("transformer_blocks.layer")
    place(layer, "weight", normal(OUTPUTS, INPUTS, seed=1))
    layer.bias = nn.Parameter(normal(OUTPUTS, seed=4).to(dtype), requires_grad=False) if bias else None
    assert isinstance(layer, FrozenInt8Linear)
    return layer


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_multiplies_so_both_ways_and_keeps_the_weights_of_int8(bias: bool) -> None:
    layer: Any = frozen(ALL_LAYERS, torch.bfloat16, bias=bias)
    usual: Any = frozen((), torch.bfloat16, bias=bias)
    x, above = inputs("normal", INPUTS, torch.bfloat16).requires_grad_(), inputs("normal", OUTPUTS, torch.bfloat16)
    with FlopCounterMode(display=False) as counted:
        out = layer(x)
        torch.autograd.backward(out, above)
    assert counted.get_total_flops() == 2 * 2 * ROWS * INPUTS * OUTPUTS
    gradient, x.grad = x.grad, None
    assert gradient is not None
    plain = usual(x)
    state = layer.state
    assert torch.equal(state.CB, usual.state.CB) and torch.equal(state.SCB, usual.state.SCB)
    assert torch.equal(out, quantized.int8_linear(x.detach(), state.CB, state.SCB, layer.bias))
    assert torch.equal(gradient, quantized.int8_input_gradient(above, state.CB, state.SCB))
    assert torch.equal(gradient, layer.input_gradient(above))
    assert 0.001 < (out - plain).norm() / plain.norm() < 0.03
    again: Tensor = checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(again, out)
    torch.autograd.backward(again, above)
    assert x.grad is not None and torch.equal(x.grad, gradient)
