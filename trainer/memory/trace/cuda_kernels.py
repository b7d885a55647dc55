"""Reproduce the behavior of CUDA that meta tensors do not show: kernels, hidden buffers, in-place sums."""

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

# On meta PyTorch computes these out of place, since it cannot know whether anything else needs the first operand: the
# sum of gradients that meet (torch/csrc/autograd/input_buffer.cpp), and what scatters a gradient into zeros
# (FunctionsManual.cpp). On CUDA they are done in place if nothing else holds that operand.
_IN_PLACE_IN_BACKWARD = frozenset({aten.add.Tensor, aten.index_put.default})

# Numbers of queries or keys that kernels process at a time; buffers are rounded up to them.
_FLASH_HEAD = 32
_FLASH_WIDE = 128
_EFFICIENT_BLOCK = 64
_NORM_CHUNK = 65536


def attention_kernel(choice: str | None, dtype: torch.dtype) -> AttentionKernel:
    """Return the kernel that PyTorch uses on a GPU for ``fit.attention``; flash attention needs a 16-bit dtype."""
    stated: dict[str | None, AttentionKernel] = {"efficient": "efficient", "cudnn": "cudnn", "math": "math"}
    return stated.get(choice, "efficient" if dtype == torch.float32 else "flash")


@contextmanager
def as_on_cuda(kernel: AttentionKernel) -> Iterator[None]:
    """During the block, make attention and dropout call their CUDA operations, which meta tensors otherwise skip."""
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
    """Compute flash attention as torch's dispatcher does, with heads padded to a multiple of 8."""
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
    """Return a mask as an additive bias whose rows are aligned to 16 elements, like pad_bias in attention.cpp."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), -math.inf).to(query.dtype)
    keys = mask.shape[-1]
    if keys % 16:
        mask = F.pad(mask, (0, -keys % 16))[..., :keys]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Compute dropout as on CUDA, which saves a mask of one byte per element."""
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
    """Multiply by 4-bit weights as bitsandbytes does on CUDA for many rows: dequantize all weights first.

    Below 1537 rows some GPUs use a fused kernel, which needs less memory.
    """
    ops = torch.ops.bitsandbytes
    if absmax_8bit is not None and absmax_offset is not None:
        restored = ops.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = restored + absmax_offset
    weight = ops.dequantize_4bit.default(B, absmax, blocksize, quant_type, shape, A.dtype)
    # Spelled out: F.linear would stay one operation below autograd, whose work is not counted.
    rows = A.reshape(-1, A.shape[-1])
    out = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return out.view(*A.shape[:-1], out.shape[-1])


def safe_softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the softmax of the math attention kernel as separate operations; fully masked rows become zero."""
    shares = torch.softmax(scores, dim, dtype=dtype)
    hidden = scores.isneginf()
    blind = hidden.all(dim, keepdim=True)
    shares.masked_fill_(blind, 0.0)
    del blind, hidden  # in the order in which PyTorch frees them
    return shares


def overwritten(func: OpOverload, args: Sequence[Any], *, backward: bool, after_product: bool) -> Tensor | None:
    """Return the operand that CUDA would overwrite in ``func`` if nothing else holds it; None if there is none.

    ``backward`` means that autograd runs ``func``; ``after_product`` means that it directly follows a matrix product,
    to which aten::linear adds its bias (Linear.cpp) and the math attention kernel its mask (attention.cpp).
    """
    if backward:
        in_place = func in _IN_PLACE_IN_BACKWARD
    else:
        in_place = after_product and func is aten.add.Tensor and _is_tensor_of_fewer_axes(args[1], args[0])
    # A view shares its memory with the tensor that it was made from, which always holds it as well.
    return args[0] if in_place and not args[0]._is_view() and _is_dense(args[0]) else None


def _is_dense(tensor: Tensor) -> bool:
    dense: bool = aten.is_non_overlapping_and_dense.default(tensor)
    return dense


def _is_tensor_of_fewer_axes(value: Any, than: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim < than.ndim


def hidden_bytes(func: OpOverload, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the bytes of each temporary buffer that CUDA's kernel for ``func`` allocates."""
    buffers = _HIDDEN.get(func)
    return buffers(args) if buffers else ()


def convolution_operands(func: OpOverload, args: Sequence[Any], results: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the total bytes of the operands of each convolution that cuDNN runs for ``func``, a convolution.

    Its backward runs one for the gradient of the input and one for that of the weight, if they are needed. Either reads
    two of the input, the weight and the output (or their gradients), and computes the third. cuDNN adds no bias.
    """
    backward = func is aten.convolution_backward.default
    operands = args[:3] if backward else (*args[:2], results[0])
    total = sum(tensor.numel() * tensor.itemsize for tensor in operands)
    return (total,) * (sum(args[10][:2]) if backward else 1)


def _flash_backward(args: Sequence[Any]) -> tuple[int, ...]:
    """Return the bytes of softmax row sums (softmax_d) and fp32 dq (dq_accum), as in mha_bwd (flash_api.cpp)."""
    batch, heads, queries, width = args[1].shape
    rows = batch * heads * _up(queries, FLASH_BLOCK)
    return rows * 4, rows * _up(width, _FLASH_HEAD if width <= _FLASH_WIDE else 2 * _FLASH_HEAD) * 4


def _efficient_backward(args: Sequence[Any]) -> tuple[int, ...]:
    """Return upper bounds for the bytes of delta and, for 16-bit inputs, fp32 gradients (kernel_backward.h)."""
    query, key = args[1], args[2]
    batch, heads, queries, width = query.shape
    delta = batch * heads * queries * 4
    if query.dtype == torch.float32:
        return (delta,)
    rows = _up(queries, _EFFICIENT_BLOCK) + 2 * _up(key.shape[2], _EFFICIENT_BLOCK)
    return delta, batch * heads * rows * _up(width, _FLASH_HEAD) * 4


def _foreach_norm(args: Sequence[Any]) -> tuple[int, ...]:
    """Return the bytes of partial sums: for each tensor, one per chunk of the largest tensor (ForeachReduceOp.cu)."""
    tensors = args[0]
    chunks = max(-(-tensor.numel() // _NORM_CHUNK) for tensor in tensors)
    return (len(tensors) * chunks * 4,)


def _group_norm(args: Sequence[Any]) -> tuple[int, ...]:
    """Return the bytes of fp32 scale and shift, one each per image and channel (group_norm_kernel.cu), and copies."""
    batch, channels = args[0].shape[:2]
    return *_copied(args[0]), batch * channels * 4, batch * channels * 4


def _group_norm_backward(args: Sequence[Any]) -> tuple[int, ...]:
    """Return the bytes of fp32 sums: three per channel and two per group of each image (group_norm_kernel.cu)."""
    batch, channels = args[1].shape[:2]
    groups = args[8]
    sums = [batch * channels * 4] * 3 + [batch * groups * 4] * 2
    return *_copied(args[0]), *_copied(args[1]), *sums


def _layer_norm(args: Sequence[Any]) -> tuple[int, ...]:
    return _copied(args[0])


def _layer_norm_backward(args: Sequence[Any]) -> tuple[int, ...]:
    return *_copied(args[0]), *_copied(args[1])


def _copied(tensor: Tensor) -> tuple[int, ...]:
    """Return the bytes of the copy that a kernel makes of a non-contiguous tensor; empty if it makes none."""
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
