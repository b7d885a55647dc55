"""Callbacks that report steps: events, TensorBoard curves, and a warning about slow steps."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

import torch

from trainer import gpu
from trainer.errors import JobError
from trainer.protocol import events
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.progress import DATA_SHARE
from trainer.protocol.text import share
from trainer.training.device.out_of_memory import MIB, current_gpu_info
from trainer.training.engine import Engine, StepResult, TrainingProgress
from trainer.training.reporting.memory_history import MemoryHistory
from trainer.training.reporting.memory_use import PhaseMemoryMeter
from trainer.training.reporting.reporter import Reporter

SLOW = 3.0
# Below this multiple of the median steps count as normal again: above the usual variation, but far enough below SLOW
# that one slowdown is not reported twice.
NORMAL = 1.5
WARM_UP = 5
WINDOW = 50
UNNOTICEABLE_WAIT = 0.001
"""Seconds per step that are not worth a warning, however short the steps are."""
# Current GPUs begin to throttle at about this temperature.
HOT_CELSIUS = 87
# Steps after which the memory history is saved: the first creates the optimizer's state, the second is like all later.
FIRST_STEPS = 2
FULL_SHARE = 0.97
OTHERS_BUSY_BYTES = 512 * MIB


class TensorBoardCallback:
    """Callback that writes loss, gradient norm and learning rates to TensorBoard after every step."""

    phase: ForecastPhase = "train"

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise JobError(
                "report.tensorboard",
                "Could not write TensorBoard curves: report.tensorboard is on, but TensorBoard is not installed.",
                "Install it with `pip install tensorboard`, or set report.tensorboard = false.",
            ) from error
        self.writer = SummaryWriter(str(folder))

    def at_start(self, progress: TrainingProgress) -> None:
        """Do nothing: there are no values before the first step."""

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Add a point to each curve."""
        values = {"loss": result.loss, "gradient_norm": result.grad_norm}
        values |= {f"learning_rate/{part}": rate for part, rate in result.learning_rates.items()}
        for name, value in values.items():
            self.writer.add_scalar(name, value, result.step)
        self.writer.flush()


class StepEventCallback:
    """Callback that writes an event for each step and keeps the heartbeat up to date."""

    phase: ForecastPhase = "train"

    def __init__(self, engine: Engine, reporter: Reporter, meter: PhaseMemoryMeter) -> None:
        self.engine = engine
        self.reporter = reporter
        self.meter = meter

    def at_start(self, progress: TrainingProgress) -> None:
        """Report the progress that earlier attempts have made."""
        self.reporter.phase("train", progress.step, self.engine.steps)

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Write the step's event and, about once a second, the heartbeat."""
        # Read first: after the first step, reporting the phase ends that step's phase, which samples memory again.
        memory, reserved = self.meter.latest, self.meter.latest_reserved
        self.reporter.phase("train", progress.step, self.engine.steps)
        self.reporter.write(
            events.StepEvent(
                step=result.step,
                epoch=result.epoch,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rates=result.learning_rates,
                images=result.images,
                seconds=result.seconds,
                skipped=result.skipped is not None,
                loss_scale=result.loss_scale,
                memory=memory,
                reserved=reserved,
                data_seconds=result.data_seconds,
            )
        )
        if result.skipped:
            self.reporter.write(events.Skipped(step=result.step, reason=result.skipped))
        for part, last in self.engine.job.recipe.stops.items():
            if result.step == last < self.engine.steps:
                name = part.replace("_", " ")
                sentence = f"Stopped training the {name} after step {last}; it keeps encoding the captions."
                self.reporter.notice("text_encoder.stopped", sentence)


class SnapshotCallback:
    """Callback that saves memory snapshots before and after the first steps, whose events are overwritten later."""

    phase: ForecastPhase = "train"

    def __init__(self, history: MemoryHistory) -> None:
        self.history = history
        self._steps = 0

    def at_start(self, progress: TrainingProgress) -> None:
        """Save the snapshot of caching and loading."""
        self.history.save("load")

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Save the snapshot once enough steps have been recorded."""
        self._steps += 1
        if self._steps == FIRST_STEPS:
            self.history.save("first-steps")


class SlowStepWarning:
    """Callback that warns once per slowdown when steps take over three times as long as usual."""

    phase: ForecastPhase = "train"

    def __init__(
        self,
        engine: Engine,
        reporter: Reporter,
        clock: Callable[[], float] = time.monotonic,
        reason: Callable[[torch.device], tuple[str, str]] | None = None,
    ) -> None:
        self.engine = engine
        self.reporter = reporter
        self.clock = clock
        self.reason = reason or reason_for_slowness
        self._times: dict[object, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._last = -math.inf
        self._slow = False

    def at_start(self, progress: TrainingProgress) -> None:
        """Do nothing: the first steps of an attempt are its warm-up."""

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Compare the step's time with earlier steps of the same sizes; ignore it if other work ran just before it."""
        now, last = self.clock(), self._last
        self._last = now
        times = self._times[self._sizes(result.step - 1)]
        usual = statistics.median(times) if len(times) >= WARM_UP else math.inf
        # After a preview or an export, memory has to be allocated again, which is no sign of a slowdown.
        waited = now - last - result.seconds
        if waited > min(usual, result.seconds):
            return
        if result.seconds > SLOW * usual:
            self._warn(result, usual)
            return
        times.append(result.seconds)
        if result.seconds < NORMAL * usual:
            self._slow = False

    def _sizes(self, step: int) -> object:
        """Return what a step's time depends on: each micro-batch's bucket and number of images."""
        feed = self.engine.batches
        parts = feed.split(feed.batch(step))
        return tuple(sorted((part[0].image.bucket, len(part)) for part in parts))

    def _warn(self, result: StepResult, usual: float) -> None:
        if self._slow:
            return
        self._slow = True
        reason, detail = self.reason(self.engine.device)
        self.reporter.write(
            events.Slow(step=result.step, seconds=result.seconds, median=usual, reason=reason, detail=detail)
        )


class DataWaitWarning:
    """Callback that warns once per attempt when training waits too much for images and cached data."""

    phase: ForecastPhase = "train"

    def __init__(self, engine: Engine, reporter: Reporter) -> None:
        self.engine = engine
        self.reporter = reporter
        self._recent: deque[StepResult] = deque(maxlen=WINDOW)
        self._is_first = True
        self._is_reported = False

    def at_start(self, progress: TrainingProgress) -> None:
        """Do nothing: the first step of an attempt always waits for its data."""

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Write the event when the last steps have waited too much; by then the loader has adapted to the disk."""
        if not self._is_first:
            self._recent.append(result)
        self._is_first = False
        if self._is_reported or len(self._recent) < WINDOW:
            return
        waited, seconds = (
            sum(times) for times in zip(*((r.data_seconds, r.seconds) for r in self._recent), strict=True)
        )
        if waited > max(DATA_SHARE * seconds, UNNOTICEABLE_WAIT * WINDOW):
            self._is_reported = True
            fit = self.engine.job.fit
            fixed = [key for key in ("loader_workers", "prefetch_batches") if getattr(fit, key) is not None]
            self.reporter.write(events.DataWait(step=result.step, share=waited / seconds, fixed=fixed))


def reason_for_slowness(device: torch.device) -> tuple[str, str]:
    """Return why steps may be slow, as a code ("spilled", "hot", "others" or "unknown") and the evidence.

    "spilled": GPU memory is full, so the driver uses main memory. "others": other programs use the GPU too.
    """
    gpu_info = current_gpu_info(device)
    return why_slow(gpu_info, os.getpid()) if gpu_info else ("unknown", "")


def why_slow(gpu_info: gpu.Gpu, own_pid: int) -> tuple[str, str]:
    """Return the code and evidence for `reason_for_slowness` from the GPU's current state."""
    held = gpu_info.total_bytes - gpu_info.free_bytes
    others = [use for use in gpu_info.uses if use.pid != own_pid]
    named = gpu.other_processes_text(gpu_info, own_pid)
    if held > FULL_SHARE * gpu_info.total_bytes:
        full = share(held, gpu_info.total_bytes)
        return "spilled", f"{full}; other programs: {named}" if named else full
    if gpu_info.temperature is not None and gpu_info.temperature >= HOT_CELSIUS:
        return "hot", f"{gpu_info.temperature} °C"
    if any(use.kind == "compute" or (use.bytes or 0) > OTHERS_BUSY_BYTES for use in others):
        return "others", named
    return "unknown", ""
