"""What a run shows and keeps: previews, validation, saving, logging."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.config.model import Section

Timestep = Annotated[int, Field(ge=0, le=999)]


class PromptConfig(Section):
    """One picture that is drawn again and again to show progress."""

    prompt: str = Field(max_length=10_000)
    """What the picture shows, as you would prompt it."""
    negative: str = ""
    """What the picture should not show (negative prompt)."""
    width: int | None = Field(default=None, ge=64, le=4096, multiple_of=8)
    """Width in pixels; absent: the recipe's resolution."""
    height: int | None = Field(default=None, ge=64, le=4096, multiple_of=8)
    """Height in pixels; absent: the recipe's resolution."""
    seed: int = Field(default=1, ge=0, le=2**63 - 1)
    """The number its noise comes from."""
    steps: int = Field(default=20, ge=1, le=1000)
    """How many denoising steps."""
    guidance: float = Field(default=7.0, ge=0.0, le=100.0)
    """How strictly the prompt is followed (CFG scale)."""
    sampler: Literal["euler", "euler_a", "ddim", "dpmpp_2m", "unipc"] = "euler"
    """The rule by which noise becomes a picture; euler is dependable, euler_a adds noise of its own."""


class PreviewConfig(Section):
    """Pictures drawn during the run, the first at step 0 as the baseline."""

    every: int | None = Field(default=None, ge=1)
    """Draw every so many steps; absent: five times over the run."""
    prompts: tuple[PromptConfig, ...] = Field(default=(), strict=False)
    """What to draw; empty: no previews."""


class ValidationConfig(Section):
    """Loss on pictures that are not trained on, at fixed noise."""

    every: int | None = Field(default=None, ge=1)
    """Measure every so many steps; absent: ten times over the run."""
    timesteps: tuple[Timestep, ...] = Field(
        default=(100, 300, 500, 700, 900), strict=False, min_length=1, max_length=50
    )
    """The noise strengths at which it is measured."""


class SavingConfig(Section):
    """LoRA files written during the run, and resumable checkpoints."""

    every_steps: int | None = Field(default=None, ge=1)
    """Write a LoRA file every so many steps; absent: ten spread over the run."""
    every_epochs: int | None = Field(default=None, ge=1)
    """Write a LoRA file every so many epochs."""
    keep: int | None = Field(default=None, ge=1)
    """How many of the LoRA files written during the run to keep, the newest; absent: all."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Write a resumable checkpoint every so many steps; absent: as LoRA files, but at least every 500."""
    checkpoint_keep: int = Field(default=2, ge=1, le=1000)
    """How many resumable checkpoints to keep."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """One rhythm for LoRA files."""
        if self.every_steps is not None and self.every_epochs is not None:
            yield "every_steps", "says how often LoRA files are written, and so does every_epochs; keep one of them"


class ReportConfig(Section):
    """What a run shows and keeps."""

    previews: PreviewConfig = PreviewConfig()
    """Pictures drawn during the run."""
    validation: ValidationConfig = ValidationConfig()
    """Loss on held-out pictures."""
    saving: SavingConfig = SavingConfig()
    """LoRA files and checkpoints."""
    tensorboard: bool = False
    """Whether curves are also written for TensorBoard."""
    max_skipped: int = Field(default=20, ge=1)
    """How many optimizer steps in a row may be skipped for non-finite gradients before the run ends."""
