"""Attention whose q, k and v are computed together, over diffusers' unchanged modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor, nn

from trainer.adapter.lean.layers import WholeLinear, through
from trainer.adapter.lean.products import Source, projections_with_lora


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
    if not _is_ordinary(attention):
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


def _is_ordinary(attention: Attention) -> bool:
    """Whether diffusers' processor comes to the same for it as ours."""
    absent = (attention.spatial_norm, attention.group_norm, attention.norm_cross, attention.norm_q, attention.norm_k)
    return (
        type(cast(object, attention.processor)) is AttnProcessor2_0
        and not any(absent)
        and not attention.residual_connection
        and attention.rescale_output_factor == 1.0
    )
