"""The training loop: next batch, micro-batches through the step, guard, optimizer, event, then what hangs on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from trainer.adapter.attach import Adapter
from trainer.config.job import Job
from trainer.dataset.sampling import Sample
from trainer.errors import TrainingFault
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.records import json_keys
from trainer.training.data.batches import BatchSchedule, Collator
from trainer.training.objective import NoiseSchedule
from trainer.training.optim.lr_schedule import Multiplier
from trainer.training.optim.master_weights import LossScaler, MasterWeights, clip, measure
from trainer.training.optim.optimizer import set_learning_rates
from trainer.training.step import MicroBatch, StepModels, training_step

# Odd multipliers keep the dropout seeds of neighbouring steps and micro-batches apart.
STEP_STRIDE = 1_000_003
MICRO_STRIDE = 7_919


TakeStep = Callable[[], "StepResult"]
SkipReason = Literal["loss", "gradient", "scale"]


@json_keys("step", "pictures", "skipped", "skipped_in_row", "back_offs", "best_step", "best_loss", "unvalidated")
@dataclass(slots=True)
class TrainingProgress:
    """The counters of a run; all of them are saved in checkpoints."""

    step: int = 0
    pictures: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    back_offs: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    unvalidated: bool = False
    """Whether the validation that was due after this step was interrupted, so that a resume begins with it."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step as it is reported."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    skipped: SkipReason | None
    """Why nothing was moved; None when the step moved the weights."""
    seconds: float
    pictures: int
    learning_rates: dict[str, float]
    loss_scale: float | None


class StepRecorder(Protocol):
    """Learns from micro-batches as :meth:`Engine.learn` does, with fewer orders to the device."""

    def learn(self, engine: Engine, micro: MicroBatch) -> Tensor:
        """Adds its gradients to the masters', the same numbers; returns the loss, which is good until the next call."""

    def forget(self) -> None:
        """Frees what was recorded: the plan has changed, or what it reads has moved."""

    def give_up(self) -> None:
        """Records nothing any more: memory ran out."""

    @property
    def in_use(self) -> bool:
        """Whether anything is recorded, or still may be."""


class Compiled(Protocol):
    """Lets parts of the models be compiled while a step learns."""

    def step(self, engine: Engine, work: Callable[[], Tensor]) -> Tensor:
        """What ``work``, a step of ``engine``, gives; done plainly where compiling fails."""

    def give_up(self) -> None:
        """Compiles nothing any more: memory ran out."""


class Component(Protocol):
    """Something that hangs on the loop: checkpoints, saving, previews, validation, events."""

    phase: ForecastPhase
    """What its work counts as when memory is measured, and when it runs out."""

    def at_start(self, progress: TrainingProgress) -> None:
        """Called once before the first step of an attempt: baselines, and what a killed attempt left undone."""

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Called after every optimizer step, in the order the components are listed."""


@dataclass(slots=True)
class Engine:
    """What the loop turns: the model and everything that moves it."""

    job: Job
    models: StepModels
    adapter: Adapter
    noise_schedule: NoiseSchedule
    masters: MasterWeights
    optimizer: torch.optim.Optimizer
    multiplier: Multiplier
    feed: BatchSchedule
    assembler: Collator
    device: torch.device
    scaler: LossScaler | None = None
    graphs: StepRecorder | None = None
    """What replays micro-batches of shapes that it has recorded, where the job asks for it."""
    compiled: Compiled | None = None
    """What compiles the UNet's blocks, where the job asks for it."""
    check: Callable[[], object] = lambda: None
    """Called between micro-batches; raises to interrupt the step. A replayed graph calls nothing of the models'."""
    progress: TrainingProgress = field(default_factory=TrainingProgress)

    @property
    def steps(self) -> int:
        """How many optimizer steps the run has in all."""
        return self.job.recipe.steps or 0

    def train(self, prepare: Prepare, take_step: TakeStep, components: Sequence[Component]) -> None:
        """Train to the last step, unless ``check`` interrupts it.

        ``take_step`` is :meth:`train_step`, or that with care taken of what may go wrong in it.
        """
        prepare(self.progress.step)
        for component in components:
            component.at_start(self.progress)
        while self.progress.step < self.steps:
            prepare(self.progress.step)
            result = take_step()
            for component in components:
                component.after_step(self.progress, result)

    def train_step(self) -> StepResult:
        """One optimizer step on one effective batch; moves nothing when loss or gradient is not finite."""
        started = time.monotonic()
        step = self.progress.step
        batch = self.feed.batch(step)
        rates = set_learning_rates(self.optimizer, self.multiplier(step))
        loss = self.forward_backward(batch)
        # The only host read of the step that is ours: loss and gradient norm in one tensor.
        loss_value, norm = measure(loss, self.masters, self.loss_scale).tolist()
        skipped = self.move(loss_value, norm)
        self.progress.step += 1
        self.progress.pictures += len(batch)
        return StepResult(
            step=self.progress.step,
            epoch=self.feed.epoch_of(step),
            loss=loss_value,
            grad_norm=norm,
            skipped=skipped,
            seconds=time.monotonic() - started,
            pictures=len(batch),
            learning_rates=rates,
            loss_scale=self.scaler.scale if self.scaler else None,
        )

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward (fp16 only)."""
        return self.scaler.scale if self.scaler else 1.0

    def forward_backward(self, batch: tuple[Sample, ...]) -> Tensor:
        """All micro-batches of an effective batch; their gradients add up in the masters. Returns the summed loss."""
        total = torch.zeros((), device=self.device)
        for index, part in enumerate(self.feed.split(batch)):
            self.check()
            self.seed_dropout(index)
            self.learn(self.assembler.assemble(part, len(batch)), total)
        return total

    def learn(self, micro: MicroBatch, total: Tensor) -> None:
        """One micro-batch: its loss is added to ``total``, its gradients to the masters'."""
        if self.graphs is not None:
            total += self.graphs.learn(self, micro)
            return
        total += self.micro_step(micro)
        self.masters.accumulate()

    def micro_step(self, micro: MicroBatch, loss_scale: Tensor | None = None) -> Tensor:
        """Forward and backward of one micro-batch, which leaves the device with this call. Returns its loss.

        ``loss_scale`` is the present one, where it has to be read from memory.
        """
        objective, scale = self.job.recipe.objective, self.loss_scale if loss_scale is None else loss_scale
        models, schedule = self.models, self.noise_schedule
        if self.compiled is None:  # nobody but the step may hold the micro-batch: tapes have it die within
            return training_step(models, schedule, objective, micro.to(self.device), scale)
        step = partial(training_step, models, schedule, objective, micro.to(self.device), scale)
        return self.compiled.step(self, step)

    def seed_dropout(self, micro_batch: int) -> None:
        """Seeds the device's own generator, used by dropout alone, from (seed, step, micro-batch)."""
        recipe = self.job.recipe
        if recipe.has_dropouts:
            seed = recipe.seed + STEP_STRIDE * self.progress.step + MICRO_STRIDE * micro_batch
            torch.manual_seed(seed % 2**63)

    def move(self, loss: float, norm: float) -> SkipReason | None:
        """Clips, moves the masters and refreshes the working weights, unless something is not finite."""
        reason = self.reason_to_skip(loss, norm)
        if reason is None:
            clip(self.masters, norm, self.job.recipe.clip_gradient, self.loss_scale)
            self.optimizer.step()
            self.masters.refresh()
        self.masters.zero_grad(keep=self.graphs is not None and self.graphs.in_use)
        if self.scaler:
            self.scaler.update(finite=reason is None)
        self.count(reason)
        return reason

    def reason_to_skip(self, loss: float, norm: float) -> SkipReason | None:
        """What is not finite, if anything; a gradient that a smaller loss scale can save is the scale's fault."""
        if not is_finite(loss):
            return "loss"
        if is_finite(norm):
            return None
        return "scale" if self.scaler and self.scaler.may_back_off else "gradient"

    def count(self, reason: SkipReason | None) -> None:
        """Counts a skipped step, fp16 overflows apart; raises TrainingFault when too many came in a row."""
        progress = self.progress
        if reason is None:
            progress.skipped_in_row = 0
        elif reason == "scale":
            progress.back_offs += 1
        else:
            progress.skipped += 1
            progress.skipped_in_row += 1
        if progress.skipped_in_row >= self.job.report.max_skipped:
            raise TrainingFault(
                "training.not_finite",
                f"{progress.skipped_in_row} steps in a row gave a loss or gradient that is not a finite number; "
                "the weights were not touched by them.",
                "Lower the learning rate, use bf16 or fp32 instead of fp16, or check the base and VAE; "
                "the last checkpoint is good.",
            )


class Prepare(Protocol):
    """Makes sure that what a step needs is cached."""

    def __call__(self, step: int) -> None:
        """``step`` counts from 0."""


def is_finite(number: float) -> bool:
    """Whether a number is neither infinite nor NaN."""
    return number - number == 0.0
