"""Runs a trainer as it is, as a process of its own, and notes when its optimizer has stepped.

    python rivals_watch.py RESULT STEPS SCRIPT ARGUMENT ...        a script by its path
    python rivals_watch.py RESULT STEPS -m MODULE ARGUMENT ...     a module

The hook is PyTorch's public one for whatever is an optimizer. Memory and time count from the WARM_UP-th step on; after
STEPS steps RESULT is written and the process ends, for what comes later is of no interest. Imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

WARM_UP = 5


class Watch:
    """Counts steps."""

    def __init__(self, result: Path, steps: int) -> None:
        self.result = result
        self.steps = steps
        self.done = 0
        self.began = 0.0

    def __call__(self, *_: Any) -> None:
        """Called after every step of every optimizer."""
        self.done += 1
        if self.done == WARM_UP:
            self._wait()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self.began = time.perf_counter()
        elif self.done == self.steps:
            self._wait()
            self._tell(time.perf_counter() - self.began)
            os._exit(0)

    def _tell(self, seconds: float) -> None:
        told: dict[str, Any] = {"step_seconds": seconds / (self.steps - WARM_UP), "allocated": None, "reserved": None}
        if torch.cuda.is_available():
            told |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        self.result.write_text(json.dumps(told), encoding="utf-8")

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def main() -> None:
    """Watches and runs."""
    result, steps, script, *words = sys.argv[1:]
    register_optimizer_step_post_hook(Watch(Path(result), int(steps)))
    if script == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *words]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
