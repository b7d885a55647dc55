"""What hangs on the loop: events, validation, checkpoints, saved LoRAs, previews, and the user's requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.config.fit import FallbackStep
from trainer.protocol import events
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.records import build, to_record
from trainer.protocol.run_directory import RunDirectory
from trainer.training import checkpoint
from trainer.training.active_plan import ActivePlan, AppliedFallback
from trainer.training.callbacks.lora_export import due
from trainer.training.loop import Engine, StepResult, TrainingProgress
from trainer.training.optim.optimizer import pack_state, unpack_state
from trainer.training.reporting.reporter import Reporter


class Checkpoints:
    """Writes resumable checkpoints at their times."""

    phase: ForecastPhase = "checkpoint"

    def __init__(self, engine: Engine, run: RunDirectory, reporter: Reporter, plan: ActivePlan) -> None:
        self.engine = engine
        self.run = run
        self.reporter = reporter
        self.plan = plan
        self.rungs: Sequence[AppliedFallback] = plan.saved
        """The rungs that the last checkpoint holds."""
        self._saved: TrainingProgress | None = None

    def at_start(self, progress: TrainingProgress) -> None:
        """Saves the start, so that a resume never begins from nothing."""
        if progress.step == 0:
            self.save(progress)

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Saves when it is time, and after the last step."""
        last_or_best = progress.step in (self.engine.steps, progress.best_step)
        if last_or_best or due(progress.step, self.engine.job.report.saving.checkpoint_every):
            self.save(progress)

    def save(self, progress: TrainingProgress, held: checkpoint.Checkpoint | None = None) -> None:
        """Writes a checkpoint now, unless this attempt wrote one since anything moved.

        ``held`` is what was captured of this very step before, where the engine is not there.
        """
        if self._saved == progress and self.rungs == self.plan.taken:
            return
        self.reporter.phase("save", 0, 1)
        now = held or capture(self.engine, self.plan.state())
        folder = checkpoint.save_checkpoint(self.run.checkpoints, now)
        self._saved, self.rungs = dataclasses.replace(progress), self.plan.taken
        # The one just written too: damaged ones that were passed over still count among the newest.
        protect = {step for step in (progress.step, progress.best_step) if step is not None}
        checkpoint.prune(self.run.checkpoints, self.engine.job.report.saving.checkpoint_keep, protect)
        self.reporter.write(events.CheckpointEvent(step=progress.step, folder=f"checkpoints/{folder.name}"))
        self.reporter.phase("save", 1, 1)


def capture(engine: Engine, rungs: list[dict[str, object]]) -> checkpoint.Checkpoint:
    """Everything that moves during training, as it is now, and the plan in force: its fit and ``rungs`` taken."""
    tensors, data = pack_state(engine.optimizer)
    state: dict[str, object] = {
        "progress": to_record(engine.progress),
        "optimizer": data,
        "scaler": engine.scaler.state() if engine.scaler else None,
        "fit": engine.job.fit.model_dump(mode="json"),
        "rungs": rungs,
    }
    masters = {key: master.detach() for key, master in engine.masters.masters.items()}
    return checkpoint.Checkpoint(engine.progress.step, masters, tensors, state)


def is_restorable(saved: checkpoint.Checkpoint) -> bool:
    """Tell whether a checkpoint holds all that `restore` and the plan take from it, of the right types."""
    try:
        state: Mapping[str, Any] = saved.state
        progress = build(TrainingProgress, state["progress"])
        optimizer = state["optimizer"]
        for each in state.get("rungs", ()):
            AppliedFallback(int(each["step"]), int(each["number"]), FallbackStep.model_validate(each["rung"]))
        named = list(_tensor_names([optimizer["state"], optimizer["groups"]]))
        sound = isinstance(optimizer["optimizer"], str) and all(name in saved.optimizer for name in named)
    except (ValueError, TypeError, LookupError, AttributeError):
        return False
    return sound and progress.step == saved.step


def _tensor_names(value: Any) -> Iterator[str]:
    """Yield the names of the tensors that the packed state of an optimizer refers to."""
    if isinstance(value, dict) and "tensor" in value:
        yield value["tensor"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensor_names(item)


def restore(engine: Engine, saved: checkpoint.Checkpoint) -> None:
    """Puts a checkpoint back into a freshly built engine."""
    engine.masters.load(saved.adapter)
    state: Mapping[str, Any] = saved.state
    unpack_state(engine.optimizer, saved.optimizer, state["optimizer"])
    if engine.scaler:
        engine.scaler.load(state["scaler"])
    engine.progress = build(TrainingProgress, state["progress"])
