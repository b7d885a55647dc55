"""One attempt at a run: cache, load, restore, train, export."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.base.source import BaseSource
from trainer.config.checks import not_forecast
from trainer.config.job import Job
from trainer.config.lr_schedule import Segment
from trainer.dataset.image import ImageRecord
from trainer.errors import ImpastoError
from trainer.protocol import events, places
from trainer.protocol.forecast import ForecastPhase, load_phase, read_forecast
from trainer.protocol.report import write_report
from trainer.protocol.run_directory import RunDirectory, State, Status, newest_step
from trainer.training import checkpoint
from trainer.training.active_plan import ActivePlan
from trainer.training.build import build_parts
from trainer.training.callbacks.checkpoints import CheckpointCallback, is_restorable
from trainer.training.callbacks.lora_export import ExportCallback, Exporter
from trainer.training.callbacks.memory_leak import LeakWarning
from trainer.training.callbacks.preview import PreviewCallback, Previewer
from trainer.training.callbacks.step_events import (
    DataWaitWarning,
    SlowStepWarning,
    SnapshotCallback,
    StepEventCallback,
    TensorBoardCallback,
)
from trainer.training.callbacks.validation import ValidationCallback, Validator
from trainer.training.device.device import attention_kernels
from trainer.training.device.out_of_memory import cap_memory
from trainer.training.engine import Callback, Engine, StepResult, TrainingProgress
from trainer.training.recovery.engine_manager import EngineManager
from trainer.training.recovery.recovery import RecoverableCallback, Recovery
from trainer.training.reporting.memory_history import start_history
from trainer.training.reporting.memory_use import PhaseMemoryMeter, warn_of_allocator
from trainer.training.reporting.report import make_report, summarize
from trainer.training.reporting.reporter import Control, Interrupted, Order, Reporter, answer
from trainer.training.run.cache_pruning import trim_and_report

Ended = tuple[events.Outcome, Path | None]

OUTCOMES: dict[Order, events.Outcome] = {"pause": "paused", "stop": "stopped"}


class Attempt:
    """One start of the engine on a run, from taking the lock to its last event."""

    def __init__(
        self,
        run: RunDirectory,
        job: Job,
        images: Sequence[ImageRecord],
        source: BaseSource,
        reporter: Reporter,
        control: Control,
        segments: Sequence[Segment],
        *,
        memory_snapshot: bool = False,
    ) -> None:
        self.run = run
        self.job = job
        self.reporter = reporter
        self.control = control
        source.interrupt_with(control.check)
        self.parts = build_parts(job, images, source, places.cache_folder())
        self.validator = Validator(images, job, self.parts.collator, self.parts.device)
        self.previewer = Previewer(job, source, self.parts.cache, run.samples)
        self.exporter = Exporter(run, job, source, images, self.parts.batches.steps_per_epoch)
        self.plan = ActivePlan.of(job)
        history = start_history(run, self.parts.device, reporter) if memory_snapshot else None
        self.meter = PhaseMemoryMeter(self.parts.device, reporter, history)
        evaluators = (self.validator, self.previewer)
        self.manager = EngineManager(job, self.parts, segments, self.plan, evaluators, run.checkpoints, reporter.notice)
        self.forecast = read_forecast(run.forecast)
        self.checkpoints: CheckpointCallback | None = None
        """Callback that writes checkpoints; None until there is an engine."""
        self.saving: ExportCallback | None = None
        """Callback that exports the LoRA; None until there is an engine."""
        self.recovery = Recovery(self.manager, self.plan, self.prepare, reporter, self.meter, self.forecast)

    def status(self, phase: events.Phase | None, number: int, state: State) -> Status:
        """Return the current status of the run; ``number`` is the attempt's number."""
        engine, steps = self.manager.engine, self.job.recipe.steps or 0
        step = engine.progress.step if engine and state == "running" else self.step
        return Status(state=state, phase=phase, step=step, steps=steps, attempt=number, heartbeat=time.time())

    @property
    def step(self) -> int:
        """Return the number of optimizer steps saved in the newest checkpoint, 0 if there is none."""
        return newest_step(self.run.checkpoints) or 0

    def run_to_end(self, number: int) -> Ended:
        """Cache, train and export; return how the attempt ended and the LoRA written at the end, if any."""
        try:
            return "done", self._train(number)
        except Interrupted as interruption:
            order = interruption.order
        # Not inside the except block: there the traceback keeps the interrupted frames and their tensors alive.
        self.control.begin_ending()
        return self._interrupt(order)

    def _train(self, number: int) -> Path:
        each = self.forecast.mean_step_seconds if self.forecast else None
        device = self.job.fit.device or "cpu"
        self.reporter.write(events.AttemptStarted(pid=os.getpid(), device=device, step_seconds=each))
        saved = self._find_checkpoint()
        self.run.write_status(self.status(None, number, "running"))
        warn_of_allocator(self.parts.device, self.reporter)
        # The free memory may have changed since the run was planned, maybe days ago.
        cap_memory(self.parts.device)
        recovery = self.recovery
        # Encode before the models are loaded, so that the VAE and the UNet need not fit in memory together.
        recovery.prepare_first_step(saved.step if saved else 0)
        engine = self._load(saved)
        self.checkpoints = checkpoints = CheckpointCallback(engine, self.run, self.reporter, self.plan)
        recovery.use_checkpoints(checkpoints)
        self.saving = saving = ExportCallback(engine, self.exporter, self.reporter)
        callbacks = [
            RecoverableCallback(callback, recovery) for callback in self._callbacks(engine, checkpoints, saving)
        ]
        with attention_kernels(self.job.fit.attention or "auto", engine.device, engine.models.dtype):
            train(engine, recovery, callbacks)
            # All steps are done: a pause request must not interrupt the final export any more.
            self.control.begin_ending()
            return self._finish(engine, saving)

    def _load(self, saved: checkpoint.Checkpoint | None) -> Engine:
        def load() -> Engine:
            self.reporter.phase("load", 0, 1)
            return self.manager.load(saved)

        engine = self.recovery.run(load_phase(self.plan.at(saved.step if saved else 0).quantize), load)
        self.reporter.phase("load", 1, 1)
        return engine

    def prepare(self, step: int, make_room: Callable[[], object]) -> None:
        """Cache what ``step`` and the epochs around it need.

        ``make_room`` is called before anything is encoded, but not if everything is already cached.
        """
        last = (self.job.recipe.steps or 1) - 1
        self.manager.follow_plan(step)
        texts = [*self.previewer.texts(), *(sample.caption for sample in self.validator.samples)]
        feed, samples = self.parts.batches, self.validator.samples

        def on_phase(phase: events.Phase, done: int, total: int) -> None:
            if phase == "cache_pictures" or phase == "cache_texts":
                self.recovery.enter_phase(phase)
            self.reporter.phase(phase, done, total)
            if done < total:
                make_room()

        if feed.prepare(min(step, last), texts, samples, on_phase, self.reporter.write):
            trim_and_report(self.reporter)

    def _find_checkpoint(self) -> checkpoint.Checkpoint | None:
        saved, damaged = checkpoint.load_latest(self.run.checkpoints, is_restorable)
        for folder in damaged:
            self.reporter.notice("checkpoint.damaged", f"Skipped the checkpoint {folder.name}: it is damaged.")
        if saved:
            self.plan.load(saved.state)
        return saved

    def _callbacks(self, engine: Engine, checkpoints: CheckpointCallback, saving: ExportCallback) -> list[Callback]:
        """Return the callbacks of the training loop in the order in which they run.

        Callbacks whose results must be in the checkpoint run before it; callbacks that may fail run after it. The
        validation callback and all later ones may be interrupted; when the run is resumed, their `at_start` does what
        they left undone.
        """
        previews = PreviewCallback(engine, self.previewer, self.exporter, self.reporter)
        # Before the callbacks that may be interrupted, because a resume adds no points for earlier steps.
        curves = [TensorBoardCallback(self.run.path / "tensorboard")] if self.job.report.tensorboard else []
        return [
            StepEventCallback(engine, self.reporter, self.meter),
            *([SnapshotCallback(self.meter.history)] if self.meter.history else []),
            SlowStepWarning(engine, self.reporter),
            DataWaitWarning(engine, self.reporter),
            LeakWarning(engine, self.reporter, self.meter),
            *curves,
            ValidationCallback(engine, self.validator, self.reporter),
            checkpoints,
            saving,
            previews,
            CommandHandler(self.control, self.reporter, saving, previews, checkpoints),
        ]

    def close(self, outcome: events.Outcome) -> None:
        """Write events with each phase's memory and time, and the report if the run finished or ran out of memory."""
        self.meter.close()
        written, _ = events.read_events(self.run.events)
        if outcome != "done" and not any(isinstance(event, events.MemoryExhausted) for event in written):
            return
        steps = self.job.recipe.steps or 1
        report = make_report(written, self.forecast, self.parts.device, steps)
        write_report(self.run.report, report)
        if outcome == "done":
            self.reporter.notice("report", summarize(report))
        # Runs with an experimental option, or whose forecast was only an estimate, would distort later forecasts.
        # So would those that stopped early, because their forecast was for all steps.
        fit = self.job.fit
        engine = self.manager.engine
        is_shorter = engine is not None and engine.stops_early
        is_special = is_shorter or fit.cuda_graphs or fit.quantize == "int8_products" or any(not_forecast(self.job))
        if not is_special and (problem := self.reporter.learn(report)):
            self.reporter.notice("calibration", problem)

    def _finish(self, engine: Engine, saving: ExportCallback) -> Path:
        progress, patience = engine.progress, self.job.report.validation.patience
        if engine.stops_early:
            missed = "the last validation" if patience == 1 else f"{patience} validations in a row"
            self.reporter.notice(
                "early_stopping",
                f"Stopped early at step {progress.step} of {engine.steps}: the {self.validator.loss_name} did not fall "
                f"in {missed}.",
            )
        if progress.best_step is not None:
            self.reporter.notice("best", self.validator.best_step_text(progress.best_step))
        return self.recovery.with_engine("save", lambda progress: saving.save(progress, final=True))

    def _interrupt(self, order: Order) -> Ended:
        """Save a checkpoint and, on a stop, the LoRA; return the outcome and the path of the LoRA written, if any."""
        checkpoints, saving = self.checkpoints, self.saving
        if checkpoints is None or saving is None:  # no engine yet: the last checkpoint is still current
            self.control.answer(self.reporter, "done", f"{OUTCOMES[order]} before training, at step {self.step}")
            return OUTCOMES[order], None
        engine = checkpoints.engine
        self.manager.rewind()
        if captured := self.manager.captured:  # the training state is in main memory, so the models stay unloaded
            checkpoints.save(engine.progress, captured)
        else:
            self.recovery.with_engine("checkpoint", checkpoints.save)
        if engine.is_done and (order == "stop" or self._is_complete(engine.progress)):
            file = self._finish(engine, saving)
            self.control.answer(self.reporter, "done", f"finished at step {engine.progress.step}, wrote {file.name}")
            return "done", file
        written = self.recovery.with_engine("save", saving.save) if order == "stop" else None
        outcome = OUTCOMES[order]
        detail = f"{outcome} at step {engine.progress.step}" + (f", wrote {written.name}" if written else "")
        self.control.answer(self.reporter, "done", detail)
        return outcome, written

    def _is_complete(self, progress: TrainingProgress) -> bool:
        """Return whether validation and previews for the current step are done."""
        return not progress.unvalidated and self.previewer.is_complete(progress.step)


def train(engine: Engine, recovery: Recovery, callbacks: Sequence[Callback]) -> None:
    """Train until the run is done, unless the engine's check interrupts it."""
    recovery.prepare_step(engine.progress.step)
    for callback in callbacks:
        callback.at_start(engine.progress)
    while not engine.is_done:
        recovery.prepare_step(engine.progress.step)
        result = recovery.train_step()
        for callback in callbacks:
            callback.after_step(engine.progress, result)


class CommandHandler:
    """Runs the commands "save" and "sample", which do not end the run."""

    phase: ForecastPhase = "preview"

    def __init__(
        self,
        control: Control,
        reporter: Reporter,
        saving: ExportCallback,
        previews: PreviewCallback,
        checkpoints: CheckpointCallback,
    ) -> None:
        self.control = control
        self.reporter = reporter
        self.saving = saving
        self.previews = previews
        self.checkpoints = checkpoints

    def at_start(self, progress: TrainingProgress) -> None:
        """Do nothing: commands left over from earlier attempts were voided when this attempt began."""

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Run the requested commands and report each command's outcome, even if it fails or is interrupted."""
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

    def _save(self, progress: TrainingProgress) -> str:
        self.checkpoints.save(progress)
        return self.saving.save(progress).name

    def _sample(self, progress: TrainingProgress) -> str:
        self.previews.render(progress)
        return f"previews of step {progress.step}"
