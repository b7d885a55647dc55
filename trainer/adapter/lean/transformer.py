"""SD 1.5 and SDXL transformer blocks based on diffusers' modules, without branches for other architectures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trainer.adapter.lean.lora import FusedLinear, Source, call_layer, projections_with_lora
from trainer.adapter.lean.residual import lean_residuals


class LeanAttention(Attention):
    """Attention for transformer blocks, without the operations that have no effect here.

    On the GPU, it omits three operations: two reshapes for image input and the division by rescale_output_factor = 1.0.
    On the host, it does not inspect the processor's signature in every call, which takes longer than a GEMM.
    """

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        source: Source | None = None,
        **cross_attention_kwargs: Any,
    ) -> Tensor:
        """Return the attention output (B, tokens, width) for input of the same shape.

        With a mask or other arguments, diffusers' forward is used. ``source`` says how backward recomputes
        `hidden_states` instead of saving them.
        """
        if attention_mask is not None or cross_attention_kwargs:
            other: Tensor = super().forward(
                hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs
            )
            return other
        if encoder_hidden_states is None:
            query, key, value = project((self.to_q, self.to_k, self.to_v), hidden_states, source)
        else:
            query = call_layer(self.to_q, hidden_states, source)
            key, value = project((self.to_k, self.to_v), encoder_hidden_states)
        query, key, value = (
            part.view(*part.shape[:-1], self.heads, -1).transpose(1, 2) for part in (query, key, value)
        )
        seen = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = seen.transpose(1, 2).flatten(2)
        for module in self.to_out:
            result = module(result)
        return result


def lean_attention(attention: Attention) -> None:
    """Turn a standard attention module into a LeanAttention.

    Also places its projections' LoRA weights next to each other in memory. This moves the weights, so call it before
    setting their values. Attention with special options stays unchanged.
    """
    if not _is_plain_attention(attention):
        return
    text = (attention.to_k, attention.to_v)
    _make_consecutive(text if attention.is_cross_attention else (attention.to_q, *text))
    attention.__class__ = LeanAttention


def project(layers: Sequence[nn.Module], x: Tensor, source: Source | None = None) -> Sequence[Tensor]:
    """Return each layer's output for x, computed by a single autograd function if possible.

    This requires that all layers are FusedLinear with active LoRAs of the same scale, consecutive in memory.
    """
    if not torch.compiler.is_compiling():
        loras = [layer.active_lora(x) for layer in layers if isinstance(layer, FusedLinear)]
        active = [lora for lora in loras if lora is not None]
        if len(active) == len(layers) and all(lora.scale == active[0].scale for lora in active):
            downs, ups = [_weight(lora.down) for lora in active], [lora.up for lora in active]
            # Check this in every call, because moving the model to another device gives each weight its own memory.
            if _are_consecutive(downs) and _are_consecutive(ups):
                frozen = [_weight(cast(nn.Module, layer.base_layer)) for layer in layers]
                return projections_with_lora(x, frozen, downs, ups, active[0].scale, source)
    return [call_layer(layer, x, source) for layer in layers]


def _make_consecutive(layers: Sequence[nn.Module]) -> None:
    """Make the layers' LoRA weights consecutive in memory if they all have the same shape and no layer has a bias.

    Each weight becomes a view of one stacked tensor, which costs no extra memory; copying into it keeps it there.
    """
    plain = [layer for layer in layers if isinstance(layer, FusedLinear) and layer.get_base_layer().bias is None]
    if len(plain) < len(layers):
        return
    for part in ("lora_A", "lora_B"):
        weights = [_weight(module) for layer in plain for module in getattr(layer, part).values()]
        if len({weight.shape for weight in weights}) == 1:
            for weight, view in zip(weights, torch.stack([weight.detach() for weight in weights]), strict=True):
                weight.data = view  # keeps the parameter object, to which PEFT and Adapter.parameters refer


def _are_consecutive(weights: Sequence[Tensor]) -> bool:
    """Return whether the weights are still consecutive in one storage; a weight that was moved has its own storage."""
    size = weights[0].numel()
    return all(weight.storage_offset() == index * size for index, weight in enumerate(weights))


def _weight(module: nn.Module) -> Tensor:
    return cast(Tensor, module.weight)


def _is_plain_attention(attention: Attention) -> bool:
    """Return whether LeanAttention computes the same result as diffusers' processor for this module."""
    absent = (attention.spatial_norm, attention.group_norm, attention.norm_cross, attention.norm_q, attention.norm_k)
    return (
        type(cast(object, attention.processor)) is AttnProcessor2_0
        and not any(absent)
        and not attention.residual_connection
        and attention.rescale_output_factor == 1.0
    )


class LeanFeedForward(FeedForward):
    """Feed-forward layers with GEGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    Between the two linear layers, only the first one's output is saved; backward recomputes the gated product.
    """

    def forward(self, hidden_states: Tensor, source: Source | None = None, **kwargs: Any) -> Tensor:
        """Return the output (..., width) for input of the same shape; ``source`` says how to recompute the input."""
        first, _, second = self.net
        wide = call_layer(cast(nn.Module, first.proj), hidden_states, source)
        return call_layer(second, geglu(wide), Source(wide, _gated))


def lean_feed_forward(layers: FeedForward) -> None:
    """Turn standard GEGLU feed-forward layers into a LeanFeedForward; leave other layers unchanged."""
    kinds = [type(layer) for layer in layers.net]
    if type(layers) is FeedForward and kinds[:2] == [GEGLU, nn.Dropout] and len(kinds) == 3 and layers.net[1].p == 0.0:
        layers.__class__ = LeanFeedForward


def geglu(x: Tensor) -> Tensor:
    """Return hidden · GELU(gate) (..., n) for x (..., 2 n), whose first half is `hidden` and second half `gate`."""
    if torch.compiler.is_compiling():
        hidden, gate = x.chunk(2, dim=-1)
        return hidden * F.gelu(gate)
    result: Tensor = _Gated.apply(x)  # type: ignore[no-untyped-call]
    return result


def _gated(x: Tensor) -> Tensor:
    hidden, gate = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(hidden)


class _Gated(Function):
    """GEGLU that saves only its input, the first linear layer's output; autograd would also save GELU(gate)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gated(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        hidden, gate = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        # Both halves are written in place, and `activated` is reused: concatenating would need a second tensor of 2 n.
        grad_hidden, grad_gate = grad_x.chunk(2, dim=-1)
        activated = F.gelu(gate)
        torch.mul(grad_output, activated, out=grad_hidden)
        torch.mul(grad_output, hidden, out=activated)
        torch.ops.aten.gelu_backward(activated, gate, grad_input=grad_gate)
        return grad_x


class LeanBlock(BasicTransformerBlock):
    """SD 1.5 and SDXL transformer block: self-attention, cross-attention and feed-forward, each after a norm.

    The norms' outputs are not saved for backward but recomputed from the residual stream, which is saved anyway.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the output (B, tokens, width) for input of the same shape and text (B, text tokens, text width).

        With any other argument, diffusers' forward is used.
        """
        if attention_mask is not None or any(one is not None for one in (*args, *kwargs.values())):
            other: Tensor = super().forward(hidden_states, attention_mask, encoder_hidden_states, *args, **kwargs)
            return other
        x = hidden_states
        x = self.attn1(self.norm1(x), source=Source(x, self.norm1.forward)) + x
        x = self.attn2(self.norm2(x), encoder_hidden_states, source=Source(x, self.norm2.forward)) + x
        result: Tensor = self.ff(self.norm3(x), Source(x, self.norm3.forward)) + x
        return result


def install(unet: nn.Module) -> None:
    """Replace the forwards of a UNet's residual, attention, feed-forward and transformer blocks with lean ones.

    Blocks with special options stay unchanged. Call this before setting the LoRA weights, because it moves them.
    """
    lean_residuals(unet)
    for module in unet.modules():
        if isinstance(module, Attention):
            lean_attention(module)
        elif isinstance(module, FeedForward):
            lean_feed_forward(module)
    # After the loop above, because a block is only replaced if its attention and feed-forward were.
    for module in unet.modules():
        if isinstance(module, BasicTransformerBlock) and _is_plain_block(module):
            module.__class__ = LeanBlock


def _is_plain_block(block: BasicTransformerBlock) -> bool:
    """Return whether LeanBlock computes the same result as diffusers' forward for this block."""
    norms, attentions = (block.norm1, block.norm2, block.norm3), (block.attn1, block.attn2)
    return (
        type(block) is BasicTransformerBlock
        and all(type(cast(object, norm)) is nn.LayerNorm for norm in norms)
        and all(type(attention) is LeanAttention for attention in attentions)
        and type(block.ff) is LeanFeedForward
        and block.norm_type == "layer_norm"
        and block.pos_embed is None
        and not block.only_cross_attention
        and block._chunk_size is None
    )
