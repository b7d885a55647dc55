"""Growth of the memory held after each step: what counts as a leak, and what it is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.cli.words import sentence
from trainer.protocol import events
from trainer.training.callbacks.memory_leak import LeakWarning
from trainer.training.reporting.memory_growth import (
    BLOCK,
    RISES,
    WARM_UP,
    Growth,
    GrowthDetector,
    what_grew,
)
from trainer.training.reporting.reporter import Reporter

MIB = 1 << 20
HELD = 1000 * MIB


def found(held: Iterable[float], needed: int = RISES) -> tuple[int, Growth] | None:
    """Return the step at which a leak is found in these bytes, with the leak; None if there is none."""
    detector = GrowthDetector()
    for step, size in enumerate(held, start=1):
        growth = detector.add(step, int(size), needed)
        if growth is not None:
            return step, growth
    return None


def test_a_leak_is_found_after_a_hundred_steps_with_its_rate_and_beginning() -> None:
    leak = found(HELD + 0.3 * MIB * max(0, step - 200) for step in range(1, 1000))
    assert leak is not None
    step, growth = leak
    assert 300 <= step <= 200 + (RISES + 2) * BLOCK
    assert 200 - BLOCK <= growth.since <= 200 + BLOCK
    assert growth.rate == pytest.approx(0.03, rel=0.25)  # 0.3 MiB of 1000 per step
    assert growth.grown == pytest.approx(0.3 * MIB * (step - 200), rel=0.3)


@pytest.mark.parametrize(
    ("what", "held"),
    [
        ("constant", lambda step: HELD),
        ("slower than one percent", lambda step: HELD + 0.09 * MIB * step),
        ("buckets of different sizes", lambda step: HELD + random.Random(step).choice([0, 5, 40, 200]) * MIB),
        ("first steps", lambda step: HELD + min(step, WARM_UP) * 50 * MIB),
        ("library workspaces, allocated once each", lambda step: HELD + MIB * (40 * (step > 60) + 8 * (step > 110))),
        (
            "validation, preview, export and another shape, each with what it keeps",
            lambda step: HELD + MIB * (90 * (step > 50) + 20 * (step > 100) + 4 * (step > 150) + 60 * (step > 200)),
        ),
        ("what is released again", lambda step: HELD + 3 * MIB * (step % 80)),
        ("a warm-up that levels off", lambda step: HELD * (1.05 - 0.05 * 0.95**step)),
    ],
)
def test_ordinary_runs_have_no_leak(what: str, held: Callable[[int], float]) -> None:
    assert found(map(held, range(1, 1500))) is None, what


def test_a_leak_in_every_preview_is_found_too() -> None:
    leak = found(HELD + 15 * MIB * (step // 100) for step in range(1, 1000))  # 1.5 % per 100 steps
    assert leak is not None
    assert 0.01 < leak[1].rate < 0.03


def test_each_cuda_graph_may_be_captured_before_growth_is_a_leak() -> None:
    graphs = [HELD + 50 * MIB * min(8, step // 30) for step in range(1, 1000)]
    assert found(graphs, RISES) is not None
    assert found(graphs, RISES + 8) is None


class Leaking:
    """A tiny engine whose steps leave tensors behind; its memory is what its tensors take."""

    def __init__(self) -> None:
        self.unet = nn.Linear(512, 512)
        self.weight = nn.Parameter(torch.zeros(64, 64))
        self.optimizer = torch.optim.AdamW([self.weight])
        self.weight.grad = torch.zeros_like(self.weight)
        self.optimizer.step()
        self.left: list[Tensor] = []
        self.engine: Any = SimpleNamespace(
            graphs=None,
            device=torch.device("cpu"),
            models=SimpleNamespace(unet=self.unet, text_encoders=()),
            adapter=SimpleNamespace(parameters={}),
            master_weights=SimpleNamespace(masters={"weight": self.weight}),
            optimizer=self.optimizer,
        )

    def run(self, steps: int, leave: Callable[[int], object]) -> list[events.Event]:
        """Train for so many steps, each followed by `leave`; return the events."""
        written: list[events.Event] = []
        meter: Any = SimpleNamespace(held={})
        warning = LeakWarning(self.engine, Reporter(written.append), meter)
        for step in range(1, steps + 1):
            leave(step)
            state = [value for values in self.optimizer.state.values() for value in values.values()]
            tensors = [*self.left, *self.unet.parameters(), *state]
            meter.held["gpu"] = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            progress: Any = None
            result: Any = SimpleNamespace(step=step)
            warning.after_step(progress, result)
        return written


def test_tensors_that_are_left_behind_are_named_by_type_and_shape() -> None:
    leaking = Leaking()
    written = leaking.run(200, lambda _: leaking.left.append(torch.zeros(4, 8, 8)))
    (leak,) = written  # once, although it continues
    assert isinstance(leak, events.MemoryLeak)
    assert list(leak.grew) == ["float32 4x8x8"]
    assert leak.grew["float32 4x8x8"] == 2 * BLOCK * 4 * 8 * 8 * 4
    assert leak.memory == "gpu"
    assert leak.since == WARM_UP + BLOCK
    text = sentence(leak)
    assert text is not None
    assert text.startswith(f"GPU memory keeps growing: {100 * leak.rate:.1f}% per 100 steps since step 35, ")
    assert "tensors of float32 4x8x8 (50.0 KiB)" in text


def test_growing_optimizer_state_is_named_as_such() -> None:
    leaking = Leaking()
    state = leaking.optimizer.state[leaking.weight]
    (leak,) = leaking.run(200, lambda step: state.update({f"history {step}": torch.zeros(2048)}))
    assert isinstance(leak, events.MemoryLeak)
    assert list(leak.grew) == ["optimizer"]


def test_growth_that_tensors_do_not_account_for_is_named_other() -> None:
    before, now = {"optimizer": 100, "float32 4x4": 64}, {"optimizer": 100, "float32 4x4": 128, "weights": 50}
    assert what_grew(before, now, 120) == {"float32 4x4": 64, "weights": 50}
    assert what_grew(before, now, 1000) == {"float32 4x4": 64, "weights": 50, "other": 886}


def test_a_run_without_a_leak_says_nothing() -> None:
    leaking = Leaking()
    assert (
        leaking.run(300, lambda step: leaking.left.__setitem__(slice(None), [torch.zeros(step % 7 + 1, 64, 64)])) == []
    )
