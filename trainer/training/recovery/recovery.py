"""Out-of-memory recovery: report, free memory, retry, then step down to smaller plans."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from trainer.config.fit import FitConfig
from trainer.errors import ResumableError
from trainer.protocol import events
from trainer.protocol.forecast import Forecast, ForecastPhase
from trainer.protocol.run_directory import newest_step
from trainer.protocol.text import size
from trainer.training.active_plan import ActivePlan
from trainer.training.callbacks.checkpoints import CheckpointCallback
from trainer.training.device.offload import empty_cache
from trainer.training.device.out_of_memory import close_programs_advice, current_gpu_info, is_out_of_memory, oom_details
from trainer.training.engine import Callback, Engine, StepResult, TrainingProgress
from trainer.training.recovery.engine_manager import EngineManager
from trainer.training.reporting.memory_use import PhaseMemoryMeter
from trainer.training.reporting.reporter import Reporter

# The same plan often fits after freeing, because that also undoes fragmentation. Each retry costs a repeated step or a
# replay, so a plan that needs more of them is too tight.
MAX_RETRIES_PER_PLAN = 3

# In these phases the validation of the current step is done. A resume would skip it, so in earlier phases a checkpoint
# would lose it.
AFTER_VALIDATION: tuple[ForecastPhase, ...] = ("first_step", "train", "preview", "save")

T = TypeVar("T")
PrepareIn = Callable[[int, Callable[[], object]], None]
"""Type of Attempt.prepare, which takes a step and a function that frees memory before encoding for that step."""


class Try:
    """Context manager that reports an out-of-memory error instead of raising it."""

    def __init__(self, report_error: Callable[[BaseException], events.MemoryExhausted]) -> None:
        self._report_error = report_error
        self.report: events.MemoryExhausted | None = None
        """Report of the out-of-memory error that ended the work; None if there was none."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Suppress an out-of-memory error and report it; return whether there was one."""
        if not isinstance(error, RuntimeError | MemoryError) or not is_out_of_memory(error):
            return False
        self.report = self._report_error(error)
        return True


class Recovery:
    """Runs all work of an attempt so that an out-of-memory error costs only time: no image is skipped."""

    def __init__(
        self,
        manager: EngineManager,
        plan: ActivePlan,
        prepare: PrepareIn,
        reporter: Reporter,
        meter: PhaseMemoryMeter,
        forecast: Forecast | None,
    ) -> None:
        self.manager = manager
        self.plan = plan
        self.prepare = prepare
        self.reporter = reporter
        self.meter = meter
        self.forecast = forecast
        self.phase: ForecastPhase = "load"
        """Phase that the current work counts as."""
        self._checkpoints: CheckpointCallback | None = None
        self._first = 0
        """Step that the attempt continues from; used until there is an engine."""
        self._between_steps = False
        """Whether the next step is being prepared, after all callbacks of one that this attempt has run."""
        self._tries = 0
        # Most callbacks do nothing after most steps. Only one that reports progress enters its phase, so that the time
        # of idle calls is not measured as that phase.
        reporter.watch_phases(lambda: meter.enter(self.phase))

    @property
    def position(self) -> int:
        """Return the number of finished optimizer steps."""
        engine = self.manager.engine
        return engine.progress.step if engine else self._first

    def tries(self, phase: ForecastPhase) -> Iterator[Try]:
        """Yield context managers for one piece of work until it succeeds in one of them.

        The work is repeated from its beginning, first under the same plan, then with one fallback step after another.
        Raises ResumableError "memory.exhausted" when no fallback step is left; other errors in the work propagate.
        """
        tried = False
        while True:
            self.phase = phase
            attempt = Try(self._report)
            yield attempt
            if attempt.report is None:
                return
            # Not while the error is handled: its traceback keeps the failed frames and their tensors alive.
            self._free()
            if tried or self._tries == MAX_RETRIES_PER_PLAN:
                self._step_down(attempt.report)
            else:
                tried, self._tries = True, self._tries + 1

    def run(self, phase: ForecastPhase, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which is repeated as described in `tries`."""
        for attempt in self.tries(phase):
            with attempt:
                return work()
        raise AssertionError("tries end with a success or an error")

    def enter_phase(self, phase: ForecastPhase) -> None:
        """Count the current work as this phase from now on."""
        self.phase = phase

    def use_checkpoints(self, checkpoints: CheckpointCallback) -> None:
        """Set the callback that saves checkpoints after fallback steps and before giving up.

        Until it is set, no checkpoints are saved.
        """
        self._checkpoints = checkpoints

    def prepare_first_step(self, step: int) -> None:
        """Set the step that the attempt continues from, and cache what it needs."""
        self._first = step
        self.prepare_step(step)

    def prepare_step(self, step: int) -> None:
        """Cache what ``step`` needs; unload the models first if they and encoding do not fit in memory together."""
        make_room = self.manager.offload if self.forecast and self.forecast.encodes_alone else _free_nothing
        self._between_steps = self.position > self._first
        self.run(self.phase, lambda: self.prepare(step, make_room))
        self._between_steps = False

    def train_step(self) -> StepResult:
        """Run one optimizer step and return its result, as Engine.train_step does."""
        self.manager.mark_goal()
        # The first step allocates the optimizer state and loads kernels, so its peak is not that of the others.
        for attempt in self.tries("train" if self.meter.has_measured("first_step") else "first_step"):
            with attempt:
                self.manager.make_ready(self._prepare_again)
                self._save_new_plan()
                engine = self._loaded_engine()
                self.reporter.phase("train", engine.progress.step, engine.steps)
                result = engine.train_step()
                self.manager.mark_complete()
        self.meter.sample()
        return result

    def with_engine(self, phase: ForecastPhase, work: Callable[[TrainingProgress], T]) -> T:
        """Make the engine ready, run ``work`` with the run's progress and return its result; repeated as in `tries`."""
        self.manager.mark_goal()

        def ready() -> T:
            self.manager.make_ready(self._prepare_again)
            return work(self._loaded_engine().progress)

        return self.run(phase, ready)

    def _prepare_again(self, step: int) -> None:
        """Cache what a replayed step needs, without changing the phase of the work that needs it."""
        phase = self.phase
        self.prepare(step, _free_nothing)
        self.phase = phase

    def _report(self, error: BaseException) -> events.MemoryExhausted:
        """Write and return the event for an out-of-memory error.

        The figures come from the error message if it states them. By the time an error in backward arrives here, most
        of the memory that was in use when it was raised has been freed, so the allocator's counters are too low.
        """
        allocated, reserved = self.meter.current_bytes()
        shortage = oom_details(error, self.manager.models)
        phase = self.phase
        forecast = self.forecast.of(phase) if self.forecast else None
        report = events.MemoryExhausted(
            phase=phase,
            step=self.position,
            requested=shortage.requested,
            stage=shortage.stage,
            module=shortage.module,
            allocated=allocated if shortage.allocated is None else shortage.allocated,
            reserved=reserved if shortage.reserved is None else shortage.reserved,
            forecast=forecast.reserved if forecast else None,
        )
        self.reporter.write(report)
        if self.meter.history is not None:
            self.meter.history.save("out-of-memory")
        return report

    def _free(self) -> None:
        self.manager.free_failed_step()
        gc.collect()  # errors and their frames can form reference cycles, which keep tensors alive
        empty_cache(self.manager.parts.device)

    def _step_down(self, report: events.MemoryExhausted) -> None:
        # Encoding between two cache shards does not need the trained models. Unloading them costs seconds but does not
        # change the result, as every fallback step of encoding does; so it comes first.
        if report.phase in ("cache_pictures", "cache_texts") and self.manager.offload():
            return
        down = self.plan.step_down(self.position, report.phase)
        if down is None:
            raise self._give_up(report)
        taken, changes = down
        self._tries = 0
        self.reporter.write(
            events.SteppedDown(step=taken.step, fallback=taken.number, changes=changes, exact=taken.fallback.exact)
        )

    def _save_new_plan(self) -> None:
        """Write a checkpoint if the plan has changed, so that a resumed run starts under the plan that works.

        Call this only before a step, after all callbacks of the previous one: a resume skips those that have not run.
        """
        engine, checkpoints = self._loaded_engine(), self._checkpoints
        if checkpoints and checkpoints.fallbacks != self.plan.applied:
            checkpoints.save(engine.progress)

    def _give_up(self, report: events.MemoryExhausted) -> ResumableError:
        """Save a checkpoint if the training state is complete, and return the error that pauses the run."""
        validated = self._between_steps or report.phase in AFTER_VALIDATION
        if validated and self._checkpoints and not self.manager.partially_updated:
            # Writing copies the weights and may run out of memory as well; the older checkpoint is then good enough.
            with suppress(RuntimeError, MemoryError):
                self._checkpoints.save(self._loaded_engine().progress, self.manager.captured)
        return ResumableError(
            "memory.exhausted",
            f"Could not continue training: memory ran out ({describe_oom(report)}), and no smaller plan is left.",
            f"{self._allowed(report)}{close_programs_advice(current_gpu_info(self.manager.parts.device))}"
            f"{remedy(report.phase, self.plan.at(report.step))}; {self._continuation()}",
        )

    def _continuation(self) -> str:
        """Return a sentence that says what `resume` will do."""
        saved = newest_step(self.manager.folder)
        return "`resume` starts the run again." if saved is None else f"`resume` continues from step {saved}."

    def _allowed(self, report: events.MemoryExhausted) -> str:
        """Return the advice to change fit keys that the user set, if that would lower memory use; "" otherwise."""
        lower = self.plan.forbidden(report.step, report.phase)
        keys = [f"fit.{key} = {json.dumps(value)}" for key, value in lower.items()]
        return f"Set {' or '.join(keys)} in the run's job.toml to use less memory. " if keys else ""

    def _loaded_engine(self) -> Engine:
        engine = self.manager.engine
        assert engine is not None, "the engine was used before it was loaded"
        return engine


def _free_nothing() -> None:
    """Do nothing; passed to `prepare` when no memory needs to be freed before encoding."""


class RecoverableCallback:
    """A callback whose work is repeated after an out-of-memory error."""

    def __init__(self, callback: Callback, recovery: Recovery) -> None:
        self.callback = callback
        self.recovery = recovery
        self.phase: ForecastPhase = callback.phase

    def at_start(self, progress: TrainingProgress) -> None:
        """Call the callback's method of the same name under out-of-memory recovery."""
        self.recovery.with_engine(self.phase, self.callback.at_start)

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Call the callback's method of the same name under out-of-memory recovery."""
        self.recovery.with_engine(self.phase, lambda now: self.callback.after_step(now, result))


def remedy(phase: ForecastPhase, fit: FitConfig) -> str:
    """Return what to try besides closing other programs: changes that lower the phase's memory use under ``fit``."""
    fewer_bits = {"int8": ' with fit.quantize = "nf4"', "nf4": ""}.get(
        fit.quantize or "", " with fit.allow_quantized = true"
    )
    match phase:
        case "cache_pictures":
            ways = ["" if fit.vae_encode_tiling else " with fit.vae_encode_tiling = true", " at a lower resolution"]
        case "cache_texts":
            ways = []
        case "preview":
            return ", or make the images under report.previews in the run's job.toml smaller, or remove them"
        case "load" | "quantise":
            ways = [fewer_bits]
        case "checkpoint" | "save":
            ways = [" with a lower rank", fewer_bits]
        case _:
            ways = [" at a lower resolution", " with a lower rank", fewer_bits]
    named = [way for way in ways if way]
    return f", or start a new run{joined(named)}" if named else ""


def joined(ways: Sequence[str]) -> str:
    """Return alternatives as one phrase: " a, b, or c"."""
    if len(ways) < 3:
        return " or".join(ways)
    return f"{','.join(ways[:-1])}, or{ways[-1]}"


def describe_oom(report: events.MemoryExhausted) -> str:
    """Return where memory ran out: "train, step 12, backward, at unet.mid_block, 20 MiB requested"."""
    parts = [
        report.phase.replace("_", " "),
        f"step {report.step + 1}" if report.stage else "",
        report.stage,
        f"at {report.module}" if report.module else "",
        f"{size(report.requested)} requested" if report.requested else "",
    ]
    return ", ".join(part for part in parts if part)
