"""Record what the CUDA caching allocator does in short jobs with random weights, as fixtures for its model.

    python -m tests.benchmarks.record_traces FOLDER [--only NAME ...] [--compare] [--cpu]

Each job runs in a separate process with a time limit, so that it starts with an empty GPU, and becomes
FOLDER/<name>.json.gz of (kind, address, size); tests/golden/allocator/README.md describes the format. After recording,
or immediately and without a GPU with --compare, the model replays each (every decision, peak and retry), and the sizes
requested by a trace on meta tensors are compared with those requested on the GPU, as a multiset and in order. A failed
job does not affect the others. Exits with 1 if one failed or the model differs.

This has not run on a GPU yet. Tested without one: all jobs with small models in main memory (--cpu, which records
nothing), and the conversion of a snapshot in PyTorch's format to a recording
(tests/unit/memory/allocator/test_recordings.py). Not tested: that torch.cuda.memory records the same fields on a GPU,
and how long full size takes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.support import ROOT
from tests.support.meters import CpuMeter, CudaMeter
from tests.support.real_phases import RealRun
from tests.support.recordings import compare, read_recording, recording_of, write_recording
from tests.support.truth_jobs import TruthJob
from trainer import gpu
from trainer.memory.allocator.settings import AllocatorSettings
from trainer.memory.device.gpu_specs import cublas_workspace_bytes
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.memory_trace import MemoryTrace, Storage
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import BucketUse, TracePart, Workload
from trainer.training.device.out_of_memory import gpu_info

ENTRIES = 2_000_000
"""More than a job has: the history must not lose its beginning."""
CAP = 0.97
"""Fraction of what a job reserves without a limit: enough, with a retry."""
LONGEST = 120.0
"""Time limit in seconds for one job: several times what the largest one needs."""


@dataclass(frozen=True)
class RecordedJob:
    """A short job, and which parts of it are recorded."""

    name: str
    job: TruthJob
    parts: tuple[TracePart, ...] = ("load", "quantise", "steps")
    """In the order of the run; the steps are two optimizer steps in every bucket, the largest first."""
    other_size: tuple[int, int] | None = None
    """A second bucket."""
    capped: bool = False
    expandable: bool = False

    def workload(self, *, tiny: bool) -> Workload:
        """Return what memory depends on."""
        workload = self.job.workload(tiny=tiny, dtype="fp32" if tiny else "bf16")
        if self.other_size is None:
            return workload
        width, height = (side // (8 if tiny else 1) for side in self.other_size)
        return replace(workload, buckets=(*workload.buckets, BucketUse(width, height, 1)))


def recorded_jobs() -> list[RecordedJob]:
    """Return about ten jobs: both families, every phase, quantization, a limit, expandable segments."""
    small = TruthJob("sd15", "sd15", (512, 512), other_phases=True)
    large = TruthJob("sdxl", "sdxl", (1024, 1024), fit={"gradient_checkpointing": "full"}, other_phases=True)
    pair = replace(small, pictures=2)
    return [
        RecordedJob("sd15_lora", small),
        RecordedJob("sd15_buckets", pair, other_size=(640, 384)),
        RecordedJob("sd15_text_encoder", replace(small, recipe={"text_encoder": {"learning_rate": 1e-5}})),
        RecordedJob("sd15_capped", pair, other_size=(640, 384), capped=True),
        RecordedJob("sd15_expandable", pair, other_size=(640, 384), expandable=True),
        RecordedJob("sdxl_lora", large),
        RecordedJob("sdxl_8bit_adam", replace(large, recipe={"optimizer": {"name": "adamw8bit"}})),
        RecordedJob("sdxl_nf4", replace(large, fit={"gradient_checkpointing": "full", "quantize": "nf4"})),
        RecordedJob("sdxl_cache", large, ("cache_pictures", "cache_texts")),
        RecordedJob("sdxl_preview", large, ("load", "preview")),
    ]


def work_of(recorded: RecordedJob, run: RealRun) -> list[Callable[[], None]]:
    """Return the job's parts on a device, in order."""
    job, workload = recorded.job, run.workload

    def steps() -> None:
        for bucket in workload.buckets:
            run.train(bucket.size, job.pictures, job.micro_batches)

    known: dict[TracePart, Callable[[], None]] = {
        "cache_pictures": run.cache_pictures,
        "cache_texts": run.cache_texts,
        "load": run.load,
        "steps": steps,
        "preview": run.preview,
    }
    return [known[part] for part in recorded.parts if part in known]


def traces_of(recorded: RecordedJob, workload: Workload, traces: TraceLibrary) -> list[MemoryTrace]:
    """Return traces of the same parts on meta tensors."""
    sequence: list[MemoryTrace] = []
    for part in recorded.parts:
        if part != "steps":
            sequence += traces.phase(workload, part)
            continue
        for number, bucket in enumerate(workload.buckets):
            steps = traces.steps(workload, bucket.size, recorded.job.pictures)
            first = steps.optimizer if number else steps.optimizer_first
            sequence += [steps.micro_first, first, steps.micro_first, steps.optimizer]
    return sequence


def record(recorded: RecordedJob, folder: Path) -> None:
    """Run a job on this process's GPU and write its recording."""
    meter = CudaMeter()
    total = torch.cuda.get_device_properties(meter.device).total_memory
    settings = AllocatorSettings(expandable=recorded.expandable)
    if recorded.capped:
        _work(recorded, meter.device)
        highest = _peaks(meter.device)["peak_reserved"]
        meter.reset()
        fraction = CAP * highest / total
        torch.cuda.set_per_process_memory_fraction(fraction, meter.device)
        settings = replace(settings, capacity=int(fraction * total))
    torch.cuda.reset_peak_memory_stats(meter.device)
    torch.cuda.reset_accumulated_memory_stats(meter.device)
    before: dict[str, Any] = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=ENTRIES, clear_history=True)
    with suppress(torch.OutOfMemoryError) if recorded.capped else nullcontext():  # it is recorded like other events
        _work(recorded, meter.device)
    peaks = _peaks(meter.device)
    peaks["cublas_bytes"] = cublas_workspace_bytes(torch.cuda.get_device_capability(meter.device), deterministic=False)
    after: dict[str, Any] = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    write_recording(folder / f"{recorded.name}.json.gz", recording_of(before, after, settings, peaks))


def _work(recorded: RecordedJob, device: torch.device) -> None:
    run = RealRun(recorded.workload(tiny=device.type == "cpu"), device)
    for work in work_of(recorded, run):
        work()


def _peaks(device: torch.device) -> dict[str, int]:
    statistics = torch.cuda.memory_stats(device)
    return {
        "peak_reserved": statistics["reserved_bytes.all.peak"],
        "peak_allocated": statistics["allocated_bytes.all.peak"],
        "retries": statistics["num_alloc_retries"],
    }


def replayed(recorded: RecordedJob, path: Path) -> bool:
    """Return whether the model does everything that the recording shows; print that, and how the trace compares."""
    recording = read_recording(path)
    result = compare(recording)
    peaks = (result.peak_reserved, result.peak_allocated, result.retries)
    exact = not result.wrong and peaks == (recording.peak_reserved, recording.peak_allocated, recording.retries)
    size, wrong = path.stat().st_size // 1024, len(result.wrong)
    say(f"{recorded.name}: {size} KB, {result.allocations} allocations, {wrong} decisions wrong, exact: {exact}")
    for fault in result.wrong[:3]:
        say(f"    {fault}")
    with TemporaryDirectory() as store:
        sequence = traces_of(recorded, recorded.workload(tiny=False), TraceLibrary(TraceStore(Path(store))))
    asked = [event.bytes for event in recording.events if event.kind == "alloc"]
    say(f"    {likeness(asked, births(sequence, recording.cublas_bytes))}")
    return exact


def births(sequence: Iterable[MemoryTrace], cublas: int) -> list[int]:
    """Return the sizes that traces request, in order, without convolution workspaces, which a trace cannot know."""
    sizes: list[int] = []
    workspaces: set[str | None] = set()
    for trace in sequence:
        for index in trace.events.tolist():
            storage: Storage | None = trace.storages[index] if index >= 0 else None
            if storage is None or (storage.kind == "workspace" and storage.name in {None, *workspaces}):
                continue
            if storage.kind == "workspace":
                workspaces.add(storage.name)
            sizes.append(cublas if storage.kind == "workspace" else storage.bytes)
    return [size for size in sizes if size]


def likeness(real: Sequence[int], traced: Sequence[int]) -> str:
    """Return how closely the requests on a GPU match those of a trace."""
    common = sum((Counter(real) & Counter(traced)).values())
    same = next((place for place, pair in enumerate(zip(real, traced, strict=False)) if pair[0] != pair[1]), None)
    missing = (Counter(real) - Counter(traced)).most_common(5)
    surplus = (Counter(traced) - Counter(real)).most_common(5)
    in_order = "all in order" if same is None else f"the first {same} in order"
    return (
        f"{len(real)} real, {len(traced)} traced, {common / max(len(real), 1):.1%} of the real in both, {in_order}; "
        f"only real (bytes, times): {missing}; only traced: {surplus}"
    )


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Record all jobs, each in a separate process, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", help="names of jobs")
    parser.add_argument(
        "--cpu", action="store_true", help="run the jobs on small models in main memory, record nothing"
    )
    parser.add_argument("--compare", action="store_true", help="record nothing, compare the recordings in FOLDER")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    chosen = [job for job in recorded_jobs() if options.only is None or job.name in options.only]
    if options.cpu:
        for job in chosen:
            say(f"{job.name}: {CpuMeter().measure(partial(_work, job, torch.device('cpu')))}")
        return 0
    if options.here:
        record(chosen[0], options.folder)
        return 0
    if not options.compare:
        capability = gpu_info(0).capability
        for job in chosen:
            say(f"{job.name}: {_record_apart(job, options.folder, capability)}")
    exact = [_compared(job, options.folder / f"{job.name}.json.gz") for job in chosen]
    return 0 if all(exact) else 1


def _record_apart(job: RecordedJob, folder: Path, capability: tuple[int, int]) -> str:
    """Record a job in a separate process; return its outcome."""
    environment = {
        **os.environ,
        "CUBLAS_WORKSPACE_CONFIG": gpu.cublas_workspace(capability, deterministic=False),
        "PYTORCH_ALLOC_CONF": f"expandable_segments:{job.expandable}",
    }
    command = [sys.executable, "-m", "tests.benchmarks.record_traces", str(folder), "--only", job.name, "--here"]
    try:
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=LONGEST).returncode
    except subprocess.TimeoutExpired:
        return f"took longer than {LONGEST:.0f} s"
    return f"failed with {code}" if code else "recorded"


def _compared(job: RecordedJob, path: Path) -> bool:
    if not path.exists():
        say(f"{job.name}: there is no recording")
        return False
    try:
        return replayed(job, path)
    except Exception as error:  # noqa: BLE001 (what is wrong with one says nothing of the others)
        say(f"{job.name}: cannot be compared, {type(error).__name__}: {error}")
        return False


if __name__ == "__main__":
    sys.exit(main())
