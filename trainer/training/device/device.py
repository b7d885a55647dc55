"""What this machine is, as far as a run depends on it: device, versions, threads, and how its mathematics is set."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer import gpu
from trainer.config.job import Job
from trainer.config.resolve import Machine
from trainer.errors import JobError
from trainer.files.architecture import Config
from trainer.host import usable_cores
from trainer.training.device.out_of_memory import card_of, is_out_of_memory

# auto takes the first that can do the job. cuDNN's backward was wrong in torch 2.10: it is used where it is asked for,
# and where a race has compared what it gives (trainer.training.acceleration.attention_autotune).
KERNELS: dict[AttentionChoice, list[SDPBackend]] = {
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def this_machine(wanted: str | None) -> Machine:
    """The device that ``wanted`` names ("cpu", "cuda", "cuda:1"), or the best there is when it is None.

    Raises JobError when a card is asked for that PyTorch cannot see.
    """
    cores = usable_cores()
    if wanted == "cpu" or (wanted is None and not torch.cuda.is_available()):
        return Machine(device="cpu", card=None, total_bytes=None, bf16=True, cores=cores)
    index = torch.device(wanted or best_card()).index or 0
    if index >= torch.cuda.device_count():
        raise JobError(
            "fit.device",
            f"fit.device is {wanted}, but PyTorch sees {torch.cuda.device_count()} CUDA cards here.",
            "Set fit.device to a card that is there, or remove the line; `python -m trainer doctor` lists them.",
        )
    card = card_of(index)
    return Machine(f"cuda:{index}", card.name, card.total_bytes, card.bf16, cores)


def own_bytes(card: gpu.Card, index: int) -> int | None:
    """Return what this process holds of PyTorch's GPU ``index``, its CUDA context included.

    None where there is a context and the driver does not say how large it is: on Windows, and in containers with
    process numbers of their own.
    """
    # PyTorch knows it only privately, and its build for the CPU not at all.
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None or not has_context(index):
        return 0
    return next((use.bytes for use in card.uses if use.pid == os.getpid()), None)


def best_card() -> str:
    """The card with the most free memory."""
    free = [card_of(index).free_bytes for index in range(torch.cuda.device_count())]
    return f"cuda:{free.index(max(free))}"


@contextmanager
def numerics(job: Job) -> Iterator[None]:
    """Sets threads, determinism and how fp16 is added up as the frozen job says while inside, and puts them back.

    So it does the card that counts as the present one: events and streams go there where none is named, and on another
    card they would time nothing and make a CUDA context of hundreds of MiB.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    accumulation = torch.backends.cuda.matmul.allow_fp16_accumulation
    taking: Any = torch.utils.deterministic  # its one setting is declared to no type checker
    filling = taking.fill_uninitialized_memory
    present = ExitStack()
    if job.fit.threads:
        torch.set_num_threads(job.fit.threads)
    if job.fit.device and job.fit.device.startswith("cuda"):
        present.enter_context(torch.cuda.device(job.fit.device))
        capability = torch.cuda.get_device_capability(job.fit.device)
        workspace = gpu.cublas_workspace(capability, deterministic=bool(job.fit.deterministic))
        # Read when the first matrices are multiplied. What the user set stays, and is read by the forecast as well.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", workspace)
    torch.use_deterministic_algorithms(bool(job.fit.deterministic))
    # Else PyTorch writes NaN to all memory that it takes, an operation each time, before anybody writes there himself.
    # Our tests let it.
    taking.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_fp16_accumulation = job.fit.fp16_accumulation
    try:
        with present:
            yield
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = accumulation
        taking.fill_uninitialized_memory = filling
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


AttentionChoice = Literal["auto", "flash", "efficient", "math", "cudnn"]


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
