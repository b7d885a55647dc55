"""Loss at fixed noise and fixed timesteps: the validation loss on held-out images, or the loss on training images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config.job import Job
from trainer.config.schema import require_value
from trainer.dataset.image import ImageRecord
from trainer.dataset.sampling import measured_samples
from trainer.errors import BaseModelError
from trainer.protocol import events
from trainer.protocol.forecast import ForecastPhase
from trainer.training.callbacks.lora_export import due, export_mode
from trainer.training.data.batches import Collator
from trainer.training.engine import Engine, StepResult, TrainingProgress, is_finite
from trainer.training.objective import NoiseSchedule
from trainer.training.reporting.reporter import Reporter
from trainer.training.step import MicroBatch, StepModels, validation_loss


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Result of one validation: the mean loss, and the loss at each timestep."""

    loss: float
    held_out: bool
    per_timestep: dict[int, float]


class Validator:
    """Measures the plain MSE loss on a fixed set of samples, with the same noise every time.

    Without held-out images, the samples are training images, and the result is never called a validation loss.
    """

    def __init__(self, images: Sequence[ImageRecord], job: Job, assembler: Collator, device: torch.device) -> None:
        self.held_out = any(image.kind == "validation" for image in images)
        self.job = job
        self.assembler = assembler
        self.device = device
        self.samples = measured_samples(images, job.recipe)

    @property
    def loss_name(self) -> str:
        """Return what to call the measured loss."""
        return "validation loss" if self.held_out else "loss on training images"

    def best_step_text(self, step: int) -> str:
        """Return a sentence that names the best step, and what it is worth."""
        if self.held_out:
            return f"Suggested LoRA: step {step}, which has the lowest validation loss."
        return (
            f"Step {step} has the lowest loss on training images. That loss also falls when a LoRA memorizes them, so "
            "compare previews before you choose this step."
        )

    def measure(
        self, models: StepModels, schedule: NoiseSchedule, on_progress: Callable[[int, int], None]
    ) -> ValidationResult:
        """Return the current loss of ``models`` without changing them; reads from the device only once, at the end."""
        losses = []
        timesteps = self.job.report.validation.timesteps
        size = require_value(self.job.fit.micro_batch)
        for done, sample in enumerate(self.samples, 1):
            parts = [timesteps[start : start + size] for start in range(0, len(timesteps), size)]
            batches = (self.assembler.assemble_fixed(sample, part) for part in parts)
            losses.append(losses_of_image(models, schedule, batches, self.device))
            on_progress(done, len(self.samples))
        by_timestep = torch.stack(losses).double().mean(dim=0).tolist()
        return ValidationResult(
            loss=sum(by_timestep) / len(by_timestep),
            held_out=self.held_out,
            per_timestep=dict(zip(timesteps, by_timestep, strict=True)),
        )


def losses_of_image(
    models: StepModels, schedule: NoiseSchedule, batches: Iterable[MicroBatch], device: torch.device
) -> Tensor:
    """Return the losses of all ``batches``, concatenated, on ``device``.

    Reads nothing back to the host, so that forecasts can trace it.
    """
    return torch.cat([validation_loss(models, schedule, batch.to(device)) for batch in batches])


class ValidationCallback:
    """Callback that measures the loss at fixed noise and records the best step."""

    phase: ForecastPhase = "validate"

    def __init__(self, engine: Engine, validator: Validator, reporter: Reporter) -> None:
        self.engine = engine
        self.validator = validator
        self.reporter = reporter

    def at_start(self, progress: TrainingProgress) -> None:
        """Measure the loss of the untrained base, or repeat a validation that was interrupted."""
        if progress.step == 0 or progress.unvalidated:
            self._measure(progress)

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Measure the loss if validation is due, and after the last step."""
        if due(progress.step, self.engine.job.report.validation.every) or progress.step == self.engine.steps:
            self._measure(progress)

    def _measure(self, progress: TrainingProgress) -> None:
        # If the run is interrupted during this, its checkpoint has the flag, and a resume starts with this validation.
        progress.unvalidated = True
        self.reporter.phase("validate", 0, len(self.validator.samples))
        with export_mode(self.engine):
            measured = self.validator.measure(
                self.engine.models,
                self.engine.noise_schedule,
                lambda done, total: self.reporter.phase("validate", done, total),
            )
        if progress.step == 0 and not any(map(is_finite, measured.per_timestep.values())):
            raise BaseModelError(
                "base.not_finite",
                "Could not train: even before training, the base returns NaN or infinity for every image.",
                "Its weights are probably damaged: download the base again or choose another one. If it works in other "
                'programs, set fit.dtype = "fp32".',
            )
        self.reporter.write(
            events.Validation(
                step=progress.step,
                loss=measured.loss,
                held_out=measured.held_out,
                per_timestep={str(timestep): loss for timestep, loss in measured.per_timestep.items()},
            )
        )
        progress.unvalidated = False
        if progress.step > 0:  # the untrained base is no candidate for the best step
            _record(progress, measured.loss)


def _record(progress: TrainingProgress, loss: float) -> None:
    """Record the current step as the best one if its loss is the lowest so far, otherwise count it as stale."""
    if is_finite(loss) and (progress.best_loss is None or loss < progress.best_loss):
        progress.best_step, progress.best_loss, progress.stale_validations = progress.step, loss, 0
    else:
        progress.stale_validations += 1
