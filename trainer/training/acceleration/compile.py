"""torch.compile for the UNet's transformer blocks during training steps (experimental).

The compiler fuses the elementwise operations between matrix products, once per kind of block and shape. Our LoRA layers
use plain PyTorch operations while they are traced. Validation and previews run the uncompiled blocks. If compiling
fails, the run continues without it and reports that once (docs/decisions/0020). Forecasts assume uncompiled blocks.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

from trainer.config.job import Job
from trainer.training.acceleration.cuda_graphs import OnNotice
from trainer.training.device.offload import empty_cache
from trainer.training.device.out_of_memory import is_out_of_memory
from trainer.training.engine import Engine

BACKEND = "inductor"
"""torch.compile backend that generates the kernels."""
RECOMPILE_LIMIT = 256
"""Recompile limit per function. PyTorch's 8 is too low: a UNet has up to four kinds of blocks per image shape."""
TRIES = 2
"""Attempts to compile before giving up.

Ctrl-C also ends the compiler's worker processes, which looks like a failure to compile in a run that is only pausing.
An uncompiled step would then round differently than in an uninterrupted run, so compiling is tried again."""
MAX_ERROR_LENGTH = 200
"""Maximum number of characters shown of a compiler error."""


def make_compiled(job: Job, device: torch.device, tell: OnNotice) -> CompiledBlocks | None:
    """Return the compiled blocks, or None if the job does not use them or no compiler works.

    They cannot be combined with CUDA graphs or dropout. If no compiler works, the reason is reported to the user.
    """
    if not job.fit.compile or job.fit.cuda_graphs or job.recipe.has_dropouts:
        return None
    if error := compiler_error(device):
        _report(tell, f"no working compiler found ({error})")
        return None
    return CompiledBlocks(tell)


def compiler_error(device: torch.device) -> str:
    """Try torch.compile on a small function; return why it does not work for this device, "" if it works."""

    def total(x: Tensor) -> Tensor:
        return (x.sin() + 1.0).sum()

    numbers = torch.ones(8, device=device, requires_grad=True)
    message = ""
    for _ in range(TRIES):
        try:
            with _compiler_settings():
                torch.autograd.backward(_compile(total)(numbers))
        except Exception as error:  # noqa: BLE001 (compilers fail in many ways)
            message = _short_message(error)
        else:
            return ""
        _restart_workers()
    return message


class CompiledBlocks:
    """Runs the UNet's transformer blocks compiled within :meth:`step`, until compiling fails."""

    def __init__(self, tell: OnNotice) -> None:
        self._tell = tell
        self._in_step = False
        self._disabled = False

    def install(self, unet: nn.Module) -> None:
        """Wrap the forward of each block; nothing is compiled before the first step."""
        for block in unet.modules():
            if isinstance(block, BasicTransformerBlock):
                eager = block.forward
                # Set on the instance, so that hooks and gradient checkpointing call the wrapper too.
                block.forward = functools.partial(self._forward, eager, _compile(eager))  # type: ignore[method-assign]

    def step(self, engine: Engine, work: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``work``, a step of ``engine``; runs it uncompiled if compiling fails twice."""
        if self._disabled:
            return work()
        message = ""
        for _ in range(TRIES):
            try:
                with self._compiling():
                    return work()
            except (
                Exception
            ) as error:  # compilers fail in many ways; any other error is raised again by the uncompiled call
                if is_out_of_memory(error):
                    raise
                message = _short_message(error)
            # The failed attempt may have left partial gradients, which would be added to those of the next.
            for weight in engine.master_weights.working.values():
                weight.grad = None
            empty_cache(engine.device)
            _restart_workers()
        self._disabled = True
        _report(self._tell, f"compiling the transformer blocks failed ({message})")
        return work()

    def give_up(self) -> None:
        """Stop compiling for good and report it, because memory ran out."""
        if not self._disabled:
            self._disabled = True
            _report(self._tell, "GPU memory ran out, so compiling is off")

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        self._in_step = True
        try:
            with _compiler_settings():
                yield
        finally:
            self._in_step = False

    def _forward(self, eager: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (compiled if self._in_step else eager)(*args, **kwargs)


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled version of ``function``; a call that fails twice raises the compiler's error."""
    compiled = _compile(function)

    def once(*inputs: Any) -> Any:
        with _compiler_settings():
            return compiled(*inputs)

    def call(*inputs: Any) -> Any:
        try:
            return once(*inputs)
        except Exception as error:  # see TRIES
            if is_out_of_memory(error):
                raise
        _restart_workers()
        return once(*inputs)

    return call


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Raise the recompile limits within the block, and hide the compiler's own warnings."""
    limits: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "accumulated_recompile_limit": RECOMPILE_LIMIT}
    with torch._dynamo.config.patch(limits), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # Dynamo inspects every tensor that a block uses, including .grad of tensors that are not leaves.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        # Activations are quantized to int8 by way of fp16 (trainer/base/quantized.py), even in a bf16 run.
        warnings.filterwarnings("ignore", "bf16 and fp16 are mixed", UserWarning)
        yield


def _restart_workers() -> None:
    """Discard the compiler's worker processes and pending kernels: Ctrl-C may have ended the workers."""
    workers = sys.modules.get("torch._inductor.async_compile")  # not imported before the first compilation
    if workers is not None:
        workers.shutdown_compile_workers()
        workers.CompiledTritonKernels.cache_clear()


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` compiled for static shapes: dynamic shapes are slower, and there are few buckets."""
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND)
    return compiled


def _report(tell: OnNotice, message: str) -> None:
    tell("compile", f"fit.compile: {message}. The run continues without it.")


def _short_message(error: BaseException) -> str:
    """Return the first line of a compiler error, shortened; the rest is for compiler developers."""
    error = getattr(error, "inner_exception", error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:MAX_ERROR_LENGTH]
