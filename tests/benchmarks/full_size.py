"""Load a full-size SDXL single file and report the peak of private memory.

    python -m tests.benchmarks.full_size /scratch/sdxl.safetensors [--dtype bf16] [--quantize nf4] [--train] [--keep]

Writes the file first (7 GB of random fp16 weights), unless it exists. Exits with 1 if the peak exceeds 1.2 times the
loaded bytes plus 1 GB. With --train a whole job follows: caching, two real steps at 64 pixels, an exported LoRA.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from tests.support.jobs import photographs, write_job
from tests.support.tiny import models_on_meta, single_file_tensors
from trainer.base.source import open_base
from trainer.config.base import BaseConfig
from trainer.files.assets import bundled_configs
from trainer.training.run.start import start

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_POOL = 1 << 24  # random numbers, reused at other positions: drawing 3.5 billion takes minutes


@dataclass
class Peak:
    """The most private bytes (USS) that this process had while it was watched."""

    bytes: int = 0


@contextmanager
def watched_memory() -> Iterator[Peak]:
    """Measure this process's peak of private memory while the block runs."""
    peak, process, done = Peak(), psutil.Process(), threading.Event()

    def measure() -> None:
        peak.bytes = max(peak.bytes, process.memory_full_info().uss)

    def watch() -> None:
        while not done.wait(0.02):
            measure()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        measure()
        done.set()
        thread.join()


def write_full_sdxl(path: Path) -> None:
    """Write a full-size SDXL single file with random fp16 weights, one tensor at a time."""
    tensors = _full_tensors()
    header, position = {}, 0
    for name, tensor in tensors.items():
        end = position + 2 * tensor.numel()
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    pool = np.random.default_rng(0).standard_normal(_POOL, dtype=np.float32)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, (name, tensor) in enumerate(tensors.items()):
            file.write(_values(name, tensor, pool[7919 * index % (_POOL // 2) :]).tobytes())


def _values(name: str, tensor: Tensor, pool: np.ndarray) -> np.ndarray:
    """Return values that keep activations finite: ones for norms, zeros for biases, otherwise scaled by fan-in."""
    if tensor.ndim < 2:
        return np.full(tensor.numel(), float(name.endswith("weight")), dtype=np.float16)
    fan_in = tensor.numel() // tensor.shape[0]
    return (np.resize(pool, tensor.numel()) * fan_in**-0.5).astype(np.float16)


def _full_tensors() -> dict[str, Tensor]:
    """Return the names and shapes of a full SDXL single file, as tensors on the meta device."""
    configs = bundled_configs("sdxl")
    parts = {part: model.state_dict() for part, model in models_on_meta(configs).items()}
    return single_file_tensors("sdxl", parts, configs)


def load_everything(
    path: Path, dtype: torch.dtype, quantize: Literal["none", "int8", "nf4"] = "none"
) -> list[nn.Module]:
    """Load all models of a base: the VAE in fp32, the others in `dtype`."""
    source = open_base(BaseConfig(model=str(path)))
    return [
        source.load_unet(dtype, "cpu", quantize),
        source.load_vae(torch.float32, "cpu"),
        *source.load_text_encoders(dtype, "cpu"),
    ]


def train_two_steps(base: Path, dtype: str, quantize: str, folder: Path) -> Path:
    """Run a whole job on the base and return the LoRA it exported."""
    job = write_job(folder, base, photographs(folder / "pictures", 3))
    settings = [f"fit.dtype={dtype}", f"fit.quantize={quantize}", "recipe.steps=2", "report.previews.prompts=[]"]
    if start(job, settings, lambda event: None) != 0:
        raise RuntimeError("the job did not end well")
    return folder / "runs" / "test" / "output" / "test.safetensors"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument("--quantize", choices=("none", "int8", "nf4"), default="none")
    parser.add_argument("--train", action="store_true", help="also run a whole job of two steps")
    parser.add_argument("--keep", action="store_true", help="do not delete the file afterwards")
    options = parser.parse_args()
    if not options.file.exists():
        write_full_sdxl(options.file)
    _say(f"{options.file}: {options.file.stat().st_size / 1e9:.2f} GB")
    before, start = psutil.Process().memory_full_info().uss, time.perf_counter()
    with watched_memory() as peak:
        models = load_everything(options.file, _DTYPES[options.dtype], options.quantize)
    kept = sum(parameter.nbytes for model in models for parameter in model.parameters())
    limit = 1.2 * kept + 1e9
    _say(f"loaded in {time.perf_counter() - start:.1f} s, {kept / 1e9:.2f} GB loaded")
    _say(f"private memory: {before / 1e9:.2f} GB before, {peak.bytes / 1e9:.2f} at its peak; limit {limit / 1e9:.2f}")
    if options.train:
        del models
        start_time = time.perf_counter()
        with TemporaryDirectory() as folder, watched_memory() as trained:
            lora = train_two_steps(options.file, options.dtype, options.quantize, Path(folder))
            size, seconds = lora.stat().st_size / 1e6, time.perf_counter() - start_time
            _say(f"two steps and a LoRA of {size:.1f} MB in {seconds:.0f} s")
        _say(f"private memory of the whole job at its peak: {trained.bytes / 1e9:.2f} GB")
    if not options.keep:
        options.file.unlink()
    return 0 if peak.bytes <= limit else 1


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
