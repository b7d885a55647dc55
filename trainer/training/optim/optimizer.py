"""The optimizers, from their libraries: built, given their learning rate in every step, saved and restored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from trainer.config.optimizer import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    Lion8bitConfig,
    LionConfig,
    OptimizerConfig,
    PagedAdamW8bitConfig,
    ProdigyConfig,
    ScheduleFreeConfig,
)
from trainer.errors import RunError
from trainer.training.optim.master_weights import MasterWeights

HOST_READS: Mapping[str, str] = {
    "adamw": "nothing",
    "adamw8bit": "nothing, but the library waits for the device after every tensor",
    "paged_adamw8bit": "nothing, but the library waits for the device after every tensor",
    "lion": "nothing, but the library waits for the device after every tensor",
    "lion8bit": "nothing, but the library waits for the device after every tensor",
    "adafactor": "with scale_parameter the size of every tensor, with weight_decay the rate made from it; else nothing",
    "prodigy": "two sums for every tensor, and once, in the first step, whether a tensor is all zeros",
    "schedulefree": "nothing",
}
"""What each library optimizer itself reads from the device in a step, beyond the one read of the loop."""

# What bitsandbytes' paged optimizers keep in memory that moves between host and device.
PAGED = ("state1", "state2")

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


def build_optimizer(config: OptimizerConfig, groups: Mapping[str, tuple[float, Sequence[Parameter]]]) -> Optimizer:
    """The optimizer of a recipe over fp32 masters: one group for each trained part, (learning rate, weights).

    Each group keeps its ``part`` and its ``base_lr``, from which :func:`set_learning_rates` makes the rate of every
    step; ``base_lr`` is None where Adafactor chooses the rate itself. Schedule-Free is put into train mode.
    What a library would refuse, such as two rates under Prodigy, the job's own rules have refused before.
    """
    own_rate = isinstance(config, AdafactorConfig) and config.relative_step
    table = [
        {"params": list(weights), "part": part, "lr": None if own_rate else rate, "base_lr": None if own_rate else rate}
        for part, (rate, weights) in groups.items()
    ]
    match config:
        case AdamWConfig():
            return torch.optim.AdamW(table, fused=True, **_adam_arguments(config))
        case AdamW8bitConfig():
            return _bitsandbytes().AdamW8bit(table, **_adam_arguments(config))  # type: ignore[no-any-return]
        case PagedAdamW8bitConfig():
            optimizer: Any = _bitsandbytes().PagedAdamW8bit(table, **_adam_arguments(config))
            # On the CPU there is nothing to page; the library would warn of that in the middle of the first step.
            optimizer._cpu_paged_warned = True
            return optimizer  # type: ignore[no-any-return]
        case LionConfig() | Lion8bitConfig():
            kind = _bitsandbytes().Lion if config.name == "lion" else _bitsandbytes().Lion8bit
            betas = (config.beta1, config.beta2)
            return kind(table, betas=betas, weight_decay=config.weight_decay)  # type: ignore[no-any-return]
        case AdafactorConfig():
            return _adafactor(config, table)
        case ProdigyConfig():
            return _prodigy(config, table)
        case ScheduleFreeConfig():
            return _schedule_free(config, table)


def set_learning_rates(optimizer: Optimizer, multiplier: float) -> dict[str, float]:
    """Sets every group's rate to its base rate times ``multiplier``; returns the rates in force by part.

    Call it before each step with the schedule's value. Prodigy multiplies the rate by the step size d that it has
    found, so what is returned for it is d times the rate; a multiplier of 0 leaves its weights and d as they are.
    Schedule-Free weighs its average by the largest rate so far, so under a falling schedule late steps count like
    early ones: its schedule should be constant, and its warm-up its own. Adafactor with relative_step takes no rate:
    what is returned is its relative step, to be scaled by the weights where scale_parameter is set.
    """
    rates: dict[str, float] = {}
    for group in optimizer.param_groups:
        if group["base_lr"] is None:
            rates[group["part"]] = _relative_step(optimizer, group)
            continue
        group["lr"] = group["base_lr"] * multiplier
        rates[group["part"]] = group["lr"] * group.get("d", 1.0)
    return rates


@contextmanager
def averaged_weights(optimizer: Optimizer, masters: MasterWeights) -> Iterator[None]:
    """Inside, masters and working weights are what should be exported: Schedule-Free's average; else nothing changes.

    Afterwards the masters have their exact former bits (the library's own way back rounds) and training goes on.
    """
    if not isinstance(optimizer, AdamWScheduleFree):
        yield
        return
    former = [master.detach().clone() for master in masters.masters.values()]
    try:
        optimizer.eval()
        masters.refresh()
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(masters.masters.values()), former)
        masters.refresh()
        for group in optimizer.param_groups:
            group["train_mode"] = True


def pack_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, JsonValue]]:
    """All state of ``optimizer`` as tensors on the CPU, for safetensors, and the rest as JSON.

    Weights are numbered in the order of the groups. The JSON says of each entry what type it had, so that a whole
    number stays one and a tensor of no dimensions stays a tensor; a tensor that entries share (quantisation maps) is
    kept once. Groups are kept whole: Prodigy's d, Schedule-Free's sums and mode are in them.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def pack(value: Any, name: str) -> JsonValue:
        if isinstance(value, Tensor):
            if id(value) not in names:
                names[id(value)] = name
                tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": names[id(value)]}
        if isinstance(value, tuple):
            return {"tuple": [pack(item, f"{name}.{index}") for index, item in enumerate(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"optimizer state {name} is a {type(value).__name__}, which cannot be saved")

    state: list[JsonValue] = [
        {key: pack(value, f"{index}.{key}") for key, value in optimizer.state.get(weight, {}).items()}
        for index, weight in enumerate(_weights(optimizer))
    ]
    groups: list[JsonValue] = [
        {key: pack(value, f"group{index}.{key}") for key, value in group.items() if key != "params"}
        for index, group in enumerate(optimizer.param_groups)
    ]
    return tensors, {"optimizer": type(optimizer).__name__, "state": state, "groups": groups}


def unpack_state(optimizer: Optimizer, tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
    """Puts a packed state into a new ``optimizer`` built for the same weights in the same order.

    Groups keep how they are computed: AdamW goes on over lists of tensors (foreach) where it began so, as in versions
    before it was fused, with the same bits. Raises RunError when it is the state of another optimizer or of other
    weights.
    """
    weights = _weights(optimizer)
    saved = data["optimizer"], len(data["state"]), len(data["groups"])
    if saved != (type(optimizer).__name__, len(weights), len(optimizer.param_groups)):
        raise RunError(
            "run.optimizer",
            f"The checkpoint holds the state of {saved[0]} over {saved[1]} weights, but the job has "
            f"{type(optimizer).__name__} over {len(weights)}.",
            "Resume with the job that the run was started with, or start a new run.",
        )
    placed: dict[str, Tensor] = {}
    # torch keeps its step counters beside the weights if it is fused, else on the host.
    fused = any(group.get("fused") for group in data["groups"])

    def unpack(value: Any, key: str, weight: Parameter) -> Any:
        if not isinstance(value, dict):
            return value
        if "tuple" in value:
            return tuple(unpack(item, key, weight) for item in value["tuple"])
        name = value["tensor"]
        if name not in placed:
            on_host = key == "step" and not fused
            placed[name] = tensors[name].clone() if on_host else _place(optimizer, tensors[name], key, weight)
        return placed[name]

    optimizer.state.clear()
    for weight, entries in zip(weights, data["state"], strict=True):
        if entries:
            optimizer.state[weight] = {key: unpack(value, key, weight) for key, value in entries.items()}
    for group, entries in zip(optimizer.param_groups, data["groups"], strict=True):
        group.update({key: unpack(value, key, group["params"][0]) for key, value in entries.items()})


def _adam_arguments(config: AdamWConfig | AdamW8bitConfig | PagedAdamW8bitConfig) -> dict[str, Any]:
    return {"betas": (config.beta1, config.beta2), "eps": config.eps, "weight_decay": config.weight_decay}


def _adafactor(config: AdafactorConfig, table: list[dict[str, Any]]) -> Optimizer:
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


def _prodigy(config: ProdigyConfig, table: list[dict[str, Any]]) -> Optimizer:
    from prodigyopt import Prodigy

    for group in table:
        # Given as an argument instead, the library prints a line about it.
        group["weight_decay"] = config.weight_decay
    return Prodigy(  # type: ignore[no-any-return]
        table,
        betas=(config.beta1, config.beta2),
        d_coef=config.d_coef,
        d0=config.d0,
        growth_rate=config.growth_rate,
        safeguard_warmup=config.safeguard_warmup,
        use_bias_correction=config.bias_correction,
    )


def _schedule_free(config: ScheduleFreeConfig, table: list[dict[str, Any]]) -> Optimizer:
    optimizer = AdamWScheduleFree(
        table,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        warmup_steps=config.warmup_steps,
        foreach=True,
    )
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def _relative_step(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Adafactor's own rate in the coming step: 1 / sqrt(step), at most 0.01, or 1e-6 * step while it warms up."""
    step = optimizer.state.get(group["params"][0], {}).get("step", 0) + 1
    most: float = 1e-6 * step if group["warmup_init"] else 1e-2
    return min(most, 1.0 / math.sqrt(step))


def _bitsandbytes() -> ModuleType:
    """bitsandbytes' optimizers, imported only when asked for: a machine where it is broken can do without."""
    import bitsandbytes.optim

    return bitsandbytes.optim


def _place(optimizer: Any, tensor: Tensor, key: str, weight: Parameter) -> Tensor:
    """A saved tensor where the library keeps it: in paged memory, or beside its weight."""
    if getattr(optimizer, "is_paged", False) and key in PAGED:
        # Only the library can make memory that pages.
        buffer: Tensor = optimizer.get_state_buffer(weight, dtype=tensor.dtype)
        return buffer.copy_(tensor)
    return tensor.to(weight.device, copy=True)


def _weights(optimizer: Optimizer) -> list[Parameter]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]
