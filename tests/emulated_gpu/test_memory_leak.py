"""Leaks of GPU memory in whole runs: an injected one is named, an ordinary run has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulated_gpu.machine import EmulatedGpu
from tests.emulated_gpu.test_training import events

# 16 KiB per step, of about 19 MiB at rest: 8 % per 100 steps.
LEAKING = """
import sys
import torch
from trainer.cli import main
from trainer.training.engine import Engine

step, left = Engine.train_step, []

def leaking(engine):
    result = step(engine)
    if result.step > 20:
        left.append(torch.zeros(64, 64, device="cuda"))
    return result

if __name__ == "__main__":
    Engine.train_step = leaking
    sys.exit(main(sys.argv[1:]))
"""
# Previews, validation, checkpoints and exports at various steps, and buckets of several sizes.
SETTINGS = ("recipe.steps=140", "report.validation.every=30", "report.previews.every=45")


def leaks(run: Path) -> list[dict[str, Any]]:
    return [event for event in events(run) if event["type"] == "memory_leak"]


@pytest.mark.parametrize("leaking", [False, True])
def test_a_leak_is_noticed_and_named(
    emulated_gpu: EmulatedGpu, tiny_job: Callable[..., Path], tmp_path: Path, leaking: bool
) -> None:
    job, program = tiny_job("sd15"), tmp_path / "leaking.py"
    program.write_text(LEAKING, encoding="utf-8")
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    words = [program] if leaking else ["-m", "trainer"]
    done = emulated_gpu.python(*words, "train", job, *settings, PYTHONPATH=str(Path.cwd()))
    assert done.returncode == 0, done.stdout + done.stderr
    found = leaks(job.parent / "runs" / "test")
    if not leaking:
        assert found == []
        return
    (leak,) = found
    assert leak["memory"] == "gpu"
    assert 20 <= leak["since"] <= 45
    assert leak["rate"] == pytest.approx(0.086, rel=0.15)
    assert list(leak["grew"]) == ["float32 64x64"]
    assert f"GPU memory keeps growing: {100 * leak['rate']:.1f}% per 100 steps" in done.stdout
