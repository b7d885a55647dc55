"""The UNet's transformer blocks compiled by torch.compile for as long as a step learns: an experiment.

PyTorch's compiler fuses what stands between the products of matrices, each kind of block once for every shape; our LoRA
layers give it plain sums for that. Validation, previews and what is saved are computed as ever. What cannot be compiled
goes on plainly and is said once, so no run ends by it (docs/decisions/0020). Forecasts count plain blocks.
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
from trainer.training.acceleration.cuda_graphs import Tell
from trainer.training.device.offload import release
from trainer.training.device.out_of_memory import is_out_of_memory
from trainer.training.loop import Engine

BACKEND = "inductor"
"""Who makes kernels of what torch.compile has read."""
MOST_GRAPHS = 256
"""Of one function: PyTorch gives up at 8, and a UNet has up to four kinds of blocks for each shape of pictures."""
TRIES = 2
"""A pause by Ctrl-C or by ending all processes of a run ends its compilers too: the run notes that, they just fail. A
step that were then computed plainly would not be the one that a run without a pause computes."""
MOST_WORDS = 200
"""Of a compiler's complaint are told, in letters."""


def compiled_of(job: Job, device: torch.device, tell: Tell) -> CompiledBlocks | None:
    """What compiles the blocks of a run, where its job asks for it and a compiler works here; else that is told."""
    if not job.fit.compile or job.fit.graphs or job.recipe.has_dropouts:
        return None
    if trouble := compiler_trouble(device):
        _say(tell, f"no compiler works here ({trouble})")
        return None
    return CompiledBlocks(tell)


def compiler_trouble(device: torch.device) -> str:
    """Why nothing can be compiled for this device, found out by compiling a sum; "" where it can."""

    def total(x: Tensor) -> Tensor:
        return (x.sin() + 1.0).sum()

    numbers = torch.ones(8, device=device, requires_grad=True)
    words = ""
    for _ in range(TRIES):
        try:
            with _compiler_at_work():
                torch.autograd.backward(_compile(total)(numbers))
        except Exception as error:  # noqa: BLE001 (compilers fail in many ways)
            words = _words(error)
        else:
            return ""
        _renew_workers()
    return words


class CompiledBlocks:
    """Lets the transformer blocks of UNets be compiled within :meth:`step`, until that fails."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._learning = False
        self._given_up = False

    def install(self, unet: nn.Module) -> None:
        """Makes the blocks ready; nothing is compiled before the first step."""
        for block in unet.modules():
            if isinstance(block, BasicTransformerBlock):
                plainly = block.forward
                # Set on the block itself: whatever hangs on it or checkpoints it calls this one.
                block.forward = functools.partial(self._forward, plainly, _compile(plainly))  # type: ignore[method-assign]

    def step(self, engine: Engine, work: Callable[[], Tensor]) -> Tensor:
        """See trainer.training.loop.Compiled."""
        if self._given_up:
            return work()
        words = ""
        for _ in range(TRIES):
            try:
                with self._compiling():
                    return work()
            except Exception as error:  # compilers fail in many ways; what is no fault of theirs fails once more
                if is_out_of_memory(error):
                    raise
                words = _words(error)
            for weight in engine.masters.working.values():
                weight.grad = None
            release(engine.device)
            _renew_workers()
        self._given_up = True
        _say(self._tell, f"compiling the transformer blocks failed ({words})")
        return work()

    def give_up(self) -> None:
        """See trainer.training.loop.Compiled."""
        if not self._given_up:
            self._given_up = True
            _say(self._tell, "memory ran out, so blocks are compiled no more")

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        self._learning = True
        try:
            with _compiler_at_work():
                yield
        finally:
            self._learning = False

    def _forward(self, plainly: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (compiled if self._learning else plainly)(*args, **kwargs)


def compile_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors compiled for itself; raises whatever a compiler may when it is called."""
    compiled = _compile(function)

    def once(*inputs: Any) -> Any:
        with _compiler_at_work():
            return compiled(*inputs)

    def call(*inputs: Any) -> Any:
        try:
            return once(*inputs)
        except Exception as error:  # see TRIES
            if is_out_of_memory(error):
                raise
        _renew_workers()
        return once(*inputs)

    return call


@contextmanager
def _compiler_at_work() -> Iterator[None]:
    """Inside, the compiler may make as many graphs as a run needs, and warns nobody of itself."""
    limits: dict[str, Any] = {"recompile_limit": MOST_GRAPHS, "accumulated_recompile_limit": MOST_GRAPHS}
    with torch._dynamo.config.patch(limits), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # It looks into all that a block uses, also for gradients that nobody asked to be kept.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        # Rows are rounded to int8 by way of fp16 (trainer/base/quantized.py), also in a run in bf16.
        warnings.filterwarnings("ignore", "bf16 and fp16 are mixed", UserWarning)
        yield


def _renew_workers() -> None:
    """Lets go of processes that make kernels for a card, and of kernels that they owe: they may have been ended."""
    workers = sys.modules.get("torch._inductor.async_compile")  # absent where nothing was given to it yet
    if workers is not None:
        workers.shutdown_compile_workers()
        workers.CompiledTritonKernels.cache_clear()


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """For shapes as they are: sizes that are left open cost speed, and buckets are few."""
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND)
    return compiled


def _say(tell: Tell, what: str) -> None:
    tell("compile", f"fit.compile: {what}; steps are computed as without it.")


def _words(error: BaseException) -> str:
    """The first line of what a compiler says, shortened: the rest is for its makers."""
    error = getattr(error, "inner_exception", error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:MOST_WORDS]
