"""Take a large synthetic dataset through listing, caches and batches, and report time and private memory of each phase.

    python -m tests.benchmarks.large_dataset [--images 200000] [--folder FOLDER] [--cache-gigabytes 100] [--limit 1e9]

Writes that many different small images with captions first, unless the folder has them. Then, in one process: a run of
a few steps from the command's own code, which lists, checks and freezes the dataset; the caches and micro-batches of a
whole epoch, in shards as a run makes them; and deleting what no run needs. Only the training of the epoch is left out.
Exits with 1 if private memory ever exceeds the limit. 200,000 images take about an hour on two cores and 4 GB of disk.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image

from tests.support.jobs import write_job
from tests.support.tiny import tiny_base
from trainer.base.source import open_base
from trainer.config.load import load_job
from trainer.dataset.dataset import read_listing
from trainer.host import private_bytes
from trainer.protocol import events, places
from trainer.protocol.run_directory import RunDirectory
from trainer.training.build import build_parts
from trainer.training.data.loader import PrefetchCollator
from trainer.training.run.cache_pruning import prune
from trainer.training.run.start import start

SIDE = 64
A_FOLDER = 10_000
CAPTIONS = 1_000
"""Number of different captions; each image has its own file, but encoding 200,000 texts would only take time."""
BATCH = 64
SAMPLE_SECONDS = 0.2


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Measurement:
    """Peaks of private memory by phase."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block and print its time and peak."""
        started, done = time.monotonic(), threading.Event()

        def watch() -> None:
            while True:
                self.peaks[name] = max(self.peaks.get(name, 0), private_bytes() or 0)
                if done.wait(SAMPLE_SECONDS):
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        say(f"{name:24} {time.monotonic() - started:8.0f} s {self.peaks[name] / 1e6:8.0f} MB")


def write_images(folder: Path, count: int) -> None:
    """Write ``count`` different images with captions, 10,000 to a folder; those that exist are kept."""
    for start_at in range(0, count, A_FOLDER):
        below = folder / f"{start_at // A_FOLDER:03}"
        below.mkdir(parents=True, exist_ok=True)
        for number in range(start_at, min(start_at + A_FOLDER, count)):
            path = below / f"{number:07}.png"
            if not path.exists():
                words = (f"tag {number % CAPTIONS} of a caption with some words", "a photo of sks", "night, rain, city")
                path.with_suffix(".txt").write_text(", ".join(words), encoding="utf-8")
                cells = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
                Image.fromarray(cells).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(path)


def job_of(folder: Path, images: Path, gigabytes: float) -> Path:
    """Write a job of four steps; all settings are those of an ordinary run but for its small models."""
    job = write_job(folder, tiny_base("sd15", folder / "bases", depth=1), images)
    text = job.read_text(encoding="utf-8")
    text = text.replace("trigger =", "recursive = true\ntrigger =").replace("steps = 6", "steps = 4", 1)
    text = text.replace("effective_batch = 3", f"effective_batch = {BATCH}").replace(
        "micro_batch = 2", "micro_batch = 16"
    )
    text = text.replace("[fit]", f"[fit]\ncache_gigabytes = {gigabytes}")
    job.write_text(text[: text.index("[report.previews]")], encoding="utf-8")
    return job


def load_epoch(run: RunDirectory, gigabytes: float, measured: Measurement) -> int:
    """Cache and load every micro-batch of an epoch as a run does; return the number of cache shards."""
    job, images = load_job(run.job), read_listing(run.listing)
    parts = build_parts(job, images, open_base(job.base), places.cache_folder())
    steps = parts.batches.steps_per_epoch
    job = job.replaced(recipe=job.recipe.replaced(steps=steps), fit=job.fit.replaced(cache_gigabytes=gigabytes))
    parts = build_parts(job, images, parts.source, places.cache_folder())
    at = [0]
    shards = 0
    with closing(PrefetchCollator(parts.collator, parts.batches, parts.device, lambda: at[0])) as loader:
        while at[0] < steps:
            shards += 1
            with measured.phase(f"caches, shard {shards}"):
                parts.batches.prepare(at[0], [], [], lambda *_: None, lambda _: None)
            with measured.phase(f"batches, shard {shards}"):
                while at[0] < steps and parts.batches.holds(at[0]):
                    batch = parts.batches.batch(at[0])
                    for part in parts.batches.split(batch):
                        loader.assemble(part, len(batch))
                    at[0] += 1
    return shards


def campaign(folder: Path, count: int, gigabytes: float, limit: float) -> int:
    """Run all phases in ``folder`` and return the exit code."""
    os.environ["IMPASTO_HOME"] = str(folder / "home")
    torch.set_num_threads(1)  # threads that share busy cores mostly wait for each other
    measured = Measurement()
    images = folder / "images"
    say(f"writing {count} images")
    write_images(images, count)
    job = job_of(folder, images, gigabytes)

    def on_event(event: events.Event) -> None:
        if isinstance(event, events.PhaseStarted):
            say(f"  {event.phase} ({event.total})")

    with measured.phase("listing and a short run"):
        assert start(job, [], on_event) == 0
    run = RunDirectory.open(max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns))
    shards = load_epoch(run, gigabytes, measured)
    with measured.phase("pruning"):
        pruned = prune()
    highest = max(measured.peaks.values())
    say(f"{shards} shards; pruned {pruned.deleted} entries; peak {highest / 1e6:.0f} MB of {limit / 1e6:.0f} MB")
    return int(highest > limit)


def main() -> int:
    """Read the arguments and run the campaign."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--cache-gigabytes", type=float, default=100.0)
    parser.add_argument("--limit", type=float, default=1e9)
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        return campaign(options.folder or Path(temporary), options.images, options.cache_gigabytes, options.limit)


if __name__ == "__main__":
    # The processes that decode images import the main module again; this way, it is none that loads torch.
    command = "import sys; from tests.benchmarks.large_dataset import main; sys.exit(main())"
    sys.exit(subprocess.call([sys.executable, "-c", command, *sys.argv[1:]]))
