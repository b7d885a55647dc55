"""Runs a trainer as it is, as a process of its own, and notes when its optimizer has stepped.

    python rivals_watch.py RESULT WARM_UP STEPS SCRIPT ARGUMENT ...        a script by its path
    python rivals_watch.py RESULT WARM_UP STEPS -m MODULE ARGUMENT ...     a module

The hooks are PyTorch's public ones for whatever is an optimizer. Memory and time count from the end of the WARM_UP-th
step to that of the STEPS-th; then all that PyTorch sends to the device up to the next step of the optimizer is counted,
and the process ends, for what comes later is of no interest. Imports nothing of ours but the counter, by its path:
trainers have packages of our names, and libraries that ours does not go with.
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
"""What counts, after what it imports; both need PyTorch alone."""


class Watch:
    """Counts the steps of one optimizer, takes their time, then counts the operations of one."""

    def __init__(self, result: Path, warm_up: int, steps: int) -> None:
        self.result = result
        self.warm_up = warm_up
        self.steps = steps
        self.optimizer: Optimizer | None = None
        self.done = 0
        self.began = 0.0
        self.told: dict[str, Any] = {}
        self.counting = ExitStack()
        self.counter: Any = None

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Called after every step of every optimizer."""
        device = next(weight.device for group in optimizer.param_groups for weight in group["params"])
        if device.type == "meta":  # a forecast steps, too
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
            self.told = self._measured(optimizer, time.perf_counter() - self.began)
            self._tell()  # now already: nothing is lost if it cannot be counted
            self._count(device)

    def steps_next(self, *_: Any) -> None:
        """Called before every step of every optimizer."""
        if self.counter is not None:
            self.counting.close()
            self.told |= {"operations": self.counter.total(), "kept": self.counter.saved_bytes}
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
        """From here on, in this thread, by which all of them step."""
        _load(DISPATCHED)
        self.counter = self.counting.enter_context(_load(COUNTING).StepCounter(device))
        self.counting.enter_context(self.counter.stage("forward"))

    def _tell(self) -> None:
        self.result.write_text(json.dumps(self.told), encoding="utf-8")

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _load(name: str) -> Any:
    """A module of ours under its name, without the packages that it lies in."""
    found = importlib.util.spec_from_file_location(name, ROOT.joinpath(*name.split(".")).with_suffix(".py"))
    assert found is not None and found.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def main() -> None:
    """Watches and runs."""
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
