"""The base class of an optimizer's table in a recipe."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from trainer.config.methods import MasterWeight, OptimizerMethod
from trainer.config.schema import Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
WeightDecay = Annotated[float, Field(ge=0.0, le=10.0)]
Epsilon = Annotated[float, Field(gt=0.0, le=1.0)]


class OptimizerSection(Section):
    """Base class of an optimizer's table: a name, its arguments, and what it is and takes."""

    method: ClassVar[OptimizerMethod]
    name: str
    """Name of the optimizer."""

    @property
    def who(self) -> str:
        """Return the optimizer's name for messages."""
        return self.method.title

    @property
    def registered_name(self) -> str:
        """Return its name in metadata and tables."""
        return self.name

    @property
    def library(self) -> str:
        """Return the distribution that computes its step."""
        return self.method.library

    @property
    def draws_random(self) -> bool:
        """Return whether a step may draw from the device's random generator, which has to be seeded for it."""
        return False

    @property
    def ignores_rates(self) -> bool:
        """Return whether it chooses the learning rate of each step itself and ignores the configured ones."""
        return False

    @property
    def finds_rates(self) -> bool:
        """Return whether it finds the learning rates itself, so that no factor between layers has its meaning."""
        return self.ignores_rates or self.method.finds_rate

    @property
    def needs_one_rate(self) -> bool:
        """Return whether all parts must have the same configured rate."""
        return self.method.one_rate

    @property
    def own_warmup(self) -> str:
        """Return the setting that replaces the schedule's warmup; empty if none is needed."""
        return ""

    def state_sizes(self, weight: MasterWeight) -> list[int]:
        """Return the bytes of each tensor of state that is kept on the GPU for a weight."""
        return self.method.layout(self, weight)
