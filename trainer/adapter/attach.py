"""Attach a recipe's adapter to a base, and hold its working weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer as PeftLoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.adapter import lean as lean_layers
from trainer.adapter.layers import LayerSettings, trained_layers
from trainer.adapter.lean.lora import register
from trainer.adapter.lean.transformer import install
from trainer.adapter.lycoris import CHANGES, Dora, LycorisLayer, make_change, uniform
from trainer.adapter.names import Slot, file_key, slots
from trainer.config.base import Family, Part
from trainer.config.recipe import RecipeConfig
from trainer.errors import LoraFileError

ADAPTER = "default"
_TIMESTEPS = 1000


Factor = nn.Linear | nn.Conv2d


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


class RankMask:
    """T-LoRA: fewer ranks learn from noisy timesteps, so that a LoRA of few images copies them less.

    ⌊(1000 - t) / 1000 · (rank - least)⌋ + least ranks learn from timestep t (Soboleva et al. 2025, "T-LoRA: Single
    Image Diffusion Model Customization Without Overfitting", arXiv 2507.05964; LyCORIS, compute_timestep_mask).
    Previews, validation and files use all ranks at all timesteps, as the programs that load the file do.
    """

    def __init__(self, least: int | None) -> None:
        self._least = least
        self._timesteps: Tensor | None = None
        self._masks: dict[int, Tensor] = {}

    def use(self, timesteps: Tensor) -> None:
        """Mask for these timesteps (B,), int64, from now on."""
        self._timesteps = timesteps
        self._masks.clear()

    def forget(self) -> None:
        """Free the masks, which backward may need to recompute blocks, at the end of a micro-batch."""
        self._timesteps = None
        self._masks.clear()

    def of(self, rank: int) -> Tensor:
        """Return the mask of the current timesteps for layers of this rank: (B, rank), bool."""
        if rank not in self._masks:
            assert self._timesteps is not None
            least = min(rank, self._least or math.ceil(rank / 2))
            active = (_TIMESTEPS - self._timesteps) * (rank - least) // _TIMESTEPS + least
            self._masks[rank] = torch.arange(rank, device=active.device) < active[:, None]
        return self._masks[rank]


@dataclass
class Adapter:
    """The LoRA layers, or those of another method, attached to a base, with their working weights."""

    table: tuple[Slot, ...]
    """All layers of the base that can carry a LoRA."""
    slots: tuple[Slot, ...]
    """The trained layers, in the order of `table`."""
    rank: dict[str, int]
    """Rank of each layer, by kohya name."""
    alpha: dict[str, float]
    """Alpha of each layer, by kohya name; its LoRA is scaled by alpha / rank."""
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    """Working weights by file key in slot order, `down` before `up`: the layers' parameters, in the base's dtype.

    Magnitudes of DoRA are in fp32."""
    zero_keys: set[str] = field(default_factory=set)
    """File keys of the weights that are zero in a new adapter."""
    loras: list[PeftLoraLayer] = field(default_factory=list)
    """The trained layers, if they are LoRAs."""
    changes: dict[Slot, LycorisLayer] = field(default_factory=dict)
    """The trained layers, if they are not LoRAs."""
    rate_factor_of: dict[str, float] = field(default_factory=dict)
    """Factor for the learning rate of each parameter's part, by file key."""
    part_of: dict[str, Part] = field(default_factory=dict)
    """Part of the base that each parameter belongs to, by file key."""
    rank_mask: RankMask | None = None
    """The mask of T-LoRA."""
    lean: bool = False
    """Whether the layers come from trainer.adapter.lean instead of PEFT."""
    frozen: frozenset[Part] = frozenset()
    """Parts that are no longer trained, whose layers have no dropout."""
    training: bool = True
    """Whether dropout and T-LoRA's mask are active; turn it off for previews, validation and comparisons."""

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Make the models compute as without the adapter inside the `with` block."""
        self._switch(on=False)
        try:
            yield
        finally:
            self._switch(on=True)

    def _switch(self, *, on: bool) -> None:
        for lora in self.loras:
            lora._disable_adapters = not on  # PEFT's method would also change what requires gradients
        for layer in self.changes.values():
            layer.active = on

    def keys(self, slot: Slot) -> tuple[str, ...]:
        """Return the file keys of a layer's parameters."""
        if slot in self.changes:
            return tuple(file_key(slot, role) for role, _ in self.changes[slot].only.named_parameters(recurse=False))
        return slot.down, slot.up

    def file_alpha(self, slot: Slot) -> float:
        """Return the alpha of a layer as files have it: in OFT, it is a limit of the rotation, and 0 means none."""
        layer = self.changes.get(slot)
        return 0.0 if layer is not None and layer.only.kind == "oft" else self.alpha[slot.kohya]

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
    """Attach adapters to the parts that the recipe trains; afterward, only their weights require gradients.

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
    if recipe.adapter == "tlora":
        adapter.rank_mask = RankMask(recipe.tlora_min_rank)
        unet.register_forward_pre_hook(partial(_note_timesteps, adapter, adapter.rank_mask))
    for part, model in models_by_part(unet, text_encoders).items():
        model.requires_grad_(False)
        sizes = {slot: size for slot, size in chosen.items() if slot.part == part}
        if recipe.adapter in CHANGES:
            _add_changes(adapter, model, sizes, recipe, dtype)
        elif sizes:
            _add_loras(adapter, model, sizes, recipe, dtype)
    if adapter.lean:
        install(unet)  # moves the weights, so they are loaded afterwards
    if not any(parameter.is_meta for parameter in adapter.parameters.values()):
        adapter.load(initial_weights(adapter, generator))
    return adapter


def initial_weights(adapter: Adapter, generator: Callable[[str], np.random.Generator]) -> dict[str, Tensor]:
    """Return initial fp32 weights by file key, with which the adapter has no effect yet.

    In a LoRA, `down` is uniform and `up` is zero. The bound 1/sqrt(fan_in) equals kaiming_uniform(a=sqrt(5)), which
    sd-scripts and PEFT use. `generator` returns a random generator for each kohya name.
    """
    weights = {}
    for slot in adapter.slots:
        if slot in adapter.changes:
            started = adapter.changes[slot].only.initial(generator(slot.kohya))
            weights.update({file_key(slot, role): value for role, value in started.items()})
        else:
            weights[slot.down] = uniform(generator(slot.kohya), adapter.parameters[slot.down])
            weights[slot.up] = torch.zeros(adapter.parameters[slot.up].shape)
    return weights


def _config_of(model: nn.Module) -> Mapping[str, Any]:
    """Return a model's config as a mapping; diffusers' configs are mappings, transformers' are objects."""
    config: Any = model.config
    return config if isinstance(config, Mapping) else cast(dict[str, Any], config.to_dict())


def _add_loras(
    adapter: Adapter, model: nn.Module, sizes: Mapping[Slot, LayerSettings], recipe: RecipeConfig, dtype: torch.dtype
) -> None:
    hooked = recipe.has_dropouts or adapter.rank_mask is not None
    customize = partial(register, hooked=hooked) if adapter.lean else None
    for slot, factors in inject(model, sizes, dtype, customize).items():
        adapter.loras.append(cast(PeftLoraLayer, model.get_submodule(module_path(model, slot))))
        parameters = {slot.down: factors.down.weight, slot.up: factors.up.weight}
        _add_layer(adapter, slot, cast(dict[str, nn.Parameter], parameters), sizes[slot].rate_factor)
        adapter.zero_keys.add(slot.up)
        if recipe.has_dropouts:
            factors.down.register_forward_hook(partial(_apply_dropout, adapter, recipe, slot.part))
        if adapter.rank_mask and slot.part == "unet":
            factors.down.register_forward_hook(partial(_mask_ranks, adapter, adapter.rank_mask))


def _add_changes(
    adapter: Adapter, model: nn.Module, sizes: Mapping[Slot, LayerSettings], recipe: RecipeConfig, dtype: torch.dtype
) -> None:
    """Wrap layers of one model in those of another method than LoRA, with uninitialized weights."""
    for slot, settings in sizes.items():
        path = module_path(model, slot)
        frozen = cast(Factor, model.get_submodule(path))
        change = make_change(recipe, frozen, settings, dtype)
        if recipe.has_dropouts and isinstance(change, Dora):  # no other one has ranks between two matrices
            change.between = partial(_dropped, adapter, recipe, slot.part, _rank_axis(frozen))
        layer = LycorisLayer(frozen, [change])
        model.set_submodule(path, layer)
        parameters = {file_key(slot, role): weight for role, weight in change.named_parameters(recurse=False)}
        _add_layer(adapter, slot, parameters, settings.rate_factor)
        adapter.changes[slot] = layer
        adapter.alpha[slot.kohya] = change.scale * settings.rank
        adapter.zero_keys |= {file_key(slot, role) for role in change.zero}


def _add_layer(adapter: Adapter, slot: Slot, parameters: Mapping[str, nn.Parameter], rate_factor: float) -> None:
    for key, parameter in parameters.items():
        adapter.parameters[key] = parameter
        adapter.part_of[key], adapter.rate_factor_of[key] = slot.part, rate_factor


def _rank_axis(layer: nn.Module) -> int:
    """Return the axis of a layer's output that its channels, or the ranks of its down matrix, are in."""
    return 1 if isinstance(layer, nn.Conv2d) else -1


def _apply_dropout(
    adapter: Adapter, recipe: RecipeConfig, part: Part, down: nn.Module, inputs: object, output: Tensor
) -> Tensor:
    return _dropped(adapter, recipe, part, _rank_axis(down), output)


def _dropped(adapter: Adapter, recipe: RecipeConfig, part: Part, axis: int, output: Tensor) -> Tensor:
    """Return the output of a down matrix with the three kinds of dropout of sd-scripts (its networks/lora.py).

    Masks are drawn on the device, without synchronizing with the host; gradient checkpointing restores the device's
    random state when it recomputes. Rank dropout scales up the remaining values; as in sd-scripts, module dropout does
    not.
    """
    if not adapter.training or part in adapter.frozen:
        return output
    if recipe.dropout:
        # The mask is drawn in memory order. contiguous() makes it the same for channels-last output with the same seed.
        output = F.dropout(output.contiguous(), recipe.dropout)
    if recipe.rank_dropout:
        mask = torch.rand(_along(output, axis), device=output.device) >= recipe.rank_dropout
        output = output * (mask.to(output.dtype) / (1 - recipe.rank_dropout))
    if recipe.module_dropout:
        mask = torch.rand((), device=output.device) >= recipe.module_dropout
        output = output * mask.to(output.dtype)
    return output


def _note_timesteps(adapter: Adapter, rank_mask: RankMask, unet: nn.Module, inputs: tuple[Any, ...]) -> None:
    if adapter.training:
        rank_mask.use(inputs[1])


def _mask_ranks(
    adapter: Adapter, rank_mask: RankMask, down: nn.Module, inputs: object, output: Tensor
) -> Tensor | None:
    """Set the ranks of a down layer's output to zero that do not learn from an image's timestep."""
    if not adapter.training:
        return None
    axis = _rank_axis(down)
    mask = rank_mask.of(output.shape[axis]).to(output.dtype)
    return output * mask.view(_along(output, axis))


def _along(output: Tensor, axis: int) -> list[int]:
    """Return the shape of one number for each image and each index of an axis."""
    return [size if dim in (0, axis % output.ndim) else 1 for dim, size in enumerate(output.shape)]
