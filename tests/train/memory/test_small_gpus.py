"""What small GPUs can train without quantization, by the forecast: whole runs with previews, one image per step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.built_in import built_in
from trainer.cli.planning import request_for_preset
from trainer.config.base import Family
from trainer.files.assets import asset_path
from trainer.memory.forecast.forecast import simulate_run
from trainer.memory.forecast.schedule import RunSchedule
from trainer.memory.planner.planner import plan
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore

MIB = 1 << 20
DESKTOP = 400 * MIB
BOTH_ENCODERS = ("recipe.text_encoder.learning_rate=1e-5", "recipe.text_encoder_2.learning_rate=1e-5")
FLOORS = [
    ("sdxl", 4096, ()),
    ("sd15", 2560 + 700, ()),  # 2.5 GiB for PyTorch
    pytest.param("sdxl", 8192, BOTH_ENCODERS, marks=pytest.mark.slow),
    pytest.param("sdxl", 8192, ("recipe.resolution=1536",), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "total", "changes"), FLOORS)
def test_a_small_gpu_trains_an_unquantized_base(
    family: Family, total: int, changes: tuple[str, ...], tmp_path: Path
) -> None:
    """Of ``total`` MiB, 300 go to CUDA and 400 to the desktop; the safety margin stays free in addition."""
    rank = ("recipe.rank=16", "recipe.effective_batch=1")
    found = request_for_preset(family, "character", "RTX 3050 Laptop", (*rank, *changes))
    state = built_in(family, "character", "RTX 3050 Laptop", "Linux").device_state
    gpu = replace(state.gpu, total_bytes=total * MIB)
    state = replace(state, gpu=gpu, free_bytes=total * MIB - DESKTOP)
    assert state.outside == 300 * MIB and found.workload.previews
    traces = TraceLibrary(TraceStore(tmp_path, asset_path("traces")))
    picked = plan(found.workload, found.written, state, traces, found.counts, others=False).pick
    assert picked is not None and picked.forecast.fits
    assert (picked.fit.quantize, picked.fit.stream) == ("none", "full")
    run = RunSchedule(replace(found.workload, fit=picked.fit), traces, found.counts, state.rate)
    simulated = simulate_run(run, state, state.budget)
    assert simulated.failure is None and simulated.reserved <= state.budget < total * MIB - DESKTOP - 300 * MIB
