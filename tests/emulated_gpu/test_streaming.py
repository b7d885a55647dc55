"""A streamed base on the emulated GPU: whole runs, the memory they take, and the order of copies and reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulated_gpu.machine import EmulatedGpu
from trainer.protocol.events import Notice, read_events

STREAMED = ("--set", 'fit.stream="full"')
SEGMENT = 2 << 20
"""Unit in which PyTorch reserves little memory."""
# No stream waits for another one.
FORGETFUL = """
import sys, torch
from tests.emulated_gpu.stream_order import main
torch.cuda.Stream.wait_event = lambda self, event: None
sys.exit(main(sys.argv[1:]))
"""
# Only 1 MiB of main memory can be pinned.
LITTLE_MEMORY = """
import sys
from trainer.cli import main
from trainer.cli.common import quieten
quieten()
from trainer.base import streaming
streaming.pinnable_bytes = lambda memory: 1 << 20
sys.exit(main())
"""
# Frees a streamed base while its first blocks are being copied.
CLOSING = """
import json, sys, torch
from tests.emulated_gpu.stream_order import StreamOrder
from trainer.base.source import open_base
from trainer.base import streaming
from trainer.config.base import BaseConfig
streaming.MIN_BYTES = 0
source, device = open_base(BaseConfig(model=sys.argv[1])), torch.device("cuda")
order = StreamOrder()
order.watch()
if sys.argv[2:] == ["forgetful"]:
    torch.cuda.Stream.synchronize = lambda self: None
with order:
    unet = source.empty_unet()
    stream = streaming.make_stream(unet, "full", device)
    source.fill_unet(unet, torch.float32, device, "none", stream)
    stream._hold([0, 1])
    stream.close()
print(json.dumps(order.report()))
"""


def settings_of(**fit: Any) -> list[str]:
    return [word for key, value in fit.items() for word in ("--set", f"fit.{key}={json.dumps(value)}")]


@pytest.mark.parametrize(
    ("family", "fit"),
    [
        ("sd15", {"gradient_checkpointing": "full", "quantize": "nf4"}),
        ("sdxl", {"gradient_checkpointing": "full"}),
        ("sdxl", {"gradient_checkpointing": "none", "stream": 4}),
        ("sdxl", {"gradient_checkpointing": ["down_blocks.1"], "quantize": "int8"}),
    ],
)
def test_a_streamed_run_orders_copies_and_takes_what_was_forecast(
    emulated_gpu: EmulatedGpu, tiny_job: Callable[..., Path], family: str, fit: dict[str, Any]
) -> None:
    job = tiny_job(family)
    order = job.parent / "order.json"
    words = ("-m", "tests.emulated_gpu.stream_order", order, "train", job)
    done = emulated_gpu.python(*words, *STREAMED, *settings_of(**fit))
    assert done.returncode == 0, done.stdout + done.stderr
    run = job.parent / "runs" / "test"
    assert (run / "output" / "test.safetensors").exists()
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    for phase in ("load", "quantise", "first_step", "train", "validate", "preview", "checkpoint", "save"):
        if phase not in report["phases"]:  # a base is either loaded or quantized
            continue
        measured, forecast = (report["phases"][phase][kind] for kind in ("measured", "forecast"))
        tolerance = 0.005 if phase in ("load", "quantise") else 0.001  # loading takes 42 kB more than forecast
        assert measured["allocated"] == pytest.approx(forecast["allocated"], rel=tolerance), phase
        assert abs(measured["reserved"] - forecast["reserved"]) <= SEGMENT, phase
    found = json.loads(order.read_text(encoding="utf-8"))
    assert not found["races"]
    assert found["ordered"]["read after write"] > 100, "weights are read after their copies"
    assert found["ordered"]["write after read"] > 100, "memory is copied to after its last use"


def test_missing_waits_are_noticed(emulated_gpu: EmulatedGpu, tiny_job: Callable[..., Path]) -> None:
    """The test above can fail: without waits, results on the emulated GPU are the same, but the order is not."""
    job = tiny_job("sd15")
    order = job.parent / "order.json"
    done = emulated_gpu.python("-c", FORGETFUL, order, "train", job, *STREAMED)
    assert done.returncode == 0, done.stdout + done.stderr
    races = json.loads(order.read_text(encoding="utf-8"))["races"]
    assert "read after write: aten.convolution.default does not wait for aten.copy_.default" in races
    assert "write after read: aten.copy_.default does not wait for aten.convolution.default" in races


@pytest.mark.parametrize("forgetful", [False, True])
def test_main_memory_is_unpinned_after_the_last_copy(
    emulated_gpu: EmulatedGpu, base_of: Callable[[Any], Path], forgetful: bool
) -> None:
    done = emulated_gpu.python("-c", CLOSING, base_of("sd15"), *(["forgetful"] if forgetful else []))
    assert done.returncode == 0, done.stderr
    assert bool(json.loads(done.stdout)["races"]) == forgetful


@pytest.mark.parametrize("limit", ["driver", "main memory"])
def test_a_base_that_cannot_be_pinned_is_streamed_all_the_same(
    make_gpu: Callable[..., EmulatedGpu], tiny_job: Callable[..., Path], limit: str
) -> None:
    """The driver's refusal leaves an error behind, which the next kernel launch would raise."""
    job = tiny_job("sdxl")
    gpu = make_gpu(**({"PINNED_MIB": 1} if limit == "driver" else {}))
    words = ("train", job, *STREAMED, "--set", "recipe.steps=1")
    done = gpu.trainer(*words) if limit == "driver" else gpu.python("-c", LITTLE_MEMORY, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    written, _ = read_events(job.parent / "runs" / "test" / "events.jsonl")
    (notice,) = [event.sentence for event in written if isinstance(event, Notice) and event.code == "stream.pageable"]
    assert "of the streamed base are not pinned in main memory" in notice
    assert ("the driver did not pin more than" if limit == "driver" else "this PC has too little free memory") in notice
