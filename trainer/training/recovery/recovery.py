"""What a run does when memory runs out: says so, frees what it can, tries again, and steps down its ladder of plans."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from trainer.errors import ResumableError
from trainer.protocol import events
from trainer.protocol.forecast import Forecast, ForecastPhase
from trainer.protocol.text import size
from trainer.training.active_plan import ActivePlan
from trainer.training.callbacks.checkpoints import Checkpoints
from trainer.training.device.offload import release
from trainer.training.device.out_of_memory import card_in_use, closing, is_out_of_memory, shortage_of
from trainer.training.loop import Component, Engine, StepResult, TrainingProgress
from trainer.training.recovery.engine_manager import EngineManager
from trainer.training.reporting.memory_use import PhaseMemoryMeter
from trainer.training.reporting.reporter import Reporter

# Once freed, the same plan often fits: what was in pieces is whole again. A plan that needs it often is too tight.
TRIES_OF_A_PLAN = 3

REMEDIES: dict[ForecastPhase, str] = {
    "cache_pictures": ", or start a new run with fit.vae_encode_tiling = true or at a lower resolution",
    "cache_texts": "",
    "load": ", or start a new run with fit.allow_quantised = true",
    "preview": ", or make the images under report.previews in the run's job.toml smaller, or remove them",
}
"""By phase, what helps besides closing other programs."""
ELSE = ", or start a new run at a lower resolution, with a lower rank, or with fit.allow_quantised = true"

# When these fail, all that a resume does not do again is done.
AFTER_VALIDATION: tuple[ForecastPhase, ...] = ("first_step", "train", "preview", "save")

T = TypeVar("T")
PrepareIn = Callable[[int, Callable[[], object]], None]
"""Attempt.prepare: given a step, and how to make room for encoding what it needs."""


class Recovery:
    """Wraps every unit of work of an attempt: running out of memory costs time, and no picture is passed over."""

    def __init__(
        self,
        keeper: EngineManager,
        plan: ActivePlan,
        prepare: PrepareIn,
        reporter: Reporter,
        meter: PhaseMemoryMeter,
        forecast: Forecast | None,
    ) -> None:
        self.keeper = keeper
        self.plan = plan
        self.prepare = prepare
        self.reporter = reporter
        self.meter = meter
        self.forecast = forecast
        self.phase: ForecastPhase = "load"
        """What the work under way counts as."""
        self.keeping: Checkpoints | None = None
        self.first = 0
        """The step that the attempt goes on from, until there is an engine that knows."""
        self._tries = 0
        # Most components have nothing to do after most steps: measured is only what says that it works.
        reporter.on_phase = lambda: meter.enter(self.phase)

    @property
    def position(self) -> int:
        """How many optimizer steps are done."""
        engine = self.keeper.engine
        return engine.progress.step if engine else self.first

    def run(self, phase: ForecastPhase, work: Callable[[], T]) -> T:
        """Does ``work``, again if need be: once more under the same plan, then under lesser ones.

        ``work`` must do all of its work again when it is called again. Raises ResumableError "memory.exhausted" when
        the ladder ends, and what ``work`` raises for other reasons.
        """
        tried = False
        while True:
            self.phase = phase
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                told = self._tell(error)
            # Only here is the error gone, and with its frames all that the work held.
            self._free()
            if tried or self._tries == TRIES_OF_A_PLAN:
                self._step_down(told)
            else:
                tried, self._tries = True, self._tries + 1

    def prepare_step(self, step: int) -> None:
        """Caches what ``step`` needs (see Attempt.prepare), without the models where there is no room beside them."""
        make_room = self.keeper.set_aside if self.forecast and self.forecast.encodes_alone else _nothing
        self.run(self.phase, lambda: self.prepare(step, make_room))

    def train_step(self) -> StepResult:
        """One optimizer step, as the engine's own."""
        self.keeper.set_out()

        def work() -> StepResult:
            self.keeper.make_ready(self._prepare_again)
            self._keep_plan()
            engine = self._engine()
            self.reporter.phase("train", engine.progress.step, engine.steps)
            return self.keeper.step()

        result = self.run("train" if self.meter.knows("first_step") else "first_step", work)
        self.meter.lap()
        return result

    def with_engine(self, phase: ForecastPhase, work: Callable[[TrainingProgress], T]) -> T:
        """Does ``work`` on the engine, which has been made whole; it is given the run's counters."""
        self.keeper.set_out()

        def ready() -> T:
            self.keeper.make_ready(self._prepare_again)
            return work(self._engine().progress)

        return self.run(phase, ready)

    def _prepare_again(self, step: int) -> None:
        """Caches what a replayed step needs, in the middle of other work."""
        phase = self.phase
        self.prepare(step, _nothing)
        self.phase = phase

    def _tell(self, error: BaseException) -> events.MemoryExhausted:
        """Write the event of a shortage.

        Its figures are those of the error's own message: by the time that an error of backward arrives here, most of
        what was in use when it was raised has been freed.
        """
        allocated, reserved = self.meter.present()
        shortage = shortage_of(error, self.keeper.models)
        phase = self.phase
        foreseen = self.forecast.of(phase) if self.forecast else None
        told = events.MemoryExhausted(
            phase=phase,
            step=self.position,
            requested=shortage.requested,
            stage=shortage.stage,
            module=shortage.module,
            allocated=allocated if shortage.allocated is None else shortage.allocated,
            reserved=reserved if shortage.reserved is None else shortage.reserved,
            forecast=foreseen.reserved if foreseen else None,
        )
        self.reporter.write(told)
        return told

    def _free(self) -> None:
        self.keeper.drop()
        gc.collect()
        release(self.keeper.parts.device)

    def _step_down(self, told: events.MemoryExhausted) -> None:
        # Encoding, between two portions of a long run, has no need of the models in training; unlike the fallback steps
        # of encoding, to set them aside leaves the result as it is.
        if told.phase in ("cache_pictures", "cache_texts") and self.keeper.set_aside():
            return
        down = self.plan.step_down(self.position, told.phase)
        if down is None:
            raise self._end(told)
        taken, changes = down
        self._tries = 0
        self.reporter.write(
            events.SteppedDown(step=taken.step, rung=taken.number, changes=changes, exact=taken.rung.exact)
        )

    def _keep_plan(self) -> None:
        """Writes a checkpoint when the plan has changed: a resumed run goes on under the plan that this one came to.

        Only between two steps, when all that belongs to the last one is done: a resume takes up no validation.
        """
        engine, keeping = self._engine(), self.keeping
        if keeping and keeping.rungs != self.plan.taken:
            keeping.save(engine.progress)

    def _end(self, told: events.MemoryExhausted) -> ResumableError:
        """The ladder has ended: what is whole is kept, and the run pauses."""
        if told.phase in AFTER_VALIDATION and self.keeping and not self.keeper.torn:
            with suppress(RuntimeError, MemoryError):
                self.keeping.save(self._engine().progress)
        return ResumableError(
            "memory.exhausted",
            f"Memory ran out ({in_words(told)}), and no plan is left that needs less for it.",
            f"{self._allowed(told)}{closing(card_in_use(self.keeper.parts.device))}{REMEDIES.get(told.phase, ELSE)}; "
            "`resume` continues from the last checkpoint.",
        )

    def _allowed(self, told: events.MemoryExhausted) -> str:
        """What the user could allow: keys of the fit that they wrote, and that would need less otherwise."""
        keys = [f"fit.{key} = {json.dumps(value)}" for key, value in self.plan.forbidden(told.step, told.phase).items()]
        return f"Set {' or '.join(keys)} in the run's job.toml, which holds what you wrote; or: " if keys else ""

    def _engine(self) -> Engine:
        engine = self.keeper.engine
        assert engine is not None, "the engine is loaded before it works"
        return engine


def _nothing() -> None:
    """Makes no room."""


class Protected:
    """A component whose work is done again when memory runs out."""

    def __init__(self, component: Component, recovery: Recovery) -> None:
        self.component = component
        self.recovery = recovery
        self.phase: ForecastPhase = component.phase

    def at_start(self, progress: TrainingProgress) -> None:
        """As the component's own."""
        self.recovery.with_engine(self.phase, self.component.at_start)

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """As the component's own."""
        self.recovery.with_engine(self.phase, lambda now: self.component.after_step(now, result))


def in_words(told: events.MemoryExhausted) -> str:
    """What was going on when memory ran out, such as "train, step 12, backward, at unet.mid_block, 20 MiB wanted"."""
    parts = [
        told.phase.replace("_", " "),
        f"step {told.step + 1}" if told.stage else "",
        told.stage,
        f"at {told.module}" if told.module else "",
        f"{size(told.requested)} wanted" if told.requested else "",
    ]
    return ", ".join(part for part in parts if part)
