"""Transformer blocks without what diffusers asks each time to tell kinds apart, over its unchanged modules."""

from __future__ import annotations

from typing import Any, cast

from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from trainer.adapter.lean.attention import LeanAttention, lean_attention
from trainer.adapter.lean.feed_forward import LeanFeedForward, lean_feed_forward
from trainer.adapter.lean.products import Source
from trainer.adapter.lean.residual import lean_residuals


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
        if isinstance(module, BasicTransformerBlock) and _is_ordinary(module):
            module.__class__ = LeanBlock


def _is_ordinary(block: BasicTransformerBlock) -> bool:
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
