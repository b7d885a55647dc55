"""Transformer blocks without what diffusers asks each time to tell kinds apart, over its unchanged modules."""

from __future__ import annotations

from typing import Any

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from trainer.adapter.lean.attention import lean


class LeanBlock(BasicTransformerBlock):
    """A block as SD 1.5 and SDXL have it: attention to itself, to the text, and two layers, each after a norm."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """(B, places, width) to the same, the text (B, tokens, width of the text); with more, as diffusers does it.

        What is alive at which time is as with diffusers' own, so memory is too: no name more, no name less.
        """
        if attention_mask is not None or any(one is not None for one in (*args, *kwargs.values())):
            other: Tensor = super().forward(hidden_states, attention_mask, encoder_hidden_states, *args, **kwargs)
            return other
        norm_hidden_states = self.norm1(hidden_states)
        attn_output = self.attn1(norm_hidden_states)
        hidden_states = attn_output + hidden_states
        norm_hidden_states = self.norm2(hidden_states)
        attn_output = self.attn2(norm_hidden_states, encoder_hidden_states)
        hidden_states = attn_output + hidden_states
        norm_hidden_states = self.norm3(hidden_states)
        ff_output = self.ff(norm_hidden_states)
        return ff_output + hidden_states  # type: ignore[no-any-return]


def install(model: nn.Module) -> None:
    """Let a UNet's transformer blocks and their attentions compute so; what is out of the ordinary stays as it is.

    Call it before the LoRAs' weights are set: they move.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            lean(module)
        elif isinstance(module, BasicTransformerBlock) and _is_ordinary(module):
            module.__class__ = LeanBlock


def _is_ordinary(block: BasicTransformerBlock) -> bool:
    """Whether diffusers' forward comes to the same for it as ours."""
    return (
        type(block) is BasicTransformerBlock
        and block.norm_type == "layer_norm"
        and block.pos_embed is None
        and block.attn2 is not None
        and not block.only_cross_attention
        and block._chunk_size is None
    )
