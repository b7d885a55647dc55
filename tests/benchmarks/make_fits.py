"""Write presets/fits: the recommended plan for each family and GPU size, with what each value costs and saves.

    python -m tests.benchmarks.make_fits

Uses the traces that tests/benchmarks/ship_traces.py makes, and records those that are missing. The presets are planned
for Windows, whose desktop takes more GPU memory than others, and for the recipe preset "character".
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
from trainer.memory.trace.workload import complete_fit
from trainer.protocol import files
from trainer.protocol.forecast import ROUNDING

RECIPE = "character"
SYSTEM = "Windows"
WIDTH = 118


def file_name(family: Family, gigabytes: int) -> str:
    """Return the file name of a fit preset."""
    return f"{family}-{gigabytes}gb.toml"


@dataclass(frozen=True)
class Reasons:
    """Reasons for each value of a planned fit."""

    question: PlanRequest
    chosen: Plan
    traces: TraceLibrary

    def of(self, key: str) -> str:
        """Return the reason for the value of a key, in sentences."""
        reason: str = getattr(self, f"_{key}")
        return reason

    @property
    def _fit(self) -> FitConfig:
        return self.chosen.fit

    @property
    def _dtype(self) -> str:
        abilities = {
            "bf16": "RTX 3000 GPUs and newer support bf16, which has the range of fp32.",
            "fp16": "RTX 2000 GPUs and older do not support bf16; with fp16, losses are scaled to avoid underflow.",
        }
        return f"16-bit, half the memory of fp32. {abilities[self._fit.dtype or 'bf16']}"

    @property
    def _quantize(self) -> str:
        if self.chosen.quality == "exact" and self._fit.stream != "none":
            return "The base is not quantized."
        if self.chosen.quality == "exact":
            cost = self._cost(quantize="int8")
            return f"The base is not quantized. In 8-bit, training would {cost}, and weights would be rounded."
        rounding = ROUNDING[self.chosen.quality]
        return f"{self._why_quantized()} This rounds weights by {rounding} on average."

    def _why_quantized(self) -> str:
        better = {"int8": "none", "nf4": "int8"}[self.chosen.quality]
        return self._without("Without quantization" if better == "none" else "In 8-bit", quantize=better)

    def _without(self, name: str, **keys: Any) -> str:
        """Return why no plan has these values: nothing fits, or it is slower."""
        question = self.question
        written = question.written.replaced(**keys)
        other = plan(question.workload, written, question.device_state, self.traces, question.counts, others=False)
        if other.pick is None:
            too_large = words.size(other.excess_bytes)
            return f"{name}, nothing fits: even with all memory savings it is {too_large} too large."
        pace = _pace(other.pick.forecast.seconds / self.chosen.forecast.seconds)
        if self.chosen.quality == "exact" != other.pick.quality:
            rounding = ROUNDING[other.pick.quality]
            return f"{name}, only a quantized base fits; training would {pace}, with weights rounded by {rounding}."
        return f"{name}, training would {pace}."

    @property
    def _stream(self) -> str:
        if self._fit.stream == "none":
            return f"The base stays on the GPU. Streamed from main memory, training would {self._cost(stream='full')}."
        return f"{self._without('Kept on the GPU', stream='none')} Streaming changes no value."

    @property
    def _vae_dtype(self) -> str:
        return f"{self._without('In fp32', vae_dtype='fp32')} An image that bf16 cannot encode is encoded in fp32."

    @property
    def _vae_encode_tiling(self) -> str:
        return f"Images are encoded in tiles. {self._without('Whole', vae_encode_tiling=False)}"

    @property
    def _micro_batch(self) -> str:
        batch = self.question.workload.recipe.effective_batch
        split = plan_text.batches(self._fit, batch).capitalize()
        size = self._fit.micro_batch or 1
        if batch == 1:
            return f"{split}, which is the whole effective batch."
        if size == 1:
            return f"{split}, gradients accumulated. Two at once would {self._cost(micro_batch=2)}."
        return f"{split}. One at a time would {self._cost(micro_batch=1)}."

    @property
    def _gradient_checkpointing(self) -> str:
        if self._fit.gradient_checkpointing == "none":
            cost = self._cost(gradient_checkpointing="full")
            return f"No gradient checkpointing. With all blocks checkpointed, training would {cost}."
        blocks = plan_text.checkpointed(self._fit).capitalize()
        return f"{blocks}. Without checkpointing, training would {self._cost(gradient_checkpointing='none')}."

    @property
    def _vae_tiling(self) -> str:
        other = self._preview_difference(vae_tiling=not self._fit.vae_tiling)
        if other == _SAME:
            no_difference = "This makes no difference at this size, but saves memory for larger images."
            return f"Previews are decoded in tiles. {no_difference}"
        decoded = ("in tiles. Whole", "whole. In tiles")[not self._fit.vae_tiling]
        return f"Previews are decoded {decoded}, they would need {other}."

    @property
    def _preview_offload(self) -> str:
        if self._fit.preview_offload:
            more = self._preview_difference(preview_offload=False)
            return f"The UNet is offloaded while previews are decoded. Kept on the GPU, they would need {more}."
        less = self._preview_difference(preview_offload=True)
        return f"The UNet stays on the GPU while previews are decoded. With it offloaded, they would need {less}."

    def _cost(self, **changes: Any) -> str:
        """Return what training would need and take with other values: "need 5.2 GiB more and be 20% faster"."""
        other = replace(self.question.workload, fit=self._fit.replaced(**changes))
        need, seconds = training_figures(other, self.question.device_state, self.traces)
        now, time = self._figures
        return f"need {_difference(need - now)} and {_pace(seconds / time)}"

    @cached_property
    def _figures(self) -> tuple[int, float]:
        workload = replace(self.question.workload, fit=self._fit)
        return training_figures(workload, self.question.device_state, self.traces)

    def _preview_difference(self, **changes: Any) -> str:
        """Return the difference in peak memory of rendering previews with other values."""
        now, other = (
            total_in_sequence(self.traces.phase_summaries(replace(self.question.workload, fit=fit), "preview")).peak
            for fit in (self._fit, self._fit.replaced(**changes))
        )
        return _difference(other - now)


_ENCODING = ("vae_dtype", "vae_encode_tiling")
_SAME = "as much"


def _pace(ratio: float) -> str:
    """Return how much longer or faster training is that takes ``ratio`` times as long."""
    percent = round(100 * (ratio - 1))
    return f"take {percent}% longer" if percent > 0 else f"be {-percent}% faster" if percent else "be as fast"


def _difference(difference: int) -> str:
    if abs(difference) < 1 << 20:
        return _SAME
    return f"{words.size(abs(difference))} {'more' if difference > 0 else 'less'}"


def preset_text(family: Family, gigabytes: int, traces: TraceLibrary) -> str:
    """Return the text of the preset file for a GPU size."""
    question = built_in(family, RECIPE, f"{gigabytes}GB", SYSTEM)
    planned = plan(question.workload, question.written, question.device_state, traces, question.counts, others=False)
    chosen = planned.pick
    assert chosen is not None  # on 4 GB something fits for both families
    largest, gpu = question.workload.buckets[0], question.device_state.gpu
    # How images are encoded is left open unless the plan differs from the default.
    usual = complete_fit(FitConfig())
    shown = [
        key for key in PLANNED if key not in _ENCODING or getattr(chosen.fit, key) not in (None, getattr(usual, key))
    ]
    values: Mapping[str, Any] = {key: getattr(chosen.fit, key) for key in shown}
    reasons = Reasons(question, chosen, traces)
    lines = [
        *_comment(_heading(question, chosen)),
        "",
        "schema = 2",
        f'name = "{gigabytes}gb"',
        'author = "Impasto"',
        'license = "Apache-2.0"',
        f'notes = "Planned for the recipe preset \\"{RECIPE}\\" with images of {largest.width} x {largest.height}."',
        "",
        "[base]",
        f'family = "{family}"',
        "",
        "[fit]",
        *(line for key in shown for line in (*_comment(reasons.of(key)), f"{key} = {toml_value(values[key])}")),
        "",
        "[gpu]",
        f"gigabytes = {gigabytes}",
        f"bf16 = {toml_value(gpu.bf16)}",
    ]
    return "\n".join(lines) + "\n"


def _heading(question: PlanRequest, chosen: Plan) -> str:
    state, forecast = question.device_state, chosen.forecast
    reserved, peak = plan_text.reserved_bytes(forecast), plan_text.peak_phase(forecast)
    name = plan_text.PHASES[peak.phase].lower()
    where = f", {max(peak.peaks, key=lambda one: one.allocated).name}" if peak.peaks else ""
    return (
        f"{NAMES[question.workload.family]} on a GPU with {state.gpu.gigabytes} GB such as the {state.gpu.name}, "
        f"planned for {SYSTEM} with its desktop. Reserves at most {words.size(reserved)} ({name}{where}) of the "
        f"{words.size(state.budget)} that PyTorch may use: {words.size(state.budget - reserved)} stay free besides a "
        f"safety margin of {words.size(state.margin)}. About {max(1, round(forecast.seconds / 60))} minutes for "
        f"{question.workload.recipe.steps:,} steps of {question.workload.recipe.effective_batch} images. Written by "
        "tests/benchmarks/make_fits.py."
    )


def _comment(text: str) -> Iterator[str]:
    return (f"# {line}" for line in textwrap.wrap(text, WIDTH - 2))


def main() -> int:
    """Write all fit presets."""
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
