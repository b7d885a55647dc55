"""The counts of tests/benchmarks/speed.py, on small things that can be counted by hand or by another way."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.benchmarks.speed import count_step, main
from tests.benchmarks.speed_host import LAYERS, narrow_unet
from tests.support.counting import StepCounter
from tests.support.cpu_steps import tiny_workload
from tests.support.loras import full_size
from trainer.config.base import Family
from trainer.memory.trace.meta_models import META, empty_engine, micro_batch
from trainer.memory.trace.workload import Workload

RECIPE = {"layers": "attention", "rank": 4, "resolution": 64}


def counted(work: Any) -> StepCounter:
    counter = StepCounter(META)
    with counter, counter.stage("forward"):
        work()
    return counter


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=META, dtype=dtype)


def test_views_and_allocations_count_for_nothing_and_host_tensors_neither() -> None:
    here = torch.ones(3)
    counter = counted(lambda: (meta(2, 6).view(3, 4).t().detach(), torch.empty_like(meta(4)), here * 2))
    assert counter.total() == 0
    assert counted(lambda: meta(4).clone().mul_(2.0)).operations == {("forward", "clone"): 1, ("forward", "mul_"): 1}


def test_a_product_and_its_backward_are_counted_by_stage_and_below_our_own_functions() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2 + 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    x, weight = meta(5, 8).requires_grad_(), meta(3, 8).requires_grad_()
    counter = counted(lambda: torch.autograd.backward(Twice.apply(F.linear(x, weight)).sum()))
    assert counter.operations == {
        ("forward", "mm"): 1,
        ("forward", "mul"): 1,
        ("forward", "add"): 1,
        ("forward", "sum"): 1,
        ("forward", "ones_like"): 1,  # the gradient of the sum itself
        ("backward", "mul"): 1,
        ("backward", "mm"): 2,
    }
    assert (counter.total("forward"), counter.total("backward"), counter.total()) == (5, 3, 8)


def test_lists_of_one_format_count_once_and_of_mixed_formats_once_a_tensor() -> None:
    wide, narrow = [meta(3) for _ in range(7)], [meta(3, dtype=torch.bfloat16) for _ in range(7)]
    assert counted(lambda: torch._foreach_add_(wide, wide)).total() == 1
    assert counted(lambda: torch._foreach_copy_(wide, narrow)).total() == 1
    assert counted(lambda: torch._foreach_add_(wide, narrow)).total() == 7


def test_what_is_kept_for_backward_is_what_lives_when_it_begins() -> None:
    weight = meta(8, 8).requires_grad_()

    def work() -> None:
        x = meta(4, 8) * 1.0
        torch.autograd.backward(torch.sigmoid(F.linear(x, weight)).sum())

    # x for the weight's gradient, sigmoid's result for its own, the sum and its gradient; not the product.
    assert counted(work).saved_bytes == 4 * (4 * 8 + 4 * 8 + 1 + 1)


def test_waits_are_seen() -> None:
    numbers, mask = meta(4), meta(4).to(torch.bool)
    assert counted(lambda: torch.ones(3).to(META, non_blocking=True)).waits == {}
    assert counted(lambda: torch.ones(3).to(META)).waits == {("forward", "_to_copy"): 1}
    assert counted(lambda: meta(3).copy_(torch.ones(3))).waits == {("forward", "copy_"): 1}
    with pytest.raises(RuntimeError):  # there is no number to read
        counted(lambda: numbers.sum().item())
    counter = StepCounter(META)
    with counter, counter.stage("optimizer"), pytest.raises(Exception, match=r"nonzero|meta"):
        _ = numbers[mask]


@pytest.fixture(scope="module")
def subject() -> Workload:
    return tiny_workload("sdxl", RECIPE, {"dtype": "bf16"}, depth=2)


@pytest.fixture(scope="module")
def ours(subject: Workload) -> Mapping[str, Any]:
    """What the command prints of a tiny base."""
    printed = io.StringIO()
    with patch("tests.benchmarks.speed.workload_of", lambda options: subject), redirect_stdout(printed):
        assert main(["--count", "--family", "sdxl", "--batch", "2", "--adapters", "peft", "--json"]) == 0
    found: Mapping[str, Any] = json.loads(printed.getvalue())
    return found


@pytest.mark.slow
def test_a_steps_kept_bytes_are_those_that_autograd_is_given(subject: Workload) -> None:
    """What autograd hands to its hooks, beside the storages that live when backward begins."""
    engine = empty_engine(subject)
    unet = engine.models.unet
    weights = {weight.untyped_storage()._cdata for weight in [*unet.parameters(), *unet.buffers()]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights and tensor.is_meta:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.micro_step(micro_batch(subject, subject.buckets[0].size, 2))
    given = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert count_step(subject, 2, "lean").saved_bytes == pytest.approx(given, rel=0.02)


@pytest.mark.slow
def test_weights_in_fp32_cost_casts_and_copies(subject: Workload, ours: Mapping[str, Any]) -> None:
    theirs = count_step(subject, 2, "peft-fp32")
    assert theirs.forward > ours["forward"]
    assert theirs.backward > ours["backward"]
    assert theirs.saved_bytes > ours["saved_bytes"]
    assert ours["waits"] == theirs.waits == {}


def test_the_command_says_what_it_counted(ours: Mapping[str, Any]) -> None:
    assert (ours["family"], ours["batch"], ours["adapters"]) == ("sdxl", 2, "peft")
    parts = [ours[part] for part in ("forward", "backward", "accumulate", "optimizer")]
    assert ours["dispatched_operations"] == sum(parts)
    assert min(parts) > 0


@pytest.mark.parametrize(
    ("family", "operations", "gibibytes"),
    [("sdxl", 6000, 5.3), pytest.param("sd15", 1950, 0.5, marks=pytest.mark.slow)],
)
def test_a_step_of_the_whole_base_asks_for_no_more_than_the_goal(
    family: Family, operations: int, gibibytes: float
) -> None:
    """LoRA r16 on attention, one picture, nothing checkpointed; the goal for SD 1.5 is what it has been brought to."""
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["--count", "--family", family, "--batch", "1", "--json"]) == 0
    told = json.loads(printed.getvalue())
    assert told["dispatched_operations"] <= operations and told["saved_bytes"] <= gibibytes * (1 << 30)
    assert told["waits"] == {}


def test_layers_of_our_own_ask_for_less(subject: Workload, ours: Mapping[str, Any]) -> None:
    """By hand, for each of the 12 transformer blocks, over two attentions with four adapted layers each.

    Forward: PEFT's layers take four operations more than the base, ours two; q, k and v share theirs, and so k and v of
    the text; nothing is divided by 1. So 8 times 4 and 2, against 5 times 2. Nor divide the 12 residual blocks.
    Backward: 2 norms of each transformer block and the 25 of the residual blocks and the end are computed again.
    """
    lean = count_step(subject, 2, "lean")
    assert ours["forward"] - lean.forward == 12 * (8 * 4 + 2 - 5 * 2) + 12
    assert ours["backward"] - lean.backward >= 12 * 24 - 12 * 2 - 25
    assert lean.accumulate <= 2
    assert lean.optimizer == ours["optimizer"]
    assert lean.saved_bytes <= 0.83 * ours["saved_bytes"]
    assert lean.waits == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_the_host_is_timed_on_every_layer_of_the_published_unet(family: Family) -> None:
    narrow, published = narrow_unet(family), full_size(family)[0]
    assert list(narrow.state_dict()) == list(published.state_dict())
    assert narrow.num_parameters() < published.num_parameters() / 90


@pytest.mark.slow
def test_the_hosts_time_is_told_by_kind_of_lora_layers() -> None:
    told = io.StringIO()
    with redirect_stdout(told):
        assert main(["--host", "--family", "sd15", "--steps", "1", "--json"]) == 0
    found = json.loads(told.getvalue())
    assert set(LAYERS) < found.keys()
    assert all(found[name][part] > 0 for name in LAYERS for part in ("forward", "backward"))
