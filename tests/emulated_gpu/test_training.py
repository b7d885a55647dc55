"""Whole runs of a tiny base on the emulated GPU: to the LoRA file, and through a shortage of memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.emulated_gpu.machine import EmulatedGpu
from trainer.files.header import read_header

# At 512 pixels a step of six images reserves 86 MiB, validation 63 MiB and a loaded base 23 MiB.
LARGE_STEP = """
[recipe]
steps = 3
effective_batch = 6
resolution = 512
rank = 4
images = {max_upscale = 16.0}
[fit]
device = "cuda"
threads = 1
"""


def events(run: Path) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_ends_with_a_lora(emulated_gpu: EmulatedGpu, tiny_job: Callable[..., Path]) -> None:
    job = tiny_job("sd15")
    done = emulated_gpu.trainer("train", job)
    assert done.returncode == 0, done.stdout + done.stderr
    run = job.parent / "runs" / "test"
    header = read_header(run / "output" / "test.safetensors", "lora")
    assert any(name.endswith(".lora_up.weight") for name in header.tensors)
    steps = [event for event in events(run) if event["type"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(0 < step["loss"] < 1 and 0 < step["grad_norm"] < 1 for step in steps)
    (report,) = [event for event in events(run) if event["type"] == "attempt_started"]
    assert report["device"] == "cuda:0"
    peaks = {event["phase"]: event for event in events(run) if event["type"] == "phase_memory"}
    samples = [event for event in events(run) if event["type"] == "memory_sample"]
    assert {"load", "validate", "preview", "checkpoint", "save"} <= {sample["phase"] for sample in samples}
    for phase in peaks.keys() - {"first_step", "train"}:
        highest = max(sample["allocated"] for sample in samples if sample["phase"] == phase)
        assert highest == peaks[phase]["allocated"]
    assert max(step["reserved"] for step in steps) == peaks["train"]["reserved"]
    assert steps[0]["memory"] == peaks["first_step"]["allocated"]
    assert max(step["memory"] for step in steps[1:]) == peaks["train"]["allocated"]


def test_a_run_takes_a_smaller_plan_when_another_program_takes_the_memory(
    emulated_gpu: EmulatedGpu, tiny_job: Callable[..., Path]
) -> None:
    job = tiny_job("sd15")
    text = job.read_text(encoding="utf-8")
    job.write_text(text[: text.index("[recipe]")] + LARGE_STEP, encoding="utf-8")
    run = job.parent / "runs" / "test"
    emulated_gpu.fill_when(run / "events.jsonl", "cache_texts", leave_mib=45)
    done = emulated_gpu.trainer("train", job)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [event["type"] for event in events(run)]
    assert "memory_exhausted" in kinds, done.stdout
    assert "stepped_down" in kinds[kinds.index("memory_exhausted") :]
    steps = [event["step"] for event in events(run) if event["type"] == "step"]
    assert steps == [1, 2, 3]
    assert (run / "output" / "test.safetensors").exists()


def test_a_run_is_planned_with_the_budget_that_plan_shows(
    emulated_gpu: EmulatedGpu, tiny_job: Callable[..., Path]
) -> None:
    """The run's own CUDA context counts once, although it exists before the plan is made."""
    job = tiny_job("sd15")
    shown = emulated_gpu.trainer("plan", job, "--json", "--set", "recipe.steps=1")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    done = emulated_gpu.trainer("train", job, "--set", "recipe.steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    forecast = json.loads((job.parent / "runs" / "test" / "forecast.json").read_text(encoding="utf-8"))
    assert forecast["budget"] == json.loads(shown.stdout)["gpu"]["budget"]
