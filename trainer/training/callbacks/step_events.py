"""Curves for TensorBoard, where it is installed and asked for."""

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
from trainer.protocol.text import share
from trainer.training.device.out_of_memory import MIB, card_in_use
from trainer.training.loop import Engine, StepResult, TrainingProgress
from trainer.training.reporting.memory_use import PhaseMemoryMeter
from trainer.training.reporting.reporter import Reporter

SLOW = 3.0
# Quick again: so far above the median that steps vary anyway, so far below SLOW that it is not told twice.
QUICK = 1.5
WARM_UP = 5
WINDOW = 50
# Cards of these generations begin to slow themselves down from about here on.
HOT_CELSIUS = 87
FULL_SHARE = 0.97
OTHERS_BUSY_BYTES = 512 * MIB


class Curves:
    """Writes loss, gradient norm and learning rates after every step."""

    phase: ForecastPhase = "train"

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise JobError(
                "report.tensorboard",
                "report.tensorboard is on, but TensorBoard is not installed.",
                "Install it with `pip install tensorboard`, or set report.tensorboard = false.",
            ) from error
        self.writer = SummaryWriter(str(folder))

    def at_start(self, progress: TrainingProgress) -> None:
        """Nothing to draw before the first step."""

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Adds a point to each curve."""
        values = {"loss": result.loss, "gradient_norm": result.grad_norm}
        values |= {f"learning_rate/{part}": rate for part, rate in result.learning_rates.items()}
        for name, value in values.items():
            self.writer.add_scalar(name, value, result.step)
        self.writer.flush()


class StepEvents:
    """Writes an event a step and keeps the heartbeat."""

    phase: ForecastPhase = "train"

    def __init__(self, engine: Engine, reporter: Reporter, meter: PhaseMemoryMeter) -> None:
        self.engine = engine
        self.reporter = reporter
        self.meter = meter

    def at_start(self, progress: TrainingProgress) -> None:
        """Shows how far the run is already."""
        self.reporter.phase("train", progress.step, self.engine.steps)

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
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


class SlowSteps:
    """Says once, and again only after recovery, that steps take more than three times what such steps took before."""

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
        """Nothing: the first steps of an attempt are its warm-up."""

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Compares the step with those of the same sizes; one that something else came before is left out."""
        now, last = self.clock(), self._last
        self._last = now
        times = self._times[self._sizes(result.step - 1)]
        usual = statistics.median(times) if len(times) >= WARM_UP else math.inf
        # After a preview or a saved file memory has to be asked for again: that is no drift.
        waited = now - last - result.seconds
        if waited > min(usual, result.seconds):
            return
        if result.seconds > SLOW * usual:
            self._say(result, usual)
            return
        times.append(result.seconds)
        if result.seconds < QUICK * usual:
            self._slow = False

    def _sizes(self, step: int) -> object:
        """What the step's time depends on: the size and number of pictures of each micro-batch."""
        feed = self.engine.feed
        parts = feed.split(feed.batch(step))
        return tuple(sorted((part[0].picture.bucket, len(part)) for part in parts))

    def _say(self, result: StepResult, usual: float) -> None:
        if self._slow:
            return
        self._slow = True
        reason, detail = self.reason(self.engine.device)
        self.reporter.write(
            events.Slow(step=result.step, seconds=result.seconds, median=usual, reason=reason, detail=detail)
        )


def reason_for_slowness(device: torch.device) -> tuple[str, str]:
    """A code and what it rests on: "spilled" into main memory, "hot", "others" use the card too, "unknown"."""
    card = card_in_use(device)
    return why_slow(card, os.getpid()) if card else ("unknown", "")


def why_slow(card: gpu.Card, own_pid: int) -> tuple[str, str]:
    """As :func:`reason_for_slowness`, from the card as the driver tells of it now."""
    held = card.total_bytes - card.free_bytes
    others = [use for use in card.uses if use.pid != own_pid]
    named = gpu.others_named(card, own_pid)
    if held > FULL_SHARE * card.total_bytes:
        full = share(held, card.total_bytes)
        return "spilled", f"{full}; also there: {named}" if named else full
    if card.temperature is not None and card.temperature >= HOT_CELSIUS:
        return "hot", f"{card.temperature} °C"
    if any(use.kind == "compute" or (use.bytes or 0) > OTHERS_BUSY_BYTES for use in others):
        return "others", named
    return "unknown", ""
