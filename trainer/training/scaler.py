"""Loss scaling for fp16: the loss is multiplied up so that small gradients survive, and less when they overflow."""

from __future__ import annotations

from dataclasses import dataclass

# torch.amp.GradScaler's defaults; ours reads nothing from the device, as the loop has read the norm already.
GROWTH = 2.0
BACK_OFF = 0.5
GOOD_STEPS_TO_GROW = 2000
LOWEST = 1.0


@dataclass(slots=True)
class LossScaler:
    """The scale in force and the good steps since it last changed; both are saved in checkpoints."""

    scale: float = 65536.0
    good_steps: int = 0

    @property
    def may_back_off(self) -> bool:
        """Whether an overflow can still be answered by a smaller scale."""
        return self.scale > LOWEST

    def update(self, *, finite: bool) -> None:
        """Notes a step: the scale halves when something was not finite, and doubles after 2000 good steps in a row."""
        if not finite:
            self.scale = max(LOWEST, self.scale * BACK_OFF)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == GOOD_STEPS_TO_GROW:
            self.scale *= GROWTH
            self.good_steps = 0

    def state(self) -> dict[str, float | int]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, float | int]) -> None:
        """Goes on from a checkpoint."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
