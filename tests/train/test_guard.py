"""The cap on a card's memory, and steps that become slow: with PyTorch's and the driver's answers written here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer import gpu
from trainer.protocol import events
from trainer.training.guard import SPARE_BYTES, SlowSteps, cap_memory, why_slow
from trainer.training.loop import Progress, StepResult
from trainer.training.reporter import Reporter

GIB = 1 << 30


def card(free: float, temperature: int | None = 60, uses: tuple[gpu.Use, ...] = ()) -> gpu.Card:
    return gpu.Card(
        0, "GPU-1", "A card", 8 * GIB, int(free * GIB), "581.15", (13, 0), (8, 6), uses, temperature=temperature
    )


@pytest.mark.parametrize(
    ("seen", "reason", "detail"),
    [
        (card(0.1), "spilled", "7.9 of 8.0 GiB"),
        (card(0.1, uses=(gpu.Use(7, "chrome.exe", None, "graphics"),)), "spilled", "also there: chrome.exe"),
        (card(4.0, temperature=91), "hot", "91 °C"),
        (card(4.0, uses=(gpu.Use(7, "game.exe", 2 * GIB, "graphics"),)), "others", "game.exe 2.0 GiB"),
        (card(4.0, uses=(gpu.Use(1, "python", 4 * GIB),)), "unknown", ""),
        (card(4.0, temperature=None, uses=(gpu.Use(7, "dwm.exe", None, "graphics"),)), "unknown", ""),
    ],
)
def test_why_steps_are_slow(seen: gpu.Card, reason: str, detail: str) -> None:
    told = why_slow(seen, own_pid=1)
    assert told[0] == reason and detail in told[1]


def test_the_cap_lies_just_under_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *words: told.append(words))
    device = torch.device("cuda:0")
    assert cap_memory(device, Reporter(told.append)) == 7 * GIB - SPARE_BYTES
    assert told == [((7 * GIB - SPARE_BYTES) / (8 * GIB), device)]


def test_another_allocator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[events.Event] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert cap_memory(torch.device("cuda:0"), Reporter(told.append)) is None
    assert [event.code for event in told if isinstance(event, events.Notice)] == ["memory.allocator"]
    assert cap_memory(torch.device("cpu"), Reporter(told.append)) is None and len(told) == 1


class Steps:
    """Steps of given seconds at a clock that only they move; pictures of two buckets in turn where asked."""

    def __init__(self, buckets: int = 1) -> None:
        self.now, self.step, self.told = 0.0, 0, list[events.Event]()
        sizes = [SimpleNamespace(picture=SimpleNamespace(bucket=(64 * (1 + number), 64))) for number in range(buckets)]
        feed = SimpleNamespace(batch=lambda step: sizes[step % buckets], split=lambda batch: [(batch,)])
        engine: Any = SimpleNamespace(feed=feed, device=torch.device("cpu"))
        self.slow = SlowSteps(engine, Reporter(self.told.append), lambda: self.now, lambda device: ("hot", "91 °C"))

    def take(self, *seconds: float, waiting: float = 0.0) -> list[int]:
        """Takes steps and returns which were told to be slow since the last call."""
        for each in seconds:
            self.step, self.now = self.step + 1, self.now + waiting + each
            self.slow.after_step(Progress(), StepResult(self.step, 0, 0.1, 1.0, None, each, 3, {}, None))
        told = [event.step for event in self.told if isinstance(event, events.Slow)]
        self.told.clear()
        return told


def test_slow_steps_are_told_once_until_they_are_quick_again() -> None:
    steps = Steps()
    assert steps.take(*[1.0] * 9, 2.9) == []
    assert steps.take(3.1, 3.5, 40.0) == [11]
    assert steps.take(1.0, 5.0) == [15]


def test_a_step_after_a_wait_is_left_out() -> None:
    steps = Steps()
    steps.take(*[1.0] * 9)
    assert steps.take(9.0, waiting=5.0) == []
    assert steps.take(9.0) == [11]


def test_the_first_steps_are_warm_up_and_buckets_are_compared_with_themselves() -> None:
    steps = Steps(buckets=2)
    assert steps.take(60.0, *[0.1, 1.0] * 9) == []
    assert steps.take(1.0, 1.0) == [20]
