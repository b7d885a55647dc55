"""What small cards are to hold, by the forecast: whole runs, with previews and checkpoints, of one picture a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.built_in import built_in
from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.files.assets import asset_path
from trainer.memory.forecast.forecast import simulate_run
from trainer.memory.forecast.schedule import RunSchedule
from trainer.memory.planner.planner import plan
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore

GIB = 1 << 30
RANK = 16
MIB = 1 << 20
TOLERANCE = 0.005
FOUR_BLOCKS = ("down_blocks.1", "down_blocks.2", "up_blocks.0", "up_blocks.1")
# Of what PyTorch's allocator may take, as torch.cuda.set_per_process_memory_fraction limits it.
# What the planner finds, and the MiB that it takes, are golden: docs/performance.md tells them.
GOALS = [
    ("sdxl", 1024, 6 * GIB, {}, {"quantize": "int8", "gradient_checkpointing": FOUR_BLOCKS}, 5540.0),
    pytest.param(
        *(
            "sdxl",
            1024,
            8 * GIB,
            {"dtype": "bf16", "quantize": "none"},
            {"gradient_checkpointing": FOUR_BLOCKS},
            7674.0,
        ),
        marks=pytest.mark.slow,
    ),
    ("sd15", 512, 4 * GIB, {"quantize": "none"}, {"gradient_checkpointing": "none"}, 3678.0),
]


@pytest.mark.parametrize(("family", "side", "cap", "written", "found", "taken"), GOALS)
def test_a_run_stays_within_the_cap(
    family: Family,
    side: int,
    cap: int,
    written: dict[str, Any],
    found: dict[str, Any],
    taken: float,
    tmp_path: Path,
) -> None:
    """With the margin left free that is kept because forecasts err, and played within the limit, too."""
    asked = built_in(family, "character", "RTX 3060 12GB", "Windows")
    subject = replace(
        asked.workload, recipe=asked.workload.recipe.replaced(rank=RANK, conv_rank=RANK, effective_batch=1)
    )
    assert {bucket.size for bucket in subject.buckets} == {(side, side)} and subject.previews
    situation = replace(asked.device_state, free_bytes=asked.device_state.outside + cap)
    traces = TraceLibrary(TraceStore(tmp_path, asset_path("traces")))
    picked = plan(subject, FitConfig(**written), situation, traces, asked.counts, others=False).pick
    assert picked is not None and picked.forecast.fits and situation.budget < cap
    course = RunSchedule(replace(subject, fit=picked.fit), traces, asked.counts, situation.rate)
    playing = simulate_run(course, situation, situation.budget)
    assert playing.failure is None and playing.reserved <= situation.budget
    assert {key: getattr(picked.fit, key) for key in found} == found
    assert playing.reserved / MIB == pytest.approx(taken, rel=TOLERANCE)
