"""The device that a run trains on: its choice, attention kernels and numeric settings."""

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
from trainer.training.device.out_of_memory import gpu_info, is_out_of_memory

# "auto" takes the first kernel that supports the inputs. cuDNN's backward was wrong in torch 2.10, so it is used only
# if the user asks for it, or if autotuning has checked its results (acceleration.attention_autotune).
KERNELS: dict[AttentionChoice, list[SDPBackend]] = {
    "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def this_machine(requested: str | None) -> Machine:
    """Return the device that ``requested`` names ("cpu", "cuda", "cuda:1"), or the best one if it is None.

    Raises JobError if it names a GPU that PyTorch does not see.
    """
    cores = usable_cores()
    if requested == "cpu" or (requested is None and not torch.cuda.is_available()):
        return Machine(device="cpu", gpu=None, total_bytes=None, bf16=True, cores=cores)
    index = torch.device(requested or freest_gpu()).index or 0
    if index >= torch.cuda.device_count():
        raise JobError(
            "fit.device",
            f'Could not use fit.device = "{requested}": PyTorch does not find this GPU.',
            "Set fit.device to a GPU that `python -m trainer doctor` lists, or remove fit.device.",
        )
    found = gpu_info(index)
    return Machine(f"cuda:{index}", found.name, found.total_bytes, found.bf16, cores)


def own_bytes(gpu_info: gpu.Gpu, index: int) -> int | None:
    """Return the bytes that this process uses on PyTorch's GPU ``index``, including its CUDA context.

    Returns None if there is a context but the driver does not report its size, as on Windows and in containers that
    have their own process ids.
    """
    # This attribute is private, and missing in PyTorch's CPU build.
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None or not has_context(index):
        return 0
    return next((use.bytes for use in gpu_info.uses if use.pid == os.getpid()), None)


def freest_gpu() -> str:
    """Return the device name of the GPU with the most free memory, such as "cuda:1"."""
    free = [gpu_info(index).free_bytes for index in range(torch.cuda.device_count())]
    return f"cuda:{free.index(max(free))}"


@contextmanager
def numeric_settings(job: Job) -> Iterator[None]:
    """Apply the frozen job's threads, determinism and fp16 accumulation inside the block.

    Also makes the job's GPU the current one. Events and streams created without a device belong to the current GPU; if
    that were another one, they would time nothing and create a CUDA context of hundreds of MiB there.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    accumulation = torch.backends.cuda.matmul.allow_fp16_accumulation
    settings: Any = torch.utils.deterministic  # its only setting is unknown to type checkers
    fill_memory = settings.fill_uninitialized_memory
    current_gpu = ExitStack()
    if job.fit.threads:
        torch.set_num_threads(job.fit.threads)
    if job.fit.device and job.fit.device.startswith("cuda"):
        current_gpu.enter_context(torch.cuda.device(job.fit.device))
        capability = torch.cuda.get_device_capability(job.fit.device)
        workspace = gpu.cublas_workspace(capability, deterministic=bool(job.fit.deterministic))
        # cuBLAS reads it at the first matrix product. A value set by the user stays; the forecast reads it as well.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", workspace)
    torch.use_deterministic_algorithms(bool(job.fit.deterministic))
    # Deterministic mode would otherwise fill every new tensor with NaN, one more kernel for each allocation. Our
    # own tests leave the fill on.
    settings.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_fp16_accumulation = job.fit.fp16_accumulation
    try:
        with current_gpu:
            yield
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = accumulation
        settings.fill_uninitialized_memory = fill_memory
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


AttentionChoice = Literal["auto", "flash", "efficient", "math", "cudnn"]


@contextmanager
def attention_kernels(choice: AttentionChoice, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Allow only the attention kernels of ``choice`` inside the block, including recomputed forward passes.

    Wrap it around training and validation, but not around the VAE: few kernels support its single wide head. Raises
    JobError if the device has none of these kernels for ``dtype``.
    """
    with sdpa_kernel(KERNELS[choice], set_priority=True):
        _try_kernel(choice, device, dtype, [64])
    # cuDNN refuses some sequence lengths; PyTorch then takes the next kernel in the list.
    with sdpa_kernel(KERNELS[choice] + (KERNELS["auto"][:2] if choice == "cudnn" else []), set_priority=True):
        yield


def choose_attention_kernel(
    choice: AttentionChoice, device: torch.device, dtype: torch.dtype, widths: Set[int]
) -> AttentionChoice:
    """Return ``choice``; for "auto", the first of flash, efficient and math that supports heads of all ``widths``.

    Raises JobError if a kernel that the user chose does not support them on this device, and RuntimeError if memory
    runs out.
    """
    if choice != "auto":
        with sdpa_kernel(KERNELS[choice]):
            _try_kernel(choice, device, dtype, widths)
        return choice
    # Flash first: forecasts assume it. Math comes last, because it stores all attention scores.
    for kernel in ("flash", "efficient"):
        with suppress(JobError):
            return choose_attention_kernel(kernel, device, dtype, widths)
    return "math"


def head_widths(unet: Config, texts: Iterable[Config]) -> set[int]:
    """Return the attention head widths of the UNet and the text encoders, from their configs."""
    blocks = unet["block_out_channels"]
    # diffusers misnamed this key: it is the number of heads.
    heads = unet.get("attention_head_dim") or 8
    counts = heads if isinstance(heads, list | tuple) else [heads] * len(blocks)
    widths = {width // count for width, count in zip(blocks, counts, strict=True)}
    return widths | {text["hidden_size"] // text["num_attention_heads"] for text in texts}


def _try_kernel(choice: AttentionChoice, device: torch.device, dtype: torch.dtype, widths: Iterable[int]) -> None:
    """Run tiny attention calls forward and backward; PyTorch reports a missing kernel only by failing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one per refused kernel, with a reason for developers
        try:
            for width in widths:
                probe = torch.zeros(1, 1, 8, width, device=device, dtype=dtype, requires_grad=True)
                torch.autograd.backward(F.scaled_dot_product_attention(probe, probe, probe).sum())
        except RuntimeError as error:
            if is_out_of_memory(error):  # does not mean that the kernel is unsupported
                raise
            raise JobError(
                "job.attention",
                f'Could not use fit.attention = "{choice}": it has no kernel on {device} for '
                f"{str(dtype).removeprefix('torch.')}.",
                "Remove fit.attention, so that Impasto chooses an attention kernel that works here.",
            ) from error
