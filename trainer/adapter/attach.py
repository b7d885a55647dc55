"""Attach a recipe's LoRA layers to a base, hold their working weights, and apply finished LoRAs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer as PeftLoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.adapter import lean as lean_layers
from trainer.adapter.layers import LayerSettings, trained_layers
from trainer.adapter.lean.lora import register
from trainer.adapter.lean.transformer import install
from trainer.adapter.names import Slot, slots
from trainer.adapter.reading import LoraLayer, LoraWeights, read_lora, reshape_to_layer
from trainer.config.base import Family, Part
from trainer.config.recipe import RecipeConfig
from trainer.errors import LoraFileError

ADAPTER = "default"


Factor = nn.Linear | nn.Conv2d
_SETTINGS = {"unet": "recipe", "text_encoder": "recipe.text_encoder", "text_encoder_2": "recipe.text_encoder_2"}


class Factors(NamedTuple):
    """The down (in_features to rank) and up (rank to out_features) layers of one LoRA, without bias."""

    down: Factor
    up: Factor


def inject(
    model: nn.Module,
    sizes: Mapping[Slot, LayerSettings],
    dtype: torch.dtype,
    customize: Callable[[LoraConfig], None] | None = None,
) -> dict[Slot, Factors]:
    """Wrap layers of one model in PEFT's LoRA layers and return their factors with uninitialized weights.

    All other parameters of `model` stop requiring gradients. The factors are created on their layer's device, which may
    be meta, and in `dtype`, because a quantized layer does not know the dtype it computes in. `customize` may register
    layers that PEFT injects instead of its own.
    """
    paths = {module_path(model, slot): size for slot, size in sizes.items()}
    common = Counter(paths.values()).most_common(1)[0][0]
    alphas: dict[str, Any] = {
        path: size.alpha for path, size in paths.items()
    }  # PEFT annotates int, but accepts any number
    config = LoraConfig(
        r=common.rank,
        lora_alpha=cast(int, common.alpha),
        target_modules=_any_of(paths),
        rank_pattern=_pattern({path: size.rank for path, size in paths.items()}, common.rank),
        alpha_pattern=_pattern(alphas, common.alpha),
        init_lora_weights=False,  # the caller sets all weights
    )
    if customize:
        customize(config)
    with _marked_as_quantized(model):
        # low_cpu_mem_usage creates the weights on the meta device, so that PyTorch's random state is not advanced.
        inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    return {slot: _materialize(model.get_submodule(module_path(model, slot)), dtype) for slot in sizes}


def models_by_part(unet: nn.Module, text_encoders: Sequence[nn.Module]) -> dict[Part, nn.Module]:
    """Return a base's models by part: the UNet, and one text encoder (SD 1.5) or two (SDXL)."""
    parts: tuple[Part, ...] = ("text_encoder", "text_encoder_2")
    return {"unet": unet, **dict(zip(parts, text_encoders, strict=False))}


def module_path(model: nn.Module, slot: Slot) -> str:
    """Return the slot's module path in this model; since transformers 5.6, CLIPTextModel has no "text_model" level."""
    if slot.part == "unet" or hasattr(model, "text_model"):
        return slot.module
    return slot.module.removeprefix("text_model.")


def _any_of(paths: Iterable[str]) -> str:
    # PEFT matches a string as a regex against whole paths, but the items of a list against the ends of paths, which
    # could select other layers too.
    return "|".join(re.escape(path) for path in paths)


def _pattern(values: Mapping[str, int], common: float) -> dict[str, int]:
    """Return PEFT's rank or alpha pattern: for each value other than `common`, one regex that matches its layers."""
    groups: dict[int, list[str]] = {}
    for path, value in values.items():
        if value != common:
            groups.setdefault(value, []).append(path)
    return {_any_of(group): value for value, group in groups.items()}


def _materialize(layer: nn.Module, dtype: torch.dtype) -> Factors:
    assert isinstance(layer, PeftLoraLayer)
    factors = Factors(cast(Factor, layer.lora_A[ADAPTER]), cast(Factor, layer.lora_B[ADAPTER]))
    # Not get_base_weight(): it would dequantize the whole weight only to read its device.
    device = cast(Tensor, layer.get_base_layer().weight).device
    for factor in factors:
        factor.weight = nn.Parameter(torch.empty(factor.weight.shape, dtype=dtype, device=device))
    return factors


@contextmanager
def _marked_as_quantized(model: nn.Module) -> Iterator[None]:
    """Mark the model as having 8-bit or 4-bit layers until the end of the `with` block.

    PEFT reads these attributes, which transformers' own loader sets, to decide whether to use bitsandbytes layers.
    """
    kinds = {"is_loaded_in_8bit": Linear8bitLt, "is_loaded_in_4bit": Linear4bit}
    names = [
        name
        for name, kind in kinds.items()
        if not hasattr(model, name) and any(isinstance(module, kind) for module in model.modules())
    ]
    for name in names:
        setattr(model, name, True)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)


@dataclass
class Adapter:
    """The LoRA layers attached to a base, with their working weights."""

    table: tuple[Slot, ...]
    """All layers of the base that can carry a LoRA."""
    slots: tuple[Slot, ...]
    """The trained layers, in the order of `table`."""
    rank: dict[str, int]
    """Rank of each layer, by kohya name."""
    alpha: dict[str, float]
    """Alpha of each layer, by kohya name; its LoRA is scaled by alpha / rank."""
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    """Working weights by file key in slot order, `down` before `up`: PEFT's parameters, in the base's dtype."""
    rate_factor_of: dict[str, float] = field(default_factory=dict)
    """Factor for the learning rate of each parameter's part, by file key."""
    part_of: dict[str, Part] = field(default_factory=dict)
    """Part of the base that each parameter belongs to, by file key."""
    lean: bool = False
    """Whether the layers come from trainer.adapter.lean instead of PEFT."""
    training: bool = True
    """Whether dropout is active; turn it off for previews, validation and comparisons."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights of any float dtype into the working weights.

        Raises LoraFileError if names or shapes do not match.
        """
        wrong = sorted(weights.keys() ^ self.parameters.keys()) or [
            key for key, parameter in self.parameters.items() if weights[key].shape != parameter.shape
        ]
        if wrong:
            raise LoraFileError(
                "lora.mismatch",
                f"Could not load the LoRA weights: {len(wrong)} do not match the recipe, such as {wrong[0]}.",
                "Use weights trained with the same base family, layers and ranks.",
            )
        with torch.no_grad():
            # In place, because lean layers rely on the positions of the weights in memory.
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
    """Attach LoRA layers to the parts that the recipe trains; afterward, only their weights require gradients.

    `dtype` is the one the base computes in. `generator` returns a random generator for each kohya name, so that a
    layer's initial weights do not depend on which other layers are trained. Models on the meta device get meta weights.
    `lean` selects the layers of trainer.adapter.lean (True), PEFT's (False), or the default (None). Raises JobError if
    nothing is trained or an entry of `recipe.blocks` has no effect.
    """
    table = slots(family, _config_of(unet), [_config_of(encoder) for encoder in text_encoders])
    chosen = trained_layers(table, recipe)
    adapter = Adapter(
        table=table,
        slots=tuple(chosen),
        rank={slot.kohya: size.rank for slot, size in chosen.items()},
        alpha={slot.kohya: size.alpha for slot, size in chosen.items()},
        lean=lean_layers.ENABLED if lean is None else lean,
    )
    dropouts = recipe.has_dropouts
    customize = partial(register, dropouts=dropouts) if adapter.lean else None
    for part, model in models_by_part(unet, text_encoders).items():
        model.requires_grad_(False)
        sizes = {slot: size for slot, size in chosen.items() if slot.part == part}
        for slot, factors in inject(model, sizes, dtype, customize).items() if sizes else ():
            _add_layer(adapter, slot, factors, recipe, sizes[slot].rate_factor)
    if adapter.lean:
        install(unet)  # moves the weights, so they are loaded afterwards
    if not any(parameter.is_meta for parameter in adapter.parameters.values()):
        adapter.load(initial_weights(adapter, generator))
    return adapter


def initial_weights(adapter: Adapter, generator: Callable[[str], np.random.Generator]) -> dict[str, Tensor]:
    """Return initial fp32 weights by file key: `down` is uniform and `up` is zero, so the LoRA has no effect yet.

    The bound 1/sqrt(fan_in) equals kaiming_uniform(a=sqrt(5)), which sd-scripts and PEFT use.
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
    """Return a model's config as a mapping; diffusers' configs are mappings, transformers' are objects."""
    config: Any = model.config
    return config if isinstance(config, Mapping) else cast(dict[str, Any], config.to_dict())


def _add_layer(adapter: Adapter, slot: Slot, factors: Factors, recipe: RecipeConfig, rate_factor: float) -> None:
    for key, factor in ((slot.down, factors.down), (slot.up, factors.up)):
        adapter.parameters[key] = cast(nn.Parameter, factor.weight)
        adapter.part_of[key], adapter.rate_factor_of[key] = slot.part, rate_factor
    if recipe.has_dropouts:
        factors.down.register_forward_hook(partial(_apply_dropout, adapter, recipe))


def _apply_dropout(
    adapter: Adapter, recipe: RecipeConfig, down: nn.Module, inputs: object, output: Tensor
) -> Tensor | None:
    """Apply the three kinds of dropout to the output of `down`, as sd-scripts does (its networks/lora.py).

    Masks are drawn on the device, without synchronizing with the host; gradient checkpointing restores the device's
    random state when it recomputes. Rank dropout scales up the remaining values; as in sd-scripts, module dropout does
    not.
    """
    if not adapter.training:
        return None
    if recipe.dropout:
        # The mask is drawn in memory order. contiguous() makes it the same for channels-last output with the same seed.
        output = F.dropout(output.contiguous(), recipe.dropout)
    if recipe.rank_dropout:
        axis = 1 if isinstance(down, nn.Conv2d) else output.ndim - 1
        shape = [size if dim in (0, axis) else 1 for dim, size in enumerate(output.shape)]
        mask = torch.rand(shape, device=output.device) >= recipe.rank_dropout
        output = output * (mask.to(output.dtype) / (1 - recipe.rank_dropout))
    if recipe.module_dropout:
        mask = torch.rand((), device=output.device) >= recipe.module_dropout
        output = output * mask.to(output.dtype)
    return output


WeightedLora = tuple[LoraWeights, float]  # strength
Scaled = tuple[LoraLayer, float]  # strength · alpha / rank


class AppliedLoras:
    """Finished LoRAs that are applied to the models that render images, and can be replaced or removed.

    They are not merged into the base: a small change added to fp16 or bf16 weights is mostly rounded away. Keeping them
    separate takes memory for their weights and a few percent more time, but leaves the base bit-identical. `dtype` is
    the one the base computes in. The models must have no LoRAs when this object is created.
    """

    def __init__(self, unet: nn.Module, text_encoders: Sequence[nn.Module], *, dtype: torch.dtype) -> None:
        self._models = models_by_part(unet, text_encoders)
        self._dtype = dtype
        self._factors: dict[Slot, Factors] = {}

    def use(self, loras: Sequence[WeightedLora]) -> None:
        """Apply these LoRAs, each with its strength (1: as trained), in place of the current ones.

        A sum of LoRAs is a single LoRA whose rank is the sum of their ranks, so they are stacked into one. If the ranks
        are unchanged, as between steps of a run, only the values are overwritten. Raises LoraFileError for shapes that
        do not match the base; the models then have no LoRAs.
        """
        stacks: dict[Slot, list[Scaled]] = {}
        for lora, strength in loras:
            for slot, layer in lora.layers.items():
                stacks.setdefault(slot, []).append((layer, strength * layer.alpha / layer.rank))
        ranks = {slot: sum(layer.rank for layer, _ in stack) for slot, stack in stacks.items()}
        try:
            if ranks != {slot: factors.down.weight.shape[0] for slot, factors in self._factors.items()}:
                self.remove()
                self._inject(ranks)
            for slot, factors in self._factors.items():
                _fill(slot, factors, stacks[slot])
        except BaseException:  # also Ctrl-C: partly filled layers would silently change every image
            self.remove()
            raise

    def remove(self) -> None:
        """Remove all LoRAs from the models."""
        for model in self._models.values():
            recurse_remove_peft_layers(model)
            if hasattr(model, "peft_config"):
                del model.peft_config
        self._factors = {}

    def _inject(self, ranks: Mapping[Slot, int]) -> None:
        for part, model in self._models.items():
            # With alpha = rank, PEFT's scale is 1: `_fill` multiplies each LoRA's own scale into `up`.
            sizes = {slot: LayerSettings(rank, rank) for slot, rank in ranks.items() if slot.part == part}
            if sizes:
                self._factors |= inject(model, sizes, self._dtype)


def _fill(slot: Slot, factors: Factors, stack: Sequence[Scaled]) -> None:
    """Fill `factors` with one layer's LoRAs, stacked along the rank, with each scale multiplied into `up`."""
    down, up = factors.down.weight, factors.up.weight
    downs = [reshape_to_layer(slot, layer.down, (layer.rank, *down.shape[1:])) for layer, _ in stack]
    ups = [reshape_to_layer(slot, layer.up, (up.shape[0], layer.rank, *up.shape[2:])) * scale for layer, scale in stack]
    down.requires_grad_(False).copy_(torch.cat(downs))
    up.requires_grad_(False).copy_(torch.cat(ups, dim=1))


def continue_from(
    path: Path, family: Family, table: Sequence[Slot], adapter: Adapter, initial: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the fp32 weights by file key to continue training from a LoRA file.

    `table` lists all layers of the base, including text encoders that are not trained. Layers missing from the file
    keep their weights in `initial` (from `initial_weights`), which have no effect yet. If the file's alpha differs from
    the recipe's, the ratio is multiplied into `up`, so that training starts with the file's effect. Raises
    LoraFileError if a part of the file would be lost, or if its ranks or shapes do not match the recipe and base.
    """
    lora = read_lora(path, family, table)
    _refuse_losses(path, lora, adapter)
    _refuse_other_ranks(path, lora, adapter)
    weights = dict(initial)
    for slot in adapter.slots:
        if slot in lora.layers:
            layer = lora.layers[slot]
            weights[slot.down] = reshape_to_layer(slot, layer.down, adapter.parameters[slot.down].shape)
            up = reshape_to_layer(slot, layer.up, adapter.parameters[slot.up].shape)
            weights[slot.up] = up * (layer.alpha / adapter.alpha[slot.kohya])
    return weights


def _refuse_losses(path: Path, lora: LoraWeights, adapter: Adapter) -> None:
    if lora.unmatched:
        keys = "1 key matches" if len(lora.unmatched) == 1 else f"{len(lora.unmatched)} keys match"
        raise LoraFileError(
            "lora.unmatched",
            f"Could not continue from {path.name}: {keys} no layer of the base, such as {lora.unmatched[0]}.",
            "Choose a plain LoRA for the same family as the base.",
        )
    # Zeros do not count: exporters add them for untrained projections of a text layer (export._missing_projections).
    lost = [slot for slot, layer in lora.layers.items() if slot.kohya not in adapter.rank and layer.up.any()]
    if lost:
        layers = "1 layer" if len(lost) == 1 else f"{len(lost)} layers"
        raise LoraFileError(
            "lora.untrained",
            f"Could not continue from {path.name}: the changes to {layers} that the recipe does not train "
            f"would be lost, for example {lost[0].kohya}.",
            _remedy(lost, adapter),
        )


def _remedy(lost: list[Slot], adapter: Adapter) -> str:
    """Return a sentence that says which setting to change so that no layer of the file is lost."""
    untrained = {slot.part for slot in lost} - {slot.part for slot in adapter.slots}
    if untrained:
        return " ".join(f"Set {_SETTINGS[part]}.learning_rate above 0." for part in sorted(untrained))
    if {slot.kind for slot in lost} <= {slot.kind for slot in adapter.slots if slot.part == "unet"}:
        return "Remove the entries of recipe.blocks that exclude these layers with rate_factor = 0."
    layers = "all" if any(slot.kind == "conv" for slot in lost) else "linear"
    return f'Set recipe.layers = "{layers}".'


def _refuse_other_ranks(path: Path, lora: LoraWeights, adapter: Adapter) -> None:
    ranks: dict[str, set[int]] = {}
    for slot, layer in lora.layers.items():
        if layer.rank != adapter.rank.get(slot.kohya, layer.rank):
            key = "recipe.conv_rank" if slot.kernel == 3 else f"{_SETTINGS[slot.part]}.rank"
            ranks.setdefault(key, set()).add(layer.rank)
    if not ranks:
        return
    listed = {key: " and ".join(map(str, sorted(found))) for key, found in ranks.items()}
    differences = ", ".join(f"{key}: {found} in the file" for key, found in listed.items())
    uneven = any(len(found) > 1 for found in ranks.values())
    raise LoraFileError(
        "lora.rank",
        f"Could not continue from {path.name}: its ranks do not match the recipe ({differences}).",
        "The file's layers have different ranks: set them in recipe.blocks, or use a LoRA that was not resized."
        if uneven
        else "Set " + " and ".join(f"{key} = {found.pop()}" for key, found in ranks.items()) + ".",
    )
