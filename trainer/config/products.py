"""Which frozen linear layers multiply in int8: found by measuring when a run starts, and frozen with it."""

from __future__ import annotations

from pydantic import Field

from trainer.config.model import Section

LEAST_ROWS = 17
"""torch._int_mm refuses fewer on CUDA cards."""


class ProductConfig(Section):
    """Layers of one size, and from how many rows (pictures times places, or words) on they multiply in int8."""

    inputs: int | None = Field(default=None, ge=1)
    """How many numbers go into the layer; absent: any."""
    outputs: int | None = Field(default=None, ge=1)
    """How many numbers come out of it; absent: any."""
    forward: int | None = Field(default=None, ge=LEAST_ROWS)
    """The rows from which on what the layer gives is an int8 product; absent: never."""
    backward: int | None = Field(default=None, ge=LEAST_ROWS)
    """The rows from which on the gradient of what goes in is an int8 product; absent: never."""

    def is_of(self, inputs: int, outputs: int) -> bool:
        """Whether a layer of this size is meant."""
        return self.inputs in (None, inputs) and self.outputs in (None, outputs)


EVERYWHERE = (ProductConfig(forward=LEAST_ROWS, backward=LEAST_ROWS),)
"""Both products of every layer; also what is forecast before anything was measured."""
