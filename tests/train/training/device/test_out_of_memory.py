"""The cap on a card's memory, and steps that become slow: with PyTorch's and the driver's answers written here."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer import gpu
from trainer.config.fit import FitConfig
from trainer.errors import ImpastoError
from trainer.protocol import events
from trainer.training.callbacks.step_events import DataWaitWarning, SlowStepWarning, why_slow
from trainer.training.device.out_of_memory import SPARE_BYTES, cap_memory, gpu_guard, oom_error
from trainer.training.engine import StepResult, TrainingProgress
from trainer.training.reporting.memory_use import warn_of_allocator
from trainer.training.reporting.reporter import Reporter

GIB = 1 << 30


def card(free: float, temperature: int | None = 60, uses: tuple[gpu.GpuProcess, ...] = ()) -> gpu.Gpu:
    return gpu.Gpu(
        0, "GPU-1", "A card", 8 * GIB, int(free * GIB), "581.15", (13, 0), (8, 6), uses, temperature=temperature
    )


@pytest.mark.parametrize(
    ("seen", "reason", "detail"),
    [
        (card(0.1), "spilled", "7.9 of 8.0 GiB"),
        (card(0.1, uses=(gpu.GpuProcess(7, "chrome.exe", None, "graphics"),)), "spilled", "other programs: chrome.exe"),
        (card(4.0, temperature=91), "hot", "91 °C"),
        (card(4.0, uses=(gpu.GpuProcess(7, "game.exe", 2 * GIB, "graphics"),)), "others", "game.exe 2.0 GiB"),
        (card(4.0, uses=(gpu.GpuProcess(1, "python", 4 * GIB),)), "unknown", ""),
        (card(4.0, temperature=None, uses=(gpu.GpuProcess(7, "dwm.exe", None, "graphics"),)), "unknown", ""),
    ],
)
def test_why_steps_are_slow(seen: gpu.Gpu, reason: str, detail: str) -> None:
    told = why_slow(seen, own_pid=1)
    assert told[0] == reason and detail in told[1]


def test_the_cap_lies_just_under_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *words: told.append(words))
    device = torch.device("cuda:0")
    assert cap_memory(device) == 7 * GIB - SPARE_BYTES
    assert told == [((7 * GIB - SPARE_BYTES) / (8 * GIB), device)]


def test_another_allocator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[events.Event] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    for name in ("cuda:0", "cpu"):
        assert cap_memory(torch.device(name)) is None
        warn_of_allocator(torch.device(name), Reporter(told.append))
    assert [event.code for event in told if isinstance(event, events.Notice)] == ["memory.allocator"]


def test_a_shortage_names_who_holds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = (
        gpu.GpuProcess(7, "blender", 5 * GIB),
        gpu.GpuProcess(os.getpid(), "python", GIB),
        gpu.GpuProcess(9, "chrome.exe", None),
    )
    monkeypatch.setattr(gpu, "list_gpus", lambda: [card(7.9), card(0.1, uses=uses)])
    with pytest.raises(ImpastoError) as full, gpu_guard("render the image"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")
    assert (full.value.code, full.value.exit_code) == ("memory.full", 2)
    assert full.value.sentence == (
        f"Could not render the image: {card(0.1).name} does not have enough free memory "
        "(102 MiB of 8.0 GiB free, 1.5 GiB more requested)."
    )
    assert full.value.remedy == "Close other programs that use the GPU (blender 5.0 GiB, chrome.exe), then try again."


def test_a_shortage_of_main_memory_is_not_blamed_on_the_gpu() -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
    for shortage in (error, MemoryError()):
        assert "main memory" in oom_error(shortage, "start training").sentence


def test_other_errors_pass_the_guard() -> None:
    with pytest.raises(RuntimeError, match="shapes"), gpu_guard("start training"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


class Steps:
    """Steps of given seconds at a clock that only they move; pictures of two buckets in turn where asked."""

    def __init__(self, buckets: int = 1) -> None:
        self.now, self.step, self.told = 0.0, 0, list[events.Event]()
        sizes = [SimpleNamespace(image=SimpleNamespace(bucket=(64 * (1 + number), 64))) for number in range(buckets)]
        feed = SimpleNamespace(batch=lambda step: sizes[step % buckets], split=lambda batch: [(batch,)])
        engine: Any = SimpleNamespace(batches=feed, device=torch.device("cpu"))
        self.slow = SlowStepWarning(
            engine, Reporter(self.told.append), lambda: self.now, lambda device: ("hot", "91 °C")
        )

    def take(self, *seconds: float, waiting: float = 0.0) -> list[int]:
        """Takes steps and returns which were told to be slow since the last call."""
        for each in seconds:
            self.step, self.now = self.step + 1, self.now + waiting + each
            self.slow.after_step(TrainingProgress(), StepResult(self.step, 0, 0.1, 1.0, None, each, 3, {}, None))
        told = [event.step for event in self.told if isinstance(event, events.Slow)]
        self.told.clear()
        return told


def test_slow_steps_are_told_once_until_they_are_quick_again() -> None:
    steps = Steps()
    assert steps.take(*[1.0] * 9, 2.9) == []
    assert steps.take(3.1, 3.5, 40.0) == [11]
    assert steps.take(1.0, 5.0) == [15]


def data_waits(fit: FitConfig, *steps: tuple[float, float]) -> list[events.Event]:
    """Return the events about steps of (seconds, seconds of waiting for data), each repeated 60 times."""
    written: list[events.Event] = []
    engine: Any = SimpleNamespace(job=SimpleNamespace(fit=fit))
    warning = DataWaitWarning(engine, Reporter(written.append))
    taken = [each for each in steps for _ in range(60)]
    for number, (seconds, waited) in enumerate(taken, 1):
        warning.after_step(TrainingProgress(), StepResult(number, 0, 0.1, 1.0, None, seconds, 3, {}, None, waited))
    return written


def test_waiting_for_data_is_reported_once_with_the_settings_that_limit_loading() -> None:
    assert data_waits(FitConfig(), (1.0, 0.019)) == []
    assert data_waits(FitConfig(), (0.004, 0.0009)) == []  # nothing that anyone could feel
    (found,) = data_waits(FitConfig(loader_workers=1), (1.0, 0.0), (1.0, 0.1), (1.0, 0.5))
    assert isinstance(found, events.DataWait) and 0.02 < found.share < 0.023
    assert (found.step, found.fixed) == (71, ["loader_workers"])


def test_a_step_after_a_wait_is_left_out() -> None:
    steps = Steps()
    steps.take(*[1.0] * 9)
    assert steps.take(9.0, waiting=5.0) == []
    assert steps.take(9.0) == [11]


def test_the_first_steps_are_warm_up_and_buckets_are_compared_with_themselves() -> None:
    steps = Steps(buckets=2)
    assert steps.take(60.0, *[0.1, 1.0] * 9) == []
    assert steps.take(1.0, 1.0) == [20]
