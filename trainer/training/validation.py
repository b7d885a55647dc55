"""Loss at fixed noise and fixed timesteps, on held-out pictures where there are any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config.job import Job
from trainer.config.model import stated
from trainer.dataset.picture import Picture
from trainer.dataset.sampling import measured_samples
from trainer.training.batch import Assembler
from trainer.training.objective import NoiseSchedule
from trainer.training.step import MicroBatch, StepModels, validation_loss


@dataclass(frozen=True, slots=True)
class Measured:
    """A validation result: the mean loss and its parts by timestep."""

    loss: float
    held_out: bool
    per_timestep: dict[int, float]


class Validator:
    """Measures the plain MSE loss on a fixed set, at the same noise every time."""

    def __init__(self, pictures: Sequence[Picture], job: Job, assembler: Assembler, device: torch.device) -> None:
        self.held_out = any(picture.kind == "validation" for picture in pictures)
        self.job = job
        self.assembler = assembler
        self.device = device
        self.samples = measured_samples(pictures, job.recipe)

    def measure(self, models: StepModels, schedule: NoiseSchedule, on_progress: Callable[[int, int], None]) -> Measured:
        """The loss now; reads the host once, at the end. ``models`` are left as they were."""
        losses = []
        timesteps = self.job.report.validation.timesteps
        size = stated(self.job.fit.micro_batch)
        for done, sample in enumerate(self.samples, 1):
            parts = [timesteps[start : start + size] for start in range(0, len(timesteps), size)]
            batches = (self.assembler.assemble_fixed(sample, part) for part in parts)
            losses.append(losses_of_picture(models, schedule, batches, self.device))
            on_progress(done, len(self.samples))
        by_timestep = torch.stack(losses).double().mean(dim=0).tolist()
        return Measured(
            loss=sum(by_timestep) / len(by_timestep),
            held_out=self.held_out,
            per_timestep=dict(zip(timesteps, by_timestep, strict=True)),
        )


def losses_of_picture(
    models: StepModels, schedule: NoiseSchedule, batches: Iterable[MicroBatch], device: torch.device
) -> Tensor:
    """The losses of all ``batches`` in a row, on ``device``; reads nothing back, so that forecasts can trace it."""
    return torch.cat([validation_loss(models, schedule, batch.to(device)) for batch in batches])
