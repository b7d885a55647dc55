"""What a training method is: its names, purpose and source, and for optimizers how much memory and work they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

# bitsandbytes quantizes the state of weights with at least this many numbers, in blocks with one fp32 scale each.
QUANTIZED_FROM = 4096
QUANTIZED_BLOCK = 256
QUANTIZATION_MAP_BYTES = 1024
# bitsandbytes puts states of this many numbers and more into paged memory, which does not count as GPU memory.
PAGED_FROM = 100_000
FP32 = 4
PROGRAMS = ("ComfyUI", "Forge", "A1111", "InvokeAI", "diffusers", "sd-scripts")
"""Programs that load LoRAs whose behavior is known; the last one is kohya's trainer."""
_COPY = "other programs load its copy as a plain LoRA"


class MasterWeight(NamedTuple):
    """A trained weight in fp32, on whose shape an optimizer's state depends."""

    shape: tuple[int, ...]
    starts_at_zero: bool
    """Whether it is the second factor of a LoRA; Prodigy remembers only a single number of its first value."""

    @property
    def numbers(self) -> int:
        """Return how many numbers it has."""
        return math.prod(self.shape)

    @property
    def averages(self) -> tuple[int, int]:
        """Return the numbers in its averages over each of the last two dimensions.

        In a 1 × 1 convolution they are as many as in the weight; in a 3 × 3 convolution, each average is a third of it.
        """
        return self.numbers // self.shape[-1], self.numbers // self.shape[-2]


class StepWork(NamedTuple):
    """Work of an optimizer step, measured on traces of both families."""

    each: int
    """Operations per weight."""
    once: int
    """Further operations per step."""
    traffic: float
    """Bytes read and written per number, gradient clipping included."""


class HostReads(NamedTuple):
    """Numbers that the host reads from the device, each of which makes it wait."""

    per_weight: int = 0
    per_group: int = 0
    per_step: int = 0


StateLayout = Callable[[Any, MasterWeight], list[int]]
"""Returns the bytes of each tensor of state that an optimizer with a config keeps on the GPU for a weight."""


@dataclass(frozen=True, slots=True)
class Method:
    """One choice in the training of a LoRA, such as an optimizer or a loss."""

    title: str
    """Name in text, such as "AdamW"."""
    purpose: str
    """What it is for: one sentence."""
    source: str
    """Where its formula comes from: the package that computes it, or the paper."""
    names: tuple[str, ...] = ()
    """Further names in other trainers, in lowercase."""
    programs: tuple[str, ...] = ()
    """For adapters, those of `PROGRAMS` that load their files; each may be limited, as in "InvokeAI for SDXL"."""
    loads_note: str = ""
    """For adapters, what else there is to know about loading their files."""

    @property
    def loads_in(self) -> str:
        """Return which programs load an adapter's files, as part of a sentence; empty for other methods."""
        if self.programs == PROGRAMS:
            return f"every program that loads LoRAs{self.loads_note}"
        listed = ", ".join(self.programs[:-1]) + " and " * (len(self.programs) > 1) + "".join(self.programs[-1:])
        return f"{listed}; {_COPY}" if self.programs else ""

    def is_loaded_by(self, program: str, family: str | None) -> bool:
        """Return whether a program loads an adapter's files, of this family if it is known ("sd15", "sdxl")."""
        return program in self.programs or (family != "sd15" and f"{program} for SDXL" in self.programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMethod(Method):
    """An optimizer, with what its state and steps take."""

    library: str
    """Distribution that computes the step; traces of a step depend on its version."""
    layout: StateLayout
    """Bytes of the tensors that it keeps for each weight."""
    shared: tuple[int, ...] = ()
    """Bytes of further tensors that it keeps once for all weights."""
    work: StepWork
    """Work of a step."""
    copies: float = 0.0
    """How often a step copies all weights at once; 0: only the largest one at a time."""
    first_moves: bool = True
    """Whether the first step already moves the weights and copies them for that."""
    reads: HostReads = field(default_factory=HostReads)
    """Numbers that the host reads from the device in a step after the first, with default arguments."""
    reads_note: str = ""
    """What else makes the host wait for the device."""
    finds_rate: bool = False
    """Whether it finds the learning rate, which the configured rates multiply."""
    one_rate: bool = False
    """Whether all weights must have the same configured rate, unless it finds one for each part."""
    averages: bool = False
    """Whether validation, previews and exports use averages of the weights that it trains (Schedule-Free)."""
    class_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of its class in kohya's trainer where they differ from ours."""
    argument_names: Mapping[str, str] = field(default_factory=dict)
    """Our names of the arguments that its class names differently."""


def quantized(entries: int, *, paged: bool = False) -> StateLayout:
    """Return the layout of bitsandbytes' 8-bit state with one or two entries per weight."""

    def layout(_: object, weight: MasterWeight) -> list[int]:
        if weight.numbers < QUANTIZED_FROM:
            return entries * [FP32 * weight.numbers]
        scales = FP32 * -(-weight.numbers // QUANTIZED_BLOCK)
        is_paged = paged and weight.numbers >= PAGED_FROM
        return entries * [scales] if is_paged else entries * [weight.numbers, scales]

    return layout


def whole(entries: int, *more: int) -> StateLayout:
    """Return the layout of an optimizer that keeps ``entries`` copies of each weight in fp32, and smaller tensors."""
    return lambda _, weight: [*(entries * [FP32 * weight.numbers]), *more]


def factorization(number: int, factor: int | None = None) -> tuple[int, int]:
    """Return two factors of a number, the smaller one first and not above `factor`, that are as close as possible.

    Without `factor` they are as close as possible to the square root. As in LyCORIS (functional/general.py).
    """
    if factor is not None and number % factor == 0:
        return min(factor, number // factor), max(factor, number // factor)
    limit = math.isqrt(number) if factor is None else min(factor, math.isqrt(number))
    smaller = next(divisor for divisor in range(limit, 0, -1) if number % divisor == 0)
    return smaller, number // smaller


ADAPTERS: Mapping[str, Method] = {
    "lora": Method(
        "LoRA",
        'Low-rank matrices beside the layers; with layers = "all" also on 3x3 convolutions (LoCon).',
        "Hu et al. 2021; networks/lora.py of kohya's sd-scripts",
        programs=PROGRAMS,
    ),
    "tlora": Method(
        "T-LoRA",
        "A LoRA of which fewer ranks learn from noisy timesteps, so that few images are copied less.",
        "Soboleva et al. 2025, arXiv 2507.05964",
        programs=PROGRAMS,
        loads_note=", which apply all ranks at all timesteps",
    ),
    "dora": Method(
        "DoRA",
        "A LoRA that also learns one magnitude per input of each layer; about twice the work of a LoRA in a step.",
        "Liu et al. 2024; locon with dora_wd and wd_on_output = False of LyCORIS",
        programs=("ComfyUI", "Forge", "A1111", "InvokeAI"),
    ),
    "loha": Method(
        "LoHa",
        "Product, number by number, of two low-rank matrices: a higher rank for the same size of file.",
        "Hyeon-Woo et al. 2022; loha of LyCORIS",
        programs=("ComfyUI", "Forge", "A1111", "InvokeAI"),
    ),
    "lokr": Method(
        "LoKr",
        "Kronecker product of a small and a larger matrix: small files.",
        "Yeh et al. 2023; lokr of LyCORIS",
        programs=("ComfyUI", "Forge", "A1111", "InvokeAI for SDXL"),
    ),
    "oft": Method(
        "OFT",
        "Rotates blocks of each layer's outputs, so that the strength of the base's features stays.",
        "Qiu et al. 2023; diag-oft of LyCORIS",
        programs=("ComfyUI", "A1111"),
    ),
}
"""Values of recipe.adapter."""

SCHEDULES: Mapping[str, Method] = {
    "constant": Method("Constant", "The same rate in every step after the warmup.", "diffusers.optimization"),
    "linear": Method("Linear", "Falls in a straight line.", "diffusers.optimization"),
    "cosine": Method("Cosine", "Falls slowly at first and at the end.", "Loshchilov and Hutter 2017"),
    "restarts": Method("Cosine with restarts", "Several cosines in a row.", "Loshchilov and Hutter 2017"),
    "polynomial": Method("Polynomial", "Falls as a power of the remaining share of the run.", "diffusers.optimization"),
    "rex": Method("REX", "Falls late in the run.", "Chen et al. 2022"),
    "inverse_sqrt": Method(
        "Inverse square root", "Falls with the square root of the steps, ever more slowly.", "transformers.optimization"
    ),
    "warmup_stable_decay": Method(
        "Warmup, stable, decay", "Stays the same until the last part, in which it falls.", "transformers.optimization"
    ),
    "piecewise": Method("Piecewise constant", "Factors and the steps where they end.", "diffusers.optimization"),
}
"""Values of recipe.schedule.kind."""

LOSSES: Mapping[str, Method] = {
    "mse": Method("Mean squared error", "The standard loss.", "Ho et al. 2020"),
    "l1": Method("L1", "The absolute error: outlier images count less.", "loss_type of kohya's sd-scripts"),
    "huber": Method("Huber", "Grows linearly above a threshold (pseudo-Huber).", "loss_type of kohya's sd-scripts"),
    "smooth_l1": Method("Smooth L1", "Huber divided by its threshold.", "loss_type of kohya's sd-scripts"),
    "log_cosh": Method("Log-cosh", "Half the squared error if small, the absolute error if large.", "OneTrainer"),
}
"""Values of recipe.objective.loss."""

Sampler = Literal[
    "euler", "euler_a", "ddim", "dpmpp_2m", "dpmpp_2m_karras", "dpmpp_2m_sde_karras", "heun", "unipc", "lcm"
]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
"""Names of the samplers that generate images; trainer/base/drawing.py has the scheduler of each."""
