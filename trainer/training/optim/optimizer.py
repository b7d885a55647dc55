"""Optimizers from several libraries: building, learning rates, saving and restoring."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from trainer.config.base import Part
from trainer.config.optimizers.section import OptimizerSection
from trainer.errors import RunError
from trainer.training.optim.factories import make_optimizer
from trainer.training.optim.master_weights import MasterWeights

# State entries that bitsandbytes' paged optimizers keep in memory that moves between host and device.
PAGED = ("state1", "state2")

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


class ParameterGroup(NamedTuple):
    """Master weights that share a learning rate."""

    part: Part
    learning_rate: float
    weights: Sequence[Parameter]


def build_optimizer(config: OptimizerSection, groups: Iterable[ParameterGroup]) -> Optimizer:
    """Return a recipe's optimizer for fp32 master weights.

    The first group of a part has the part's own learning rate. Each group of the optimizer has a ``part`` and a
    ``base_lr``, from which :func:`set_learning_rates` computes the rate for every step; ``base_lr`` is None if
    the optimizer chooses the rate itself. Schedule-Free is put into train mode. Settings that a library would refuse,
    such as two rates with Prodigy, were already refused when the job was checked.
    """
    own = config.ignores_rates
    table = [
        {"params": list(weights), "part": part, "lr": None if own else rate, "base_lr": None if own else rate}
        for part, rate, weights in groups
    ]
    optimizer = make_optimizer(config, table)
    if config.method.averages:
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def set_learning_rates(optimizer: Optimizer, multiplier: float) -> dict[str, float]:
    """Set every group's rate to its base rate times ``multiplier``; return the effective rate of each part.

    That is the rate of the part's first group: the part's own, unless blocks change all of it. Call this before each
    step with the schedule's value. Prodigy multiplies the rate by its estimated step size d, so d times the rate is
    returned for it; with a multiplier of 0 neither its weights nor d change. Schedule-Free weights its average by the
    largest rate so far, so with a falling schedule late steps count as much as early ones: its schedule should be
    constant, with its own warm-up. Adafactor with relative_step ignores the rate; the rate returned for it is its
    relative step, before the scaling by the weights that scale_parameter adds.
    """
    rates: dict[str, float] = {}
    for group in optimizer.param_groups:
        if group["base_lr"] is None:
            rates.setdefault(group["part"], _relative_step(optimizer, group))
            continue
        # From the base rate and not the current one, so rounding errors do not add up and a resume gives the same rate.
        group["lr"] = group["base_lr"] * multiplier
        rates.setdefault(group["part"], group["lr"] * group.get("d", 1.0))
    return rates


@contextmanager
def averaged_weights(optimizer: Optimizer, masters: MasterWeights) -> Iterator[None]:
    """Load Schedule-Free's averaged weights inside the block; do nothing for other optimizers.

    Afterwards the master weights are restored bit for bit; the library's own switch back would round them.
    """
    if "train_mode" not in optimizer.param_groups[0]:
        yield
        return
    # Costs a copy of the master weights on the device while the block runs.
    saved = [master.detach().clone() for master in masters.masters.values()]
    try:
        optimizer.eval()  # type: ignore[attr-defined]
        masters.refresh()
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(masters.masters.values()), saved)
        masters.refresh()
        for group in optimizer.param_groups:
            group["train_mode"] = True


def pack_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, JsonValue]]:
    """Return the state of ``optimizer``: tensors on the CPU, for safetensors, and everything else as JSON.

    Weights are numbered in the order of the groups. The JSON preserves each entry's type: an integer stays an integer
    and a 0-dim tensor stays a tensor. A tensor that several entries share (quantization maps) is stored once. Groups
    are stored completely, because they contain Prodigy's d and Schedule-Free's sums and mode.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def pack(value: Any, name: str) -> JsonValue:
        if isinstance(value, Tensor):
            # bitsandbytes shares its quantization maps between all weights; stored per weight they would add up.
            # A matrix in column order keeps it, because matrix products in the other order round differently.
            columns = value.ndim == 2 and not value.is_contiguous() and value.mT.is_contiguous()
            if id(value) not in names:
                names[id(value)] = name
                kept = value.detach().mT if columns else value.detach()
                tensors[name] = kept.to("cpu", copy=True).contiguous()
            return {"tensor": names[id(value)], **({"columns": True} if columns else {})}
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [pack(item, f"{name}.{index}") for index, item in enumerate(value)]}
        if isinstance(value, dict):  # a list of pairs, because the names in JSON are always strings
            return {"dict": [[pack(key, name), pack(item, f"{name}.{key}")] for key, item in value.items()]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
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
    # Some optimizers also keep entries, such as a step counter, that belong to no weight.
    entries: dict[Any, Any] = optimizer.state
    whole = {key: pack(value, f"whole.{key}") for key, value in entries.items() if isinstance(key, str)}
    data: dict[str, JsonValue] = {"optimizer": type(optimizer).__name__, "state": state, "groups": groups}
    return tensors, data | ({"whole": whole} if whole else {})


def unpack_state(optimizer: Optimizer, tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
    """Restore a packed state into a new ``optimizer`` built for the same weights in the same order.

    Groups keep their implementation: an AdamW that started with foreach, as in earlier versions, continues with it
    and gives the same bits. Raises RunError if the state belongs to another optimizer or to other weights.
    """
    weights = _weights(optimizer)
    saved = data["optimizer"], len(data["state"]), len(data["groups"])
    if saved != (type(optimizer).__name__, len(weights), len(optimizer.param_groups)):
        raise RunError(
            "run.optimizer",
            f"Could not restore the optimizer: the checkpoint has {saved[0]} with {saved[1]} weights, the job has "
            f"{type(optimizer).__name__} with {len(weights)}.",
            "Resume with the job that the run was started with, or start a new run.",
        )
    placed: dict[str, Tensor] = {}
    # A fused torch optimizer keeps its step counters on the device, any other on the host.
    fused = any(group.get("fused") for group in data["groups"])

    def unpack(value: Any, key: str, weight: Parameter) -> Any:
        if not isinstance(value, dict):
            return value
        if "tuple" in value:
            return tuple(unpack(item, key, weight) for item in value["tuple"])
        if "list" in value:
            return [unpack(item, key, weight) for item in value["list"]]
        if "dict" in value:
            return {unpack(name, key, weight): unpack(item, key, weight) for name, item in value["dict"]}
        if "dtype" in value:
            return getattr(torch, value["dtype"])
        name = value["tensor"]
        if name not in placed:
            on_host = key == "step" and not fused
            placed[name] = tensors[name].clone() if on_host else _place(optimizer, tensors[name], key, weight)
        return placed[name].mT if value.get("columns") else placed[name]

    optimizer.state.clear()
    for weight, entries in zip(weights, data["state"], strict=True):
        if entries:
            optimizer.state[weight] = {key: unpack(value, key, weight) for key, value in entries.items()}
    optimizer.state.update({key: unpack(value, key, weights[0]) for key, value in data.get("whole", {}).items()})
    for group, entries in zip(optimizer.param_groups, data["groups"], strict=True):
        group.update({key: unpack(value, key, group["params"][0]) for key, value in entries.items()})


def _relative_step(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Return the rate that Adafactor will use in the next step.

    It is 1 / sqrt(step), at most 0.01, or 1e-6 * step with warm-up.
    """
    step = optimizer.state.get(group["params"][0], {}).get("step", 0) + 1
    most: float = 1e-6 * step if group["warmup_init"] else 1e-2
    return min(most, 1.0 / math.sqrt(step))


def _place(optimizer: Any, tensor: Tensor, key: str, weight: Parameter) -> Tensor:
    """Return a copy of a saved tensor where the library expects it: in paged memory or on its weight's device."""
    if getattr(optimizer, "is_paged", False) and key in PAGED:
        # Only the library can allocate paged memory.
        buffer: Tensor = optimizer.get_state_buffer(weight, dtype=tensor.dtype)
        return buffer.copy_(tensor)
    return tensor.to(weight.device, copy=True)


def _weights(optimizer: Optimizer) -> list[Parameter]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]
