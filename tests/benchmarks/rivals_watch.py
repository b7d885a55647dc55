"""Run an unmodified trainer in a separate process, and record when its optimizer makes steps.

    python rivals_watch.py RESULT WARM_UP STEPS SCRIPT ARGUMENT ...        a script by its path
    python rivals_watch.py RESULT WARM_UP STEPS -m MODULE ARGUMENT ...     a module

Uses PyTorch's public hooks for optimizers. Memory and time are measured from the end of step WARM_UP to the end of step
STEPS; then everything that PyTorch sends to the device up to the optimizer's next step is counted, and the process
ends, since the rest does not matter. Imports none of our modules except the counter, by its path: trainers have
packages with the same names, and libraries that ours does not work with.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

ROOT = Path(__file__).resolve().parents[2]
DISPATCHED, COUNTING = "trainer.training.device.dispatched", "tests.support.counting"
"""The counter, and what it imports; both need only PyTorch."""


class Watch:
    """Counts the steps of one optimizer, measures their time, then counts the operations of one step."""

    def __init__(self, result: Path, warm_up: int, steps: int) -> None:
        self.result = result
        self.warm_up = warm_up
        self.steps = steps
        self.optimizer: Optimizer | None = None
        self.done = 0
        self.began = 0.0
        self.results: dict[str, Any] = {}
        self.counting = ExitStack()
        self.counter: Any = None

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Record a step; called after every step of every optimizer."""
        device = next(weight.device for group in optimizer.param_groups for weight in group["params"])
        if device.type == "meta":  # a forecast makes steps too
            return
        if optimizer is not self.optimizer:
            self.optimizer, self.done = optimizer, 0
        self.done += 1
        if self.done == self.warm_up:
            self._wait()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self.began = time.perf_counter()
        elif self.done == self.steps:
            self._wait()
            self.results = self._measured(optimizer, time.perf_counter() - self.began)
            self._tell()  # written before counting, so that nothing is lost if counting fails
            self._count(device)

    def steps_next(self, *_: Any) -> None:
        """End the count; called before every step of every optimizer."""
        if self.counter is not None:
            self.counting.close()
            self.results |= {"operations": self.counter.total(), "kept": self.counter.saved_bytes}
            self._tell()
            os._exit(0)

    def _measured(self, optimizer: Optimizer, seconds: float) -> dict[str, Any]:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        cuda = torch.cuda.is_available()
        return {
            "step_seconds": seconds / (self.steps - self.warm_up),
            "allocated": torch.cuda.max_memory_allocated() if cuda else None,
            "reserved": torch.cuda.max_memory_reserved() if cuda else None,
            "trained": sum(weight.numel() for weight in weights),
            "operations": None,
            "kept": None,
        }

    def _count(self, device: torch.device) -> None:
        """Count from here on, in this thread, which all trainers use for their steps."""
        _load(DISPATCHED)
        self.counter = self.counting.enter_context(_load(COUNTING).StepCounter(device))
        self.counting.enter_context(self.counter.stage("forward"))

    def _tell(self) -> None:
        self.result.write_text(json.dumps(self.results), encoding="utf-8")

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _load(name: str) -> Any:
    """Import a module of ours under its name, without the packages that contain it."""
    found = importlib.util.spec_from_file_location(name, ROOT.joinpath(*name.split(".")).with_suffix(".py"))
    assert found is not None and found.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def main() -> None:
    """Watch and run."""
    result, warm_up, steps, script, *words = sys.argv[1:]
    watch = Watch(Path(result), int(warm_up), int(steps))
    register_optimizer_step_pre_hook(watch.steps_next)
    register_optimizer_step_post_hook(watch.stepped)
    if script == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *words]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
