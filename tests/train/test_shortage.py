"""What is told of memory that ran out, from PyTorch's own errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from trainer.training.shortage import is_out_of_memory, shortage_of

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
    told = shortage_of(refused.value, {"unet": model})
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
    assert shortage_of(RuntimeError(words), {}).requested == requested


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), KeyError("x")],
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)
