"""Kill runs at random moments and resume them: everything they leave must equal the undisturbed run's files.

    python -m tests.faults.kill_resume [--kills 25] [--seed 0] [--family sd15] [--set key=value ...]
    python -m tests.faults.kill_resume --all [--kills 5] [--record]      every optimizer, bf16 and fp16

Each trial starts the real command line in a separate process and kills it (SIGKILL, on Windows TerminateProcess) at a
random moment of caching, training, saving or previewing, in turn; resumes it, and in every third trial also kills the
resumed attempt, at any moment. Compared are every LoRA by SHA-256 of its tensors and all metadata except the time keys,
every image and note byte by byte, and the last checkpoint with the whole optimizer state. Jobs with 8-bit optimizers
must have 8-bit state in it, and those with fp16 must have had an overflow.

If the system can fork, processes come from one that has imported the libraries, which saves half of the time.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import io
import json
import multiprocessing
import os
import random
import runpy
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from tests.support.jobs import photographs, write_job
from tests.support.optimizers import NAMES, settings_of
from tests.support.tiny import tiny_base
from trainer.adapter.export import TIME_KEYS
from trainer.cli.common import quieten
from trainer.protocol.run_directory import steps_on_disk
from trainer.training.optim.master_weights import LossScaler

RESULTS = Path(__file__).resolve().parent / "results" / "kill_resume.md"
LIBRARIES = [
    "tests.support.tiny",
    "trainer.cli.planning",
    "trainer.memory.planner.planner",
    "trainer.memory.forecast.schedule",
]
LIBRARIES += ["trainer.training.run.start", "bitsandbytes.optim", "prodigyopt", "transformers.optimization"]
# Seconds after an event: most of a phase's work is done between two events.
DELAYS = (0.0, 0.0, 0.01, 0.03, 0.1, 0.3)
# In files above 1 MiB, kohya's legacy hash is of bytes that move with the length of the time in the metadata.
OF_THE_TIME = (*TIME_KEYS, "sshs_legacy_hash")
# Events that occur in every run; progress events depend on time.
STEADY = ("phase_started", "phase_finished", "step", "validation", "checkpoint", "saved", "preview")
PARTS: Mapping[str, tuple[str, ...]] = {
    "caching": ("phase_started:cache_pictures", "phase_started:cache_texts"),
    "training": ("phase_started:train", "step"),
    "saving": ("phase_started:save", "checkpoint", "saved"),
    "preview": ("phase_started:preview", "preview"),
}

# Rank 64 makes tensors of 4096 elements, from which bitsandbytes uses 8-bit state.
COMMON = ("recipe.rank=64", "recipe.alpha=64", "recipe.layers=attention", "recipe.steps=5", "report.validation.every=9")
ADAPTER = ("recipe.optimizer.name=adamw", "fit.dtype=bf16", "recipe.layers=all")
LIVE = ("recipe.dropout=0.1", "recipe.text_encoder.learning_rate=1e-4")
CASES: Mapping[str, tuple[str, ...]] = {
    **{f"{name}, fp32": tuple(settings_of(name)) for name in NAMES},
    "adamw8bit, bf16": ("recipe.optimizer.name=adamw8bit", "fit.dtype=bf16", *LIVE),
    # At this strength of the adapter, gradients overflow until the scale is a sixteenth.
    "int8 products, channels last, checkpointed, bf16": (
        *("recipe.optimizer.name=adamw8bit", "fit.dtype=bf16", "fit.quantize=int8_products"),
        *("fit.channels_last=true", "fit.gradient_checkpointing=full", "fit.micro_batch=1", *LIVE),
    ),
    **{
        f"{kind}, bf16": (
            "recipe.optimizer.name=adamw",
            "fit.dtype=bf16",
            f"recipe.adapter={kind}",
            "recipe.layers=all",
        )
        for kind in ("tlora", "dora", "loha", "lokr", "oft")
    },
    "ema, bf16": ("recipe.optimizer.name=adamw", "fit.dtype=bf16", "recipe.ema_decay=0.5", *LIVE),
    "text encoder stops, bf16": (
        *("recipe.optimizer.name=adamw", "fit.dtype=bf16", "recipe.text_encoder.stop_after=3"),
        *("fit.gradient_checkpointing=full", *LIVE),
    ),
    "folder settings, bf16": (
        *("recipe.optimizer.name=adamw", "fit.dtype=bf16", "dataset.folders.0.resolutions=[64,96]"),
        *(
            "dataset.folders.0.captions={shuffle=true,dropout=0.3}",
            "dataset.folders.0.images={flip=true,rotation=9,color_jitter=true}",
        ),
        "dataset.folders.0.timestep_max=400",
    ),
    "adamw, fp16": ("recipe.optimizer.name=adamw", "fit.dtype=fp16", *LIVE, "recipe.rank=8", "recipe.alpha=4096"),
}


class Lines(io.TextIOBase):
    """A standard output that sends every line to another process, which is notified of its end too."""

    def __init__(self, to: Connection) -> None:
        self.to = to

    def write(self, text: str) -> int:
        """Send each line that is not empty."""
        if text.strip():
            self.to.send(text)
        return len(text)


def command_line(arguments: Sequence[str], home: str, to: Connection) -> None:
    """Do what a process of `python -m trainer` does."""
    os.environ["IMPASTO_HOME"] = home
    sys.argv = ["trainer", *arguments, "--json"]
    sys.stdout = Lines(to)
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)


@cache
def processes() -> Any:
    """Return the multiprocessing context that starts processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    quieten()
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    return context


@dataclass(frozen=True)
class Moment:
    """When to kill: ``delay`` seconds after an event occurred ``times`` times; an empty name means any event."""

    name: str | None
    times: int
    delay: float

    def __str__(self) -> str:
        return f"{self.delay} s after {self.name or 'event'} {self.times}"


def run_trainer(arguments: Sequence[str], home: Path, moment: Moment | None = None) -> tuple[int, list[str]]:
    """Run the trainer, killed at ``moment`` if it gets that far; return exit code and event names."""
    here, there = processes().Pipe(duplex=False)
    process = processes().Process(target=command_line, args=(list(arguments), str(home), there))
    process.start()
    there.close()
    seen: list[str] = []
    timer: threading.Timer | None = None
    try:
        while True:
            seen.append(name_of(json.loads(here.recv())))
            come = len(seen) if moment and moment.name is None else seen.count((moment and moment.name) or "")
            if moment and timer is None and come == moment.times:
                timer = threading.Timer(moment.delay, process.kill)
                timer.start()
    except (EOFError, ConnectionError):
        process.join()
    if timer:
        timer.cancel()
    return process.exitcode, seen


def name_of(event: Mapping[str, object]) -> str:
    """Return the event's type, with its phase if it has one."""
    return f"{event['type']}:{event['phase']}" if "phase" in event else str(event["type"])


def left_by(run: Path) -> dict[str, object]:
    """Return everything that must be equal, by file: the user's files, and the last checkpoint."""
    left: dict[str, object] = {}
    last = run / "checkpoints" / f"step-{steps_on_disk(run / 'checkpoints')[-1]:08d}"
    for path in [*run.glob("output/*"), *run.glob("samples/*"), *last.iterdir()]:
        data, name = path.read_bytes(), path.relative_to(run).as_posix()
        if name.startswith("output/") and path.suffix == ".safetensors":
            data = data[8 + int.from_bytes(data[:8], "little") :]
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = {key: value for key, value in file.metadata().items() if key not in OF_THE_TIME}
            left[f"{name}, metadata"] = metadata
        left[name] = hashlib.sha256(data).hexdigest()
    return left


@dataclass
class Case:
    """One job: its undisturbed run, and the trials compared with it."""

    name: str
    folder: Path
    family: str
    settings: Sequence[str]
    chance: random.Random
    killed: int = 0
    runs: int = 0
    twice: int = 0
    moments: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.base = tiny_base(self.family, self.folder.parent / "bases")  # type: ignore[arg-type]
        self.pictures = photographs(self.folder.parent / "pictures")
        run, home = self.job("undisturbed"), self.folder / "home"
        code, self.events = run_trainer(self.train(run), home)
        assert code == 0, f"{self.name}: the undisturbed run ended with {code}"
        self.traces = home / "cache" / "traces"
        self.truth = left_by(run)
        self.require_state(run)

    def require_state(self, run: Path) -> None:
        """Check that the job has the state that is to survive the kills."""
        last = run / "checkpoints" / f"step-{steps_on_disk(run / 'checkpoints')[-1]:08d}"
        tensors = safetensors.torch.load_file(last / "optimizer.safetensors")
        eight_bit = any(tensor.dtype == torch.uint8 for tensor in tensors.values())
        assert eight_bit == ("8bit" in " ".join(self.settings)), f"{self.name}: 8-bit state is {eight_bit}"
        scaler = json.loads((last / "state.json").read_text(encoding="utf-8"))["scaler"]
        assert scaler is None or scaler["scale"] < LossScaler().scale, f"{self.name}: no overflow was met"

    def job(self, name: str) -> Path:
        """Return where the run of a new job will be."""
        return write_job(self.folder / name, self.base, self.pictures).parent / "runs" / "test"

    def train(self, run: Path) -> list[str]:
        """Return the command that starts a run."""
        return ["train", str(run.parents[1] / "job.toml"), *(part for one in self.settings for part in ("--set", one))]

    def trial(self, part: str) -> str:
        """Kill one run in ``part`` of it, maybe twice, and resume it; return a description of what was done."""
        self.runs += 1
        run, home = self.job(f"trial {self.runs}"), self.folder / f"home {self.runs}"
        shutil.copytree(self.traces, home / "cache" / "traces")  # speeds up planning, which is not killed
        story = self.attempt(self.train(run), home, self.moment_of(part), part)
        if self.runs % 3 == 0:
            self.twice += 1
            again = Moment(None, self.chance.randrange(1, 25), self.chance.choice(DELAYS))
            story += ", then " + self.attempt(self.go_on(run), home, again, "resumed")
        code, _ = run_trainer(self.go_on(run), home)
        assert code == 0, f"{self.name}, {story}: the resumed run ended with {code}"
        left = left_by(run)
        wrong = sorted(name for name in left.keys() | self.truth.keys() if left.get(name) != self.truth.get(name))
        assert not wrong, f"{self.name}, {story}: these differ: {', '.join(wrong)}; see {run}"
        return story

    def moment_of(self, part: str) -> Moment:
        """Return a random moment of a part of the run, after one of its regular events."""
        name = self.chance.choice([name for name in PARTS[part] if name in self.events])
        return Moment(name, self.chance.randint(1, self.events.count(name)), self.chance.choice(DELAYS))

    def go_on(self, run: Path) -> list[str]:
        """Return the command that continues: resume, or train if there is no attempt to resume yet."""
        record = run / "run.json"
        if record.exists() and json.loads(record.read_text(encoding="utf-8"))["attempts"]:
            return ["resume", str(run)]
        if run.exists():
            run.rename(run.with_name("never started"))
        return self.train(run)

    def attempt(self, arguments: Sequence[str], home: Path, moment: Moment, part: str) -> str:
        """Run one attempt that is killed; a late kill may miss its end."""
        code, seen = run_trainer(arguments, home, moment)
        if code != 0:
            self.killed += 1
            self.moments[part] += 1
        return f"killed {moment} (last event {seen[-1] if seen else 'none'}), exit {code}"


def record(cases: Sequence[Case]) -> None:
    """Write the results into the repository."""
    date = datetime.datetime.now(datetime.UTC).date()
    lines = [
        "# Runs killed at random moments and resumed",
        f"Made on {date} by `python -m tests.faults.kill_resume {' '.join(sys.argv[1:])}`, torch {torch.__version__},",
        "on the CPU, one thread. Tiny sd15, five steps. In every trial everything was equal to the",
        "undisturbed run's: every LoRA by SHA-256 of its tensors and by all metadata except "
        f"{' and '.join(f'`{key}`' for key in OF_THE_TIME)},",
        "every image and note byte by byte, and the last checkpoint with the whole optimizer state. Checkpoints of",
        "8-bit optimizers contained uint8 state; the loss scale of fp16 had come down.",
        "",
        "| job | trials | killed twice | kills | in caching | training | saving | preview | after resuming |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        parts = " | ".join(str(case.moments[part]) for part in (*PARTS, "resumed"))
        lines.append(f"| {case.name} | {case.runs} | {case.twice} | {case.killed} | {parts} |")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Run the campaign and print the result of every trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="of each job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=("sd15", "sdxl"), default="sd15")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--all", action="store_true", help="every optimizer, bf16 and fp16")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}, after every round of trials")
    options = parser.parse_args()
    table = CASES if options.all else {"the job": ()}
    with tempfile.TemporaryDirectory(prefix="impasto kill ü ") as folder:
        cases: list[Case] = []
        for number, (name, settings) in enumerate(table.items()):
            chance = random.Random(options.seed * 1000 + number)
            common = COMMON if options.all else ()
            where, given = Path(folder) / str(number), (*common, *settings, *options.set)
            cases.append(Case(name, where, options.family, given, chance))
        turn = 0
        while any(case.killed < options.kills for case in cases):
            for number, case in enumerate(cases):
                if case.killed < options.kills:
                    part = list(PARTS)[(turn + number) % len(PARTS)]
                    sys.stdout.write(f"{case.name}: equal: {case.trial(part)}\n")
                    sys.stdout.flush()
            turn += 1
            if options.record:
                record(cases)
    done = sum(case.killed for case in cases), sum(case.runs for case in cases)
    sys.stdout.write(f"{done[0]} kills in {done[1]} runs, all equal to the undisturbed ones\n")


if __name__ == "__main__":
    main()
