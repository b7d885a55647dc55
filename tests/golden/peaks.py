"""Golden peaks of memory: what built-in recipes are forecast to take at most on typical cards, in MiB.

`python -m tests.golden.peaks` renews tests/golden/peaks.json from the tapes that ship; say in the commit why they
moved. Every fit preset is in it under both systems, and each other recipe once, with the fit that the planner chose.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.benchmarks.built_in import FAMILIES, GIGABYTES, RECIPES, SYSTEMS, built_in
from tests.benchmarks.make_fits import RECIPE, file_name
from trainer.config.base import Family
from trainer.config.fit import PLANNED, FitConfig
from trainer.config.presets.exchange import load_preset
from trainer.files.assets import preset_path
from trainer.memory.forecast.forecast import Simulation, simulate_run
from trainer.memory.forecast.schedule import RunSchedule
from trainer.memory.planner.planner import plan
from trainer.memory.planner.request import PlanRequest
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import complete_fit
from trainer.protocol import files

FILE = Path(__file__).with_suffix(".json")
MIB = 1 << 20
TOLERANCE = 0.005
OTHERS_GIGABYTES = 12


@dataclass(frozen=True)
class Golden:
    """One row of the table: a recipe on a card."""

    family: Family
    recipe: str
    gigabytes: int
    system: str

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.family} {self.recipe}, {self.gigabytes} GB, {self.system}"

    @property
    def question(self) -> PlanRequest:
        """What the planner is asked."""
        return built_in(self.family, self.recipe, f"{self.gigabytes}GB", self.system)


def preset_rows() -> list[Golden]:
    """Every fit preset under both systems."""
    return [
        Golden(family, RECIPE, gigabytes, system)
        for family in FAMILIES
        for gigabytes in GIGABYTES
        for system in SYSTEMS
    ]


def other_rows() -> list[Golden]:
    """The recipes that have no fit presets of their own."""
    others = [recipe for recipe in RECIPES if recipe != RECIPE]
    return [Golden(family, recipe, OTHERS_GIGABYTES, SYSTEMS[0]) for family in FAMILIES for recipe in others]


def preset_fit(family: Family, gigabytes: int) -> FitConfig:
    """What a fit preset says."""
    fit = load_preset(preset_path("fits", file_name(family, gigabytes))).fit
    assert fit is not None
    return fit


def play(question: PlanRequest, fit: FitConfig, traces: TraceLibrary) -> Simulation:
    """The whole run on that card with that fit."""
    subject, situation = replace(question.workload, fit=complete_fit(fit)), question.device_state
    return simulate_run(RunSchedule(subject, traces, question.counts, situation.rate), situation, situation.budget)


def peaks_of(playing: Simulation) -> dict[str, float]:
    """MiB at the peak: handed out by the allocator, and taken by it from the driver."""
    allocated = max(phase.allocated(phase.peak_allocated()) for phase in playing.phases.values())
    return {"allocated": round(allocated / MIB, 1), "reserved": round(playing.reserved / MIB, 1)}


def _renewed(traces: TraceLibrary) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for row in preset_rows():
        yield row.name, peaks_of(play(row.question, preset_fit(row.family, row.gigabytes), traces))
    for row in other_rows():
        asked = row.question
        picked = plan(asked.workload, asked.written, asked.device_state, traces, asked.counts, others=False).pick
        assert picked is not None, f"{row.name}: nothing fits"
        fit = picked.fit
        stated = {key: value for key in PLANNED if (value := getattr(fit, key)) is not None}
        yield row.name, {**peaks_of(play(asked, fit, traces)), "fit": stated}


def main() -> int:
    """Writes the peaks as they are now, one row a line."""
    rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in _renewed(TraceLibrary(TraceStore.of_user()))]
    files.write_text(FILE, "{\n" + ",\n".join(rows) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
