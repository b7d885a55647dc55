"""What each optimizer needs in a job, against the state that the real optimizers allocate for the real weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.plans import device_state_with, small_workload
from tests.support.tiny import Family
from trainer.cli.planning import request_for_preset
from trainer.config.methods import PAGED_FROM, QUANTIZED_FROM, MasterWeight
from trainer.config.optimizers.kinds import OptimizerConfig
from trainer.config.recipe import RecipeConfig
from trainer.memory.device import roofline
from trainer.memory.planner.optimizers import (
    all_optimizers,
    estimated_steps,
    master_weights,
    optimizer_rows,
    state_bytes,
    with_optimizer,
)
from trainer.memory.planner.suggestions import changed
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import summary_of
from trainer.memory.trace.meta_models import empty_engine
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.train_step import trace_micro
from trainer.memory.trace.workload import TraceRequest, Workload, complete_fit
from trainer.training.optim.optimizer import ParameterGroup, build_optimizer

NAMES = [config.name for config in all_optimizers(RecipeConfig())]
EVERYTHING = {"layers": "all", "conv_rank": 2, "text_encoder": {"learning_rate": 1e-5, "rank": 3}}


def config_of(name: str) -> OptimizerConfig:
    return next(config for config in all_optimizers(RecipeConfig()) if config.name == name)


def workload_of(family: Family, **recipe: Any) -> Workload:
    return small_workload(family, previews=False, side=64, rank=16, **recipe)


@pytest.fixture(scope="module")
def trained() -> tuple[list[MasterWeight], list[tuple[str, torch.Size]]]:
    """Return the weights of a job, as read from its trace and as the engine has them.

    It has convolutions, other ranks for some layers, and weights too small to be quantized.
    """
    workload = workload_of("sd15", **EVERYTHING)
    masters = empty_engine(workload).master_weights.masters
    placed = trace_micro(workload, [workload.buckets[0].size], 1).weights
    return master_weights(placed, workload), [(key, weight.shape) for key, weight in masters.items()]


def stepped_bytes(config: OptimizerConfig, shapes: list[tuple[str, torch.Size]]) -> int:
    """Return the bytes of an optimizer's state after a step on the CPU, each tensor rounded up to 512 bytes."""
    weights = []
    for key, shape in shapes:
        start = torch.zeros(shape) if key.endswith("lora_up.weight") else torch.full(shape, 0.5)
        weights.append(torch.nn.Parameter(start))
        weights[-1].grad = torch.full(shape, 0.25)
    optimizer = build_optimizer(config, [ParameterGroup("unet", 1e-4, weights)])
    optimizer.step()
    tensors: dict[int, Tensor] = {}
    for weight in weights:
        for entry, value in optimizer.state[weight].items():
            paged = getattr(optimizer, "is_paged", False) and entry in ("state1", "state2")
            if isinstance(value, Tensor) and not (paged and weight.numel() >= PAGED_FROM):
                tensors[value.data_ptr()] = value
            elif entry == "RMS":  # a number on the CPU, a tensor on a GPU
                tensors[-len(tensors) - 1] = torch.zeros(1)
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors.values())


@pytest.mark.parametrize("name", NAMES)
def test_state_is_what_the_library_allocates(
    name: str, trained: tuple[list[MasterWeight], list[tuple[str, torch.Size]]]
) -> None:
    weights, shapes = trained
    assert len(weights) == len(shapes) > 40 and min(weight.numbers for weight in weights) < QUANTIZED_FROM
    expected = stepped_bytes(config_of(name), shapes)
    assert state_bytes(config_of(name), weights) == pytest.approx(expected, rel=0.002)


# Tracing takes seconds each; the traces of AdamW ship.
@pytest.mark.parametrize("name", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_an_estimate_is_what_a_trace_says(name: str) -> None:
    """Weights of SD 1.5: state, peak of training and seconds per step."""
    asked = request_for_preset("sd15", "style", "8GB")
    workload = replace(asked.workload, fit=complete_fit(asked.workload.fit.replaced(dtype="bf16")))
    if config_of(name).method.averages:
        recipe = changed(workload.recipe, {"schedule": {"kind": "constant", "warmup": 0}})
        workload = replace(workload, recipe=recipe)
    bucket, traces = workload.buckets[0].size, TraceLibrary(TraceStore.of_user())
    own = traces.steps(workload, bucket, 1)
    weights, gradients = master_weights(own.weights, workload), summary_of(own.micro_first).totals.net
    config = config_of(name)
    first, later = estimated_steps(config, weights, gradients)
    traced, traced_later = traces.phase_summaries(with_optimizer(workload, config), "optimizer")
    assert first.totals.net == pytest.approx(traced.totals.net, abs=2**17)
    assert later.totals.net == traced_later.totals.net
    assert first.totals.peak == pytest.approx(traced.totals.peak, abs=3 * 2**20)
    seconds = [roofline.seconds(each.work, asked.device_state.rate) for each in (later, traced_later)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.1)


def test_rows_start_with_the_job_s_own_optimizer_and_only_that_is_traced() -> None:
    workload = workload_of("sd15", optimizer={"name": "lion"})
    traces = TraceLibrary(TraceStore.of_user())
    rows = list(optimizer_rows(workload, device_state_with(2**30), traces))
    assert [row.name for row in rows] == ["lion", *(name for name in NAMES if name != "lion")]
    assert [row.name for row in rows if row.exact] == [row.name for row in rows if row.chosen] == ["lion"]
    by_name = {row.name: row for row in rows}
    assert 2 * by_name["lion"].state < by_name["adamw"].state < 3 * by_name["lion"].state  # and step counters
    traces.read(TraceRequest(with_optimizer(workload, config_of("prodigy")), "optimizer"))
    again = {row.name: row for row in optimizer_rows(workload, device_state_with(2**30), traces)}
    assert again["prodigy"].exact and again["prodigy"].peak == pytest.approx(by_name["prodigy"].peak, rel=0.001)
