"""What small cards are to hold, by the forecast: whole runs, with previews and checkpoints, of one picture a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.built_in import built_in
from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.files.assets import asset_path
from trainer.memory.course import Course
from trainer.memory.forecast import run_through
from trainer.memory.planner import plan
from trainer.memory.store import TapeStore
from trainer.memory.traces import Traces

GIB = 1 << 30
RANK = 16
# Of what PyTorch's allocator may take, as torch.cuda.set_per_process_memory_fraction limits it.
GOALS: list[tuple[Family, int, int, dict[str, Any]]] = [
    ("sdxl", 1024, 6 * GIB, {}),
    ("sdxl", 1024, 8 * GIB, {"dtype": "bf16", "quantise": "none"}),
    ("sd15", 512, 4 * GIB, {"quantise": "none"}),
]


@pytest.mark.parametrize(("family", "side", "cap", "written"), GOALS)
def test_a_run_stays_within_the_cap(
    family: Family, side: int, cap: int, written: dict[str, Any], tmp_path: Path
) -> None:
    """With the margin left free that is kept because forecasts err, and played within the limit, too."""
    asked = built_in(family, "character", "RTX 3060 12GB", "Windows")
    subject = replace(asked.subject, recipe=asked.subject.recipe.changed(rank=RANK, conv_rank=RANK, effective_batch=1))
    assert {bucket.size for bucket in subject.buckets} == {(side, side)} and subject.previews
    situation = replace(asked.situation, free_bytes=asked.situation.outside + cap)
    traces = Traces(TapeStore(tmp_path, asset_path("traces")))
    picked = plan(subject, FitConfig(**written), situation, traces, asked.occasions, others=False).pick
    assert picked is not None and picked.forecast.fits and situation.budget < cap
    course = Course(replace(subject, fit=picked.fit), traces, asked.occasions, situation.rate)
    playing = run_through(course, situation, situation.budget)
    assert playing.failure is None and playing.reserved <= situation.budget
