"""What hangs on the loop: events, validation, checkpoints, saved LoRAs, previews, and the user's requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config.ladder import RungConfig
from trainer.errors import BaseModelError, ImpastoError
from trainer.protocol import events
from trainer.protocol.fields import build, to_record
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.rundir import RunDirectory
from trainer.training import checkpoint as checkpoints
from trainer.training.control import Control, Interrupted, answer
from trainer.training.loop import Engine, Progress, StepResult, is_finite
from trainer.training.measure import Meter
from trainer.training.optimizer import averaged_weights, pack_state, unpack_state
from trainer.training.output import Exporter
from trainer.training.plan import Plan, Taken
from trainer.training.preview import Previewer
from trainer.training.reporter import Reporter
from trainer.training.validation import Validator


def due(step: int, every: int | None) -> bool:
    """Whether something done every so many steps is due now."""
    return bool(every) and step > 0 and step % (every or 1) == 0


@contextmanager
def as_exported(engine: Engine) -> Iterator[None]:
    """Inside, the model is as it would be exported: no dropout, and for Schedule-Free the averaged weights."""
    engine.adapter.training = False
    try:
        with averaged_weights(engine.optimizer, engine.masters):
            yield
    finally:
        engine.adapter.training = True


class StepEvents:
    """Writes an event a step and keeps the heartbeat."""

    phase: ForecastPhase = "train"

    def __init__(self, engine: Engine, reporter: Reporter, meter: Meter) -> None:
        self.engine = engine
        self.reporter = reporter
        self.meter = meter

    def at_start(self, progress: Progress) -> None:
        """Shows how far the run is already."""
        self.reporter.phase("train", progress.step, self.engine.steps)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Writes the step's event and, now and then, the heartbeat."""
        self.reporter.phase("train", progress.step, self.engine.steps)
        self.reporter.write(
            events.StepEvent(
                step=result.step,
                epoch=result.epoch,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rates=result.learning_rates,
                pictures=result.pictures,
                seconds=result.seconds,
                skipped=result.skipped is not None,
                loss_scale=result.loss_scale,
                memory=self.meter.latest,
            )
        )
        if result.skipped:
            self.reporter.write(events.Skipped(step=result.step, reason=result.skipped))


class Validation:
    """Measures the held-out loss and remembers the best step."""

    phase: ForecastPhase = "validate"

    def __init__(self, engine: Engine, validator: Validator, reporter: Reporter) -> None:
        self.engine = engine
        self.validator = validator
        self.reporter = reporter

    def at_start(self, progress: Progress) -> None:
        """Measure the untrained start, or what an interrupted attempt did not finish."""
        if progress.step == 0 or progress.unvalidated:
            self._measure(progress)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Measures when it is time, and after the last step."""
        if due(progress.step, self.engine.job.report.validation.every) or progress.step == self.engine.steps:
            self._measure(progress)

    def _measure(self, progress: Progress) -> None:
        progress.unvalidated = True
        self.reporter.phase("validate", 0, len(self.validator.samples))
        with as_exported(self.engine):
            measured = self.validator.measure(
                self.engine.models,
                self.engine.noise_schedule,
                lambda done, total: self.reporter.phase("validate", done, total),
            )
        if progress.step == 0 and not any(map(is_finite, measured.per_timestep.values())):
            raise BaseModelError(
                "base.not_finite",
                "Could not train: the base predicts numbers that are not finite (NaN or infinity) for every image, "
                "before anything was trained.",
                "Its weights are probably damaged: get the base again or choose another one. If it works elsewhere, "
                'set fit.dtype = "fp32".',
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
        # Only held-out pictures can tell a best step; the untrained start is no candidate.
        better = is_finite(measured.loss) and (progress.best_loss is None or measured.loss < progress.best_loss)
        if measured.held_out and progress.step > 0 and better:
            progress.best_step, progress.best_loss = progress.step, measured.loss


class Checkpoints:
    """Writes resumable checkpoints at their times."""

    phase: ForecastPhase = "checkpoint"

    def __init__(self, engine: Engine, run: RunDirectory, reporter: Reporter, plan: Plan) -> None:
        self.engine = engine
        self.run = run
        self.reporter = reporter
        self.plan = plan
        self.rungs: Sequence[Taken] = plan.saved
        """The rungs that the last checkpoint holds."""
        self._saved: Progress | None = None

    def at_start(self, progress: Progress) -> None:
        """Saves the start, so that a resume never begins from nothing."""
        if progress.step == 0:
            self.save(progress)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Saves when it is time, and after the last step."""
        last_or_best = progress.step in (self.engine.steps, progress.best_step)
        if last_or_best or due(progress.step, self.engine.job.report.saving.checkpoint_every):
            self.save(progress)

    def save(self, progress: Progress, held: checkpoints.Checkpoint | None = None) -> None:
        """Writes a checkpoint now, unless this attempt wrote one since anything moved.

        ``held`` is what was captured of this very step before, where the engine is not there.
        """
        if self._saved == progress and self.rungs == self.plan.taken:
            return
        self.reporter.phase("save", 0, 1)
        now = held or capture(self.engine, self.plan.state())
        folder = checkpoints.save_checkpoint(self.run.checkpoints, now)
        self._saved, self.rungs = dataclasses.replace(progress), self.plan.taken
        # The one just written too: damaged ones that were passed over still count among the newest.
        protect = {step for step in (progress.step, progress.best_step) if step is not None}
        checkpoints.prune(self.run.checkpoints, self.engine.job.report.saving.checkpoint_keep, protect)
        self.reporter.write(events.CheckpointEvent(step=progress.step, folder=f"checkpoints/{folder.name}"))
        self.reporter.phase("save", 1, 1)


def capture(engine: Engine, rungs: list[dict[str, object]]) -> checkpoints.Checkpoint:
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
    return checkpoints.Checkpoint(engine.progress.step, masters, tensors, state)


class Saving:
    """Exports the LoRA at its times; all are kept unless the user sets a limit."""

    phase: ForecastPhase = "save"

    def __init__(self, engine: Engine, exporter: Exporter, reporter: Reporter) -> None:
        self.engine = engine
        self.exporter = exporter
        self.reporter = reporter
        self.finished = exporter.finished_step()

    def at_start(self, progress: Progress) -> None:
        """Exports what a killed attempt had no time for, and as a step's file what was finished before."""
        if self._due(progress) and not self.exporter.step_path(progress.step).exists():
            self.save(progress)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Exports when it is time."""
        if self._due(progress):
            self.save(progress)

    def _due(self, progress: Progress) -> bool:
        """At its times, at the best step so far and where a shorter run ended; the finished file is the last step's."""
        step = progress.step
        in_time = due(step, self.engine.job.report.saving.every_steps)
        return step < self.engine.steps and (in_time or step in (progress.best_step, self.finished))

    def save(self, progress: Progress, *, final: bool = False) -> Path:
        """Exports the LoRA now: as a step's file, or as the finished one."""
        self.reporter.phase("save", 0, 1)
        with averaged_weights(self.engine.optimizer, self.engine.masters):
            path, sha256 = self.exporter.export(self.engine.masters.masters, self.engine.adapter, progress, final=final)
        self.reporter.write(events.Saved(step=progress.step, file=f"output/{path.name}", sha256=sha256))
        self.reporter.phase("save", 1, 1)
        if not final:
            self.exporter.prune(self.engine.job.report.saving.keep, (progress.best_step, self.finished))
        return path


class Previews:
    """Draws the preview prompts at their times, the first at step 0 as the baseline."""

    phase: ForecastPhase = "preview"

    def __init__(self, engine: Engine, previewer: Previewer, exporter: Exporter, reporter: Reporter) -> None:
        self.engine = engine
        self.previewer = previewer
        self.exporter = exporter
        self.reporter = reporter

    def at_start(self, progress: Progress) -> None:
        """Draws the baseline, or what a killed attempt had no time for."""
        if (progress.step == 0 or self._due(progress.step)) and not self.previewer.drawn(progress.step):
            self.draw(progress)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Draws when it is time, and after the last step."""
        if self._due(progress.step):
            self.draw(progress)

    def _due(self, step: int) -> bool:
        return step == self.engine.steps or due(step, self.engine.job.report.previews.every)

    def draw(self, progress: Progress) -> None:
        """Draws all prompts with the weights as they would be exported now."""
        if not self.previewer.prompts:
            return
        self.reporter.phase("preview", 0, len(self.previewer.prompts))
        with as_exported(self.engine):
            self.previewer.draw_all(
                progress.step,
                self.engine.models.unet,
                self.engine.models.text_encoders,
                lambda index, file, seconds: self.reporter.write(
                    events.Preview(step=progress.step, index=index, file=f"samples/{file.name}", seconds=seconds)
                ),
                lambda done, total: self.reporter.phase("preview", done, total),
            )
        self.exporter.add_preview(progress.step)


class Requests:
    """Answers the commands "save" and "sample", which do not end the run."""

    phase: ForecastPhase = "preview"

    def __init__(
        self, control: Control, reporter: Reporter, saving: Saving, previews: Previews, keeping: Checkpoints
    ) -> None:
        self.control = control
        self.reporter = reporter
        self.saving = saving
        self.previews = previews
        self.keeping = keeping

    def at_start(self, progress: Progress) -> None:
        """Nothing: leftovers of former attempts were voided at the start."""

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Carry out what was asked for and answer; what fails or is interrupted is answered too."""
        for command in self.control.requests():
            try:
                detail = self._save(progress) if command.name == "save" else self._sample(progress)
            except ImpastoError as error:
                answer(self.reporter, command, "failed", error.sentence)
                raise
            except Interrupted:
                answer(self.reporter, command, "void", "The run ended before this was done.")
                raise
            answer(self.reporter, command, "done", detail)

    def _save(self, progress: Progress) -> str:
        self.keeping.save(progress)
        return self.saving.save(progress).name

    def _sample(self, progress: Progress) -> str:
        self.previews.draw(progress)
        return f"previews of step {progress.step}"


def is_restorable(saved: checkpoints.Checkpoint) -> bool:
    """Tell whether a checkpoint holds all that `restore` and the plan take from it, of the right types."""
    try:
        state: Mapping[str, Any] = saved.state
        progress = build(Progress, state["progress"])
        optimizer = state["optimizer"]
        for each in state.get("rungs", ()):
            Taken(int(each["step"]), int(each["number"]), RungConfig.model_validate(each["rung"]))
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


def restore(engine: Engine, saved: checkpoints.Checkpoint) -> None:
    """Puts a checkpoint back into a freshly built engine."""
    engine.masters.load(saved.adapter)
    state: Mapping[str, Any] = saved.state
    unpack_state(engine.optimizer, saved.optimizer, state["optimizer"])
    if engine.scaler:
        engine.scaler.load(state["scaler"])
    engine.progress = build(Progress, state["progress"])
