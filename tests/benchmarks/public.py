"""Compare forecasts with published measurements; needs no GPU.

    python -m tests.benchmarks.public [--results FOLDER]

Each published configuration is approximated as closely as our trainer can, and the differences are listed: this does
not test exactness (tests/benchmarks/memory_truth.py does), but whether forecasts have the right magnitude. Totals
include the CUDA context. What our trainer cannot do at all (training whole models, another trainer's presets) is left
out. Writes tests/benchmarks/results/public.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tests.support.truth import predict
from tests.support.truth_jobs import TruthJob
from trainer.base.drawing import decode_levels
from trainer.config.base import Family
from trainer.memory.allocator.allocator import Allocator
from trainer.memory.allocator.replay import replay
from trainer.memory.device.device_state import DeviceState, state_of_listed_gpu
from trainer.memory.device.gpu_specs import find_gpu
from trainer.memory.trace.meta_models import META, bare_vae, place
from trainer.memory.trace.other_phases import VAE_ATTENTION
from trainer.memory.trace.recorder import recording

GIB = 2**30
RESULTS = Path(__file__).parent / "results" / "public.md"
Measure = Literal["allocated", "reserved", "total"]
_TEXT = {"text_encoder": {"learning_rate": 1e-5}}
_FULL = {"gradient_checkpointing": "full"}
_ADAM8 = {"optimizer": {"name": "adamw8bit"}}


@dataclass(frozen=True)
class Bytes:
    """Forecast bytes."""

    allocated: int
    reserved: int
    total: int
    """Reserved, plus what the process takes outside the allocator."""


Forecaster = Callable[[DeviceState, Path], Bytes]


@dataclass(frozen=True)
class Published:
    """A published measurement."""

    name: str
    source: str
    forecast: Forecaster
    differs: str
    """Known differences between the published configuration and ours."""
    least: float
    """GiB; for a figure with an unknown unit, the smaller interpretation; for a GPU that it ran on, 0."""
    most: float
    """The larger interpretation, or the GPU's size."""
    measure: Measure


def training(family: Family, side: int, **changes: Any) -> Forecaster:
    """Return a forecast of loading and some steps of our own training on squares of ``side`` pixels."""
    dtype = changes.pop("dtype", "bf16")
    job = TruthJob("", family, (side, side), **changes)

    def forecast(device_state: DeviceState, folder: Path) -> Bytes:
        phases = predict(job, job.workload(dtype=dtype), device_state, folder).phases.values()
        allocated, reserved = max(phase.allocated for phase in phases), max(phase.reserved for phase in phases)
        return Bytes(allocated, reserved, reserved + device_state.outside)

    return forecast


def decoding(family: Family, side: int, dtype: torch.dtype) -> Forecaster:
    """Return a forecast of the VAE alone on the GPU, decoding a whole image."""

    def forecast(device_state: DeviceState, folder: Path) -> Bytes:
        vae = bare_vae(TruthJob("", family, (side, side)).workload())
        with recording(VAE_ATTENTION) as tracer:
            place(vae, dtype)
            latents = torch.empty(1, 4, side // 8, side // 8, dtype=dtype, device=META)
            decode_levels(vae, latents, tiling=False)
            trace = tracer.cut("decode")
        allocator = Allocator()
        replay([trace], allocator, {}, device_state.workspace_bytes)
        reserved = allocator.peak_reserved
        return Bytes(allocator.peak_allocated, reserved, reserved + device_state.outside)

    return forecast


def published() -> list[Published]:
    """Yield the published measurements that can be approximated here."""
    return [*_dreambooth(), *_decodes(), *_totals(), *_cards()]


def _dreambooth() -> Iterator[Published]:
    source = "PEFT README: train_dreambooth on an A100, max_memory_allocated"
    differs = "LoRA on all attention layers, not only on q and v; fp32 master weights too; no VAE in the loop"
    recipe = {**_TEXT, "layers": "attention"}
    for name, fit, least, most in (
        ("A1 SD 1.4, 512, 2 images, fp32", {}, 14.44, 15.14),
        ("A2 the same, checkpointing", _FULL, 7.56, 7.93),
    ):
        forecast = training("sd15", 512, pictures=2, recipe=recipe, fit={**fit, "attention": "math"}, dtype="fp32")
        yield Published(name, source, forecast, differs, least, most, "allocated")


def _decodes() -> Iterator[Published]:
    cases: list[tuple[str, Family, int, torch.dtype, int]] = [
        ("V1 SD 1 decode, 512, fp32", "sd15", 512, torch.float32, 1696),
        ("V2 SDXL decode, 1024, fp16", "sdxl", 1024, torch.float16, 3232),
        ("V3 SDXL decode, 1024, fp32", "sdxl", 1024, torch.float32, 5568),
    ]
    for name, family, side, dtype, mebibytes in cases:
        gib = mebibytes / 1024
        differs = "cudaMallocAsync there, another allocator"
        yield Published(name, "InvokeAI#7674", decoding(family, side, dtype), differs, gib, gib, "reserved")


def _totals() -> Iterator[Published]:
    cached = training("sdxl", 1024, fit={**_FULL, "quantize": "int8"}, recipe=_ADAM8)
    differs = "fp8 for the whole base there; int8 for its blocks' linear layers here"
    yield Published("B1 SDXL 1024, fp8 base, checkpointing", "sd-scripts#1057", cached, differs, 4.10, 4.4, "total")
    rest = "autocast, VAE and text encoder on the GPU, a context of about 1.2 GiB there"
    for name, kernel, differs, least, most in (
        ("D1 SD 1.5 LoRA r4, 512, 2 images, plain attention", "math", f"{rest}; scores in fp32 here", 9.31, 10.0),
        ("D2 the same, xformers", "efficient", rest, 5.59, 6.0),
    ):
        recipe = {"rank": 4, "layers": "attention"}
        forecast = training("sd15", 512, pictures=2, recipe=recipe, fit={"attention": kernel}, dtype="fp16")
        yield Published(name, "ngwaifoong on Medium: diffusers", forecast, differs, least, most, "total")


def _cards() -> Iterator[Published]:
    """Yield configurations of which only the GPU they ran on is known."""
    texts = {**_TEXT, "text_encoder_2": _TEXT["text_encoder"]}
    light = {"fit": _FULL, "recipe": _ADAM8}
    wide = training("sdxl", 1024, fit=_FULL, recipe={**_ADAM8, "rank": 256})
    with_texts = training("sdxl", 1024, fit=_FULL, recipe={**_ADAM8, **texts, "rank": 32})
    plain = training("sdxl", 1024, recipe={"layers": "attention"}, dtype="fp16")
    masters = "fp32 master weights and their gradients, 5.1 GiB at this rank, which a pure bf16 run does not have"
    cases: list[tuple[str, str, float, Forecaster, str]] = [
        ("SDXL LoRA 1024, base cast on the CPU", "sd-scripts#645", 8.0, training("sdxl", 1024, **light), ""),
        ("SDXL r256, UNet alone", "sd-scripts#661", 12.0, wide, masters),
        ("SDXL r32 with text encoders", "sd-scripts#661", 12.0, with_texts, ""),
        ("SDXL 768, 3 images", "sd-scripts#1184", 10.0, training("sdxl", 768, pictures=3, fit=_FULL), ""),
        ("SDXL 1024, fp16, no checkpointing", "diffusers README", 16.0, plain, ""),
    ]
    for name, source, gib, forecast, differs in cases:
        yield Published(name, f"{source}: ran on {gib:.0f} GB", forecast, differs, 0.0, gib, "total")
    forecast = training("sdxl", 1024, pictures=4)
    source, differs = "kohya_ss#3296: fills 31.5 GB and spills over", "unknown whether with gradient checkpointing"
    yield Published("SDXL 1024, 4 images", source, forecast, differs, 31.2, float("inf"), "total")


def row(one: Published, device_state: DeviceState, folder: Path) -> str:
    """Return a row of the table."""
    forecast = one.forecast(device_state, folder)
    value = getattr(forecast, one.measure) / GIB
    inside = one.least <= value <= one.most
    nearest = min(max(value, one.least), one.most)
    verdict = "in range" if inside else f"{value / nearest - 1.0:+.1%}"
    said = f"{one.least:.2f} to {one.most:.2f}" if one.least < one.most else f"{one.most:.2f}"
    figures = f"{forecast.allocated / GIB:.2f} | {forecast.reserved / GIB:.2f} | {forecast.total / GIB:.2f}"
    return f"| {one.name} | {one.source} | {one.measure} {said} | {figures} | {verdict} | {one.differs} |"


def table(device_state: DeviceState, folder: Path) -> Iterator[str]:
    """Yield the whole table, line by line."""
    yield "# Forecasts compared with published measurements"
    yield f"Made by `python -m tests.benchmarks.public`, torch {torch.__version__}."
    yield "GiB. Where a source's unit is unknown, both interpretations are given: 10^9 bytes and GiB.\n"
    yield "| configuration | source | published | forecast allocated | reserved | total | error | differences |"
    yield "|---|---|---|---:|---:|---:|---:|---|"
    for one in published():
        yield row(one, device_state, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, and print each line once it is known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for line in table(state_of_listed_gpu(find_gpu("RTX 4090"), system="Linux"), Path(folder)):
            lines.append(line)
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
