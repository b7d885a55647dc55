"""Attention whose q, k and v are computed together, over diffusers' unchanged modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor, nn

from trainer.adapter.lean.layers import WholeLinear
from trainer.adapter.lean.products import projections_with_lora


class LeanAttnProcessor(AttnProcessor2_0):
    """diffusers' processor for the attentions of transformer blocks, without the operations that change nothing.

    Those are two reshapes for pictures, and the division by a factor of 1.0, which costs three operations in all.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """(B, places, width) to the same; with a mask as diffusers does it."""
        if attention_mask is not None:
            masked: Tensor = super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, *args, **kwargs
            )
            return masked
        if encoder_hidden_states is None:
            query, key, value = projected((attn.to_q, attn.to_k, attn.to_v), hidden_states)
        else:
            query = attn.to_q(hidden_states)
            key, value = projected((attn.to_k, attn.to_v), encoder_hidden_states)
        query, key, value = (
            part.view(*part.shape[:-1], attn.heads, -1).transpose(1, 2) for part in (query, key, value)
        )
        seen = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = seen.transpose(1, 2).flatten(2)
        for module in attn.to_out:
            result = module(result)
        return result


def install(model: nn.Module) -> None:
    """Let the attentions of a UNet's transformer blocks compute so, and lay the LoRAs of their projections together.

    Call it before the LoRAs' weights are set: they move. An attention with anything out of the ordinary stays as it is.
    """
    for module in model.modules():
        if isinstance(module, Attention) and _is_ordinary(module):
            text = (module.to_k, module.to_v)
            _lay_together(text if module.is_cross_attention else (module.to_q, *text))
            module.set_processor(cast(Any, LeanAttnProcessor)())


def projected(layers: Sequence[nn.Module], x: Tensor) -> Sequence[Tensor]:
    """What each of the layers makes of x, in one function where their LoRAs lie together."""
    if torch.compiler.is_compiling():
        return [layer(x) for layer in layers]
    alike = [layer for layer in layers if isinstance(layer, WholeLinear) and layer.acts_alone_on(x)]
    if len(alike) == len(layers):
        bases = [cast(nn.Linear, layer.base_layer) for layer in alike]
        downs, ups = [_weight(layer.down) for layer in alike], [layer.up for layer in alike]
        plain = not any(base.bias is not None for base in bases) and len({layer.strength for layer in alike}) == 1
        if plain and _adjoin(downs) and _adjoin(ups):
            return projections_with_lora(x, [base.weight for base in bases], downs, ups, alike[0].strength)
    return [layer(x) for layer in layers]


def _lay_together(layers: Sequence[nn.Module]) -> None:
    """Move the weights of LoRAs of one shape into memory in which they follow each other."""
    alike = [layer for layer in layers if isinstance(layer, WholeLinear)]
    if len(alike) < len(layers):
        return
    for weights in ([_weight(layer.down) for layer in alike], [layer.up for layer in alike]):
        if len({weight.shape for weight in weights}) == 1:
            for weight, part in zip(weights, torch.stack([weight.detach() for weight in weights]), strict=True):
                weight.data = part


def _adjoin(weights: Sequence[Tensor]) -> bool:
    """Whether weights lie where `_lay_together` put them; a weight that was moved since begins its own memory."""
    first = weights[0]
    return all(
        weight.shape == first.shape and weight.storage_offset() == first.storage_offset() + index * first.numel()
        for index, weight in enumerate(weights)
    )


def _weight(module: nn.Module) -> Tensor:
    return cast(Tensor, module.weight)


def _is_ordinary(attention: Attention) -> bool:
    """Whether diffusers' processor comes to the same for it as ours."""
    absent = (attention.spatial_norm, attention.group_norm, attention.norm_cross, attention.norm_q, attention.norm_k)
    return (
        type(cast(object, attention.processor)) is AttnProcessor2_0
        and not any(absent)
        and not attention.residual_connection
        and attention.rescale_output_factor == 1.0
    )
