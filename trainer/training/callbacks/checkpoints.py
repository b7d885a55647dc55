"""The checkpoint callback, and the capture and restore of the training state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.protocol import events
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.records import build, to_record
from trainer.protocol.run_directory import RunDirectory
from trainer.training import checkpoint
from trainer.training.active_plan import ActivePlan, AppliedFallback, applied_fallbacks
from trainer.training.callbacks.lora_export import due
from trainer.training.engine import Engine, StepResult, TrainingProgress
from trainer.training.optim.optimizer import pack_state, unpack_state
from trainer.training.reporting.reporter import Reporter


class CheckpointCallback:
    """Callback that writes resumable checkpoints."""

    phase: ForecastPhase = "checkpoint"

    def __init__(self, engine: Engine, run: RunDirectory, reporter: Reporter, plan: ActivePlan) -> None:
        self.engine = engine
        self.run = run
        self.reporter = reporter
        self.plan = plan
        self.fallbacks: Sequence[AppliedFallback] = plan.saved
        """Fallback steps stored in the last checkpoint."""
        self._saved: TrainingProgress | None = None

    def at_start(self, progress: TrainingProgress) -> None:
        """Save a checkpoint at step 0, so that a resume always finds one."""
        if progress.step == 0:
            self.save(progress)

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Save a checkpoint if one is due, if this is the best step so far, and after the last step."""
        last_or_best = self.engine.is_done or progress.step == progress.best_step
        if last_or_best or due(progress.step, self.engine.job.report.saving.checkpoint_every):
            self.save(progress)

    def save(self, progress: TrainingProgress, captured: checkpoint.Checkpoint | None = None) -> None:
        """Write a checkpoint now, unless nothing has changed since the last one of this attempt.

        ``captured`` is the training state of the current step, if it was captured before the models were unloaded.
        """
        if self._saved == progress and self.fallbacks == self.plan.applied:
            return
        self.reporter.phase("save", 0, 1)
        now = captured or capture(self.engine, self.plan.state())
        folder = checkpoint.save_checkpoint(self.run.checkpoints, now)
        self._saved, self.fallbacks = dataclasses.replace(progress), self.plan.applied
        # The new one needs protection: skipped damaged checkpoints of later steps count among the newest.
        protect = {step for step in (progress.step, progress.best_step) if step is not None}
        checkpoint.prune(self.run.checkpoints, self.engine.job.report.saving.checkpoint_keep, protect)
        self.reporter.write(events.CheckpointEvent(step=progress.step, folder=f"checkpoints/{folder.name}"))
        self.reporter.phase("save", 1, 1)


def capture(engine: Engine, fallbacks: list[dict[str, object]]) -> checkpoint.Checkpoint:
    """Return the current training state, including the fit settings in force and the applied ``fallbacks``."""
    tensors, data = pack_state(engine.optimizer)
    state: dict[str, object] = {
        "progress": to_record(engine.progress),
        "optimizer": data,
        "scaler": engine.scaler.state() if engine.scaler else None,
        "fit": engine.job.fit.model_dump(mode="json"),
        "fallbacks": fallbacks,
    }
    masters = {key: master.detach() for key, master in engine.master_weights.masters.items()}
    averages = dict(engine.ema.weights) if engine.ema else {}
    return checkpoint.Checkpoint(engine.progress.step, masters, tensors, state, averages)


def is_restorable(saved: checkpoint.Checkpoint) -> bool:
    """Return whether a checkpoint contains everything that `restore` and the plan need, in the right types."""
    try:
        state: Mapping[str, Any] = saved.state
        progress = build(TrainingProgress, state["progress"])
        optimizer = state["optimizer"]
        applied_fallbacks(state)
        named = list(_tensor_names([optimizer["state"], optimizer["groups"]]))
        sound = isinstance(optimizer["optimizer"], str) and all(name in saved.optimizer for name in named)
    except (ValueError, TypeError, LookupError, AttributeError):
        return False
    return sound and progress.step == saved.step


def _tensor_names(value: Any) -> Iterator[str]:
    """Yield the names of the tensors that an optimizer's packed state refers to."""
    if isinstance(value, dict) and "tensor" in value:
        yield value["tensor"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensor_names(item)


def restore(engine: Engine, saved: checkpoint.Checkpoint) -> None:
    """Restore a checkpoint into an engine with the same adapter and optimizer."""
    engine.follow_stops(saved.step)  # first, because the saved state is only that of weights that are still trained
    engine.master_weights.load(saved.adapter)
    if engine.ema is not None:
        engine.ema.load(saved.ema)
    state: Mapping[str, Any] = saved.state
    unpack_state(engine.optimizer, saved.optimizer, state["optimizer"])
    if engine.scaler:
        engine.scaler.load(state["scaler"])
    engine.progress = build(TrainingProgress, state["progress"])
