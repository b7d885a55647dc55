"""Run directories as an engine leaves them, written by the engine's own classes but without training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from PIL import Image, ImageDraw

from trainer.protocol import events
from trainer.protocol.events import EventWriter
from trainer.protocol.run_directory import RunDirectory, State, Status

PROMPTS = (
    "sks cat on a wooden table, soft light",
    "sks cat in the snow, close-up, winter morning",
    "a dog <b>beside</b> a red car",
)


def write_frozen_job(run: RunDirectory, prompts: Iterable[str] = PROMPTS, steps: int = 1000) -> None:
    """Write those parts of a job that the app reads."""
    listed = ",\n".join(f'{{prompt = "{prompt}", width = 256, height = 320}}' for prompt in prompts)
    run.job.write_text(
        f"""schema = 3
name = "{run.name}"
[base]
model = 'base.safetensors'
[[dataset.folders]]
path = 'pictures'
[recipe]
steps = {steps}
resolution = 512
[report.previews]
prompts = [{listed}]
""",
        encoding="utf-8",
    )


def sample(run: RunDirectory, step: int, index: int, size: tuple[int, int] = (256, 320)) -> events.Preview:
    """Write a preview image and return its event; each image differs from every other."""
    shade = min(255, step // 4)
    picture = Image.new("RGB", size, (shade, 60 + 50 * index % 190, 255 - shade))
    pen = ImageDraw.Draw(picture)
    pen.ellipse((size[0] // 4, size[1] // 4, size[0] * 3 // 4, size[1] * 3 // 4), fill=(255 - shade, 200, shade))
    pen.text((12, 12), f"{step} / {index}", fill=(255, 255, 255))
    file = run.samples / f"step-{step:08d}-{index}.png"
    picture.save(file)
    return events.Preview(step=step, index=index, file=f"samples/{file.name}", seconds=1.5)


class RunWriter:
    """Writes what an engine would write, and holds the run as it does."""

    def __init__(self, run: RunDirectory, writer: EventWriter, attempt: int, steps: int) -> None:
        self.run, self._writer, self._attempt, self._steps = run, writer, attempt, steps

    def tell(self, *written: events.Event) -> None:
        """Write events."""
        for event in written:
            self._writer.write(event)

    def draw(self, *steps: int, prompts: int = len(PROMPTS)) -> None:
        """Write previews of these steps."""
        for step in steps:
            self.tell(*(sample(self.run, step, index) for index in range(prompts)))

    def save(self, step: int) -> Path:
        """Write a placeholder file as the LoRA of a step."""
        file = self.run.output / f"{self.run.name}-step{step:06d}.safetensors"
        file.write_bytes(b"a LoRA")
        self.tell(events.Saved(step=step, file=f"output/{file.name}", sha256="0" * 64))
        return file

    def stand(self, state: State, step: int, phase: events.Phase | None = None) -> None:
        """Write the status of the run."""
        self.run.write_status(Status(state, phase, step, self._steps, self._attempt, 1000.0 + step))


@contextlib.contextmanager
def held(run: RunDirectory, steps: int = 1000) -> Iterator[RunWriter]:
    """Yield the writer of a running attempt; without further events, the attempt ends like a crash."""
    with run.hold():
        attempt = run.begin_attempt({"device": "cpu", "threads": 1, "versions": {"impasto": "0.1.0"}})
        with EventWriter(run.events, attempt) as writer:
            teller = RunWriter(run, writer, attempt, steps)
            teller.tell(events.AttemptStarted(pid=1, device="cpu"))
            teller.stand("running", 0, "load")
            yield teller


def new_run(folder: Path, name: str, prompts: Iterable[str] = PROMPTS, steps: int = 1000) -> RunDirectory:
    """Create a run that has not been started."""
    run = RunDirectory.create(folder, name)
    write_frozen_job(run, prompts, steps)
    return run
