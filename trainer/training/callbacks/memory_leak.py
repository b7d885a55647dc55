"""Callback that warns once about each memory that keeps growing, and names what grows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from trainer.config.fit import MAX_CUDA_GRAPHS
from trainer.protocol import events
from trainer.protocol.forecast import ForecastPhase
from trainer.training.engine import Engine, StepResult, TrainingProgress
from trainer.training.reporting.memory_growth import RISES, Census, Growth, GrowthDetector, census, what_grew
from trainer.training.reporting.memory_use import Memory, PhaseMemoryMeter
from trainer.training.reporting.reporter import Reporter

# Number of rises after which the tensors are counted, to compare them once there are enough rises for a warning.
SUSPICIOUS = RISES // 2


class LeakWarning:
    """Callback that compares the memory held after each step, and warns of growth above 1% per 100 steps."""

    phase: ForecastPhase = "train"

    def __init__(self, engine: Engine, reporter: Reporter, meter: PhaseMemoryMeter) -> None:
        self.engine = engine
        self.reporter = reporter
        self.meter = meter
        self._detectors: dict[Memory, GrowthDetector] = {}
        self._before: dict[Memory, tuple[int, Census]] = {}
        """Bytes held and tensors when growth became suspicious."""
        self._reported: set[Memory] = set()

    def at_start(self, progress: TrainingProgress) -> None:
        """Do nothing: the first steps of an attempt are its warm-up."""

    def after_step(self, progress: TrainingProgress, result: StepResult) -> None:
        """Add the memory held after the step; count tensors or warn if it keeps growing."""
        for memory, held in self.meter.held.items():
            if memory in self._reported:
                continue
            detector = self._detectors.setdefault(memory, GrowthDetector())
            growth = detector.add(result.step, held, self._needed())
            if growth is not None:
                self._warn(result.step, memory, held, growth)
            elif detector.rises < SUSPICIOUS:
                self._before.pop(memory, None)
            elif memory not in self._before:
                self._before[memory] = held, self._census(memory)

    def _needed(self) -> int:
        """Return the number of rises that make a leak; each captured CUDA graph may be one more."""
        graphs = self.engine.graphs
        return RISES + (MAX_CUDA_GRAPHS if graphs is not None and graphs.in_use else 0)

    def _warn(self, step: int, memory: Memory, held: int, growth: Growth) -> None:
        self._reported.add(memory)
        then, before = self._before.pop(memory)
        self.reporter.write(
            events.MemoryLeak(
                step=step,
                memory=memory,
                since=growth.since,
                rate=growth.rate,
                held=held,
                grown=growth.grown,
                grew=what_grew(before, self._census(memory), held - then),
            )
        )

    def _census(self, memory: Memory) -> Census:
        device = self.engine.device if memory == "gpu" else torch.device("cpu")
        return census(device, {kind: list(tensors) for kind, tensors in _known(self.engine).items()})


def _known(engine: Engine) -> dict[str, Iterator[Tensor]]:
    """Return the engine's tensors by kind of memory; a tensor in several kinds belongs to the last of them."""
    models, masters = engine.models, engine.master_weights
    modules = (models.unet, *models.text_encoders)
    trained = (*engine.adapter.parameters.values(), *masters.masters.values())
    state = chain.from_iterable(values.values() for values in engine.optimizer.state.values())
    return {
        "weights": chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules),
        "adapter": iter(trained),
        "gradients": (weight.grad for weight in trained if weight.grad is not None),
        "optimizer": (value for value in state if isinstance(value, Tensor)),
    }
