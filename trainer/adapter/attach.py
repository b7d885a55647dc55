"""Attaches the LoRA that a recipe asks for to a base, and holds its working weights."""

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

from trainer.adapter import lean as lean_room
from trainer.adapter.lean.lora import register
from trainer.adapter.lean.transformer import install
from trainer.adapter.names import Part, Slot, slots
from trainer.adapter.reading import LoraLayer, LoraWeights, fitted, read_lora
from trainer.config.base import Family
from trainer.config.recipe import RecipeConfig
from trainer.errors import JobError, LoraFileError

ADAPTER = "default"


Factor = nn.Linear | nn.Conv2d
_SETTINGS = {"unet": "recipe", "text_encoder": "recipe.text_encoder", "text_encoder_2": "recipe.text_encoder_2"}


class LoraSize(NamedTuple):
    """How large the LoRA of one layer is, and how strongly it acts: with alpha / rank."""

    rank: int
    alpha: float


class Factors(NamedTuple):
    """The two layers of one LoRA: down (in_features to rank) and up (rank to out_features), without bias."""

    down: Factor
    up: Factor


def inject(
    model: nn.Module,
    sizes: Mapping[Slot, LoraSize],
    dtype: torch.dtype,
    customise: Callable[[LoraConfig], None] | None = None,
) -> dict[Slot, Factors]:
    """Wrap the layers of one model in PEFT's LoRA layers and return their factors, weights still unset.

    All other parameters of `model` stop requiring gradients. The factors lie on their layer's device (meta
    included) in `dtype`, which a quantised layer cannot tell by itself. `customise` may register layers for PEFT
    to take instead of its own.
    """
    paths = {module_path(model, slot): size for slot, size in sizes.items()}
    common = Counter(paths.values()).most_common(1)[0][0]
    alphas: dict[str, Any] = {path: size.alpha for path, size in paths.items()}  # PEFT says int, any number will do
    config = LoraConfig(
        r=common.rank,
        lora_alpha=cast(int, common.alpha),
        target_modules=_any_of(paths),
        rank_pattern=_pattern({path: size.rank for path, size in paths.items()}, common.rank),
        alpha_pattern=_pattern(alphas, common.alpha),
        init_lora_weights=False,
    )
    if customise:
        customise(config)
    with _quantisation_stated(model):
        # low_cpu_mem_usage leaves the weights on the meta device, so nothing draws from PyTorch's random numbers.
        inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    return {slot: _materialise(model.get_submodule(module_path(model, slot)), dtype) for slot in sizes}


def models_by_part(unet: nn.Module, text_encoders: Sequence[nn.Module]) -> dict[Part, nn.Module]:
    """Name the models of a base: one text encoder for SD 1.5, two for SDXL."""
    parts: tuple[Part, ...] = ("text_encoder", "text_encoder_2")
    return {"unet": unet, **dict(zip(parts, text_encoders, strict=False))}


def module_path(model: nn.Module, slot: Slot) -> str:
    """Return the slot's path in this model: transformers since 5.6 has CLIPTextModel without its "text_model" level."""
    if slot.part == "unet" or hasattr(model, "text_model"):
        return slot.module
    return slot.module.removeprefix("text_model.")


def _any_of(paths: Iterable[str]) -> str:
    return "|".join(re.escape(path) for path in paths)


def _pattern(values: Mapping[str, int], common: float) -> dict[str, int]:
    """Say for PEFT which layers differ from the common rank or alpha, with one expression for each value."""
    groups: dict[int, list[str]] = {}
    for path, value in values.items():
        if value != common:
            groups.setdefault(value, []).append(path)
    return {_any_of(group): value for value, group in groups.items()}


def _materialise(layer: nn.Module, dtype: torch.dtype) -> Factors:
    assert isinstance(layer, PeftLoraLayer)
    factors = Factors(cast(Factor, layer.lora_A[ADAPTER]), cast(Factor, layer.lora_B[ADAPTER]))
    # Not get_base_weight(), which would restore a quantised weight only to say where it lies.
    device = cast(Tensor, layer.get_base_layer().weight).device
    for factor in factors:
        factor.weight = nn.Parameter(torch.empty(factor.weight.shape, dtype=dtype, device=device))
    return factors


@contextmanager
def _quantisation_stated(model: nn.Module) -> Iterator[None]:
    """Tell PEFT for a while which bitsandbytes layers the model has: it asks for what transformers' loader notes."""
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


def _size(slot: Slot, recipe: RecipeConfig) -> LoraSize:
    """Only 3x3 kernels take the convolutions' rank, as in sd-scripts; LoCon's other layers take the recipe's."""
    if slot.part == "unet":
        rank, alpha = (recipe.conv_rank, recipe.conv_alpha) if slot.kernel == 3 else (None, None)
    else:
        encoder = recipe.text_encoder if slot.part == "text_encoder" else recipe.text_encoder_2
        rank, alpha = encoder.rank, encoder.alpha
    return LoraSize(rank or recipe.rank, alpha or recipe.alpha)


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


Weighted = tuple[LoraWeights, float]  # strength
Scaled = tuple[LoraLayer, float]  # strength · alpha / rank


class AppliedLoras:
    """The LoRAs that models carry while pictures are drawn: others can take their place, or none.

    They stay apart from the base's weights, because a small change added to fp16 or bf16 weights is mostly rounded
    away; that costs the LoRAs' memory and some percent of the time, and leaves the base as it was, bit for bit.
    `dtype` is the one the base computes in. The models carry none when this is made.
    """

    def __init__(self, unet: nn.Module, text_encoders: Sequence[nn.Module], *, dtype: torch.dtype) -> None:
        self._models = models_by_part(unet, text_encoders)
        self._dtype = dtype
        self._factors: dict[Slot, Factors] = {}

    def use(self, loras: Sequence[Weighted]) -> None:
        """Put these LoRAs, each with its strength (1: as trained), in the place of those before.

        A sum of LoRAs is a LoRA of the sum of their ranks, so they become one. Where only strengths differ, or
        weights of the same ranks, as between steps of a run, just the numbers are written anew. Raises LoraFileError
        for other shapes; the models then carry none.
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
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Leave the models without LoRAs."""
        for model in self._models.values():
            recurse_remove_peft_layers(model)
            if hasattr(model, "peft_config"):
                del model.peft_config
        self._factors = {}

    def _inject(self, ranks: Mapping[Slot, int]) -> None:
        for part, model in self._models.items():
            sizes = {slot: LoraSize(rank, rank) for slot, rank in ranks.items() if slot.part == part}
            if sizes:
                self._factors |= inject(model, sizes, self._dtype)


def _fill(slot: Slot, factors: Factors, stack: Sequence[Scaled]) -> None:
    """Stack the matrices of one layer's LoRAs along the rank; `up` takes the scale."""
    down, up = factors.down.weight, factors.up.weight
    downs = [fitted(slot, layer.down, (layer.rank, *down.shape[1:])) for layer, _ in stack]
    ups = [fitted(slot, layer.up, (up.shape[0], layer.rank, *up.shape[2:])) * scale for layer, scale in stack]
    down.requires_grad_(False).copy_(torch.cat(downs))
    up.requires_grad_(False).copy_(torch.cat(ups, dim=1))


def continue_from(
    path: Path, family: Family, table: Sequence[Slot], adapter: Adapter, initial: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights (fp32, by file key) with which training goes on from a LoRA file.

    `table` holds all layers of the base, text encoders included whether trained or not. `initial` are the weights of a
    fresh start (`initial_weights`); layers that the file lacks keep them, and do nothing yet. Another alpha than the
    recipe's is folded into `up`, so the first step sees what the file does. Raises LoraFileError when part of the file
    would be lost, or its ranks or shapes are not those of recipe and base.
    """
    lora = read_lora(path, family, table)
    _refuse_losses(path, lora, adapter)
    _refuse_other_ranks(path, lora, adapter)
    weights = dict(initial)
    for slot in adapter.slots:
        if slot in lora.layers:
            layer = lora.layers[slot]
            weights[slot.down] = fitted(slot, layer.down, adapter.parameters[slot.down].shape)
            up = fitted(slot, layer.up, adapter.parameters[slot.up].shape)
            weights[slot.up] = up * (layer.alpha / adapter.alpha[slot.kohya])
    return weights


def _refuse_losses(path: Path, lora: LoraWeights, adapter: Adapter) -> None:
    if lora.unmatched:
        raise LoraFileError(
            "lora.unmatched",
            f"{path.name} holds {len(lora.unmatched)} keys that fit no layer of the base, first {lora.unmatched[0]}.",
            "Choose a plain LoRA that was made for the family of the base.",
        )
    # Exporters complete a text layer's projections with zeros: those carry nothing.
    lost = [slot for slot, layer in lora.layers.items() if slot.kohya not in adapter.rank and layer.up.any()]
    if lost:
        raise LoraFileError(
            "lora.untrained",
            f"{path.name} also changes {len(lost)} layers that this recipe does not train, first {lost[0].kohya}; "
            "they would be lost.",
            _remedy(lost, adapter),
        )


def _remedy(lost: list[Slot], adapter: Adapter) -> str:
    """Say which setting makes the recipe train the lost layers."""
    untrained = {slot.part for slot in lost} - {slot.part for slot in adapter.slots}
    if untrained:
        return " ".join(f"Set {_SETTINGS[part]}.learning_rate above 0." for part in sorted(untrained))
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
    stated = ", ".join(f"{key} is not {' and '.join(map(str, sorted(found)))}" for key, found in ranks.items())
    uneven = any(len(found) > 1 for found in ranks.values())
    raise LoraFileError(
        "lora.rank",
        f"{path.name} has another rank than the recipe: {stated}.",
        "Its layers differ in rank, which a recipe cannot: continue from a LoRA that was not resized."
        if uneven
        else "Set " + " and ".join(f"{key} = {found.pop()}" for key, found in ranks.items()) + ".",
    )
