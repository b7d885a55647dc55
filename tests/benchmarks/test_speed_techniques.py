"""Techniques that only the benchmark can switch on: the same step with each, and the unchanged model afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks import speed_encode
from tests.benchmarks.speed_rows import Base
from tests.benchmarks.speed_techniques import applied
from tests.support.real_phases import RealRun
from trainer.adapter.lean.residual import NormAndSilu
from trainer.training.acceleration.channels_last import ChannelsLastNormAndSilu, Kernels
from trainer.training.acceleration.cuda_graphs import GraphedSteps
from trainer.training.engine import Engine
from trainer.training.step import MicroBatch

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_norm_and_silu_in_one_are_those_of_pytorch(layout: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(1)
    norm = nn.GroupNorm(4, 12, eps=1e-3).double().requires_grad_(requires_grad=False)
    norm.weight.normal_(generator=generator)
    norm.bias.normal_(generator=generator)
    x = torch.randn(2, 12, 5, 3, generator=generator, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    above = torch.randn(2, 12, 5, 3, generator=generator, dtype=torch.float64).to(memory_format=layout)
    together = copy.deepcopy(norm)
    together.__class__ = NormAndSilu if layout is torch.contiguous_format else ChannelsLastNormAndSilu
    together.kernels = Kernels(compiled=False)  # type: ignore[assignment]
    result = together(x)
    (gradient,) = torch.autograd.grad(result, x, above)
    expected = F.silu(F.group_norm(x, 4, norm.weight, norm.bias, 1e-3))
    (expected_gradient,) = torch.autograd.grad(expected, x, above)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    assert result.is_contiguous(memory_format=layout) and gradient.is_contiguous(memory_format=layout)


@pytest.fixture(scope="module")
def run() -> RealRun:
    torch.manual_seed(1)
    run = RealRun(Base("sdxl", dtype="fp32").workload(1024, small=True), CPU)
    run.load()
    assert run.engine is not None
    for weight in run.engine.master_weights.working.values():
        weight.data.normal_(std=0.02)
    return run


@pytest.fixture(scope="module")
def micro(run: RealRun) -> MicroBatch:
    micro = run._batch((64, 64), 2)
    for tensor in micro.tensors():
        if tensor.is_floating_point():
            tensor.normal_()
    return micro


def stepped(engine: Engine, micro: MicroBatch, technique: str) -> tuple[Tensor, dict[str, Tensor]]:
    unet = engine.models.unet
    with applied(technique, engine):  # type: ignore[arg-type]
        loss = engine.micro_step(micro)
        assert type(unet.conv_norm_out) is (ChannelsLastNormAndSilu if technique == "channels_last" else NormAndSilu)
        assert unet.conv_in.weight.is_contiguous() != (technique == "channels_last")
    gradients = {key: weight.grad for key, weight in engine.master_weights.working.items() if weight.grad is not None}
    engine.master_weights.zero_grad()
    return loss, gradients


def test_a_step_is_the_same_and_leaves_the_model_as_it_was(run: RealRun, micro: MicroBatch) -> None:
    engine = run.engine
    assert engine is not None
    before = {name: type(module) for name, module in engine.models.unet.named_modules()}
    loss, gradients = stepped(engine, micro, "none")
    other, others = stepped(engine, micro, "channels_last")
    assert len(others) == len(engine.master_weights.working)
    torch.testing.assert_close(other, loss, rtol=1e-5, atol=0)
    wrong = torch.stack([(others[key] - gradients[key]).norm() for key in gradients]).norm()
    assert wrong < 1e-3 * torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert {name: type(module) for name, module in engine.models.unet.named_modules()} == before
    assert all(weight.is_contiguous() for weight in engine.models.unet.parameters())
    again, _ = stepped(engine, micro, "none")
    assert torch.equal(again, loss)


@pytest.mark.slow
def test_graphs_are_those_of_the_trainer_and_go_with_their_row(run: RealRun, micro: MicroBatch) -> None:
    engine = run.engine
    assert engine is not None
    totals = [torch.zeros(()) for _ in range(4)]
    engine.accumulate_gradients(micro, totals[0])
    engine.master_weights.zero_grad()
    with applied("graphs", engine):
        for total in totals[1:]:
            engine.accumulate_gradients(micro, total)
            assert torch.equal(total, totals[0])
        assert isinstance(engine.graphs, GraphedSteps)
        with pytest.raises(RuntimeError, match="what prevents it"):
            engine.graphs._tell("graphs", "what prevents it")
    engine.master_weights.zero_grad()
    assert engine.graphs is None


@pytest.mark.slow
def test_encoding_is_timed_in_every_way_and_what_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_encode, "LEAST_SECONDS", 0.0)
    real = speed_encode._timed

    def timed(what: speed_encode.Encoding, *how: Any) -> speed_encode.Encoding:
        if what.at_once == 8:
            raise RuntimeError("CUDA out of memory\nand more")
        return real(what, *how)

    monkeypatch.setattr(speed_encode, "_timed", timed)
    rows = list(speed_encode.encodings("sd15", CPU, small=True))
    assert len({(row.dtype, row.what, row.at_once) for row in rows}) == len(rows) == 24
    assert {row.failure for row in rows if row.at_once == 8} == {"CUDA out of memory"}
    assert all(row.a_second > 0 and row.difference < 5e-2 for row in rows if row.at_once < 8)
    assert rows[0].difference == 0.0 and rows[0].line().startswith("| bf16 | images, contiguous | 1 | ")
