"""Golden losses of tiny runs: a refactor must not move them.

`python -m tests.golden.losses` renews tests/golden/losses.json; say in the commit why they moved.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.protocol import events
from trainer.training.run.start import start

FILE = Path(__file__).with_suffix(".json")

# Each name is a run; the settings are what differs from the job of tests/support/jobs.py.
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sd15": ("sd15", ()),
    "sdxl": ("sdxl", ()),
    "sd15 min-snr, noise offset, all layers": (
        "sd15",
        ("recipe.objective.min_snr_gamma=5.0", "recipe.objective.noise_offset=0.05", "recipe.layers=all"),
    ),
    "sdxl with text encoders, huber, shuffled tags": (
        "sdxl",
        (
            "recipe.text_encoder.learning_rate=1e-4",
            "recipe.text_encoder_2.learning_rate=1e-4",
            "recipe.objective.loss=huber",
            "recipe.captions.shuffle=true",
        ),
    ),
}


def losses_of(name: str, folder: Path) -> list[float | None]:
    """Trains one of RUNS in ``folder`` and returns the loss of every step."""
    family, settings = RUNS[name]
    base = tiny_base(family, folder / "bases")  # type: ignore[arg-type]
    job = write_job(folder / "job", base, photographs(folder / "pictures"))
    seen: list[float | None] = []

    def watch(event: events.Event) -> None:
        if isinstance(event, events.StepEvent):
            seen.append(event.loss)

    start(job, ["report.previews.prompts=[]", *settings], watch)
    return seen


def main() -> None:
    """Writes the losses as they are now."""
    with tempfile.TemporaryDirectory() as folder:
        losses = {name: losses_of(name, Path(folder) / str(number)) for number, name in enumerate(RUNS)}
    FILE.write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
