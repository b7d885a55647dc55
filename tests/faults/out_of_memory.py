"""Make memory run out at random allocations of whole runs: the LoRA must equal that of a run with the same fit changes.

    python -m tests.faults.out_of_memory [--points 50] [--seed 0] [--family sd15] [--set key=value ...]

Each trial trains a real tiny job in this process and raises torch.OutOfMemoryError at a random allocation (or, in every
third trial, at a random operation of the optimizer) after a randomly chosen event, one to four times. In every fourth
trial the run is killed at a later event and resumed. The result is compared, by SHA-256 of the tensors and all metadata
except the time keys, with a run without recovery that is paused, edited and resumed at the steps where the first one
fell back; if only exact fallbacks were taken, also with the undisturbed run. A run that has no fallback left must end
with an error and exit code 75, and resuming it is compared in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.exhaustion import Exhaustion, Killed, Trial, run_with_changes
from tests.support.jobs import photographs, write_job
from tests.support.optimizers import NAMES
from tests.support.tiny import tiny_base
from trainer.protocol import events
from trainer.protocol.run_directory import RunDirectory

LADDER = (
    "fallbacks=[{exact=true, vae_tiling=true}, {exact=true, preview_offload=true}, "
    '{exact=true, gradient_checkpointing="full"}, {exact=false, micro_batch=1}]'
)
STEPS = 5
MOST_ALLOCATIONS = 4000
# Out of the operations of one optimizer step; AdamW's has two.
MOST_OF_OPTIMIZER = {"adamw": 4}


Changes = list[tuple[int, dict[str, object]]]


def changes_of(seen: Sequence[events.Event]) -> Changes:
    """Return what changed and from which step on, from the events."""
    return [(event.step, dict(event.changes)) for event in seen if isinstance(event, events.SteppedDown)]


def kept(run: RunDirectory) -> Changes:
    """Return the same from the newest checkpoint, if there is one."""
    newest = max(run.checkpoints.glob("step-*"), default=None)
    if newest is None:
        return []
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    return [
        (
            taken["step"],
            {key: value for key, value in taken["fallback"].items() if value is not None and key != "exact"},
        )
        for taken in state["fallbacks"]
    ]


class Campaign:
    """Runs with random shortages, and the runs that they are compared with."""

    def __init__(self, folder: Path, family: str, settings: Sequence[str], seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.settings = [f"recipe.steps={STEPS}", "report.validation.timesteps=[500]", LADDER, *settings]
        self.base = tiny_base(family, folder / "bases")  # type: ignore[arg-type]
        self.pictures = photographs(folder / "pictures")
        self.made = 0
        self.known: dict[str, tuple[str, dict[str, str]]] = {}

    def job(self) -> Path:
        """Write a job in a separate folder."""
        self.made += 1
        return write_job(self.folder / f"job {self.made}", self.base, self.pictures)

    def truth(self, settings: Sequence[str], changes: Changes) -> object:
        """Return the LoRA of a run with the same fit changes; changes after the last step do not count."""
        changes = [(step, changed) for step, changed in changes if step < STEPS]
        key = repr((settings, changes))
        if key not in self.known:
            self.known[key] = run_with_changes(self.job(), settings, changes).lora()
        return self.known[key]

    def trial(self, number: int) -> tuple[bool, str]:
        """Run one trial; return whether memory ran out in it, and a description of what was done."""
        chance = self.chance
        optimizer = chance.choice(NAMES)
        settings = [*self.settings, f"recipe.optimizer.name={optimizer}"]
        first, in_optimizer = chance.randint(5, 60), number % 3 == 0
        most = MOST_OF_OPTIMIZER.get(optimizer, 40) if in_optimizer else MOST_ALLOCATIONS
        at, times = chance.randint(1, most), chance.randint(1, 4)
        kill_at = first + chance.randint(5, 40) if number % 4 == 0 else None
        exhaustion = Exhaustion(lambda _: len(trial.seen) >= first, at, times, in_optimizer=in_optimizer)

        def act(event: events.Event) -> None:
            exhaustion.tell(event)
            if kill_at is not None and len(trial.seen) >= kill_at and isinstance(event, events.StepEvent):
                exhaustion.close()
                raise Killed

        trial = Trial(self.job(), settings, act)
        trial.start()
        exhaustion.close()
        ended, before = trial.code, len(trial.seen)
        taken = changes_of(trial.seen)
        if ended != 0:
            assert ended in (None, 75), f"ended with {ended}: {trial.error}"
            # The last fallback is lost if the run ended before the next step.
            taken = kept(trial.run) + changes_of(trial.resume().seen[before:])
        shortages = trial.of(events.MemoryExhausted)
        phases = ", ".join(f"{event.phase} {event.stage}".strip() for event in shortages)
        story = f"{settings[-1]}: out of memory in [{phases}], fell back {taken}, first exit {ended}"
        assert trial.code == 0, story
        assert trial.lora() == self.truth(settings, taken), (
            f"{story}: the LoRA differs from that of a run with the same fit changes"
        )
        if not any("micro_batch" in changed for _, changed in taken):
            assert trial.lora() == self.truth(settings, []), f"{story}: the LoRA differs from the undisturbed one"
        return bool(shortages), story


def main() -> None:
    """Run the campaign and print the result of every trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=("sd15", "sdxl"), default="sd15")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory(prefix="impasto memory ü ") as folder:
        os.environ |= {"HF_HUB_OFFLINE": "1", "IMPASTO_HOME": str(Path(folder) / "home")}
        campaign = Campaign(Path(folder), options.family, options.set, options.seed)
        number = hit = 0
        while hit < options.points:
            number += 1
            happened, story = campaign.trial(number)
            hit += happened
            sys.stdout.write(f"{number:3d} equal: {story}\n")
            sys.stdout.flush()
    sys.stdout.write(
        f"memory ran out in {hit} of {number} runs, every LoRA equal to that of a run with the same fit changes\n"
    )


if __name__ == "__main__":
    main()
