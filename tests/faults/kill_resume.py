"""Kills runs at random moments and resumes them: the LoRA must be the undisturbed one, bit for bit.

    python -m tests.faults.kill_resume [--kills 25] [--seed 0] [--family sd15] [--set key=value ...]

Each trial starts a real `python -m trainer train --json`, kills it (SIGKILL, on Windows TerminateProcess) right after a
randomly chosen event (caching, checkpoint, save, preview and steps included) or a random fraction of a second later,
resumes it, kills the resumed attempt too in every third trial, and compares SHA-256 of the tensors and all metadata but
the time keys.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import safetensors

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.adapter.metadata import TIME_KEYS

ROOT = Path(__file__).resolve().parents[2]


def facts_of(lora: Path) -> tuple[str, dict[str, str]]:
    """SHA-256 of a LoRA's tensors, and its metadata without what tells the time."""
    data = lora.read_bytes()
    payload = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
    with safetensors.safe_open(lora, framework="pt") as file:
        return payload, {key: value for key, value in file.metadata().items() if key not in TIME_KEYS}


def run_trainer(arguments: Sequence[str], home: Path, kill_after: int | None, delay: float) -> tuple[int, list[str]]:
    """Runs the trainer, killed ``delay`` seconds after event ``kill_after``; returns exit code and event names."""
    environment = os.environ | {"IMPASTO_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer", *arguments, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment, cwd=ROOT)
    assert process.stdout is not None
    seen: list[str] = []
    timer: threading.Timer | None = None
    for line in process.stdout:
        seen.append(name_of(json.loads(line)))
        if kill_after is not None and len(seen) == kill_after:
            timer = threading.Timer(delay, process.kill)
            timer.start()
    code = process.wait()
    if timer:
        timer.cancel()
    return code, seen


def name_of(event: dict[str, object]) -> str:
    """The event's type, with its phase where it has one."""
    return f"{event['type']}:{event['phase']}" if "phase" in event else str(event["type"])


class Campaign:
    """One reference run and the trials against it."""

    def __init__(self, folder: Path, family: str, settings: Sequence[str], seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.killed = 0
        self.settings = [part for setting in settings for part in ("--set", setting)]
        self.base = tiny_base(family, folder / "bases")  # type: ignore[arg-type]
        self.pictures = photographs(folder / "pictures")
        job = self.job("undisturbed")
        code, self.events = run_trainer(["train", str(job), *self.settings], folder / "undisturbed home", None, 0)
        assert code == 0, f"the undisturbed run ended with {code}"
        self.truth = facts_of(job.parent / "runs" / "test" / "output" / "test.safetensors")

    def job(self, name: str) -> Path:
        """A job in a folder of its own."""
        return write_job(self.folder / name, self.base, self.pictures)

    def trial(self, number: int) -> str:
        """One run that is killed, maybe twice, and resumed to its end; returns what was done in words."""
        job, home = self.job(f"trial {number}"), self.folder / f"home {number}"
        run = job.parent / "runs" / "test"
        story = self.attempt(["train", str(job), *self.settings], home, len(self.events))
        for _ in range(1 if number % 3 == 0 else 0):
            # What is left of a run has fewer events than the whole.
            story += ", then " + self.attempt(self.go_on(job, run), home, len(self.events) // 4)
        code, _ = run_trainer(self.go_on(job, run), home, None, 0)
        assert code == 0, f"{story}: the resumed run ended with {code}"
        assert facts_of(run / "output" / "test.safetensors") == self.truth, f"{story}: the LoRA differs"
        return story

    def go_on(self, job: Path, run: Path) -> list[str]:
        """The command that continues: resume, or train when the kill came before there was an attempt to resume."""
        record = run / "run.json"
        started = record.exists() and json.loads(record.read_text(encoding="utf-8"))["attempts"]
        if started:
            return ["resume", str(run)]
        if run.exists():
            run.rename(run.with_name("never started"))
        return ["train", str(job), *self.settings]

    def attempt(self, arguments: Sequence[str], home: Path, most: int) -> str:
        """One attempt that is killed at a random one of its first ``most`` events; a late kill may miss its end."""
        at = self.chance.randrange(1, most)
        delay = self.chance.choice([0.0, 0.0, 0.01, 0.05, 0.2])
        code, seen = run_trainer(arguments, home, at, delay)
        self.killed += code != 0
        return f"killed {delay} s after event {at} ({seen[min(at, len(seen)) - 1]}), exit {code}"


def main() -> None:
    """Runs the campaign and says what every trial was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=("sd15", "sdxl"), default="sd15")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="impasto kill ü ") as folder:
        campaign = Campaign(Path(folder), options.family, options.set, options.seed)
        number = 0
        while campaign.killed < options.kills:
            number += 1
            sys.stdout.write(f"{number:3d} equal: {campaign.trial(number)}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{campaign.killed} kills in {number} runs, every LoRA equal to the undisturbed one\n")


if __name__ == "__main__":
    main()
