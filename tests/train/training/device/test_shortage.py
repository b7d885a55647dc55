"""What is told of memory that ran out, from PyTorch's own errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer.training.device.out_of_memory import is_out_of_memory, oom_details

MORE_THAN_ANY = 1 << 45


class Greedy(nn.Module):
    def forward(self, _inputs: torch.Tensor) -> torch.Tensor:
        return torch.empty(MORE_THAN_ANY, dtype=torch.uint8)


def test_what_the_cpu_says_is_understood() -> None:
    """A real allocation that the machine refuses."""
    model = nn.Sequential(nn.Identity(), nn.Sequential(Greedy()))
    with pytest.raises(RuntimeError) as refused:
        model(torch.zeros(1))
    assert is_out_of_memory(refused.value)
    told = oom_details(refused.value, {"unet": model})
    assert (told.requested, told.module, told.stage) == (MORE_THAN_ANY, "unet.1.0", "")


def test_numpy_too() -> None:
    with pytest.raises(MemoryError) as refused:
        np.empty(MORE_THAN_ANY, dtype=np.uint8)
    assert is_out_of_memory(refused.value)


@pytest.mark.parametrize(
    ("words", "requested"),
    [
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 8.00 GiB", 3 << 29),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", None),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", None),
        ("CUDA error: out of memory", None),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.", 4096),
    ],
)
def test_what_cards_say_is_understood(words: str, requested: int | None) -> None:
    assert is_out_of_memory(RuntimeError(words))
    assert oom_details(RuntimeError(words), {}).requested == requested


def test_a_backward_outside_of_a_step_is_no_stage_of_it() -> None:
    """Kernels are probed with a backward before texts are encoded."""

    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    with pytest.raises(torch.OutOfMemoryError) as full:
        torch.autograd.backward(Full.apply(torch.ones((), requires_grad=True)))
    assert oom_details(full.value, {}).stage == ""


@pytest.mark.parametrize("private", ["", " with 30.00 MiB allocated in private pools (e.g., CUDA Graphs),"])
def test_the_message_says_what_was_in_use_when_it_was_raised(private: str) -> None:
    """As PyTorch 2.13 words it, on a GPU with a cap."""
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0 has a total capacity of 11.76 GiB of which 9.22 GiB "
        "is free. Including non-PyTorch memory, this process has 2.54 GiB memory in use. 2.35 GiB allowed; Of the "
        f"allocated memory 2.50 GiB is allocated by PyTorch,{private} and 102.00 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting"
    )
    found = oom_details(error, {})
    assert (found.allocated, found.reserved) == (5 << 29, (5 << 29) + (102 << 20))


def test_a_convolution_without_an_engine_is_a_shortage_only_on_a_full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real allocator: tests/emulated_gpu. There is none here, so what it would say is given."""
    error = RuntimeError("GET was unable to find an engine to execute this computation")
    assert not is_out_of_memory(error)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, fraction, reserved, short in ((6, 1.0, 1, False), (0.5, 1.0, 1, True), (6, 0.5, 3.5, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (int(free * 2**30), 8 << 30))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda fraction=fraction: fraction)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda reserved=reserved: int(reserved * 2**30))
        assert is_out_of_memory(error) is short


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), KeyError("x")],
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)
