"""A job that runs repeatedly gets the same plan: its own runs take no memory from the next one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulated_gpu.machine import EmulatedGpu

RUNS = 5
SETTINGS = ("--set", "recipe.steps=3")


def plan_of(gpu: EmulatedGpu, job: Path) -> dict[str, Any]:
    done = gpu.trainer("plan", job, "--json", *SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(1200)  # eleven programs, each of which takes ten seconds on an idle core
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_the_same_job_five_times_gets_the_same_plan(
    make_gpu: Callable[..., EmulatedGpu], tiny_job: Callable[..., Path], family: str
) -> None:
    gpu, job = make_gpu("3060", MIB=1200), tiny_job(family)
    first = plan_of(gpu, job)
    for _ in range(RUNS):
        done = gpu.trainer("train", job, *SETTINGS)
        assert done.returncode == 0, done.stdout + done.stderr
        again = plan_of(gpu, job)
        assert again["pick"]["fit"] == first["pick"]["fit"]
        assert again["gpu"]["budget"] >= first["gpu"]["budget"]
        assert again["gpu"]["margin"]["reason"] == "runs"
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in job.parent.glob("runs/*/report.json")]
    assert len(reports) == RUNS
    for phase, found in reports[0]["phases"].items():
        if found["forecast"] and found["measured"]:
            # Segments of tiny bases are 2 and 20 MiB; one more is not a forecast error.
            assert found["measured"]["reserved"] <= found["forecast"]["reserved"] + (24 << 20), phase
