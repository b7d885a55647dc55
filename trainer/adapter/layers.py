"""Puts PEFT's LoRA layers into a model at named slots."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from trainer.adapter.names import Part, Slot

ADAPTER = "default"


Factor = nn.Linear | nn.Conv2d


class Size(NamedTuple):
    """How large the LoRA of one layer is, and how strongly it acts: with alpha / rank."""

    rank: int
    alpha: float


class Factors(NamedTuple):
    """The two layers of one LoRA: down (in_features to rank) and up (rank to out_features), without bias."""

    down: Factor
    up: Factor


def inject(
    model: nn.Module,
    sizes: Mapping[Slot, Size],
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
    assert isinstance(layer, LoraLayer)
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
