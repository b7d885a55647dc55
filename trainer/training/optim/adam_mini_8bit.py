"""Adam-mini with 8-bit momentum: an eighth of AdamW's state."""

from __future__ import annotations

import math
from typing import Any

import bitsandbytes.functional
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from trainer.config.methods import QUANTIZED_BLOCK, QUANTIZED_FROM


class AdamMini8bit(Optimizer):
    """Adam with one step size per matrix, whose momentum is quantized in blocks as in bitsandbytes' 8-bit Adam.

    Adam-mini (Zhang et al. 2024, algorithm 1, each matrix one block) with decoupled weight decay::

        v = beta2 · v + (1 - beta2) · mean(g²)
        m = beta1 · m + (1 - beta1) · g
        w = w · (1 - lr · weight_decay) - lr · m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    m is kept as bytes and one fp32 scale per 256 numbers (Dettmers et al. 2022); small weights keep it in fp32.
    A step computes with m in fp32, which takes a copy of the largest weight for a moment.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(groups, {"lr": 1e-3, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._codes: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with the weights' gradients; weights without one stay as they are."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[weight], group["betas"]
        if not state:
            self._begin(weight, state)
        state["step"] += 1
        first, second = 1.0 - beta1 ** state["step"], 1.0 - beta2 ** state["step"]
        # The norm needs no copy of the gradient, as its square would.
        mean = torch.linalg.vector_norm(gradient).square() / gradient.numel()
        state["v"].lerp_(mean, 1.0 - beta2)
        momentum = self._momentum(weight, state).lerp_(gradient, 1.0 - beta1)
        if "absmax1" in state:
            self._quantize(momentum, state)
            scaled = momentum  # a copy
        else:
            scaled = momentum.clone()
        scaled.mul_(group["lr"] / first / (state["v"].sqrt() / math.sqrt(second) + group["eps"]))
        weight.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(scaled)

    def _begin(self, weight: Parameter, state: dict[str, Any]) -> None:
        state["step"] = 0
        state["v"] = torch.zeros((), dtype=weight.dtype, device=weight.device)
        if weight.numel() < QUANTIZED_FROM:
            state["state1"] = torch.zeros_like(weight)
            return
        code = self._code(weight.device)
        # Zero is a code of its own, but not the byte 0.
        state["state1"], state["absmax1"] = torch.ops.bitsandbytes.quantize_blockwise(
            torch.zeros_like(weight), code, QUANTIZED_BLOCK
        )
        state["qmap1"] = code

    def _momentum(self, weight: Parameter, state: dict[str, Any]) -> Tensor:
        """Return the momentum in the weight's dtype; a copy if it is quantized."""
        if "absmax1" not in state:
            return state["state1"]  # type: ignore[no-any-return]
        stored = state["state1"], state["absmax1"], state["qmap1"], QUANTIZED_BLOCK, weight.dtype
        return torch.ops.bitsandbytes.dequantize_blockwise(*stored)  # type: ignore[no-any-return]

    def _quantize(self, momentum: Tensor, state: dict[str, Any]) -> None:
        """Write a momentum into its state, in place: a new tensor in each step would fragment memory."""
        quantized, scales = torch.ops.bitsandbytes.quantize_blockwise(momentum, state["qmap1"], QUANTIZED_BLOCK)
        state["state1"].copy_(quantized)
        state["absmax1"].copy_(scales)

    def _code(self, device: torch.device) -> Tensor:
        """Return the numbers that the 256 bytes stand for, once per device."""
        if device not in self._codes:
            self._codes[device] = bitsandbytes.functional.create_dynamic_map(signed=True).to(device)
        return self._codes[device]
