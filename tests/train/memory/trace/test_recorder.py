"""The tracer on small programs whose tapes can be written down by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.cpu_steps import tiny_workload
from tests.support.traced_steps import trace_steps
from trainer.base.quantized import quantize_linears
from trainer.memory.trace.cuda_kernels import AttentionKernel
from trainer.memory.trace.memory_trace import MemoryTrace, Storage
from trainer.memory.trace.recorder import CUBLAS_WORKSPACE, Tracer, recording

META = torch.device("meta")


def tape_of(program: Callable[[Tracer], object], kernel: AttentionKernel = "flash") -> MemoryTrace:
    with recording(kernel) as tracer:
        program(tracer)
        return tracer.cut("tape")


def story(tape: MemoryTrace) -> list[tuple[str, int]]:
    """Births and deaths with their bytes, workspaces left out."""
    return [
        ("born" if event >= 0 else "dies", tape.storages[max(event, ~event)].bytes)
        for event in tape.events.tolist()
        if tape.storages[max(event, ~event)].kind != "workspace"
    ]


def by_kind(tape: MemoryTrace, kind: str) -> list[Storage]:
    return [storage for storage in tape.storages if storage.kind == kind]


def test_births_and_deaths_in_their_order() -> None:
    def program(tracer: Tracer) -> None:
        first = torch.empty(10, device=META)
        second = first + 1.0
        view = second[2:]
        del first, second  # the view holds the second
        third = view.double()
        del view, third
        torch.ones(4)  # on the CPU: not seen

    assert story(tape_of(program)) == [
        ("born", 40),
        ("born", 40),
        ("dies", 40),
        ("born", 64),
        ("dies", 40),
        ("dies", 64),
    ]


def test_what_outlives_a_tape_dies_in_a_later_one_under_its_name() -> None:
    with recording("flash") as tracer:
        weight = torch.empty(8, device=META)
        tracer.label(weight, "weights", "layer", "layer.weight")
        nameless = weight * 2
        first = tracer.cut("first")
        del nameless, weight
        second = tracer.cut("second")
    assert [storage.name for storage in first.storages] == ["layer.weight", "first:1"]
    assert second.events.tolist() == [~0, ~1]
    assert [storage.name for storage in second.storages] == ["first:1", "layer.weight"]
    assert first.storages[0].kind == "weights"


def test_stages_modules_and_what_is_kept_for_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device=META), nn.ReLU(), nn.Linear(4, 2, device=META))

    def program(tracer: Tracer) -> None:
        tracer.watch("net", model)
        batch = torch.empty(3, 4, device=META)
        with tracer.stage("forward"):
            model(batch).sum().backward()
        for path, weight in model.named_parameters():
            assert weight.grad is not None
            tracer.label(weight.grad, "gradients", path)

    tape = tape_of(program)
    kept = by_kind(tape, "activations")
    # The loss and the gradient that backward begins with, besides what ReLU keeps.
    assert [(storage.module, storage.bytes) for storage in kept] == [("net.1", 48), ("", 4), ("", 4)]
    passed_on = [storage for storage in by_kind(tape, "temporary") if storage.stage == "backward"]
    assert {storage.module for storage in passed_on} >= {"net.1", "net.2"}
    assert sorted(storage.module for storage in by_kind(tape, "gradients")) == [
        "0.bias",
        "0.weight",
        "2.bias",
        "2.weight",
    ]


def test_attention_takes_flashs_operations_and_hidden_buffers() -> None:
    def program(tracer: Tracer) -> None:
        query = torch.empty(1, 2, 300, 40, device=META, dtype=torch.bfloat16, requires_grad=True)
        with tracer.stage("forward"):
            F.scaled_dot_product_attention(query, query, query).sum().backward()

    tape = tape_of(program)
    sizes = [storage.bytes for storage in by_kind(tape, "temporary") if storage.stage == "backward"]
    assert 2 * 384 * 4 in sizes  # softmax_d: rows rounded up to 384
    assert 2 * 384 * 64 * 4 in sizes  # dq_accum: heads of 40 rounded up to 64
    assert 300 * 300 * 2 not in sizes  # no matrix of scores
    (forward,) = [work for work in tape.work if work.kind == "attention" and work.stage == "forward"]
    assert (forward.flops, forward.dtype) == (2 * 2 * (2 * 300 * 300 * 40), "bfloat16")


def test_bytes_are_what_an_operation_reads_and_what_it_writes() -> None:
    """Of six numbers in fp32 two are read and one is written, in place or not; what is written to only counts once.

    A view does nothing, and nothing is written to memory that is only taken.
    """

    def program(tracer: Tracer) -> None:
        x, y, place = (torch.ones(6, device=META) for _ in range(3))
        tracer.cut("inputs")
        with tracer.stage("forward"):
            x.view(2, 3) * y.view(2, 3)
            torch.mul(x, y, out=place)
            x.mul_(y)
            torch.ops.aten.gelu_backward(x, y, grad_input=place)
            torch.empty_like(x)

    done = [one for one in tape_of(program).work if one.stage == "forward" and one.count]
    assert [(work.bytes, work.count) for work in done] == [(3 * 6 * 4, 1)] * 4


def test_a_mask_turns_flash_into_efficient_with_an_aligned_bias() -> None:
    def program(tracer: Tracer) -> None:
        query = torch.empty(1, 2, 77, 64, device=META, dtype=torch.float16)
        mask = torch.empty(77, 77, device=META, dtype=torch.bool)
        F.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    assert 77 * 80 * 2 in [storage.bytes for storage in tape_of(program).storages]


def test_dropout_keeps_a_mask_of_bytes() -> None:
    def program(tracer: Tracer) -> None:
        F.dropout(torch.empty(1000, device=META, requires_grad=True), 0.5)

    assert [size for what, size in story(tape_of(program)) if what == "born"] == [4000, 4000, 1000]


def test_workspaces_of_products_and_convolutions() -> None:
    """One workspace of cuBLAS per thread stays allocated; cuDNN's exists only while it works."""
    layer = nn.Conv2d(4, 8, 3, padding=1, device=META)

    def program(tracer: Tracer) -> None:
        matrix = torch.empty(5, 5, device=META, requires_grad=True)
        with tracer.stage("forward"):
            ((matrix @ matrix) @ matrix).sum().backward()
            layer(torch.empty(1, 4, 6, 6, device=META))

    workspaces = by_kind(tape_of(program), "workspace")
    assert [(storage.module, storage.name, storage.bytes) for storage in workspaces] == [
        ("cublas", "cublas.caller", CUBLAS_WORKSPACE),
        ("cublas", "cublas.autograd", CUBLAS_WORKSPACE),
        ("cudnn", None, 4 * (4 * 36 + 8 * 36 + 8 * 4 * 9)),
    ]


@pytest.mark.parametrize(("frozen", "count"), [(True, 1), (False, 2)])
def test_backward_of_a_convolution_takes_a_workspace_for_each_gradient(frozen: bool, count: int) -> None:
    """Either gradient is a convolution of three operands: a frozen weight leaves only that of the input."""
    layer = nn.Conv2d(4, 8, 3, padding=1, device=META).requires_grad_(not frozen)

    def program(tracer: Tracer) -> None:
        with tracer.stage("forward"):
            layer(torch.empty(1, 4, 6, 6, device=META, requires_grad=True)).sum().backward()

    found = [storage.bytes for storage in by_kind(tape_of(program), "workspace") if storage.stage == "backward"]
    assert found == count * [4 * (4 * 36 + 8 * 36 + 8 * 4 * 9)]


def test_numbers_can_be_read_where_there_are_none() -> None:
    def program(tracer: Tracer) -> None:
        zeros, others = torch.zeros(3, device=META), torch.zeros(3, device=META)
        tracer.mark_zero(zeros)
        assert not zeros.any()
        assert others.any()
        assert others.sum().item() == 1.0

    tape_of(program)


def test_comparisons_of_an_optimizer_follow_what_is_known_of_its_numbers() -> None:
    """A sum is not zero unless it is known to be; with `== 0` read as true, a step would be traced to its middle."""

    def program(tracer: Tracer) -> None:
        zeros, others = torch.zeros(3, device=META), torch.zeros(3, device=META)
        tracer.mark_zero(zeros)
        with tracer.stage("optimizer"):
            is_nothing = others.sum() == 0
            assert not is_nothing
            assert others.any() > 0
            assert not zeros.any() > 0

    tape_of(program)


def test_a_product_with_4_bit_weights_restores_them() -> None:
    model = nn.ModuleDict({"transformer_blocks": nn.Linear(64, 128, device=META)})
    place = quantize_linears(model, "nf4", torch.bfloat16, META)
    layer = model["transformer_blocks"]
    assert place(layer, "weight", torch.empty(128, 64, device=META, dtype=torch.bfloat16))
    layer.bias = nn.Parameter(torch.empty(128, device=META, dtype=torch.bfloat16))

    def program(tracer: Tracer) -> Tensor:
        result: Tensor = layer(torch.empty(2, 64, device=META, dtype=torch.bfloat16))
        return result

    changes = story(tape_of(program))
    assert ("born", 128 * 64 * 2) in changes
    assert ("dies", 128 * 64 * 2) in changes


def test_states_that_page_are_not_the_allocators() -> None:
    """Optimizer states of 100,000 elements and more are in paged memory that moves between host and GPU."""

    def state(name: str) -> int:
        tapes = trace_steps(tiny_workload("sd15", {"rank": 512, "optimizer": {"name": name}}), [(64, 64)], 1)
        return sum(storage.bytes for storage in tapes.optimizer_first.storages if storage.kind == "optimizer")

    # Feed-forward layers of 64 * 4 or 64 * 8 by 512; the rest of the layers have fewer numbers.
    assert 0 < state("paged_adamw8bit") < state("adamw8bit")


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", "math"])
def test_kernels_are_put_back(kernel: AttentionKernel) -> None:
    before = F.scaled_dot_product_attention, F.dropout
    with pytest.raises(ZeroDivisionError), recording(kernel):
        _ = 1 / 0
    assert before == (F.scaled_dot_product_attention, F.dropout)
