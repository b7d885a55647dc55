"""The engine: models and everything that trains them, from an effective batch to an optimizer step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from trainer.adapter.attach import Adapter, models_by_part
from trainer.config.job import Job
from trainer.config.lr_schedule import Multiplier
from trainer.dataset.sampling import Sample
from trainer.errors import TrainingError
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.records import json_keys
from trainer.training.data.batches import BatchSchedule, Collator
from trainer.training.device.gradient_checkpointing import set_checkpointing
from trainer.training.device.offload import empty_cache
from trainer.training.objective import NoiseSchedule
from trainer.training.optim.ema import WeightAverage
from trainer.training.optim.master_weights import LossScaler, MasterWeights, clip, measure
from trainer.training.optim.optimizer import set_learning_rates
from trainer.training.optim.text_encoder_stops import TextEncoderStops
from trainer.training.optim.weight_norm import WeightNormLimit
from trainer.training.step import MicroBatch, StepModels, training_step

# Large odd multipliers keep the dropout seeds of nearby steps and micro-batches apart.
STEP_STRIDE = 1_000_003
MICRO_STRIDE = 7_919


SkipReason = Literal["loss", "gradient", "scale"]


@json_keys(
    "step", "images", "skipped", "skipped_in_row", "back_offs", "best_step", "best_loss", "unvalidated",
    "stale_validations",
    former={"pictures": "images"},
)  # fmt: skip
@dataclass(slots=True)
class TrainingProgress:
    """Counters of a run; all are saved in checkpoints."""

    step: int = 0
    images: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    back_offs: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    unvalidated: bool = False
    """Whether the validation due after this step was interrupted; a resume then starts with it."""
    stale_validations: int = 0
    """Number of validations since the one with the lowest loss."""

    @property
    def updates(self) -> int:
        """Return the number of completed steps that changed the weights."""
        return self.step - self.skipped - self.back_offs


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    skipped: SkipReason | None
    """Reason why the weights were not updated; None if they were."""
    seconds: float
    images: int
    learning_rates: dict[str, float]
    loss_scale: float | None
    data_seconds: float = 0.0
    """Seconds of the step in which training waited for micro-batches."""


class StepRecorder(Protocol):
    """Runs micro-batches as :meth:`Engine.accumulate_gradients` does, but with fewer kernel launches.

    Implemented above this module, in trainer.training.acceleration.
    """

    def run(self, engine: Engine, micro: MicroBatch) -> Tensor:
        """Add the micro-batch's gradients to those of the master weights and return its loss.

        The numbers are the same as without recording. The loss is valid until the next call.
        """

    def forget(self) -> None:
        """Free all recordings, because the plan has changed or the memory they use has moved."""

    def give_up(self) -> None:
        """Stop recording for good, because memory ran out."""

    @property
    def in_use(self) -> bool:
        """Return whether anything is recorded or may still be recorded."""


class StepCompiler(Protocol):
    """Compiles parts of the models while a step runs; implemented in trainer.training.acceleration."""

    def step(self, engine: Engine, work: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``work``, a step of ``engine``; runs it uncompiled if compiling fails."""

    def give_up(self) -> None:
        """Stop compiling for good, because memory ran out."""


class Callback(Protocol):
    """A callback of the loop: checkpoints, LoRA export, previews, validation, events."""

    phase: ForecastPhase
    """Phase that the callback's work counts as when memory is measured or runs out."""

    def at_start(self, progress: TrainingProgress) -> None:
        """Run once before the first step of an attempt, for baselines and work that a killed attempt left undone."""

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Run after every optimizer step, in the order in which the callbacks are listed."""


@dataclass(slots=True)
class Engine:
    """The models and everything that trains them."""

    job: Job
    models: StepModels
    adapter: Adapter
    noise_schedule: NoiseSchedule
    master_weights: MasterWeights
    optimizer: torch.optim.Optimizer
    multiplier: Multiplier
    batches: BatchSchedule
    collator: Collator
    device: torch.device
    norm_limit: WeightNormLimit | None = None
    """Limit of the norm of each layer's LoRA, if the recipe sets one."""
    ema: WeightAverage | None = None
    """Moving average of the master weights, if the recipe asks for one."""
    stops: TextEncoderStops | None = None
    """Stops of text encoders that are not trained to the end, if there are any."""
    scaler: LossScaler | None = None
    graphs: StepRecorder | None = None
    """Recorder that replays micro-batches of recorded shapes, if the job asks for it."""
    compiled: StepCompiler | None = None
    """Compiler of the UNet's blocks, if the job asks for it."""
    check: Callable[[], object] = lambda: None
    """Function called before each micro-batch; it may raise to interrupt the step.

    Hooks also call it during backward, but they do not run when a CUDA graph is replayed.
    """
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    data_seconds: float = 0.0
    """Seconds of the current step in which training waited for micro-batches."""

    @property
    def steps(self) -> int:
        """Return the total number of optimizer steps of the run."""
        return self.job.recipe.steps or 0

    @property
    def stops_early(self) -> bool:
        """Return whether early stopping ends the run before its last step."""
        patience = self.job.report.validation.patience
        return patience is not None and self.progress.stale_validations >= patience and self.progress.step < self.steps

    @property
    def is_done(self) -> bool:
        """Return whether the run has no more steps to train."""
        return self.progress.step >= self.steps or self.stops_early

    def train_step(self) -> StepResult:
        """Run one optimizer step on one effective batch; nothing is updated if the loss or gradient is not finite."""
        started = time.monotonic()
        step = self.progress.step
        batch = self.batches.batch(step)
        rates = set_learning_rates(self.optimizer, self.multiplier(step))
        loss = self.forward_backward(batch)
        # Our only host read in a step, because each one waits for the device: loss and gradient norm in one tensor.
        loss_value, norm = measure(loss, self.master_weights, self.loss_scale).tolist()
        skipped = self.optimizer_step(loss_value, norm)
        self.follow_stops(step + 1)
        # Counted last: after an error above, the step number is unchanged, so that recovery can repeat the step.
        self.progress.step += 1
        self.progress.images += len(batch)
        return StepResult(
            step=self.progress.step,
            epoch=self.batches.epoch_of(step),
            loss=loss_value,
            grad_norm=norm,
            skipped=skipped,
            seconds=time.monotonic() - started,
            images=len(batch),
            learning_rates=rates,
            loss_scale=self.scaler.scale if self.scaler else None,
            data_seconds=self.data_seconds,
        )

    def follow_stops(self, done: int) -> None:
        """Train the parts that the recipe trains after ``done`` steps; free the memory of those that have stopped."""
        if self.stops is None or not self.stops.follow(done):
            return
        if self.norm_limit is not None:
            limit = self.job.recipe.max_weight_norm
            self.norm_limit = WeightNormLimit.create(limit, self.adapter, self.master_weights)
        self.apply_checkpointing()
        if self.graphs is not None:  # recorded graphs contain the backward of the text encoders
            self.graphs.forget()
        empty_cache(self.device)

    def apply_checkpointing(self) -> None:
        """Set gradient checkpointing to that of the job's fit."""
        models, recipe = self.models, self.job.recipe
        parts = models_by_part(models.unet, models.text_encoders)
        set_checkpointing(
            models.unet,
            models.text_encoders,
            self.job.fit.gradient_checkpointing or "none",
            dropouts=recipe.has_dropouts,
            frozen=[parts[part] for part in self.adapter.frozen],
        )

    @property
    def loss_scale(self) -> float:
        """Return the factor that the loss is multiplied by before backward: 1 except for fp16."""
        return self.scaler.scale if self.scaler else 1.0

    def forward_backward(self, batch: tuple[Sample, ...]) -> Tensor:
        """Run all micro-batches of an effective batch and return the sum of their losses.

        The gradients are added up in the master weights' ``.grad``.
        """
        total = torch.zeros((), device=self.device)
        self.data_seconds = 0.0
        for index, part in enumerate(self.batches.split(batch)):
            self.check()
            self.seed_dropout(index)
            self.accumulate_gradients(self._next_micro_batch(part, len(batch)), total)
        return total

    def _next_micro_batch(self, samples: tuple[Sample, ...], batch_size: int) -> MicroBatch:
        """Return a micro-batch of ``samples`` and add the seconds that this took to those of the step."""
        started = time.monotonic()
        micro = self.collator.assemble(samples, batch_size)
        self.data_seconds += time.monotonic() - started
        return micro

    def accumulate_gradients(self, micro: MicroBatch, total: Tensor) -> None:
        """Run one micro-batch; add its loss to ``total`` and its gradients to the master weights' gradients."""
        if self.graphs is not None:
            total += self.graphs.run(self, micro)
            return
        total += self.micro_step(micro)
        self.master_weights.accumulate()

    def micro_step(self, micro: MicroBatch, loss_scale: Tensor | None = None) -> Tensor:
        """Run forward and backward of one micro-batch and return its loss.

        The batch's copy on the device is freed before this returns. ``loss_scale`` is the current scale as a tensor for
        CUDA graphs, which have to read it from device memory.
        """
        objective, scale = self.job.recipe.objective, self.loss_scale if loss_scale is None else loss_scale
        models, schedule = self.models, self.noise_schedule
        if self.compiled is None:  # no other reference to the device copy: memory traces have it freed within the step
            loss = training_step(models, schedule, objective, micro.to(self.device), scale)
        else:
            step = partial(training_step, models, schedule, objective, micro.to(self.device), scale)
            loss = self.compiled.step(self, step)
        if self.adapter.rank_mask:
            self.adapter.rank_mask.forget()
        return loss

    def seed_dropout(self, micro_batch: int) -> None:
        """Seed the device's generator, which only dropout and some optimizers use, from (seed, step, micro-batch).

        A repeated or replayed step then drops the same values.
        """
        if self.job.recipe.has_dropouts:
            self._seed(micro_batch)

    def _seed(self, micro_batch: int) -> None:
        seed = self.job.recipe.seed + STEP_STRIDE * self.progress.step + MICRO_STRIDE * micro_batch
        torch.manual_seed(seed % 2**63)

    def optimizer_step(self, loss: float, norm: float) -> SkipReason | None:
        """Clip the gradients and update the weights; if loss or norm is not finite, only return the reason."""
        reason = self.reason_to_skip(loss, norm)
        if reason is None:
            clip(self.master_weights, norm, self.job.recipe.max_grad_norm, self.loss_scale)
            if self.job.recipe.optimizer.draws_random:
                self._seed(-1)  # no micro-batch has this number
            self.optimizer.step()
            if self.norm_limit is not None:
                self.norm_limit.apply()
            if self.ema is not None:
                self.ema.update(self.progress.updates)
            self.master_weights.refresh()
        # Recorded graphs add gradients at fixed addresses, so those are zeroed in place while graphs are in use.
        self.master_weights.zero_grad(keep=self.graphs is not None and self.graphs.in_use)
        if self.scaler:  # only now: `clip` unscales with the scale that backward used
            self.scaler.update(finite=reason is None)
        self.count(reason)
        return reason

    def reason_to_skip(self, loss: float, norm: float) -> SkipReason | None:
        """Return what is not finite, or None; "scale" means a gradient that may be finite with a lower loss scale."""
        if not is_finite(loss):
            return "loss"
        if is_finite(norm):
            return None
        return "scale" if self.scaler and self.scaler.may_back_off else "gradient"

    def count(self, reason: SkipReason | None) -> None:
        """Update the counts of skipped steps and fp16 overflows; raise TrainingError after too many skips in a row."""
        progress = self.progress
        if reason is None:
            progress.skipped_in_row = 0
        elif reason == "scale":
            progress.back_offs += 1
        else:
            progress.skipped += 1
            progress.skipped_in_row += 1
        if progress.skipped_in_row >= self.job.report.max_skipped:
            raise TrainingError(
                "training.not_finite",
                f"Could not continue training: {progress.skipped_in_row} steps in a row had a loss or gradient "
                "that is not finite (NaN or infinity). They did not change the weights.",
                "Lower the learning rate, use bf16 or fp32 instead of fp16, or check the base and VAE. "
                "The last checkpoint is not affected.",
            )


def is_finite(number: float) -> bool:
    """Return whether a number is neither infinite nor NaN."""
    return number - number == 0.0
