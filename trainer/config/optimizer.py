"""The optimizers, each with its own arguments as typed fields."""

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
    """Which optimizer."""
    beta1: Beta = 0.9
    """How long the direction of earlier steps is remembered."""
    beta2: Beta = 0.999
    """How long the size of earlier gradients is remembered."""
    eps: Epsilon = 1e-8
    """A small number that keeps divisions safe."""
    weight_decay: WeightDecay = 0.01
    """How strongly weights are pulled back to zero."""


class AdamWConfig(_AdamLike):
    """AdamW: the dependable default."""

    name: Literal["adamw"] = "adamw"
    """AdamW, from PyTorch."""


class AdamW8bitConfig(_AdamLike):
    """AdamW with 8-bit state: a little less memory."""

    name: Literal["adamw8bit"] = "adamw8bit"
    """AdamW with 8-bit state, from bitsandbytes."""


class PagedAdamW8bitConfig(_AdamLike):
    """8-bit AdamW whose state may move to main memory."""

    name: Literal["paged_adamw8bit"] = "paged_adamw8bit"
    """8-bit AdamW whose state may move to main memory, from bitsandbytes."""


class _LionLike(Section):
    name: str
    """Which optimizer."""
    beta1: Beta = 0.9
    """How much of the remembered direction a step follows."""
    beta2: Beta = 0.99
    """How long directions are remembered."""
    weight_decay: WeightDecay = 0.01
    """How strongly weights are pulled back to zero."""


class LionConfig(_LionLike):
    """Lion: steps of one size; wants a learning rate 3 to 10 times smaller than AdamW's."""

    name: Literal["lion"] = "lion"
    """Lion, from bitsandbytes."""


class Lion8bitConfig(_LionLike):
    """Lion with 8-bit state."""

    name: Literal["lion8bit"] = "lion8bit"
    """Lion with 8-bit state, from bitsandbytes."""


class AdafactorConfig(Section):
    """Adafactor: very little state."""

    name: Literal["adafactor"] = "adafactor"
    """Adafactor, from transformers."""
    relative_step: bool = False
    """Whether it chooses the learning rate itself; the schedule must then be constant without warm-up."""
    scale_parameter: bool = False
    """Whether steps are scaled by the size of the weights."""
    warmup_init: bool = False
    """Whether relative steps start very small."""
    clip_threshold: float = Field(default=1.0, gt=0.0)
    """Updates larger than this (root mean square) are shortened."""
    decay_rate: float = Field(default=-0.8, lt=0.0)
    """How the memory of squared gradients grows with the step."""
    beta1: Beta | None = None
    """How long the direction of earlier steps is remembered; absent: not at all."""
    weight_decay: WeightDecay = 0.0
    """How strongly weights are pulled back to zero."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Warm-up of the relative step needs the relative step; transformers refuses it otherwise."""
        if self.warmup_init and not self.relative_step:
            yield "warmup_init", "works only together with relative_step = true"


class ProdigyConfig(Section):
    """Prodigy: finds the learning rate itself; use learning_rate = 1."""

    name: Literal["prodigy"] = "prodigy"
    """Prodigy, from prodigyopt."""
    beta1: Beta = 0.9
    """How long the direction of earlier steps is remembered."""
    beta2: Beta = 0.999
    """How long the size of earlier gradients is remembered."""
    weight_decay: WeightDecay = 0.01
    """How strongly weights are pulled back to zero."""
    d_coef: float = Field(default=1.0, gt=0.0, le=100.0)
    """Multiplies the learning rate that it finds."""
    d0: float = Field(default=1e-6, gt=0.0, le=1.0)
    """Its first guess of the step size."""
    growth_rate: float = Field(default=float("1e30"), gt=1.0)
    """How fast its guess may grow per step."""
    safeguard_warmup: bool = True
    """Keeps the guess from running away during warm-up."""
    bias_correction: bool = True
    """Whether the first steps are corrected as Adam does."""


class ScheduleFreeConfig(Section):
    """Schedule-Free AdamW: needs no schedule; use constant."""

    name: Literal["schedulefree"] = "schedulefree"
    """Schedule-Free AdamW, from schedulefree."""
    beta1: Beta = 0.9
    """How far the weights trained on lean towards their average."""
    beta2: Beta = 0.999
    """How long the size of earlier gradients is remembered."""
    eps: Epsilon = 1e-8
    """A small number that keeps divisions safe."""
    weight_decay: WeightDecay = 0.01
    """How strongly weights are pulled back to zero."""
    warmup_steps: int = Field(default=0, ge=0)
    """Its own warm-up, in steps."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """The average is found by taking the latest weights out of those trained on, which beta1 = 0 makes the same."""
        if self.beta1 == 0.0:
            yield "beta1", "must be above 0, or there is no average to export"


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
