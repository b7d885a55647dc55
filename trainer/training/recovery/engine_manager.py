"""Keeps the engine in accord with the plan in force, and makes it whole again after a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trainer.config.fit import FitConfig
from trainer.config.job import Job
from trainer.errors import ResumableError
from trainer.training import checkpoint
from trainer.training.acceleration.compile import compiled_of
from trainer.training.acceleration.cuda_graphs import Tell, graphs_of
from trainer.training.active_plan import ActivePlan
from trainer.training.build import RunParts, build_engine
from trainer.training.callbacks.checkpoints import capture, is_restorable, restore
from trainer.training.callbacks.preview import Previewer
from trainer.training.callbacks.validation import Validator
from trainer.training.data.batches import PrefetchCollator
from trainer.training.device.gradient_checkpointing import set_checkpointing
from trainer.training.device.offload import discard, is_emptied, release, release_at
from trainer.training.device.release_points import load_phase
from trainer.training.loop import Engine, Prepare, StepResult, TrainingProgress
from trainer.training.optim.lr_schedule import Segment
from trainer.training.reporting.reporter import watch


class EngineManager:
    """The one engine of an attempt.

    A step that fails before the optimizer moved leaves the masters as they were: its gradients are dropped and it can
    be repeated. One that fails later leaves some of them moved. Then the last checkpoint is put back and the steps
    since are replayed, under the plans that they had: what a step computes is a function of the masters, the
    optimizer's state and its number, so this gives the same bits wherever training itself does, and costs nothing
    until it is needed (docs/decisions/0007).
    """

    def __init__(
        self,
        job: Job,
        parts: RunParts,
        segments: Sequence[Segment],
        plan: ActivePlan,
        drawers: tuple[Validator, Previewer],
        folder: Path,
        tell: Tell,
    ) -> None:
        self.job = job
        ahead = PrefetchCollator(parts.assembler, parts.feed, parts.device, lambda: self._require().progress.step)
        self.parts = dataclasses.replace(parts, assembler=ahead)
        self.segments = segments
        self.plan = plan
        self.drawers = drawers
        self.folder = folder
        self.graphs = graphs_of(job.fit, parts.device, tell)
        """Those of every engine of the attempt; None from the moment on when memory runs out."""
        self.compiled = compiled_of(job, parts.device, tell)
        self.engine: Engine | None = None
        self.torn = False
        """Whether the optimizer may have moved some weights and not others."""
        self._held: checkpoint.Checkpoint | None = None
        self._empty = False
        self._replaying = False
        self._goal = TrainingProgress()

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models in memory by the names that users know them under."""
        if self.engine is None:
            return {}
        encoders = self.engine.models.text_encoders
        return {"unet": self.engine.models.unet} | {
            f"text_encoder{f'_{number}' if number > 1 else ''}": encoder for number, encoder in enumerate(encoders, 1)
        }

    def load(self, saved: checkpoint.Checkpoint | None) -> Engine:
        """Loads the engine for the first time: at its start, or at a checkpoint."""
        self._use(self.plan.at(saved.step if saved else 0))
        engine = self._build(fresh=saved is None)
        if saved:
            restore(engine, saved)
        self.engine = engine
        return engine

    def follow_plan(self, step: int) -> None:
        """Let all that encode and draw follow the plan in force at ``step``; the models themselves follow later."""
        fit = self.plan.at(step)
        if fit != self.parts.feed.job.fit:
            self._use(fit)

    def set_out(self) -> None:
        """Notes how far the run is, to come back there after a failure."""
        self._goal = dataclasses.replace(self._require().progress)

    def step(self) -> StepResult:
        """One optimizer step."""
        result = self._require().train_step()
        self.torn = False
        return result

    @property
    def held(self) -> checkpoint.Checkpoint | None:
        """What was learned up to now, while it waits in main memory without the models; None while they are there."""
        now = self._require().progress.step
        return self._held if self._empty and self._held and self._held.step == now else None

    def rewind(self) -> None:
        """Go back to what is held or saved if the engine is not whole, so that nothing is replayed to end the run."""
        engine = self._require()
        if self.torn or self._empty or self._held:
            self._held = self._held or self._last_checkpoint()
            state: dict[str, Any] = self._held.state
            engine.progress = TrainingProgress(**state["progress"])

    def set_aside(self) -> bool:
        """Frees the models until they are needed again, if there are any; what was learned waits in main memory."""
        if self.engine is None or self._empty:
            return False
        self._take_apart()
        return True

    def drop(self) -> None:
        """Lets go of what a failed step left: gradients, graphs, compiling, and models that did not come back."""
        if self.engine is None or self._empty:
            return
        if self.graphs:
            self.graphs.give_up()
            self.graphs = self.engine.graphs = None
        if self.compiled:
            self.compiled.give_up()
        self.engine.masters.zero_grad()
        if any(is_emptied(model) for model in self.models.values()):
            self._take_apart()

    def make_ready(self, prepare: Prepare) -> None:
        """Brings the engine to where it set out from, whole and under the plan in force there.

        Quick when nothing is wrong. May run out of memory like any step; call it again then.
        """
        engine = self._require()
        if self._empty:  # what its first step needs is encoded before the models take that room again
            self._held = self._held or self._last_checkpoint()
            self._use(self.plan.at(self._held.step))
            prepare(self._held.step)
        self._mend(engine)
        while engine.progress.step < self._goal.step:
            self._replaying = True
            prepare(engine.progress.step)
            self._accord(engine)
            self.step()
        if self._replaying:  # what was done again may have been of another portion, which is on disk now
            prepare(self._goal.step)
            self._replaying = False
        if engine.progress != self._goal:  # what was counted beside the steps, such as the best one
            engine.progress = dataclasses.replace(self._goal)
        self._accord(engine)

    def _mend(self, engine: Engine) -> None:
        """Builds and restores what is missing or torn."""
        if not (self.torn or self._empty or self._held):
            return
        self._held = self._held or self._last_checkpoint()
        if self._empty:
            self._use(self.plan.at(self._held.step))
            built = self._build(fresh=False)
            for field in dataclasses.fields(Engine):
                setattr(engine, field.name, getattr(built, field.name))
            self._empty = False
        restore(engine, self._held)
        self._held, self.torn = None, False

    def _accord(self, engine: Engine) -> None:
        """Lets the engine and all who work with it follow the plan."""
        fit = self.plan.at(engine.progress.step)
        if fit == engine.job.fit:
            return
        if fit.quantise != engine.job.fit.quantise:
            self._take_apart()
            self._mend(engine)
        engine.job = self._use(fit)
        if engine.graphs:
            engine.graphs.forget()
        choice, dropouts = fit.checkpointing or "none", engine.job.recipe.has_dropouts
        set_checkpointing(engine.models.unet, engine.models.text_encoders, choice, dropouts=dropouts)

    def _use(self, fit: FitConfig) -> Job:
        """The job as the plan makes it now, for all who look into its fit."""
        job = self.job.changed(fit=fit)
        for user in (self.parts.cache, self.parts.feed, *self.drawers):
            user.job = job
        return job

    def _build(self, *, fresh: bool) -> Engine:
        engine = build_engine(self.parts.feed.job, self.parts, self.segments, fresh=fresh)
        engine.optimizer.register_step_pre_hook(self._on_move)
        engine.graphs, engine.compiled = self.graphs, self.compiled
        engine.check = self.parts.source.check
        watch(engine.masters.working.values(), engine.check)
        if self.compiled:
            self.compiled.install(engine.models.unet)
        release_at(load_phase(engine.job.fit), engine.device)
        return engine

    def _on_move(self, *_: Any) -> None:
        self.torn = True

    def _take_apart(self) -> None:
        """Frees the models, masters and the optimizer's state, to be built anew.

        What was learned so far is held in main memory, if it is whole.
        """
        engine = self._require()
        if not self.torn and self._held is None:
            now = capture(engine, self.plan.state())
            masters = {key: master.to("cpu", copy=True) for key, master in now.adapter.items()}
            self._held = dataclasses.replace(now, adapter=masters)
        self._empty = True
        if engine.graphs:
            engine.graphs.forget()
        for model in self.models.values():
            discard(model)
        engine.masters.discard()
        engine.optimizer.state.clear()
        release(engine.device)

    def _last_checkpoint(self) -> checkpoint.Checkpoint:
        saved, _ = checkpoint.load_latest(self.folder, is_restorable)
        if saved is None:
            raise ResumableError(
                "checkpoint.none",
                "Memory ran out in the middle of a step, and no sound checkpoint is left to go back to.",
                "Start the job again with `train`.",
            )
        return saved

    def _require(self) -> Engine:
        assert self.engine is not None, "the engine is loaded before it is used"
        return self.engine
