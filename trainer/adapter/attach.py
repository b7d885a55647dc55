"""Attaches the LoRA that a recipe asks for to a base, and holds its working weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.adapter import lean as lean_room
from trainer.adapter.layers import Factors, Size, inject, models_by_part
from trainer.adapter.lean.blocks import install
from trainer.adapter.lean.layers import register
from trainer.adapter.names import Part, Slot, slots
from trainer.config.base import Family
from trainer.config.recipe import RecipeConfig
from trainer.errors import JobError, LoraFileError


@dataclass
class Adapter:
    """The LoRA layers in a base, as the training step sees them."""

    table: tuple[Slot, ...]
    """All layers of the base that could be."""
    slots: tuple[Slot, ...]
    """The layers that are trained, in the order of the name table."""
    rank: dict[str, int]
    """The rank of each, by kohya name."""
    alpha: dict[str, float]
    """The alpha of each, by kohya name: it acts with alpha / rank."""
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    """The working weights by file key, `down` before `up`, in slot order: PEFT's own parameters in the base's dtype."""
    part_of: dict[str, Part] = field(default_factory=dict)
    """Which model each parameter belongs to, by file key."""
    lean: bool = False
    """Whether its layers are those of trainer.adapter.lean instead of PEFT's."""
    training: bool = True
    """Whether the dropouts act; switch off to draw, to validate, or to compare."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights of any float dtype into the working weights; LoraFileError unless names and shapes agree."""
        wrong = sorted(weights.keys() ^ self.parameters.keys()) or [
            key for key, parameter in self.parameters.items() if weights[key].shape != parameter.shape
        ]
        if wrong:
            raise LoraFileError(
                "lora.mismatch",
                f"The weights do not fit the LoRA that the recipe describes: {len(wrong)} differ, first {wrong[0]}.",
                "Use weights that were made with the same base family, layers and ranks.",
            )
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(weights[key])


def attach(
    family: Family,
    unet: nn.Module,
    text_encoders: Sequence[nn.Module],
    recipe: RecipeConfig,
    *,
    dtype: torch.dtype,
    generator: Callable[[str], np.random.Generator],
    lean: bool | None = None,
) -> Adapter:
    """Attach LoRA layers to the parts that the recipe trains; only their weights require gradients afterwards.

    `dtype` is the one the base computes in. `generator` gives each layer's random numbers by its kohya name, so that a
    layer starts alike whatever else is trained. Models on the meta device get meta weights. `lean` asks for the layers
    of trainer.adapter.lean instead of PEFT's; absent: as that room has it switched. Raises JobError when every learning
    rate is zero.
    """
    table = slots(family, _config_of(unet), [_config_of(encoder) for encoder in text_encoders])
    chosen = {slot: _size(slot, recipe) for slot in table if _is_trained(slot, recipe)}
    if not chosen:
        raise JobError(
            "recipe.nothing_trained",
            "Every learning rate is zero, so nothing would be trained.",
            "Set recipe.learning_rate (1e-4 is usual) or that of a text encoder above zero.",
        )
    adapter = Adapter(
        table=table,
        slots=tuple(chosen),
        rank={slot.kohya: size.rank for slot, size in chosen.items()},
        alpha={slot.kohya: size.alpha for slot, size in chosen.items()},
        lean=lean_room.SWITCHED_ON if lean is None else lean,
    )
    dropouts = recipe.has_dropouts
    customise = partial(register, dropouts=dropouts) if adapter.lean else None
    for part, model in models_by_part(unet, text_encoders).items():
        model.requires_grad_(False)
        sizes = {slot: size for slot, size in chosen.items() if slot.part == part}
        for slot, factors in inject(model, sizes, dtype, customise).items() if sizes else ():
            _adopt(adapter, slot, factors, recipe)
    if adapter.lean:
        install(unet)
    if not any(parameter.is_meta for parameter in adapter.parameters.values()):
        adapter.load(initial_weights(adapter, generator))
    return adapter


def initial_weights(adapter: Adapter, generator: Callable[[str], np.random.Generator]) -> dict[str, Tensor]:
    """Draw the weights an adapter starts from, in fp32 by file key: `down` uniform, `up` zero, so it does nothing yet.

    The bound 1/sqrt(fan_in) is what kaiming_uniform(a=sqrt(5)) comes to, as in sd-scripts and PEFT.
    """
    weights = {}
    for slot in adapter.slots:
        shape = tuple(adapter.parameters[slot.down].shape)
        bound = np.float32(1 / math.sqrt(math.prod(shape[1:])))
        values = generator(slot.kohya).random(shape, dtype=np.float32)
        weights[slot.down] = torch.from_numpy((2 * values - 1) * bound)
        weights[slot.up] = torch.zeros(adapter.parameters[slot.up].shape)
    return weights


def _config_of(model: nn.Module) -> Mapping[str, Any]:
    """Return the config of a diffusers model, a mapping, or of a transformers one, an object."""
    config: Any = model.config
    return config if isinstance(config, Mapping) else cast(dict[str, Any], config.to_dict())


def _is_trained(slot: Slot, recipe: RecipeConfig) -> bool:
    if slot.part == "unet":
        kinds = {"attention": ("attention",), "linear": ("attention", "linear"), "all": ("attention", "linear", "conv")}
        return recipe.learning_rate > 0 and slot.kind in kinds[recipe.layers]
    encoder = recipe.text_encoder if slot.part == "text_encoder" else recipe.text_encoder_2
    return encoder.learning_rate > 0


def _size(slot: Slot, recipe: RecipeConfig) -> Size:
    """Only 3x3 kernels take the convolutions' rank, as in sd-scripts; LoCon's other layers take the recipe's."""
    if slot.part == "unet":
        rank, alpha = (recipe.conv_rank, recipe.conv_alpha) if slot.kernel == 3 else (None, None)
    else:
        encoder = recipe.text_encoder if slot.part == "text_encoder" else recipe.text_encoder_2
        rank, alpha = encoder.rank, encoder.alpha
    return Size(rank or recipe.rank, alpha or recipe.alpha)


def _adopt(adapter: Adapter, slot: Slot, factors: Factors, recipe: RecipeConfig) -> None:
    adapter.parameters[slot.down] = cast(nn.Parameter, factors.down.weight)
    adapter.parameters[slot.up] = cast(nn.Parameter, factors.up.weight)
    adapter.part_of[slot.down] = adapter.part_of[slot.up] = slot.part
    if recipe.has_dropouts:
        factors.down.register_forward_hook(partial(_drop_out, adapter, recipe))


def _drop_out(adapter: Adapter, recipe: RecipeConfig, down: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
    """Apply the three dropouts to what `down` gives, as sd-scripts does (its networks/lora.py).

    They draw from the device's own stream (no host read); checkpointing restores that stream when it recomputes.
    Rank dropout scales up what is left; module dropout, as in sd-scripts, does not.
    """
    if not adapter.training:
        return None
    if recipe.dropout:
        # Numbers are drawn in the order of memory, which is that of the layout: one seed has to drop the same in each.
        output = F.dropout(output.contiguous(), recipe.dropout)
    if recipe.rank_dropout:
        axis = 1 if isinstance(down, nn.Conv2d) else output.ndim - 1
        shape = [size if dim in (0, axis) else 1 for dim, size in enumerate(output.shape)]
        kept = torch.rand(shape, device=output.device) >= recipe.rank_dropout
        output = output * (kept.to(output.dtype) / (1 - recipe.rank_dropout))
    if recipe.module_dropout:
        kept = torch.rand((), device=output.device) >= recipe.module_dropout
        output = output * kept.to(output.dtype)
    return output
