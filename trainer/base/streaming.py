"""Streaming of the frozen base: weights stay in main memory and are copied to the GPU shortly before they are used.

Weights are copied only to the GPU, never back, because they do not change. The unit of streaming is a residual or
transformer block of the UNet: while one computes, the next ones are copied on a second CUDA stream, in the order of
forward, recomputation and backward.

Each streamed weight keeps its tensor and its storage; only the storage's memory is freed and allocated again, as in
PyTorch's first FSDP. Everything that refers to the storage (tensors that autograd saved, transposed views, the state of
8-bit layers) therefore stays valid, and results are bit-identical to those of a base that stays on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from trainer.base.stream_order import Pass, exchanged, following, streamed_places
from trainer.base.weights import Placer
from trainer.config.fit import StreamAmount
from trainer.host import main_memory, pinnable_bytes
from trainer.protocol.text import share
from trainer.protocol.text import size as text_of_size

MIN_BYTES = 64 << 10
"""Smaller weights stay on the GPU: norms and biases are half of a base's tensors, but hardly any of its bytes."""
_PAGE = 4096
"""Unit in which main memory is pinned, in bytes."""


@dataclass(eq=False, slots=True)
class StreamedWeight:
    """Frozen weight whose values stay in main memory, and whose storage on the device is usually empty."""

    parameter: nn.Parameter
    storage: torch.UntypedStorage
    bytes: int
    host: Tensor | None
    """Values as uint8 (n,), in pinned memory if the system allows it; None in forecasts, where weights have none."""

    def allocate(self) -> None:
        """Allocate the memory on the device, with arbitrary content."""
        self.storage.resize_(self.bytes)

    def copy(self) -> None:
        """Copy the values to the device; asynchronous if they are in pinned memory."""
        if self.host is None:
            return
        _bytes_in(self.storage).copy_(self.host, non_blocking=True)

    def free(self) -> None:
        """Free the memory on the device."""
        self.storage.resize_(0)


@dataclass(eq=False, slots=True)
class _Block:
    """Part of the UNet whose weights are copied together."""

    module: nn.Module
    weights: list[StreamedWeight] = field(default_factory=list)
    resident: bool = False
    """Whether the weights have memory on the device."""
    copied: torch.cuda.Event | None = None
    """End of the copy to the device; None if there is no copy that the computing stream has to wait for."""


class WeightStream:
    """The streamed blocks of a UNet, in the order in which a forward runs them.

    When a block is needed, hooks fetch it together with the blocks that are needed next, and free all others.
    Next are the following blocks in a forward, and the preceding ones in backward, where checkpointed blocks run again.
    Between micro-batches none stay on the device, so that each begins with the same free memory as the one before:
    blocks that stay would be at another address each time and fragment it in a way that no forecast can know. Each
    forward therefore waits for the copy of its first block, less than a millisecond from pinned memory.
    """

    def __init__(self, unet: UNet2DConditionModel, amount: StreamAmount, device: torch.device) -> None:
        """Choose the blocks of a UNet that has no weights yet; `placer` then takes their weights."""
        self.device = device
        self.blocks = [_Block(module) for module in streamed_modules(unet, amount)]
        self.on_allocated: Callable[[StreamedWeight], None] = _ignore
        """Called after a weight's memory has been allocated; forecasts record it."""
        self.on_freed: Callable[[StreamedWeight], None] = _ignore
        """Called after a weight's memory has been freed."""
        self._memory = _HostMemory(device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        for index, block in enumerate(self.blocks):
            block.module.register_forward_pre_hook(partial(self._on_forward, index))
            block.module.register_forward_hook(partial(self._on_output, index))
        unet.register_forward_hook(self._on_prediction)

    @property
    def weights(self) -> Iterator[StreamedWeight]:
        """Yield all streamed weights in the order of their blocks."""
        return (weight for block in self.blocks for weight in block.weights)

    def placer(self, placer: Placer | None) -> Placer:
        """Return a placer that moves streamed weights to main memory after ``placer`` has placed (or quantized) them.

        Each weight is copied to the GPU once, even without quantization; this takes less than a second for SDXL. At
        most one of these weights is on the GPU at a time.
        """
        # Now, because quantizing has replaced modules since the blocks were chosen.
        owners = {part: block for block in self.blocks for part in block.module.modules()}

        def place(module: nn.Module, leaf: str, tensor: Tensor) -> bool:
            block = owners.get(module)
            placed = placer is not None and placer(module, leaf, tensor)
            if block is None or tensor.nbytes < MIN_BYTES:
                return placed
            if not placed:
                weight = tensor.contiguous().to(self.device, copy=True)
                module.register_parameter(leaf, nn.Parameter(weight, requires_grad=False))
            streamed = self._move_to_host(cast(nn.Parameter, getattr(module, leaf)))
            block.weights.append(streamed)
            self.on_freed(streamed)
            return True

        return place

    def release(self) -> None:
        """Free all blocks' memory on the device; call it after every backward."""
        self._hold([])

    def close(self) -> None:
        """Free all memory on the device, and unpin main memory; the model becomes unusable."""
        self.release()
        if self._copies is not None:
            self._copies.synchronize()  # a copy may still read main memory, which is released below
        for weight in self.weights:
            if weight.host is not None:
                _unpin(weight.host)
                weight.host = None

    @property
    def pageable_text(self) -> str:
        """Return how much of the weights is not pinned, why, and what to do, in two sentences; "" if all are pinned."""
        return self._memory.pageable_text

    def _move_to_host(self, parameter: nn.Parameter) -> StreamedWeight:
        """Copy a placed weight to main memory and free its memory on the device."""
        storage = parameter.untyped_storage()
        size = storage.nbytes()
        host = None
        if storage.device.type != "meta":
            host = self._memory.allocate(size)
            host.copy_(_bytes_in(storage))
        storage.resize_(0)
        return StreamedWeight(parameter, storage, size, host)

    def _on_forward(self, index: int, *_: Any) -> None:
        """Fetch the block that is about to run, in a forward or when backward recomputes it."""
        self._need(index, backward=torch._C._current_graph_task_id() != -1)

    def _on_output(self, index: int, module: nn.Module, args: Any, output: Tensor) -> None:
        """Fetch the block again before its backward begins."""
        if output.requires_grad and torch._C._current_graph_task_id() == -1:
            output.register_hook(partial(self._on_gradient, index))  # type: ignore[no-untyped-call]

    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        self._need(index, backward=True)

    def _on_prediction(self, *_: Any) -> None:
        """Free all blocks if no backward follows: in validation and previews."""
        if not torch.is_grad_enabled():
            self.release()

    def _need(self, index: int, *, backward: bool) -> None:
        """Make block ``index`` usable by the computing stream, and fetch those that are needed next."""
        now: Pass = "backward" if backward else "forward" if torch.is_grad_enabled() else "inference"
        self._hold([index, *following(index, len(self.blocks), now)])
        block = self.blocks[index]
        if block.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(block.copied)
            block.copied = None

    def _hold(self, indices: Sequence[int]) -> None:
        """Free all blocks but those at ``indices``, and fetch these in the given order."""
        held = [place for place, block in enumerate(self.blocks) if block.resident]
        freed, fetched = exchanged(held, indices)
        for index in freed:
            self._free(self.blocks[index])
        for index in fetched:
            self._fetch(self.blocks[index])

    def _fetch(self, block: _Block) -> None:
        """Begin to copy a block to the device.

        Its memory is allocated on the computing stream, on which earlier kernels may still use the same addresses. So
        the copy waits for all kernels launched so far; those launched while it runs overlap with it.
        """
        try:
            for weight in block.weights:
                weight.allocate()
                self.on_allocated(weight)
        except BaseException:  # out of memory: leave the block as it was, because the step will be repeated
            self._free(block)
            raise
        block.resident = True
        if self._copies is None:
            for weight in block.weights:
                weight.copy()
            return
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            for weight in block.weights:
                weight.copy()
            block.copied = self._copies.record_event()

    def _free(self, block: _Block) -> None:
        """Free a block's memory for kernels launched from now on; those launched so far may still use it."""
        if block.copied is not None:  # never used: later kernels in this memory must wait for the end of the copy
            torch.cuda.current_stream(self.device).wait_event(block.copied)
            block.copied = None
        block.resident = False
        for weight in block.weights:
            if weight.storage.nbytes():
                weight.free()
                self.on_freed(weight)


def make_stream(unet: UNet2DConditionModel, amount: StreamAmount | None, device: torch.device) -> WeightStream | None:
    """Return the stream of an empty UNet's blocks; None if none are to be streamed."""
    return None if amount in (None, "none") else WeightStream(unet, amount, device)


def streamed_modules(unet: UNet2DConditionModel, amount: StreamAmount) -> list[nn.Module]:
    """Return the residual and transformer blocks to stream, in the order of a forward.

    If only some are streamed, they are spread evenly over the UNet, so that the copies are spread evenly over time.
    """
    middle = [] if unet.mid_block is None else [unet.mid_block]
    every = [module for block in (*unet.down_blocks, *middle, *unet.up_blocks) for module in _parts(block)]
    count = 0 if amount == "none" else len(every) if amount == "full" else amount
    return [every[place] for place in streamed_places(len(every), count)]


def _parts(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the residual and transformer blocks of a UNet block in the order of its forward.

    The middle block begins and ends with a residual block; elsewhere, transformer blocks follow each residual block.
    """
    resnets = list(cast(nn.ModuleList, block.resnets))
    attentions = list(cast(nn.ModuleList, getattr(block, "attentions", ())))
    if len(resnets) > len(attentions) > 0:
        yield resnets.pop(0)
        for attention, resnet in zip(attentions, resnets, strict=True):
            yield from (*_transformers(attention), resnet)
        return
    for place, resnet in enumerate(resnets):
        yield resnet
        if attentions:
            yield from _transformers(attentions[place])


def _transformers(attention: nn.Module) -> Iterator[nn.Module]:
    return (part for part in attention.modules() if isinstance(part, BasicTransformerBlock))


def _bytes_in(storage: torch.UntypedStorage) -> Tensor:
    """Return the content of a storage as uint8 (n,), without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _HostMemory:
    """Main memory for streamed weights, pinned as far as the system allows.

    Without pinning, copies are slower and do not overlap with computation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = self._pageable = 0
        self._refusal = ""
        memory = main_memory() if device.type == "cuda" else None
        self._limit = pinnable_bytes(memory) if memory else None

    def allocate(self, size: int) -> Tensor:
        """Return ``size`` bytes as uint8 (n,).

        PyTorch's own allocator rounds pinned memory up to powers of two, which would take a quarter more memory for
        SDXL.
        """
        if self._device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        rounded = -(-size // _PAGE) * _PAGE
        whole = torch.empty(rounded + _PAGE, dtype=torch.uint8)
        start = -whole.data_ptr() % _PAGE
        pages = whole[start : start + rounded]  # whole pages, so that no page is pinned twice
        if self._refusal or not self._pin(pages):
            self._pageable += size
        return pages[:size]

    def _pin(self, pages: Tensor) -> bool:
        """Pin memory; if that is not possible, remember why, because later attempts would fail too."""
        if self._limit is not None and self._pinned + pages.numel() > self._limit:
            self._refusal = f"this PC has too little free memory to pin more than {text_of_size(self._limit)}"
            return False
        error = int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.numel(), 0))  # type: ignore[no-untyped-call]
        if error:
            self._refusal = f"the driver did not pin more than {text_of_size(self._pinned)} (CUDA error {error})"
            _clear_error(self._device)
            return False
        self._pinned += pages.numel()
        return True

    @property
    def pageable_text(self) -> str:
        """Return the notice for the user; "" if all memory is pinned."""
        if not self._pageable:
            return ""
        amount = share(self._pageable, self._pinned + self._pageable)
        return (
            f"{amount} of the streamed base are not pinned in main memory and are copied more slowly: {self._refusal}. "
            "To speed up training, close other programs or stream fewer blocks (fit.stream)."
        )


def _clear_error(device: torch.device) -> None:
    """Clear the CUDA error of a call that failed; otherwise the next kernel launch would raise it.

    PyTorch has no function for that, so a launch raises it here. The error does not affect the device itself.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _unpin(host: Tensor) -> None:
    if host.is_pinned():
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())  # type: ignore[no-untyped-call]


def _ignore(_: StreamedWeight) -> None:
    """Do nothing; the default for `on_allocated` and `on_freed`."""
