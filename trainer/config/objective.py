"""What the loss measures and which noise the pictures get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.config.model import Section


class ObjectiveConfig(Section):
    """The training objective; formulas and sources stand beside the code in trainer/training/objective.py."""

    loss: Literal["mse", "huber"] = "mse"
    """How an error counts: squared (mse), or less for large errors (huber), which forgives odd pictures."""
    huber_c: float = Field(default=0.1, gt=0.0, le=10.0)
    """Where huber turns from squared to linear; smaller forgives more."""
    min_snr_gamma: float | None = Field(default=None, gt=0.0, le=100.0)
    """Levels how much easy and hard noise strengths count (min-SNR); 5 is usual; absent: off."""
    debiased: bool = False
    """Weights noise strengths by 1/sqrt(SNR) (debiased estimation); not together with min_snr_gamma."""
    noise_offset: float = Field(default=0.0, ge=0.0, le=1.0)
    """Adds a random brightness shift to the noise, for darker darks and brighter brights; 0.05 is usual; 0: off."""
    multires_discount: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Mixes in coarser noise, each level weighing this much less (multires noise); 0.3 is usual; 0: off."""
    multires_levels: int = Field(default=6, ge=1, le=10)
    """How many coarser levels multires noise has."""
    input_perturbation: float = Field(default=0.0, ge=0.0, le=1.0)
    """Extra noise on the input but not in the target, against overfitting; 0.1 is usual; 0: off."""
    prior_weight: float = Field(default=1.0, ge=0.0, le=100.0)
    """How much regularisation pictures count against the others."""
    unmasked_weight: float = Field(default=0.1, ge=0.0, le=1.0)
    """How much the parts outside a mask still count."""
    timesteps: Literal["uniform", "logit_normal"] = "uniform"
    """How noise strengths are drawn: all alike, or mostly the middle ones."""
    timestep_min: int = Field(default=0, ge=0, le=999)
    """Smallest noise strength used (0 to 999)."""
    timestep_max: int = Field(default=999, ge=0, le=999)
    """Largest noise strength used (0 to 999)."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """One loss weighting at a time; a range of noise strengths that holds something."""
        if self.debiased and self.min_snr_gamma is not None:
            yield (
                "debiased",
                "cannot be combined with min_snr_gamma: both weigh the noise strengths; keep one of the two",
            )
        if self.timestep_min > self.timestep_max:
            yield "timestep_min", f"is {self.timestep_min}, which is above timestep_max = {self.timestep_max}"
