"""Measure the CPU time of the training loop besides the step, in a real run of a tiny base on the CPU.

The step is forward and backward, gradient accumulation, the gradient norm, clipping and the optimizer, which on a GPU
is the GPU's work. Everything else in an iteration comes on top, because the GPU is idle between two steps: handing over
the next images, events, heartbeat, commands, measuring and fault checks. Assembling the next images is listed
separately, as a thread does it while the step is computed. There are no previews, checkpoints or validation in between.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.config.base import Family
from trainer.protocol import events
from trainer.training import engine as engine_module
from trainer.training.data.loader import PrefetchCollator
from trainer.training.optim.master_weights import MasterWeights
from trainer.training.run.start import start

STEP = (
    (engine_module.Engine, "micro_step"),
    (MasterWeights, "accumulate"),
    (engine_module, "measure"),
    (engine_module.Engine, "optimizer_step"),
)
"""Functions that belong to the step."""
DATA = ((PrefetchCollator, "assemble"),)
AHEAD = ((PrefetchCollator, "_assemble"),)
WARM_UP = 5
RARE = 1_000_000
"""An interval that prevents checkpoints, previews and validation."""


@dataclass
class Watch:
    """CPU time of the training thread, by iterations of the loop."""

    turns: list[Counter[str]] = field(default_factory=list)
    """Seconds in "turn", "step", "data" and "ahead" from one step event to the next."""
    _spent: Counter[str] = field(default_factory=Counter)
    _before: Counter[str] | None = None

    def __call__(self, event: events.Event) -> None:
        """Record an event; the run calls it for every event, in its thread."""
        if not isinstance(event, events.StepEvent):
            return
        now = Counter({**self._spent, "turn": time.thread_time()})
        if self._before is not None:
            self.turns.append(Counter({name: now[name] - self._before[name] for name in now}))
        self._before = now

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, its seconds added to ``name``."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                self._spent[name] += time.thread_time() - started

        return watched


@dataclass(frozen=True)
class Overhead:
    """Milliseconds of CPU time, median of the iterations."""

    data: float
    """Handing over the micro-batch."""
    loop: float
    """Everything else outside the step."""
    ahead: float
    """In the background thread: assembling the next micro-batch."""
    step: float
    """The step itself, which the CPU computes here."""


def measure_overhead(family: Family = "sdxl", resolution: int = 64, steps: int = 40) -> Overhead:
    """Train a tiny base with one image per step."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder, _watched(watch):
        run_tiny(family, Path(folder), steps, watch, resolution)
    turns = watch.turns[WARM_UP:]

    def middle(of: Callable[[Counter[str]], float]) -> float:
        return 1e3 * statistics.median(map(of, turns))

    return Overhead(
        data=middle(lambda turn: turn["data"]),
        loop=middle(lambda turn: turn["turn"] - turn["step"] - turn["data"]),
        ahead=middle(lambda turn: turn["ahead"]),
        step=middle(lambda turn: turn["step"]),
    )


def run_tiny(
    family: Family, folder: Path, steps: int, on_event: Callable[[events.Event], None], resolution: int = 64
) -> None:
    """Run a real training run, from reading its images to the LoRA, with nothing between its steps."""
    settings = {
        "recipe.steps": steps,
        "recipe.resolution": resolution,
        "recipe.images.bucket_max": 2 * resolution,
        "recipe.effective_batch": 1,
        "fit.micro_batch": 1,
        "report.validation.every": RARE,
        "report.saving.every_steps": RARE,
        "report.saving.checkpoint_every": RARE,
        "report.previews.prompts": "[]",
    }
    job = write_job(folder, tiny_base(family, folder), photographs(folder / "pictures"))
    with patch.dict(os.environ, {"IMPASTO_HOME": str(folder / "home")}):
        if start(job, [f"{key}={value}" for key, value in settings.items()], on_event) != 0:
            raise SystemExit("the run did not end well")


@contextmanager
def _watched(watch: Watch) -> Iterator[None]:
    with ExitStack() as stack:
        for name, works in (("step", STEP), ("data", DATA), ("ahead", AHEAD)):
            for owner, attribute in works:
                stack.enter_context(patch.object(owner, attribute, watch.timed(name, getattr(owner, attribute))))
        yield
