"""One factory per optimizer: its class with a recipe's arguments, for groups of weights with their learning rates.

Libraries are imported when they are needed, so that a broken installation of one affects no other optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.config.optimizers.kinds import (
    AdafactorConfig,
    AdamMini8bitConfig,
    AdamMiniConfig,
    AdamW8bitConfig,
    AdamWConfig,
    AdoptConfig,
    CameConfig,
    DAdaptAdamConfig,
    Lion8bitConfig,
    LionConfig,
    PagedAdamW8bitConfig,
    ProdigyConfig,
    ProdigyPlusConfig,
    RAdamScheduleFreeConfig,
    ScheduleFreeConfig,
    StableAdamWConfig,
)
from trainer.config.optimizers.others import OtherConfig
from trainer.config.optimizers.section import OptimizerSection
from trainer.errors import RunError
from trainer.protocol.text import printable

Groups = list[dict[str, Any]]
"""Groups of weights as torch's optimizers take them, each with its own "lr"."""


@singledispatch
def make_optimizer(config: OptimizerSection, table: Groups) -> Optimizer:
    """Return the optimizer of a config for groups of fp32 weights."""
    raise TypeError(f"no factory for {type(config).__name__}")


@make_optimizer.register
def _adamw(config: AdamWConfig, table: Groups) -> Optimizer:
    return torch.optim.AdamW(table, fused=True, **_adam_arguments(config))


@make_optimizer.register
def _adamw8bit(config: AdamW8bitConfig, table: Groups) -> Optimizer:
    return _bitsandbytes().AdamW8bit(table, **_adam_arguments(config))  # type: ignore[no-any-return]


@make_optimizer.register
def _paged_adamw8bit(config: PagedAdamW8bitConfig, table: Groups) -> Optimizer:
    optimizer: Any = _bitsandbytes().PagedAdamW8bit(table, **_adam_arguments(config))
    # On the CPU there is nothing to page, and the library would warn about that in the first step.
    optimizer._cpu_paged_warned = True
    return optimizer  # type: ignore[no-any-return]


@make_optimizer.register
def _lion(config: LionConfig | Lion8bitConfig, table: Groups) -> Optimizer:
    kind = _bitsandbytes().Lion if isinstance(config, LionConfig) else _bitsandbytes().Lion8bit
    betas = (config.beta1, config.beta2)
    return kind(table, betas=betas, weight_decay=config.weight_decay)  # type: ignore[no-any-return]


@make_optimizer.register
def _adafactor(config: AdafactorConfig, table: Groups) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(
        table,
        lr=None,
        clip_threshold=config.clip_threshold,
        decay_rate=config.decay_rate,
        beta1=config.beta1,
        weight_decay=config.weight_decay,
        scale_parameter=config.scale_parameter,
        relative_step=config.relative_step,
        warmup_init=config.warmup_init,
    )


@make_optimizer.register
def _came(config: CameConfig, table: Groups) -> Optimizer:
    from pytorch_optimizer import CAME

    return CAME(
        table,
        betas=(config.beta1, config.beta2, config.beta3),
        weight_decay=config.weight_decay,
        clip_threshold=config.clip_threshold,
        foreach=False,  # all weights at once would need three more copies of them
    )


@make_optimizer.register
def _adam_mini(config: AdamMiniConfig, table: Groups) -> Optimizer:
    """Return Adam-mini with a group per weight, as the package makes them, in the order of the groups given.

    Its blocks for attention heads are for whole models, so that each matrix of a LoRA is one block.
    """
    from pytorch_optimizer import AdamMini

    groups = [group for group in table for _ in group["params"]]
    weights = nn.ParameterList([weight for group in table for weight in group["params"]])
    optimizer = AdamMini(weights, foreach=True, **_adam_arguments(config))
    for made, group in zip(optimizer.param_groups, groups, strict=True):
        made.update({key: value for key, value in group.items() if key != "params"})
    del optimizer.model  # would keep the weights alive as long as the optimizer
    return optimizer


@make_optimizer.register
def _adam_mini_8bit(config: AdamMini8bitConfig, table: Groups) -> Optimizer:
    from trainer.training.optim.adam_mini_8bit import AdamMini8bit  # imports bitsandbytes

    return AdamMini8bit(table, **_adam_arguments(config))


@make_optimizer.register
def _adopt(config: AdoptConfig, table: Groups) -> Optimizer:
    from pytorch_optimizer import ADOPT

    return ADOPT(table, weight_decouple=True, foreach=True, **_adam_arguments(config))


@make_optimizer.register
def _stable_adamw(config: StableAdamWConfig, table: Groups) -> Optimizer:
    from pytorch_optimizer import StableAdamW

    return StableAdamW(table, kahan_sum=False, foreach=True, **_adam_arguments(config))


@make_optimizer.register
def _dadapt_adam(config: DAdaptAdamConfig, table: Groups) -> Optimizer:
    from pytorch_optimizer import DAdaptAdam

    return _by_part(DAdaptAdam, config.rate_per_part)(  # type: ignore[no-any-return]
        table,
        d0=config.d0,
        growth_rate=config.growth_rate,
        bias_correction=config.bias_correction,
        weight_decouple=True,
        foreach=True,
        **_adam_arguments(config),
    )


@make_optimizer.register
def _prodigy(config: ProdigyConfig, table: Groups) -> Optimizer:
    from prodigyopt import Prodigy

    for group in table:
        # In the group, because the library prints a line if it is passed as an argument.
        group["weight_decay"] = config.weight_decay
    return _by_part(Prodigy, config.rate_per_part)(  # type: ignore[no-any-return]
        table,
        betas=(config.beta1, config.beta2),
        d_coef=config.d_coef,
        d0=config.d0,
        growth_rate=config.growth_rate,
        safeguard_warmup=config.safeguard_warmup,
        use_bias_correction=config.bias_correction,
    )


@make_optimizer.register
def _schedule_free(config: ScheduleFreeConfig, table: Groups) -> Optimizer:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(  # type: ignore[no-any-return]
        table,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        warmup_steps=config.warmup_steps,
        foreach=True,
    )


@make_optimizer.register
def _radam_schedule_free(config: RAdamScheduleFreeConfig, table: Groups) -> Optimizer:
    from schedulefree import RAdamScheduleFree

    return RAdamScheduleFree(table, foreach=True, **_adam_arguments(config))  # type: ignore[no-any-return]


@make_optimizer.register
def _prodigy_plus(config: ProdigyPlusConfig, table: Groups) -> Optimizer:
    from prodigyplus import ProdigyPlusScheduleFree

    return ProdigyPlusScheduleFree(  # type: ignore[no-any-return]
        table,
        d_coef=config.d_coef,
        d0=config.d0,
        factored=config.factored,
        use_stableadamw=config.stable_steps,
        use_bias_correction=config.bias_correction,
        split_groups=len(table) > 1,  # the library prints a line if it turns this off itself
        **_adam_arguments(config),
    )


@make_optimizer.register
def _other(config: OtherConfig, table: Groups) -> Optimizer:
    """Return an optimizer by its name in the registry; raises RunError if it refuses its arguments.

    Muon and its relatives update only groups that say so; for all others the entry means nothing.
    """
    groups = [{**group, "use_muon": True} for group in table]
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in config.args.items()}
    try:
        return _built(config, groups, arguments)
    except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
        raise RunError(
            "run.optimizer",
            f"Could not create the optimizer {config.optimizer}: {printable(str(error), 200)}.",
            "Change recipe.optimizer.args.",
        ) from error


def _built(config: OtherConfig, groups: Groups, arguments: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer without state, which each allocates in its first step."""
    kind = _class_of(config)
    if config.library != "adv_optm":
        return kind(groups, **arguments)  # type: ignore[no-any-return]
    # adv-optm allocates state for its weights here, and in a step where it is missing. Forecasts expect it in the first
    # step; so it is made for weights in main memory, whose state is dropped.
    others = [{**group, "params": [_in_main_memory(weight) for weight in group["params"]]} for group in groups]
    optimizer: Optimizer = kind(others, **arguments)
    for made, given in zip(optimizer.param_groups, groups, strict=True):
        made["params"] = list(given["params"])
    optimizer.state.clear()
    return optimizer


def _in_main_memory(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros_like(weight, device="cpu"))


def _class_of(config: OtherConfig) -> Any:
    if config.library == "adv_optm":
        import adv_optm

        return next(getattr(adv_optm, name) for name in adv_optm.__all__ if name.lower() == config.optimizer)
    from pytorch_optimizer.optimizer import OPTIMIZERS

    return OPTIMIZERS[config.optimizer]


class _PartByPart:
    """Lets an optimizer that finds one rate for all its groups find one for each part, as if each had its own."""

    param_groups: Groups

    def step(self) -> None:
        """Take the library's step for the groups of each part in turn."""
        groups = self.param_groups
        try:
            for part in dict.fromkeys(group["part"] for group in groups):
                self.param_groups = [group for group in groups if group["part"] == part]
                super().step()  # type: ignore[misc]
        finally:
            self.param_groups = groups


def _by_part(kind: Any, wanted: bool | None) -> Any:
    """Return a class of optimizers, or one that finds a rate for each part."""
    return type(f"{kind.__name__}ByPart", (_PartByPart, kind), {}) if wanted else kind


def _adam_arguments(config: Any) -> dict[str, Any]:
    return {"betas": (config.beta1, config.beta2), "eps": config.eps, "weight_decay": config.weight_decay}


def _bitsandbytes() -> ModuleType:
    import bitsandbytes.optim

    return bitsandbytes.optim
