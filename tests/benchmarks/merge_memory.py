"""Merge a LoRA into a full-size SDXL single file and report the peak of the process's memory (Linux).

    python -m tests.benchmarks.merge_memory /scratch/folder [--rank 32] [--keep]

Writes the base first (7 GB of random fp16 weights) and a LoRA of all its layers, unless they exist; the merged base
takes another 7 GB. Exits with 1 if the peak of resident memory exceeds 3 GB.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.benchmarks.full_size import write_full_sdxl
from tests.support.loras import golden_rows

LIMIT = 3e9


def write_lora(path: Path, rank: int) -> None:
    """Write a LoRA of all layers that sd-scripts adapts, with random fp16 values."""
    stream = torch.Generator().manual_seed(0)
    tensors = {}
    for name, _, *shapes in golden_rows("sdxl"):
        for role, shape in zip(("down", "up"), shapes, strict=True):
            sizes = [rank if size == "r" else int(size) for size in shape.split("x")]
            tensors[f"{name}.lora_{role}.weight"] = (torch.randn(sizes, generator=stream) * 0.01).half()
        tensors[f"{name}.alpha"] = torch.tensor(float(rank))
    save_file(tensors, path, {"ss_base_model_version": "sdxl_base_v1-0"})


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--keep", action="store_true", help="do not delete the files afterwards")
    options = parser.parse_args()
    base, lora, out = (options.folder / f"{name}.safetensors" for name in ("base", "lora", "merged"))
    if not base.exists():
        write_full_sdxl(base)
    if not lora.exists():
        write_lora(lora, options.rank)
    start = time.perf_counter()
    words = ["lora", "merge", f"{lora}=0.8", "--into", str(base), "--out", str(out), "--force"]
    subprocess.run([sys.executable, "-m", "trainer", *words], check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    sizes = f"base {base.stat().st_size / 1e9:.2f} GB, LoRA {lora.stat().st_size / 1e9:.2f} GB"
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{sizes}: merged in {seconds:.0f} s, peak resident memory {peak / 1e9:.2f} GB\n")
    if not options.keep:
        for path in (base, lora, out):
            path.unlink()
    return 0 if peak <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
