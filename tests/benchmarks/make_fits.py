"""Writes presets/fits: the planner's pick for each family and card size, with what each value costs and saves.

    python -m tests.benchmarks.make_fits

Needs the traces that tests/benchmarks/ship_traces.py makes, and makes what is missing. A preset is planned under
Windows, where a desktop takes more of a card, for the recipe preset "character".
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.benchmarks.built_in import FAMILIES, GIGABYTES, built_in
from trainer.cli import plan_text, words
from trainer.config.base import Family
from trainer.config.fit import PLANNED, FitConfig
from trainer.config.toml_file import toml_value
from trainer.files.architecture import NAMES
from trainer.files.assets import preset_path
from trainer.memory.planner.planner import Plan, plan
from trainer.memory.planner.request import PlanRequest
from trainer.memory.planner.suggestions import training_figures
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import total_in_sequence
from trainer.memory.trace.store import TraceStore
from trainer.protocol import files
from trainer.protocol.forecast import ROUNDING

RECIPE = "character"
SYSTEM = "Windows"
WIDTH = 118


def file_name(family: Family, gigabytes: int) -> str:
    """What a preset's file is called."""
    return f"{family}-{gigabytes}gb.toml"


@dataclass(frozen=True)
class Reasons:
    """Why each value of a planned fit is what it is."""

    question: PlanRequest
    chosen: Plan
    traces: TraceLibrary

    def of(self, key: str) -> str:
        """The reason for a key of the fit, in sentences."""
        reason: str = getattr(self, f"_{key}")
        return reason

    @property
    def _fit(self) -> FitConfig:
        return self.chosen.fit

    @property
    def _dtype(self) -> str:
        abilities = {
            "bf16": "RTX 3000 cards and newer compute in bf16, which holds numbers as large as fp32 does.",
            "fp16": "RTX 2000 cards and older do not compute in bf16; with fp16 losses are scaled against underflow.",
        }
        return f"16 bits, half the bytes of fp32. {abilities[self._fit.dtype or 'bf16']}"

    @property
    def _quantize(self) -> str:
        if self.chosen.quality == "exact":
            return f"The base unrounded. In 8 bits it would {self._cost(quantize='int8')}, and round weights."
        rounding = ROUNDING[self.chosen.quality]
        return f"{self._why_rounded()} This rounds weights by {rounding} on average."

    def _why_rounded(self) -> str:
        better = {"int8": "none", "nf4": "int8"}[self.chosen.quality]
        question = self.question
        written = question.written.replaced(quantize=better)
        other = plan(question.workload, written, question.device_state, self.traces, question.counts, others=False)
        name = "unrounded" if better == "none" else "in 8 bits"
        return (
            f"{name.capitalize()} nothing fits: with all that saves memory it lacks {words.size(other.excess_bytes)}."
        )

    @property
    def _micro_batch(self) -> str:
        batch = self.question.workload.recipe.effective_batch
        told = plan_text.batches(self._fit, batch)
        size = self._fit.micro_batch or 1
        if batch == 1:
            return f"{told.capitalize()}, which is the whole effective batch."
        if size == 1:
            return f"{told.capitalize()}, gradients summed. Two at once would {self._cost(micro_batch=2)}."
        return f"{told.capitalize()}. One at a time would {self._cost(micro_batch=1)}."

    @property
    def _gradient_checkpointing(self) -> str:
        if self._fit.gradient_checkpointing == "none":
            return f"Activations stay in memory. Recomputing all would {self._cost(gradient_checkpointing='full')}."
        told = plan_text.checkpointed(self._fit).capitalize()
        return f"{told}: activations are recomputed. Without, it would {self._cost(gradient_checkpointing='none')}."

    @property
    def _vae_tiling(self) -> str:
        other = self._drawn(vae_tiling=not self._fit.vae_tiling)
        if other == _SAME:
            return "Previews are decoded in tiles: no matter for pictures of this size, but for larger ones."
        told = ("in tiles. Whole", "whole. In tiles")[not self._fit.vae_tiling]
        return f"Previews are decoded {told} they would need {other} then."

    @property
    def _preview_offload(self) -> str:
        if self._fit.preview_offload:
            less = self._drawn(preview_offload=False)
            return f"The UNet waits in main memory while previews are decoded; else they would need {less} then."
        less = self._drawn(preview_offload=True)
        return f"The UNet stays on the card while previews are decoded. Sent away, {less} would be needed then."

    def _cost(self, **changes: Any) -> str:
        """What training would need and take with other values: "need 5.2 GiB more and be 20 % quicker"."""
        other = replace(self.question.workload, fit=self._fit.replaced(**changes))
        need, seconds = training_figures(other, self.question.device_state, self.traces)
        now, time = self._figures
        percent = round(100 * (seconds / time - 1))
        pace = f"take {percent} % longer" if percent > 0 else f"be {-percent} % quicker" if percent else "be as quick"
        return f"need {_than(need - now)} and {pace}"

    @cached_property
    def _figures(self) -> tuple[int, float]:
        subject = replace(self.question.workload, fit=self._fit)
        return training_figures(subject, self.question.device_state, self.traces)

    def _drawn(self, **changes: Any) -> str:
        """What drawing previews would need beside what lasts, against what it does."""
        now, other = (
            total_in_sequence(self.traces.phase_summaries(replace(self.question.workload, fit=fit), "preview")).peak
            for fit in (self._fit, self._fit.replaced(**changes))
        )
        return _than(other - now)


_SAME = "as much"


def _than(difference: int) -> str:
    if abs(difference) < 1 << 20:
        return _SAME
    return f"{words.size(abs(difference))} {'more' if difference > 0 else 'less'}"


def preset_text(family: Family, gigabytes: int, traces: TraceLibrary) -> str:
    """The whole preset file for a card size."""
    question = built_in(family, RECIPE, f"{gigabytes}GB", SYSTEM)
    planned = plan(question.workload, question.written, question.device_state, traces, question.counts, others=False)
    chosen = planned.pick
    assert chosen is not None  # on 6 GB something fits for both families
    largest, card = question.workload.buckets[0], question.device_state.gpu
    values: Mapping[str, Any] = {key: getattr(chosen.fit, key) for key in PLANNED}
    reasons = Reasons(question, chosen, traces)
    lines = [
        *_comment(_heading(question, chosen)),
        "",
        "schema = 1",
        f'name = "{gigabytes}gb"',
        'author = "Impasto"',
        'license = "Apache-2.0"',
        f'notes = "Planned for the recipe preset \\"{RECIPE}\\" with pictures of {largest.width} x {largest.height}."',
        "",
        "[base]",
        f'family = "{family}"',
        "",
        "[fit]",
        *(line for key in PLANNED for line in (*_comment(reasons.of(key)), f"{key} = {toml_value(values[key])}")),
        "",
        "[card]",
        f"gigabytes = {gigabytes}",
        f"bf16 = {toml_value(card.bf16)}",
    ]
    return "\n".join(lines) + "\n"


def _heading(question: PlanRequest, chosen: Plan) -> str:
    situation, found = question.device_state, chosen.forecast
    taken, peak = plan_text.reserved_bytes(found), plan_text.peak_phase(found)
    name = plan_text.PHASES[peak.phase].lower()
    where = f", {max(peak.peaks, key=lambda one: one.allocated).name}" if peak.peaks else ""
    return (
        f"{NAMES[question.workload.family]} on a card with {situation.gpu.gigabytes} GB such as the "
        f"{situation.gpu.name}, as the planner finds it for {SYSTEM} and its desktop: at most {words.size(taken)} "
        f"({name}{where}) of {words.size(situation.budget)} that PyTorch may take, so that "
        f"{words.size(situation.budget - taken)} are left beside a margin of {words.size(situation.margin)}. About "
        f"{max(1, round(found.seconds / 60))} minutes for {question.workload.recipe.steps:,} steps of "
        f"{question.workload.recipe.effective_batch} pictures. Made by tests/benchmarks/make_fits.py."
    )


def _comment(text: str) -> Iterator[str]:
    return (f"# {line}" for line in textwrap.wrap(text, WIDTH - 2))


def main() -> int:
    """Write all of them."""
    folder: Path = preset_path("fits")
    traces = TraceLibrary(TraceStore.of_user())
    for family in FAMILIES:
        for gigabytes in GIGABYTES:
            path = folder / file_name(family, gigabytes)
            files.write_text(path, preset_text(family, gigabytes, traces))
            sys.stdout.write(f"{path.name}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
