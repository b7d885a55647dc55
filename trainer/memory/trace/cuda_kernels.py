"""What CUDA does that meta tensors do not show: attention and dropout kernels, hidden buffers, sums in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import bitsandbytes  # noqa: F401 (defines its operators)
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from trainer.memory.trace.derive import FLASH_BLOCK

AttentionKernel = Literal["flash", "efficient", "cudnn", "math"]

aten = torch.ops.aten

# PyTorch computes these out of place for tensors like meta's, of which it does not know whether their first operand is
# free to be overwritten: the sum of gradients that meet (torch/csrc/autograd/input_buffer.cpp) and what scatters a
# gradient into zeros (FunctionsManual.cpp). On CUDA they are done in place where nothing else holds that operand.
_IN_PLACE_IN_BACKWARD = frozenset({aten.add.Tensor, aten.index_put.default})

# Kernels read by blocks of so many queries or keys; buffers are rounded up to them.
_FLASH_HEAD = 32
_FLASH_WIDE = 128
_EFFICIENT_BLOCK = 64
_NORM_CHUNK = 65536


def attention_kernel(choice: str | None, dtype: torch.dtype) -> AttentionKernel:
    """The kernel that PyTorch takes on a card for ``fit.attention``: flash computes in 16 bits only."""
    stated: dict[str | None, AttentionKernel] = {"efficient": "efficient", "cudnn": "cudnn", "math": "math"}
    return stated.get(choice, "efficient" if dtype == torch.float32 else "flash")


@contextmanager
def as_on_cuda(kernel: AttentionKernel) -> Iterator[None]:
    """Inside, attention and dropout run the operations that they run on CUDA; on meta they would run others."""
    attention, dropout = F.scaled_dot_product_attention, F.dropout
    kernels: dict[AttentionKernel, Callable[..., Tensor]] = {
        "flash": _flash,
        "efficient": _efficient,
        "cudnn": _cudnn,
        "math": attention,
    }

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        chosen = _efficient if kernel == "flash" and attn_mask is not None else kernels[kernel]
        return chosen(query, key, value, attn_mask, *args, **kwargs)

    F.scaled_dot_product_attention = scaled_dot_product_attention
    F.dropout = _dropout
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.dropout = attention, dropout


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """As torch's dispatcher calls it: heads padded to a multiple of 8."""
    width = query.shape[-1]
    if width % 8:
        query, key, value = (F.pad(tensor, (0, -width % 8)) for tensor in (query, key, value))
        scale = scale or 1 / math.sqrt(width)
    out: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return out[..., :width] if width % 8 else out


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    saved = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    out: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, saved, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    saved = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    out: Tensor = aten._scaled_dot_product_cudnn_attention(
        query, key, value, bias, saved, dropout_p, is_causal, False, scale=scale
    )[0]
    return out


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as numbers to add, in memory whose rows are 16 numbers aligned, as pad_bias in attention.cpp has it."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), -math.inf).to(query.dtype)
    keys = mask.shape[-1]
    if keys % 16:
        mask = F.pad(mask, (0, -keys % 16))[..., :keys]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """CUDA keeps a mask of bytes."""
    if not training or p == 0.0:
        return input
    out: Tensor = aten.native_dropout(input, p, True)[0]
    return out


def gemm_4bit(
    A: Tensor,  # noqa: N803 (as bitsandbytes names it)
    B: Tensor,  # noqa: N803
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """bitsandbytes' product with 4-bit weights as its CUDA backend takes it for many rows: weights restored whole.

    For fewer than 1537 rows some cards take a fused kernel, which needs less.
    """
    ops = torch.ops.bitsandbytes
    if absmax_8bit is not None and absmax_offset is not None:
        restored = ops.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = restored + absmax_offset
    weight = ops.dequantize_4bit.default(B, absmax, blocksize, quant_type, shape, A.dtype)
    # Spelled out, since F.linear stays one operation below autograd, whose work is not counted.
    rows = A.reshape(-1, A.shape[-1])
    out = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return out.view(*A.shape[:-1], out.shape[-1])


def safe_softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The softmax of the math kernel of attention by its parts: rows without any key to look at become zero."""
    shares = torch.softmax(scores, dim, dtype=dtype)
    hidden = scores.isneginf()
    blind = hidden.all(dim, keepdim=True)
    shares.masked_fill_(blind, 0.0)
    del blind, hidden  # in the order in which the library lets go of them
    return shares


def overwritten(func: OpOverload, args: Sequence[Any], *, backward: bool, after_product: bool) -> Tensor | None:
    """The operand in whose place CUDA would compute ``func`` if nothing else holds it; None where it would not.

    ``backward``: it is part of a backward; ``after_product``: the operation before it was a product of matrices, to
    which aten::linear adds its bias (Linear.cpp) and the math kernel of attention its mask (attention.cpp).
    """
    if backward:
        in_place = func in _IN_PLACE_IN_BACKWARD
    else:
        in_place = after_product and func is aten.add.Tensor and _is_tensor_of_fewer_axes(args[1], args[0])
    # A view holds the tensor that it is a view of, so that its memory always has another owner.
    return args[0] if in_place and not args[0]._is_view() and _is_dense(args[0]) else None


def _is_dense(tensor: Tensor) -> bool:
    dense: bool = aten.is_non_overlapping_and_dense.default(tensor)
    return dense


def _is_tensor_of_fewer_axes(value: Any, than: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim < than.ndim


def hidden_bytes(func: OpOverload, args: Sequence[Any]) -> tuple[int, ...]:
    """Bytes of each buffer that CUDA's kernel for ``func`` takes beside its results, and gives back when it is done."""
    buffers = _HIDDEN.get(func)
    return buffers(args) if buffers else ()


def _flash_backward(args: Sequence[Any]) -> tuple[int, ...]:
    """dq is summed in fp32 (dq_accum), and the softmax's row sums are kept (softmax_d): flash_api.cpp, mha_bwd."""
    batch, heads, queries, width = args[1].shape
    rows = batch * heads * _up(queries, FLASH_BLOCK)
    return rows * 4, rows * _up(width, _FLASH_HEAD if width <= _FLASH_WIDE else 2 * _FLASH_HEAD) * 4


def _efficient_backward(args: Sequence[Any]) -> tuple[int, ...]:
    """The row sums delta and, for 16 bits, gradients summed in fp32: at most this (kernel_backward.h, workspace)."""
    query, key = args[1], args[2]
    batch, heads, queries, width = query.shape
    delta = batch * heads * queries * 4
    if query.dtype == torch.float32:
        return (delta,)
    rows = _up(queries, _EFFICIENT_BLOCK) + 2 * _up(key.shape[2], _EFFICIENT_BLOCK)
    return delta, batch * heads * rows * _up(width, _FLASH_HEAD) * 4


def _foreach_norm(args: Sequence[Any]) -> tuple[int, ...]:
    """A partial sum for each chunk of each tensor, as many for all as for the largest (ForeachReduceOp.cu)."""
    tensors = args[0]
    chunks = max(-(-tensor.numel() // _NORM_CHUNK) for tensor in tensors)
    return (len(tensors) * chunks * 4,)


def _group_norm(args: Sequence[Any]) -> tuple[int, ...]:
    """Scale and shift of each channel in fp32 (group_norm_kernel.cu)."""
    batch, channels = args[0].shape[:2]
    return *_copied(args[0]), batch * channels * 4, batch * channels * 4


def _group_norm_backward(args: Sequence[Any]) -> tuple[int, ...]:
    """Three numbers for each channel and two for each group, in fp32 (group_norm_kernel.cu)."""
    batch, channels = args[1].shape[:2]
    groups = args[8]
    sums = [batch * channels * 4] * 3 + [batch * groups * 4] * 2
    return *_copied(args[0]), *_copied(args[1]), *sums


def _layer_norm(args: Sequence[Any]) -> tuple[int, ...]:
    return _copied(args[0])


def _layer_norm_backward(args: Sequence[Any]) -> tuple[int, ...]:
    return *_copied(args[0]), *_copied(args[1])


def _copied(tensor: Tensor) -> tuple[int, ...]:
    """The copy that a kernel makes of a tensor that is not contiguous."""
    return () if tensor.is_contiguous() else (tensor.numel() * tensor.itemsize,)


_HIDDEN: dict[OpOverload, Callable[[Sequence[Any]], tuple[int, ...]]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
