"""Which attention kernel PyTorch uses: stated, never left to its default, and settled when a run is frozen."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.errors import JobError
from trainer.files.architecture import Config
from trainer.training.shortage import is_out_of_memory

AttentionChoice = Literal["auto", "flash", "efficient", "math", "cudnn"]

# auto takes the first that can do the job. cuDNN's backward was wrong in torch 2.10: it is used where it is asked for,
# and where a race has compared what it gives (trainer.training.attention_race).
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
        _try_kernel(choice, device, dtype, [64])
    # cuDNN refuses some lengths; there PyTorch goes on to the next.
    with sdpa_kernel(KERNELS[choice] + (KERNELS["auto"][:2] if choice == "cudnn" else []), set_priority=True):
        yield


def settled(choice: AttentionChoice, device: torch.device, dtype: torch.dtype, widths: Set[int]) -> AttentionChoice:
    """The choice as a run is frozen with it: for "auto" the first kernel that suits heads of all ``widths``.

    Raises JobError when a stated kernel does not suit them on this device, and RuntimeError when memory runs out.
    """
    if choice != "auto":
        with sdpa_kernel(KERNELS[choice]):
            _try_kernel(choice, device, dtype, widths)
        return choice
    for kernel in ("flash", "efficient"):
        with suppress(JobError):
            return settled(kernel, device, dtype, widths)
    return "math"


def head_widths(unet: Config, texts: Iterable[Config]) -> set[int]:
    """How wide the attention heads of these models are, by their configs; the VAE's is another matter."""
    blocks = unet["block_out_channels"]
    # The name is diffusers' mistake: it counts the heads.
    heads = unet.get("attention_head_dim") or 8
    counts = heads if isinstance(heads, list | tuple) else [heads] * len(blocks)
    widths = {width // count for width, count in zip(blocks, counts, strict=True)}
    return widths | {text["hidden_size"] // text["num_attention_heads"] for text in texts}


def _try_kernel(choice: AttentionChoice, device: torch.device, dtype: torch.dtype, widths: Iterable[int]) -> None:
    """Runs tiny attentions there and back, because PyTorch says only by failing that a kernel is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one per kernel that was refused, with a reason for developers
        try:
            for width in widths:
                probe = torch.zeros(1, 1, 8, width, device=device, dtype=dtype, requires_grad=True)
                torch.autograd.backward(F.scaled_dot_product_attention(probe, probe, probe).sum())
        except RuntimeError as error:
            if is_out_of_memory(error):  # says nothing of the kernel
                raise
            raise JobError(
                "job.attention",
                f'fit.attention = "{choice}" has no kernel on {device} for {str(dtype).removeprefix("torch.")}.',
                "Remove fit.attention, so that one is chosen which works here.",
            ) from error
