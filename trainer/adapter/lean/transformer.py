"""Transformer blocks without what diffusers asks each time to tell kinds apart, over its unchanged modules."""

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

from trainer.adapter.lean.lora import Source, WholeLinear, projections_with_lora, through
from trainer.adapter.lean.residual import lean_residuals


class LeanAttention(Attention):
    """diffusers' attention of transformer blocks, without the work that changes nothing.

    On the device that is two reshapes for pictures, and the division by a factor of 1.0, which costs three operations
    in all; on the host the look at its processor's signature, which takes longer than a product.
    """

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        source: Source | None = None,
        **cross_attention_kwargs: Any,
    ) -> Tensor:
        """(B, places, width) to the same; with a mask, or anything else, as diffusers does it.

        ``source`` says what `hidden_states` was made of, so that it need not be kept.
        """
        if attention_mask is not None or cross_attention_kwargs:
            other: Tensor = super().forward(
                hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs
            )
            return other
        if encoder_hidden_states is None:
            query, key, value = projected((self.to_q, self.to_k, self.to_v), hidden_states, source)
        else:
            query = through(self.to_q, hidden_states, source)
            key, value = projected((self.to_k, self.to_v), encoder_hidden_states)
        query, key, value = (
            part.view(*part.shape[:-1], self.heads, -1).transpose(1, 2) for part in (query, key, value)
        )
        seen = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = seen.transpose(1, 2).flatten(2)
        for module in self.to_out:
            result = module(result)
        return result


def lean_attention(attention: Attention) -> None:
    """Let an attention compute so over its own modules, and lay the LoRAs of its projections together.

    Call it before the LoRAs' weights are set: they move. One with anything out of the ordinary stays as it is.
    """
    if not _is_plain_attention(attention):
        return
    text = (attention.to_k, attention.to_v)
    _lay_together(text if attention.is_cross_attention else (attention.to_q, *text))
    attention.__class__ = LeanAttention


def projected(layers: Sequence[nn.Module], x: Tensor, source: Source | None = None) -> Sequence[Tensor]:
    """What each of the layers makes of x, in one function where their LoRAs lie together."""
    if not torch.compiler.is_compiling():
        loras = [layer.alone_on(x) for layer in layers if isinstance(layer, WholeLinear)]
        acting = [lora for lora in loras if lora is not None]
        if len(acting) == len(layers) and all(lora.strength == acting[0].strength for lora in acting):
            downs, ups = [_weight(lora.down) for lora in acting], [lora.up for lora in acting]
            if _adjoin(downs) and _adjoin(ups):
                frozen = [_weight(cast(nn.Module, layer.base_layer)) for layer in layers]
                return projections_with_lora(x, frozen, downs, ups, acting[0].strength, source)
    return [through(layer, x, source) for layer in layers]


def _lay_together(layers: Sequence[nn.Module]) -> None:
    """Move the weights of LoRAs of one shape into memory in which they follow each other; of layers without bias."""
    alike = [layer for layer in layers if isinstance(layer, WholeLinear) and layer.get_base_layer().bias is None]
    if len(alike) < len(layers):
        return
    for part in ("lora_A", "lora_B"):
        weights = [_weight(module) for layer in alike for module in getattr(layer, part).values()]
        if len({weight.shape for weight in weights}) == 1:
            for weight, place in zip(weights, torch.stack([weight.detach() for weight in weights]), strict=True):
                weight.data = place


def _adjoin(weights: Sequence[Tensor]) -> bool:
    """Whether weights lie where `_lay_together` put them; a weight that was moved since begins its own memory."""
    size = weights[0].numel()
    return all(weight.storage_offset() == index * size for index, weight in enumerate(weights))


def _weight(module: nn.Module) -> Tensor:
    return cast(Tensor, module.weight)


def _is_plain_attention(attention: Attention) -> bool:
    """Whether diffusers' processor comes to the same for it as ours."""
    absent = (attention.spatial_norm, attention.group_norm, attention.norm_cross, attention.norm_q, attention.norm_k)
    return (
        type(cast(object, attention.processor)) is AttnProcessor2_0
        and not any(absent)
        and not attention.residual_connection
        and attention.rescale_output_factor == 1.0
    )


class LeanFeedForward(FeedForward):
    """diffusers' layers with GEGLU between them (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    Of what lies between the two layers backward finds what the first gave and no more; the rest is made again.
    """

    def forward(self, hidden_states: Tensor, source: Source | None = None, **kwargs: Any) -> Tensor:
        """(..., width) to the same; ``source`` says what `hidden_states` was made of, so that it need not be kept."""
        first, _, second = self.net
        wide = through(cast(nn.Module, first.proj), hidden_states, source)
        return through(second, gated(wide), Source(wide, _gated))


def lean_feed_forward(layers: FeedForward) -> None:
    """Let them compute so; with anything out of the ordinary they stay as they are."""
    kinds = [type(layer) for layer in layers.net]
    if type(layers) is FeedForward and kinds[:2] == [GEGLU, nn.Dropout] and len(kinds) == 3 and layers.net[1].p == 0.0:
        layers.__class__ = LeanFeedForward


def gated(x: Tensor) -> Tensor:
    """hidden · GELU(gate) of x (..., 2 n), whose first n are `hidden` and the others `gate`: (..., n)."""
    if torch.compiler.is_compiling():
        hidden, gate = x.chunk(2, dim=-1)
        return hidden * F.gelu(gate)
    result: Tensor = _Gated.apply(x)  # type: ignore[no-untyped-call]
    return result


def _gated(x: Tensor) -> Tensor:
    hidden, gate = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(hidden)


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gated(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        hidden, gate = x.chunk(2, dim=-1)
        of_x = torch.empty_like(x)
        of_hidden, of_gate = of_x.chunk(2, dim=-1)
        again = F.gelu(gate)
        torch.mul(gradient, again, out=of_hidden)
        torch.mul(gradient, hidden, out=again)
        torch.ops.aten.gelu_backward(again, gate, grad_input=of_gate)
        return of_x


class LeanBlock(BasicTransformerBlock):
    """A block as SD 1.5 and SDXL have it: attention to itself, to the text, and two layers, each after a norm.

    What a norm gives is not kept for backward but made again.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """(B, places, width) to the same, the text (B, tokens, width of the text); with more, as diffusers does it."""
        if attention_mask is not None or any(one is not None for one in (*args, *kwargs.values())):
            other: Tensor = super().forward(hidden_states, attention_mask, encoder_hidden_states, *args, **kwargs)
            return other
        x = hidden_states
        x = self.attn1(self.norm1(x), source=Source(x, self.norm1.forward)) + x
        x = self.attn2(self.norm2(x), encoder_hidden_states, source=Source(x, self.norm2.forward)) + x
        result: Tensor = self.ff(self.norm3(x), Source(x, self.norm3.forward)) + x
        return result


def install(unet: nn.Module) -> None:
    """Let a UNet's blocks of all kinds compute so; what is out of the ordinary stays as it is.

    Call it before the LoRAs' weights are set: they move.
    """
    lean_residuals(unet)
    for module in unet.modules():
        if isinstance(module, Attention):
            lean_attention(module)
        elif isinstance(module, FeedForward):
            lean_feed_forward(module)
    for module in unet.modules():
        if isinstance(module, BasicTransformerBlock) and _is_plain_block(module):
            module.__class__ = LeanBlock


def _is_plain_block(block: BasicTransformerBlock) -> bool:
    """Whether diffusers' forward comes to the same for it as ours."""
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
