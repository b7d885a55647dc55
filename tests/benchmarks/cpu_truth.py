"""Compare the trace of full-size steps with real ones on the CPU, allocation by allocation.

Run ``python -m tests.benchmarks.cpu_truth [--family sdxl] [--resolution 256]``: it needs no weights, a few gigabytes of
memory and some minutes. What differs on CUDA is left out on both sides: buffers within kernels, and the copy of the
micro-batch to the GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate
from unittest.mock import patch

from tests.support.cpu_steps import outside_kernels, real_steps, traced_bytes
from tests.support.traced_steps import trace_steps
from trainer.config.fit import FitConfig
from trainer.config.recipe import RecipeConfig
from trainer.memory.trace import recorder
from trainer.memory.trace.meta_models import micro_batch
from trainer.memory.trace.workload import Workload, workload_without_base

MIB = 2**20
FITS = (
    {"gradient_checkpointing": "none"},
    {"gradient_checkpointing": ["down_blocks.1", "mid_block"]},
    {"gradient_checkpointing": "full"},
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("sd15", "sdxl"), default="sd15")
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--images", type=int, default=1)
    options = parser.parse_args(arguments)
    bucket = (options.resolution, options.resolution)
    say(f"{options.family}, {options.resolution} pixels, {options.images} images, fp32, math attention")
    same = True
    for fit in FITS:
        workload = workload_without_base(
            options.family,
            RecipeConfig(resolution=options.resolution),
            FitConfig.model_validate({"dtype": "fp32", "attention": "math", **fit}),
        )
        say(f"checkpointing {fit['checkpointing']}:")
        same &= compare(workload, bucket, options.images)
    return 0 if same else 1


def compare(workload: Workload, bucket: tuple[int, int], pictures: int) -> bool:
    """Print changes and peaks of both for each part of a step; return whether every change was the same."""
    real = [outside_kernels(part) for part in real_steps(workload, bucket, pictures, micro_batches=2)]
    with patch.object(recorder, "hidden_bytes", lambda func, args: ()):
        traces = trace_steps(workload, [bucket], pictures)
    micro = micro_batch(workload, bucket, pictures)
    traced = [
        traced_bytes(traces.micro_first[bucket], micro),
        traced_bytes(traces.micro_more[bucket], micro),
        traced_bytes(traces.optimizer_first),
    ]
    for name, seen, said in zip(
        ("first micro-batch", "further one", "first optimizer step"), real, traced, strict=True
    ):
        peaks = max(accumulate(seen)), max(accumulate(said))
        say(
            f"  {name}: {len(seen)} real and {len(said)} traced changes, {'the same' if seen == said else 'DIFFERENT'};"
            f" peak {peaks[0] / MIB:.2f} and {peaks[1] / MIB:.2f} MiB ({peaks[1] / peaks[0] - 1:+.4%})"
        )
    return real == traced


def say(line: str) -> None:
    """Print a line at once: parts take minutes."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
