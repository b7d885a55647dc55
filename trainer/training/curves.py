"""Curves for TensorBoard, where it is installed and asked for."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import JobError
from trainer.protocol.forecast import ForecastPhase
from trainer.training.loop import Progress, StepResult


class Curves:
    """Writes loss, gradient norm and learning rates after every step."""

    phase: ForecastPhase = "train"

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise JobError(
                "report.tensorboard",
                "report.tensorboard is on, but TensorBoard is not installed.",
                "Install it with `pip install tensorboard`, or set report.tensorboard = false.",
            ) from error
        self.writer = SummaryWriter(str(folder))

    def at_start(self, progress: Progress) -> None:
        """Nothing to draw before the first step."""

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Adds a point to each curve."""
        values = {"loss": result.loss, "gradient_norm": result.grad_norm}
        values |= {f"learning_rate/{part}": rate for part, rate in result.learning_rates.items()}
        for name, value in values.items():
            self.writer.add_scalar(name, value, result.step)
        self.writer.flush()
