"""Layers with DoRA, LoHa, LoKr and OFT, whose weights have the names, shapes and meaning of LyCORIS files.

PEFT's classes for these methods are not used: their magnitudes belong to outputs and their rotations to inputs, which
the programs that load LyCORIS files do not read, and they build a matrix of the base weight's size in every layer.
Here only LoHa builds one, and backward builds it again instead of keeping it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, cast

import numpy as np
import torch
from peft.tuners.lora import LoraLayer as PeftLoraLayer
from torch import Tensor, nn

from trainer.adapter.layers import LayerSettings
from trainer.adapter.names import RANKED_ROLES
from trainer.adapter.products import (
    Frozen,
    apply_built,
    apply_kronecker,
    apply_pointwise,
    apply_weight,
    base_shape,
    dense_weight,
    minus_bias,
    recomputed,
    without_bias,
)
from trainer.config.methods import factorization
from trainer.config.recipe import AdapterKind, RecipeConfig

Shapes = Mapping[str, Sequence[int]]


class Change(nn.Module):
    """What an adapter of one layer adds to the output of that layer, which is frozen.

    Parameters are named like the tensors of a file without ".weight". Weights are (outputs, inputs) for linear layers
    and (outputs, inputs, k, k) for convolutions.
    """

    kind: ClassVar[AdapterKind]
    zero: ClassVar[tuple[str, ...]]
    """Parameters that start at zero, so that a new adapter has no effect."""

    def __init__(self, frozen: Frozen, shapes: Shapes, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = scale
        """alpha / rank."""
        device = frozen.weight.device
        for role, shape in shapes.items():
            self.register_parameter(role, nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device=device)))

    @classmethod
    @abstractmethod
    def shapes_of(cls, base: Sequence[int], settings: LayerSettings, factor: int | None) -> Shapes:
        """Return the shapes of the parameters, by role, for a base weight of shape `base`."""

    @classmethod
    @abstractmethod
    def fits(cls, shapes: Shapes, base: Sequence[int]) -> bool:
        """Return whether parameters of these shapes, as from a file, change a base weight of shape `base`."""

    @abstractmethod
    def forward(self, x: Tensor, output: Tensor, frozen: Frozen) -> Tensor:
        """Return what is added to `output`, the frozen layer's output for x."""

    @abstractmethod
    def weight_change(self, weights: Mapping[str, Tensor], frozen: Frozen) -> Tensor:
        """Return the change of the base weight, in the base weight's shape, for fp32 or float64 weights by role."""

    @abstractmethod
    def initial(self, random: np.random.Generator) -> dict[str, Tensor]:
        """Return initial fp32 weights by role, with which the change is zero."""


class Dora(Change):
    """DoRA (Liu et al. 2024): W' = m (W + s · up · down) / ‖W + s · up · down‖, with one norm per input.

    In training, the norm is over outputs and kernel (LyCORIS: wd_on_output = False), the only form that all programs
    with DoRA read alike; files may have one norm per output instead. As in section 4.3 of the paper, it gets no
    gradient. The factor m / norm is close to 1, where bf16 has steps of 0.8 %, so x and x · (factor - 1) go through the
    base separately.
    """

    kind = "dora"
    zero = ("lora_up",)
    lora_down: nn.Parameter
    lora_up: nn.Parameter
    dora_scale: nn.Parameter
    base_squares: Tensor
    between: Callable[[Tensor], Tensor] | None = None
    """What is applied between `lora_down` and `lora_up`, such as dropout."""

    def __init__(self, frozen: Frozen, shapes: Shapes, scale: float, dtype: torch.dtype) -> None:
        low_rank = {role: shape for role, shape in shapes.items() if role != "dora_scale"}
        super().__init__(frozen, low_rank, scale, dtype)
        magnitudes = tuple(shapes["dora_scale"])
        self._per_input = magnitudes[0] == 1
        squares = _square_sums(dense_weight(frozen), 1 if self._per_input else 0)
        self.dora_scale = nn.Parameter(torch.empty(magnitudes, dtype=squares.dtype, device=squares.device))
        self.register_buffer("base_squares", squares, persistent=False)

    @classmethod
    def shapes_of(cls, base: Sequence[int], settings: LayerSettings, factor: int | None) -> Shapes:
        """Return the shapes of the parameters, by role, for a base weight of shape `base`."""
        outputs, inputs, *kernel = base
        ones = [1 for _ in kernel]
        down, up = (settings.rank, inputs, *kernel), (outputs, settings.rank, *ones)
        return {"lora_down": down, "lora_up": up, "dora_scale": (1, inputs, *ones)}

    @classmethod
    def fits(cls, shapes: Shapes, base: Sequence[int]) -> bool:
        """Return whether parameters of these shapes, as from a file, change a base weight of shape `base`."""
        outputs, inputs, *kernel = base
        (rank, *rest), up, magnitudes = (list(shapes[role]) for role in ("lora_down", "lora_up", "dora_scale"))
        ones = [1 for _ in kernel]
        return (
            rest == [inputs, *kernel]
            and up == [outputs, rank, *ones]
            and magnitudes in ([1, inputs, *ones], [outputs, 1, *ones])
        )

    def forward(self, x: Tensor, output: Tensor, frozen: Frozen) -> Tensor:
        """Return what is added to `output`, the frozen layer's output for x."""
        factor = self.dora_scale / self._norms(frozen).view(self.dora_scale.shape)
        if not isinstance(frozen, nn.Conv2d):
            factor = factor.flatten()
        elif not self._per_input:
            factor = factor.transpose(0, 1)
        more = (factor - 1).to(x.dtype)
        if not self._per_input:
            return minus_bias(frozen, output) * more + self._low_rank(frozen, x) * factor.to(x.dtype)
        scaled = x * more
        return without_bias(frozen, scaled) + self._low_rank(frozen, x + scaled)

    def _low_rank(self, frozen: Frozen, x: Tensor) -> Tensor:
        hidden = apply_weight(frozen, x, self.lora_down)
        return apply_pointwise(self.between(hidden) if self.between else hidden, self.lora_up * self.scale)

    @torch.no_grad()
    def _norms(self, frozen: Frozen) -> Tensor:
        """Return the norms of W + s · up · down, (inputs,) or (outputs,), without a matrix of the base's size.

        ‖W + s U D‖² = ‖W‖² + 2 s Σ D ∘ (Uᵀ W) + s² Σ D ∘ (Uᵀ U D) per input, each sum over the rank and the kernel;
        and the same with the roles of U and Dᵀ exchanged per output.
        """
        base = dense_weight(frozen, self.lora_up.dtype).flatten(1)
        first, second = self.lora_down.flatten(1), self.lora_up.flatten(1)
        if not self._per_input:
            base, first, second = base.t(), second.t(), first.t()
        wide = self.base_squares.dtype
        crossed, own = (second.t() @ base).to(wide), (second.t() @ second).to(wide)
        first = first.to(wide)
        added = (first * (2 * self.scale * crossed + self.scale**2 * (own @ first))).sum(0)
        return _roots(self.base_squares + added.view(len(self.base_squares), -1).sum(1))

    def weight_change(self, weights: Mapping[str, Tensor], frozen: Frozen) -> Tensor:
        """Return the change of the base weight, in the base weight's shape, for fp32 or float64 weights by role."""
        base = dense_weight(frozen, weights["lora_up"].dtype)
        low_rank = weights["lora_up"].flatten(1) @ weights["lora_down"].flatten(1)
        changed = base + self.scale * low_rank.view(base.shape)
        magnitudes = weights["dora_scale"]
        norms = _roots(_square_sums(changed, 1 if self._per_input else 0))
        return changed * (magnitudes / norms.view(magnitudes.shape)) - base

    def initial(self, random: np.random.Generator) -> dict[str, Tensor]:
        """Return initial fp32 weights by role, with which the change is zero."""
        norms = self.base_squares.sqrt().view(self.dora_scale.shape).float().cpu()
        return {"lora_down": uniform(random, self.lora_down), "lora_up": _zeros(self.lora_up), "dora_scale": norms}


class LoHa(Change):
    """LoHa (Hyeon-Woo et al. 2022, FedPara): ΔW = s · (w1_a · w1_b) ∘ (w2_a · w2_b), of rank up to rank²."""

    kind = "loha"
    zero = ("hada_w2_a",)

    @classmethod
    def shapes_of(cls, base: Sequence[int], settings: LayerSettings, factor: int | None) -> Shapes:
        """Return the shapes of the parameters, by role, for a base weight of shape `base`."""
        a, b = (base[0], settings.rank), (settings.rank, math.prod(base[1:]))
        return {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": a, "hada_w2_b": b}

    @classmethod
    def fits(cls, shapes: Shapes, base: Sequence[int]) -> bool:
        """Return whether parameters of these shapes, as from a file, change a base weight of shape `base`."""
        pairs = (("hada_w1_a", "hada_w1_b"), ("hada_w2_a", "hada_w2_b"))
        return all(_multiplies_to(shapes[a], shapes[b], (base[0], math.prod(base[1:]))) for a, b in pairs)

    def forward(self, x: Tensor, output: Tensor, frozen: Frozen) -> Tensor:
        """Return what is added to `output`, the frozen layer's output for x."""
        return apply_built(frozen, x, self._build, *self.parameters(recurse=False))

    def _build(self, w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor) -> Tensor:
        return (w1_a @ w1_b) * (w2_a * self.scale @ w2_b)

    def weight_change(self, weights: Mapping[str, Tensor], frozen: Frozen) -> Tensor:
        """Return the change of the base weight, in the base weight's shape, for fp32 or float64 weights by role."""
        return self._build(*(weights[role] for role, _ in self.named_parameters(recurse=False))).view(
            base_shape(frozen)
        )

    def initial(self, random: np.random.Generator) -> dict[str, Tensor]:
        """Return initial fp32 weights by role, with which the change is zero; as in LyCORIS (modules/loha.py)."""
        deviations = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_a": 0.0, "hada_w2_b": 1.0}
        return {
            role: torch.from_numpy(random.standard_normal(weight.shape, dtype=np.float32)) * deviations[role]
            for role, weight in self.named_parameters(recurse=False)
        }


class LoKr(Change):
    """LoKr (Yeh et al. 2023, LyCORIS): ΔW = s · w1 ⊗ w2, where w2 is a product of two matrices if its rank is low.

    The factors are applied to the input one after the other, so the Kronecker product is never built.
    """

    kind = "lokr"
    zero = ("lokr_w2", "lokr_w2_b")  # whichever it has

    @classmethod
    def shapes_of(cls, base: Sequence[int], settings: LayerSettings, factor: int | None) -> Shapes:
        """Return the shapes of the parameters, by role, for a base weight of shape `base`."""
        outputs, inputs, *kernel = base
        (out_1, out_2), (in_1, in_2) = factorization(outputs, factor), factorization(inputs, factor)
        w1 = {"lokr_w1": (out_1, in_1)}
        if settings.rank >= max(out_2, in_2) / 2:
            return {**w1, "lokr_w2": (out_2, in_2, *kernel)}
        return {**w1, "lokr_w2_a": (out_2, settings.rank), "lokr_w2_b": (settings.rank, in_2 * math.prod(kernel))}

    @classmethod
    def fits(cls, shapes: Shapes, base: Sequence[int]) -> bool:
        """Return whether parameters of these shapes, as from a file, change a base weight of shape `base`."""
        rows, columns = shapes["lokr_w1"]
        rest = (base[0] // rows, math.prod(base[1:]) // columns)
        if (rows * rest[0], columns * rest[1]) != (base[0], math.prod(base[1:])) or base[1] % columns:
            return False
        if "lokr_w2" in shapes:
            return [*shapes["lokr_w2"]] == [rest[0], base[1] // columns, *base[2:]]
        return _multiplies_to(shapes["lokr_w2_a"], shapes["lokr_w2_b"], rest)

    def forward(self, x: Tensor, output: Tensor, frozen: Frozen) -> Tensor:
        """Return what is added to `output`, the frozen layer's output for x."""

        def compute(x: Tensor, w1: Tensor, *w2: Tensor) -> Tensor:
            return apply_kronecker(frozen, x, w1, self._w2(frozen, w1, *w2))

        return recomputed(compute, x, *self.parameters(recurse=False))

    def _w2(self, frozen: Frozen, w1: Tensor, *factors: Tensor) -> Tensor:
        if len(factors) == 1:
            return factors[0] * self.scale
        _, inputs, *kernel = base_shape(frozen)
        return (factors[0] * self.scale @ factors[1]).view(-1, inputs // w1.shape[1], *kernel)

    def weight_change(self, weights: Mapping[str, Tensor], frozen: Frozen) -> Tensor:
        """Return the change of the base weight, in the base weight's shape, for fp32 or float64 weights by role."""
        w1, *w2 = (weights[role] for role, _ in self.named_parameters(recurse=False))
        built = self._w2(frozen, w1, *w2)
        return torch.kron(w1.view(*w1.shape, *(1 for _ in built.shape[2:])), built)

    def initial(self, random: np.random.Generator) -> dict[str, Tensor]:
        """Return initial fp32 weights by role, with which the change is zero; as in LyCORIS (modules/lokr.py)."""
        return {
            role: _zeros(weight) if role in self.zero else uniform(random, weight)
            for role, weight in self.named_parameters(recurse=False)
        }


class Oft(Change):
    """OFT (Qiu et al. 2023) with Cayley's transform: W' = R W, with R a block-diagonal rotation of the outputs.

    R = (I + Q) (I - Q)⁻¹ with Q = B - Bᵀ for each block B, transposed as in LyCORIS (modules/diag_oft.py). The change
    R - I = 2 Q (I - Q)⁻¹ is computed without the 1, beside which bf16 would round it away.
    """

    kind = "oft"
    zero = ("oft_blocks",)
    oft_blocks: nn.Parameter

    @classmethod
    def shapes_of(cls, base: Sequence[int], settings: LayerSettings, factor: int | None) -> Shapes:
        """Return the shapes of the parameters, by role, for a base weight of shape `base`."""
        size, count = factorization(base[0], settings.rank)
        return {"oft_blocks": (count, size, size)}

    @classmethod
    def fits(cls, shapes: Shapes, base: Sequence[int]) -> bool:
        """Return whether parameters of these shapes, as from a file, change a base weight of shape `base`."""
        blocks = shapes["oft_blocks"]
        return len(blocks) == 3 and blocks[1] == blocks[2] and blocks[0] * blocks[1] == base[0]

    def forward(self, x: Tensor, output: Tensor, frozen: Frozen) -> Tensor:
        """Return what is added to `output`, the frozen layer's output for x."""
        turned = self._change_of_rotation(self.oft_blocks).to(output.dtype)
        axis = 1 if isinstance(frozen, nn.Conv2d) else -1
        last = minus_bias(frozen, output).movedim(axis, -1)
        blocks = last.reshape(*last.shape[:-1], *turned.shape[:2])
        result: Tensor = torch.einsum("knm,...kn->...km", turned, blocks).flatten(-2).movedim(-1, axis)
        return result

    @staticmethod
    def _change_of_rotation(blocks: Tensor) -> Tensor:
        wide = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
        q = wide - wide.mT
        # inv_ex, because inv waits for the device to check that I - Q is invertible, which it always is.
        inverse: Tensor = torch.linalg.inv_ex(torch.eye(q.shape[-1], dtype=q.dtype, device=q.device) - q).inverse
        return 2 * q @ inverse

    def weight_change(self, weights: Mapping[str, Tensor], frozen: Frozen) -> Tensor:
        """Return the change of the base weight, in the base weight's shape, for fp32 or float64 weights by role."""
        turned = self._change_of_rotation(weights["oft_blocks"])
        base = dense_weight(frozen, turned.dtype)
        blocks = base.reshape(*turned.shape[:2], -1)
        return torch.einsum("knm,kni->kmi", turned, blocks).reshape(base.shape)

    def initial(self, random: np.random.Generator) -> dict[str, Tensor]:
        """Return initial fp32 weights by role, with which the change is zero."""
        return {"oft_blocks": _zeros(self.oft_blocks)}


CHANGES: Mapping[str, type[Change]] = {change.kind: change for change in (Dora, LoHa, LoKr, Oft)}
"""Kinds of adapter whose files are not plain LoRAs."""


def make_change(recipe: RecipeConfig, frozen: Frozen, settings: LayerSettings, dtype: torch.dtype) -> Change:
    """Return the change of one layer that a recipe trains, with uninitialized weights in `dtype`."""
    kind = CHANGES[recipe.adapter]
    shapes = kind.shapes_of(base_shape(frozen), settings, recipe.lokr_factor)
    return kind(frozen, shapes, scale_of(shapes, settings.alpha), dtype)


def scale_of(shapes: Shapes, alpha: float) -> float:
    """Return the scale, alpha / rank, of parameters of these shapes; 1 for rotations and for LoKr of full rank."""
    ranks = [shapes[role][0] for role in RANKED_ROLES if role in shapes]
    return alpha / ranks[0] if ranks else 1.0


class LycorisLayer(nn.Module):
    """A frozen layer, which may have a LoRA, with further changes, each with a strength (1: as trained)."""

    def __init__(self, base_layer: nn.Module, changes: Sequence[Change]) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.changes = nn.ModuleList(changes)
        self.strengths = [1.0 for _ in changes]
        self.active = True

    @property
    def only(self) -> Change:
        """Return the change of a layer that has one, as in training."""
        (change,) = self.changes
        return cast(Change, change)

    @property
    def frozen(self) -> Frozen:
        """Return the layer of the base."""
        inner = self.base_layer.get_base_layer() if isinstance(self.base_layer, PeftLoraLayer) else self.base_layer
        return cast(Frozen, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with all changes."""
        result: Tensor = self.base_layer(x)
        if not self.active:
            return result
        frozen = self.frozen
        output = result if frozen is self.base_layer else frozen(x)
        for change, strength in zip(self.changes, self.strengths, strict=True):
            added = change(x, output, frozen)
            result = result + (added if strength == 1.0 else added * strength)
        return result


def _multiplies_to(a: Sequence[int], b: Sequence[int], product: tuple[int, int]) -> bool:
    return len(a) == len(b) == 2 and a[1] == b[0] and (a[0], b[1]) == product


def _square_sums(weight: Tensor, kept: int) -> Tensor:
    """Return the sums of squares over all dimensions but one, fp32 or wider."""
    dims = [dim for dim in range(weight.ndim) if dim != kept]
    wide = torch.promote_types(weight.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(weight, dim=dims, dtype=wide)
    return norms.square()


def _roots(squares: Tensor) -> Tensor:
    """Return square roots to divide by; an input that the base ignores has norm 0, and 0 / 0 would spread as NaN."""
    return squares.clamp(min=0.0).sqrt().clamp(min=torch.finfo(squares.dtype).eps)


def uniform(random: np.random.Generator, weight: Tensor) -> Tensor:
    """Return values for a weight of kaiming_uniform_(a=sqrt(5)): uniform within 1 / sqrt(fan_in), fp32 on the CPU."""
    bound = np.float32(1 / math.sqrt(math.prod(weight.shape[1:])))
    return torch.from_numpy((2 * random.random(tuple(weight.shape), dtype=np.float32) - 1) * bound)


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape)
