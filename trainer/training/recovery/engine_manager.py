"""The engine manager: loads the engine, applies the plan in force, and restores it after a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trainer.config.fit import FitConfig
from trainer.config.job import Job
from trainer.config.lr_schedule import Segment
from trainer.errors import ResumableError
from trainer.protocol.forecast import load_phase
from trainer.training import checkpoint
from trainer.training.acceleration.compile import make_compiled
from trainer.training.acceleration.cuda_graphs import OnNotice, make_graphs
from trainer.training.active_plan import ActivePlan
from trainer.training.build import RunParts, build_engine
from trainer.training.callbacks.checkpoints import capture, is_restorable, restore
from trainer.training.callbacks.preview import Previewer
from trainer.training.callbacks.validation import Validator
from trainer.training.data.loader import PrefetchCollator
from trainer.training.device.offload import empty_cache, free_weights, is_emptied, release_at
from trainer.training.engine import Engine, TrainingProgress
from trainer.training.reporting.reporter import check_in_backward


class EngineManager:
    """Owner of an attempt's engine, of which there is only one at a time.

    A step that fails before the optimizer runs leaves the master weights unchanged: its gradients are dropped and the
    step is repeated. A step that fails inside the optimizer may have updated only some of them. Then the last
    checkpoint is restored and the steps since then are replayed, each under the plan it first ran with. A step depends
    only on the master weights, the optimizer state and the step number, so a replay gives the same bits if training
    itself is deterministic. Recovery costs nothing until it is needed (docs/decisions/0007).
    """

    def __init__(
        self,
        job: Job,
        parts: RunParts,
        segments: Sequence[Segment],
        plan: ActivePlan,
        evaluators: tuple[Validator, Previewer],
        folder: Path,
        notify: OnNotice,
    ) -> None:
        self.job = job
        self.loader = PrefetchCollator(
            parts.collator, parts.batches, parts.device, lambda: self._loaded_engine().progress.step
        )
        self.parts = dataclasses.replace(parts, collator=self.loader)
        self.segments = segments
        self.plan = plan
        self.evaluators = evaluators
        self.folder = folder
        self._notify = notify
        self.graphs = make_graphs(job.fit, parts.device, notify)
        """CUDA graphs shared by all engines of the attempt; None if they are not used or memory has run out."""
        self.compiled = make_compiled(job, parts.device, notify)
        self.engine: Engine | None = None
        self.partially_updated = False
        """Whether the optimizer may have updated only some of the master weights."""
        self._captured: checkpoint.Checkpoint | None = None
        """Training state in main memory to restore the engine from; None if the engine's own state is valid."""
        self._unloaded = False
        """Whether the models, master weights and optimizer state have been freed; the Engine object itself stays."""
        self._replaying = False
        """Whether the current `make_ready` has replayed steps; stays set if it fails and is called again."""
        self._goal = TrainingProgress()

    @property
    def models(self) -> dict[str, nn.Module]:
        """Return the loaded models by the names used in messages."""
        if self.engine is None:
            return {}
        encoders = self.engine.models.text_encoders
        return {"unet": self.engine.models.unet} | {
            f"text_encoder{f'_{number}' if number > 1 else ''}": encoder for number, encoder in enumerate(encoders, 1)
        }

    def load(self, saved: checkpoint.Checkpoint | None) -> Engine:
        """Build the first engine of the attempt, at step 0 or from the checkpoint ``saved``."""
        self._use(self.plan.at(saved.step if saved else 0))
        engine = self._build(fresh=saved is None)
        if saved:
            restore(engine, saved)
        self.engine = engine
        return engine

    def follow_plan(self, step: int) -> None:
        """Apply the plan in force at ``step`` to caching, validation and previews, but not to the models yet."""
        fit = self.plan.at(step)
        if fit != self.parts.batches.job.fit:
            self._use(fit)

    def mark_goal(self) -> None:
        """Record the current progress as the point that `make_ready` returns to after a failure."""
        self._goal = dataclasses.replace(self._loaded_engine().progress)

    def mark_complete(self) -> None:
        """Record that an optimizer step is complete, so weights and optimizer state are consistent."""
        self.partially_updated = False

    @property
    def captured(self) -> checkpoint.Checkpoint | None:
        """Return the training state at the current step if the models are unloaded, else None."""
        now = self._loaded_engine().progress.step
        return self._captured if self._unloaded and self._captured and self._captured.step == now else None

    def rewind(self) -> None:
        """Set the progress back to the last complete training state, so that ending the run replays no steps.

        Does nothing if the engine's own state is complete.
        """
        engine = self._loaded_engine()
        if self.partially_updated or self._unloaded or self._captured:
            # The next `mark_goal` then marks this step, so `make_ready` restores the state and has no step to replay.
            self._captured = self._captured or self._last_checkpoint()
            state: dict[str, Any] = self._captured.state
            engine.progress = TrainingProgress(**state["progress"])

    def offload(self) -> bool:
        """Free the models until they are needed again, keeping the training state in main memory.

        Returns whether there was anything to free.
        """
        if self.engine is None or self._unloaded:
            return False
        self._unload()
        return True

    def free_failed_step(self) -> None:
        """Free what a failed step left behind: gradients, CUDA graphs, compiled code and half-restored models."""
        if self.engine is None or self._unloaded:
            return
        # Graphs and compiled code take extra memory only to be faster, so the rest of the attempt runs without them.
        if self.graphs:
            self.graphs.give_up()
            self.graphs = self.engine.graphs = None
        if self.compiled:
            self.compiled.give_up()
        self.engine.master_weights.zero_grad()
        # A preview that ran out of memory while it brought the UNet back leaves weights without storage.
        stream = self.engine.models.stream
        streamed = [weight.parameter for weight in stream.weights] if stream else []
        if any(is_emptied(model, streamed) for model in self.models.values()):
            self._unload()

    def make_ready(self, prepare: Callable[[int], object]) -> None:
        """Bring the complete engine to the progress that `mark_goal` recorded, under the plan in force at that step.

        ``prepare`` caches what an optimizer step (counted from 0) needs, unless it is cached already. Returns
        at once if the engine is already in that state. Like any step, it may run out of memory; in that case call it
        again.
        """
        engine = self._loaded_engine()
        # Encode before the models are loaded: memory may not suffice for the VAE or text encoders as well.
        if self._unloaded:
            self._captured = self._captured or self._last_checkpoint()
            self._use(self.plan.at(self._captured.step))
            prepare(self._captured.step)
        self._restore(engine)
        while engine.progress.step < self._goal.step:
            self._replaying = True
            prepare(engine.progress.step)
            self._apply_plan(engine)
            engine.train_step()
            self.mark_complete()
        # Replayed steps may belong to an earlier cache shard, which then replaced the current one on disk.
        if self._replaying:
            prepare(self._goal.step)
            self._replaying = False
        # Replaying restores the step counters only; the best step, for instance, is set by validation.
        if engine.progress != self._goal:
            engine.progress = dataclasses.replace(self._goal)
        self._apply_plan(engine)

    def _restore(self, engine: Engine) -> None:
        """If needed, rebuild an unloaded engine and restore the last complete training state."""
        if not (self.partially_updated or self._unloaded or self._captured):
            return
        self._captured = self._captured or self._last_checkpoint()
        if self._unloaded:
            self._use(self.plan.at(self._captured.step))
            built = self._build(fresh=False)
            # Callbacks reference this Engine object, so its fields are replaced instead of the object.
            for field in dataclasses.fields(Engine):
                setattr(engine, field.name, getattr(built, field.name))
            self._unloaded = False
        restore(engine, self._captured)
        self._captured, self.partially_updated = None, False

    def _apply_plan(self, engine: Engine) -> None:
        """Apply the plan in force at the engine's step to the engine and to everything that reads the job."""
        fit = self.plan.at(engine.progress.step)
        if fit == engine.job.fit:
            return
        if (fit.quantize, fit.stream) != (engine.job.fit.quantize, engine.job.fit.stream):
            # The base must be loaded again, in another number format or to another place; the training state survives
            # in main memory.
            self._unload()
            self._restore(engine)
        engine.job = self._use(fit)
        if engine.graphs:  # graphs recorded under the previous plan would replay that plan
            engine.graphs.forget()
        engine.apply_checkpointing()

    def _use(self, fit: FitConfig) -> Job:
        """Pass a job with ``fit`` to everything that reads fit settings, and return that job."""
        job = self.job.replaced(fit=fit)
        for user in (self.parts.cache, self.parts.batches, *self.evaluators):
            user.job = job
        return job

    def _build(self, *, fresh: bool) -> Engine:
        engine = build_engine(self.parts.batches.job, self.parts, self.segments, fresh=fresh)
        engine.optimizer.register_step_pre_hook(self._on_optimizer_step)
        if engine.models.stream and (text := engine.models.stream.pageable_text):
            self._notify("stream.pageable", text)
        if not engine.models.stream:  # a graph would not copy the weights, and a compiled block would run no hooks
            engine.graphs, engine.compiled = self.graphs, self.compiled
        engine.check = self.parts.source.check
        check_in_backward(engine.master_weights.working.values(), engine.check)
        if engine.compiled and self.compiled:
            self.compiled.install(engine.models.unet)
        release_at(load_phase(engine.job.fit.quantize), engine.device)
        return engine

    def _on_optimizer_step(self, *_: Any) -> None:
        # Runs before the first weight changes; `mark_complete` clears it. A failed step in between cannot be repeated.
        self.partially_updated = True

    def _unload(self) -> None:
        """Free the models, the master weights and the optimizer state, so that the engine has to be rebuilt.

        The training state is copied to main memory first, unless it is only partially updated.
        """
        engine = self._loaded_engine()
        if not self.partially_updated and self._captured is None:
            now = capture(engine, self.plan.state())
            masters, averages = (
                {key: weight.to("cpu", copy=True) for key, weight in weights.items()}
                for weights in (now.adapter, now.ema)
            )
            self._captured = dataclasses.replace(now, adapter=masters, ema=averages)
        self._unloaded = True
        if engine.graphs:  # graphs contain addresses of the memory that is freed here
            engine.graphs.forget()
        if engine.models.stream:
            engine.models.stream.close()
        # References to the tensors exist in many places, so their storage is freed instead of waiting for the last one.
        for model in self.models.values():
            free_weights(model)
        engine.master_weights.discard()
        if engine.ema is not None:
            engine.ema.discard()
        engine.optimizer.state.clear()
        empty_cache(engine.device)

    def _last_checkpoint(self) -> checkpoint.Checkpoint:
        saved, _ = checkpoint.load_latest(self.folder, is_restorable)
        if saved is None:
            raise ResumableError(
                "checkpoint.none",
                "Could not continue: memory ran out in the middle of a step, and there is no undamaged checkpoint.",
                "Start the job again with `train`.",
            )
        return saved

    def _loaded_engine(self) -> Engine:
        assert self.engine is not None, "the engine was used before it was loaded"
        return self.engine
