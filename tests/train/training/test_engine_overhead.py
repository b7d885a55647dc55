"""What the loop asks of the host in every step, counted in a real run: reads of the device, files, folders."""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from tests.benchmarks import speed
from tests.benchmarks.speed_overhead import Watch
from trainer.protocol import events
from trainer.training.reporting import reporter
from trainer.training.reporting import reporter as control

READS = {"item", "tolist", "numpy", "cpu", "nonzero", "is_nonzero", "equal", "allclose"}
READS |= {"__bool__", "__float__", "__int__", "__index__", "__contains__"}


class Reads(TorchFunctionMode):
    """Counts reads of tensors' numbers in the thread that trains.

    Not those inside the optimizer: Adam counts its steps in tensors that lie in main memory whatever is trained on.
    That it reads nothing of a device is shown on meta tensors, of which nothing can be read (test_speed_count.py).
    """

    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self.counted = counted
        self.moving = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and not self.moving:
            self.counted[f"read by {name}"] += 1
        return func(*args, **(kwargs or {}))

    def move(self, moving: bool) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.moving = moving

        return hook


def counting(counted: Counter[str], what: str, work: Any) -> Any:
    def watched(place: Any, *args: Any, **kwargs: Any) -> Any:
        counted[f"{what} {Path(place).name}" if isinstance(place, str | os.PathLike) else what] += 1
        return work(place, *args, **kwargs)

    return watched


def test_a_turn_of_the_loop_reads_the_device_once_and_opens_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Counter[str] = Counter()
    turns: list[Counter[str]] = []
    for module, name, what in ((io, "open", "open"), (os, "scandir", "look into"), (os, "listdir", "look into")):
        monkeypatch.setattr(module, name, counting(counted, what, getattr(module, name)))
    for module, name in ((reporter, "BEAT_SECONDS"), (control, "POLL_SECONDS")):  # by the clock, whatever steps take
        monkeypatch.setattr(module, name, float("inf"))
    watch = Watch.__call__

    def noted(watching: Watch, event: events.Event) -> None:
        if isinstance(event, events.StepEvent):
            turns.append(Counter(counted))
            counted.clear()
        watch(watching, event)

    monkeypatch.setattr(Watch, "__call__", noted)
    printed, reads = io.StringIO(), Reads(counted)
    before = register_optimizer_step_pre_hook(reads.move(True))
    after = register_optimizer_step_post_hook(reads.move(False))
    try:
        with reads, redirect_stdout(printed):
            assert speed.main(["--overhead", "--family", "sd15", "--steps", "8", "--json"]) == 0
    finally:
        before.remove()
        after.remove()
    own_memory = {"open status": 1} if sys.platform == "linux" else {}
    assert len(turns) == 8
    for turn in turns[1:]:
        assert turn == {"read by tolist": 1, "look into commands": 1, **own_memory}
    told = json.loads(printed.getvalue())
    assert {"loop", "data", "ahead", "step"} <= told.keys() and min(told[name] for name in ("loop", "step")) > 0
