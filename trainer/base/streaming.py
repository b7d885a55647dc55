"""Streaming of the frozen base: weights stay in main memory and are copied to the GPU shortly before they are used.

Weights are copied only to the GPU, never back, because they do not change. The unit of streaming is a residual or
transformer block of the UNet: while one computes, the next ones are copied on a second CUDA stream, in the order of
forward, recomputation and backward.

Each streamed weight keeps its tensor and its storage; only the storage's memory is freed and allocated again, as in
PyTorch's first FSDP. Everything that refers to the storage (tensors that autograd saved, transposed views, the state of
8-bit layers) therefore stays valid, and results are bit-identical to those of a base that stays on the GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from trainer.base.weights import Placer
from trainer.config.fit import StreamAmount

_LOG = logging.getLogger(__name__)

AHEAD = 2
"""Number of blocks that are copied ahead of the one that computes; an SDXL block takes up to 70 MB in bf16."""
MIN_BYTES = 64 << 10
"""Smaller weights stay on the GPU: norms and biases are half of a base's tensors, but hardly any of its bytes."""
_PAGE = 4096  # unit in which main memory is pinned


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

    When a block is needed, hooks fetch it together with the `AHEAD` blocks that are needed next, and free all others.
    Next are the following blocks in a forward, and the preceding ones in backward, where checkpointed blocks run again.
    Between steps, the first blocks stay on the device, because the next forward begins with them.
    """

    def __init__(self, unet: UNet2DConditionModel, amount: StreamAmount, device: torch.device) -> None:
        """Choose the blocks of a UNet that has no weights yet; `placer` then takes their weights."""
        self.device = device
        self.blocks = [_Block(module) for module in streamed_modules(unet, amount)]
        self.on_allocated: Callable[[StreamedWeight], None] = _ignore
        """Called after a weight's memory has been allocated; forecasts record it."""
        self.on_freed: Callable[[StreamedWeight], None] = _ignore
        """Called after a weight's memory has been freed."""
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
            streamed = _move_to_host(cast(nn.Parameter, getattr(module, leaf)))
            block.weights.append(streamed)
            self.on_freed(streamed)
            return True

        return place

    def rewind(self) -> None:
        """Keep only the first blocks on the device, for the next forward; call it after every backward."""
        self._hold(list(range(min(AHEAD, len(self.blocks)))))

    def close(self) -> None:
        """Free all memory on the device, and unpin main memory; the model becomes unusable."""
        self._hold([])
        for weight in self.weights:
            if weight.host is not None:
                _unpin(weight.host)
                weight.host = None

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
        """Prepare the next forward if no backward follows: in validation and previews."""
        if not torch.is_grad_enabled():
            self.rewind()

    def _need(self, index: int, *, backward: bool) -> None:
        """Make block ``index`` usable by the computing stream, and fetch those that are needed next."""
        self._hold([index, *self._following(index, backward=backward)])
        block = self.blocks[index]
        if block.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(block.copied)
            block.copied = None

    def _following(self, index: int, *, backward: bool) -> list[int]:
        """Return the blocks needed after ``index``: backward follows a training forward, a forward follows backward."""
        last = len(self.blocks) - 1
        if backward:
            steps = range(index - 1, index - 1 - AHEAD, -1)
            return [step if step >= 0 else -step - 1 for step in steps if -step - 1 <= last]
        steps = range(index + 1, index + 1 + AHEAD)
        if torch.is_grad_enabled():
            return [step if step <= last else 2 * last - step + 1 for step in steps if 2 * last - step + 1 >= 0]
        return [step % (last + 1) for step in steps]

    def _hold(self, indices: Sequence[int]) -> None:
        """Free all blocks but those at ``indices``, and fetch these in the given order."""
        wanted = {id(self.blocks[index]) for index in indices}
        for block in self.blocks:
            if block.resident and id(block) not in wanted:
                self._free(block)
        for index in indices:
            if not self.blocks[index].resident:
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
    count = 0 if amount == "none" else len(every) if amount == "full" else min(amount, len(every))
    return [
        module for place, module in enumerate(every) if (place + 1) * count // len(every) > place * count // len(every)
    ]


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


def _move_to_host(parameter: nn.Parameter) -> StreamedWeight:
    """Copy a placed weight to pinned main memory and free its memory on the device."""
    storage = parameter.untyped_storage()
    size = storage.nbytes()
    host = None
    if storage.device.type != "meta":
        host = _pinned(size) if storage.device.type == "cuda" else torch.empty(size, dtype=torch.uint8)
        host.copy_(_bytes_in(storage))
    storage.resize_(0)
    return StreamedWeight(parameter, storage, size, host)


def _bytes_in(storage: torch.UntypedStorage) -> Tensor:
    """Return the content of a storage as uint8 (n,), without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned(size: int) -> Tensor:
    """Return ``size`` bytes of main memory, pinned if the system allows it.

    PyTorch's own allocator rounds pinned memory up to powers of two, which would take a quarter more memory for SDXL.
    Without pinning, copies are slower and do not overlap with computation.
    """
    rounded = -(-size // _PAGE) * _PAGE
    whole = torch.empty(rounded + _PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    pages = whole[start : start + rounded]  # whole pages, so that no page is pinned twice
    failed = int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.numel(), 0))  # type: ignore[no-untyped-call]
    if failed:
        _LOG.debug("Could not pin %d bytes of main memory: CUDA error %d", size, failed)
    return pages[:size]


def _unpin(host: Tensor) -> None:
    if host.is_pinned():
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())  # type: ignore[no-untyped-call]


def _ignore(_: StreamedWeight) -> None:
    """Do nothing; the default for `on_allocated` and `on_freed`."""
