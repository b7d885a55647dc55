"""What the training loop costs the host besides the step: a real run of a tiny base on the CPU, by the CPU's own clock.

The step is forward and backward, the gradients taken into the masters, their norm, clipping and the optimizer, which
on a card is the card's work. All else of a turn of the loop comes on top of it, because between two steps the card has
nothing to do: handing over the next pictures, and events, heartbeat, orders, measuring and guarding. Putting pictures
together is told apart, as a thread does it while the step is computed. Nothing is drawn, saved or validated in between.
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
from trainer.training import loop
from trainer.training.data.batches import PrefetchCollator
from trainer.training.optim.master_weights import MasterWeights
from trainer.training.run.start import start

STEP = ((loop.Engine, "micro_step"), (MasterWeights, "accumulate"), (loop, "measure"), (loop.Engine, "move"))
"""What counts as the step's own."""
DATA = ((PrefetchCollator, "assemble"),)
AHEAD = ((PrefetchCollator, "_assemble"),)
WARM_UP = 5
RARE = 1_000_000
"""No checkpoint, preview or measurement comes in between."""


@dataclass
class Watch:
    """What the training thread spent, by turns of the loop."""

    turns: list[Counter[str]] = field(default_factory=list)
    """Seconds in "turn", "step", "data" and "ahead" from one step event to the next."""
    _spent: Counter[str] = field(default_factory=Counter)
    _before: Counter[str] | None = None

    def __call__(self, event: events.Event) -> None:
        """Called by the run for every event, in its thread."""
        if not isinstance(event, events.StepEvent):
            return
        now = Counter({**self._spent, "turn": time.thread_time()})
        if self._before is not None:
            self.turns.append(Counter({name: now[name] - self._before[name] for name in now}))
        self._before = now

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, its seconds added to ``name``."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                self._spent[name] += time.thread_time() - started

        return watched


@dataclass(frozen=True)
class Overhead:
    """Milliseconds of the CPU in the middle one of the turns."""

    data: float
    """Handing over the micro-batch."""
    loop: float
    """All else outside the step."""
    ahead: float
    """In the thread beside: putting the next micro-batch together."""
    step: float
    """The step itself, which the CPU computes here."""


def measure_overhead(family: Family = "sdxl", resolution: int = 64, steps: int = 40) -> Overhead:
    """Trains a tiny base with one picture a step."""
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
    """A real run, from reading its pictures to the LoRA, with nothing between its steps."""
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
