"""Which attention kernels PyTorch may use: stated, never left to its default."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.errors import JobError

AttentionChoice = Literal["auto", "flash", "efficient", "math", "cudnn"]

# auto takes the first that can do the job; cuDNN's only when asked for (its backward was wrong in torch 2.10).
KERNELS: dict[AttentionChoice, list[SDPBackend]] = {
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}


@contextmanager
def attention(choice: AttentionChoice, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Allows only the kernels of ``choice`` inside, forward and recomputed forward alike.

    Wrap it around training and validation, not around the VAE: its one wide head suits few kernels. Raises JobError
    when the device has none of these kernels for ``dtype``.
    """
    with sdpa_kernel(KERNELS[choice], set_priority=True):
        _try_kernel(choice, device, dtype)
        yield


def _try_kernel(choice: AttentionChoice, device: torch.device, dtype: torch.dtype) -> None:
    """Runs one tiny attention, because PyTorch says only by failing that a kernel is missing."""
    probe = torch.zeros(1, 1, 8, 64, device=device, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one per kernel that was refused, with a reason for developers
        try:
            F.scaled_dot_product_attention(probe, probe, probe)
        except RuntimeError as error:
            raise JobError(
                "job.attention",
                f'fit.attention = "{choice}" has no kernel on {device} for {str(dtype).removeprefix("torch.")}.',
                "Remove fit.attention, so that one is chosen which works here.",
            ) from error
