"""The optimizers and their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.config.schema import Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
WeightDecay = Annotated[float, Field(ge=0.0, le=10.0)]
Epsilon = Annotated[float, Field(gt=0.0, le=1.0)]


class _AdamLike(Section):
    name: str
    """Name of the optimizer."""
    beta1: Beta = 0.9
    """Momentum: decay rate of the gradient average; typically 0.9."""
    beta2: Beta = 0.999
    """Decay rate of the squared gradient average; typically 0.99 to 0.999."""
    eps: Epsilon = 1e-8
    """Epsilon: small number that prevents division by zero; typically 1e-8."""
    weight_decay: WeightDecay = 0.01
    """Weight decay; typically 0.01."""


class AdamWConfig(_AdamLike):
    """AdamW: a safe choice."""

    name: Literal["adamw"] = "adamw"
    """AdamW, from PyTorch."""


class AdamW8bitConfig(_AdamLike):
    """AdamW with 8-bit state: saves a little memory."""

    name: Literal["adamw8bit"] = "adamw8bit"
    """AdamW with 8-bit state, from bitsandbytes."""


class PagedAdamW8bitConfig(_AdamLike):
    """8-bit AdamW whose state can move to system memory."""

    name: Literal["paged_adamw8bit"] = "paged_adamw8bit"
    """8-bit AdamW whose state can move to system memory, from bitsandbytes."""


class _LionLike(Section):
    name: str
    """Name of the optimizer."""
    beta1: Beta = 0.9
    """Momentum used in a step; typically 0.9."""
    beta2: Beta = 0.99
    """Decay rate of the momentum; typically 0.99."""
    weight_decay: WeightDecay = 0.01
    """Weight decay; typically 0.01."""


class LionConfig(_LionLike):
    """Lion: needs a learning rate 3 to 10 times lower than AdamW."""

    name: Literal["lion"] = "lion"
    """Lion, from bitsandbytes."""


class Lion8bitConfig(_LionLike):
    """Lion with 8-bit state."""

    name: Literal["lion8bit"] = "lion8bit"
    """Lion with 8-bit state, from bitsandbytes."""


class AdafactorConfig(Section):
    """Adafactor: needs very little memory."""

    name: Literal["adafactor"] = "adafactor"
    """Adafactor, from transformers."""
    relative_step: bool = False
    """Adafactor chooses the learning rate itself; requires a constant schedule without warmup."""
    scale_parameter: bool = False
    """Scale the learning rate by the root mean square of the weights."""
    warmup_init: bool = False
    """Start relative steps very small; requires relative_step."""
    clip_threshold: float = Field(default=1.0, gt=0.0)
    """Updates whose root mean square is above this threshold are scaled down to it."""
    decay_rate: float = Field(default=-0.8, lt=0.0)
    """Exponent that sets how the decay of the squared gradient average changes with the step; typically -0.8."""
    beta1: Beta | None = None
    """Momentum: decay rate of the gradient average; default: no momentum, which saves memory."""
    weight_decay: WeightDecay = 0.0
    """Weight decay; typically 0.01."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error for warmup_init without relative_step, which transformers does not allow."""
        if self.warmup_init and not self.relative_step:
            yield "warmup_init", "requires relative_step = true"


class ProdigyConfig(Section):
    """Prodigy: finds the learning rate itself; set all learning rates to 1.0."""

    name: Literal["prodigy"] = "prodigy"
    """Prodigy, from prodigyopt."""
    beta1: Beta = 0.9
    """Momentum: decay rate of the gradient average; typically 0.9."""
    beta2: Beta = 0.999
    """Decay rate of the squared gradient average; typically 0.99 to 0.999."""
    weight_decay: WeightDecay = 0.01
    """Weight decay; typically 0.01."""
    d_coef: float = Field(default=1.0, gt=0.0, le=100.0)
    """Multiplies the learning rate that Prodigy finds; typically 0.5 to 2."""
    d0: float = Field(default=1e-6, gt=0.0, le=1.0)
    """Initial estimate of the step size; typically 1e-6."""
    growth_rate: float = Field(default=float("1e30"), gt=1.0)
    """Largest factor by which the estimate may grow per step; 1e30 is unlimited."""
    safeguard_warmup: bool = True
    """Keep the estimate from growing too fast during warmup."""
    bias_correction: bool = True
    """Use Adam's bias correction in the first steps (kohya: use_bias_correction)."""


class ScheduleFreeConfig(Section):
    """Schedule-Free AdamW: needs no learning rate schedule; set it to constant."""

    name: Literal["schedulefree"] = "schedulefree"
    """Schedule-Free AdamW, from schedulefree."""
    beta1: Beta = 0.9
    """Interpolation between the latest and the averaged weights; typically 0.9."""
    beta2: Beta = 0.999
    """Decay rate of the squared gradient average; typically 0.99 to 0.999."""
    eps: Epsilon = 1e-8
    """Epsilon: small number that prevents division by zero; typically 1e-8."""
    weight_decay: WeightDecay = 0.01
    """Weight decay; typically 0.01."""
    warmup_steps: int = Field(default=0, ge=0)
    """Warmup steps of the optimizer itself."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error for beta1 = 0.

        The averaged weights are computed from the trained and the latest weights. With beta1 = 0, these would be equal,
        and the average could not be recovered.
        """
        if self.beta1 == 0.0:
            yield "beta1", "must be above 0, or there are no averaged weights to export"


OptimizerConfig = (
    AdamWConfig
    | AdamW8bitConfig
    | PagedAdamW8bitConfig
    | LionConfig
    | Lion8bitConfig
    | AdafactorConfig
    | ProdigyConfig
    | ScheduleFreeConfig
)


def averages_weights(optimizer: OptimizerConfig) -> bool:
    """Return whether an optimizer saves and validates with averages of the weights that it trains."""
    return isinstance(optimizer, ScheduleFreeConfig)
