"""Pictures that the engine draws with a run's LoRAs: one to try something, or a grid of steps and strengths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.core.engine import ServedProcess
from app.core.events import Emitter
from app.core.tasks import Post
from trainer.errors import ImpastoError, RunError

if TYPE_CHECKING:
    from app.core.runs.queue import Look
    from trainer.config.job import Job

_REMEDY = "Try again. If it happens again, please report this message."


@dataclass(frozen=True, slots=True)
class GridCell:
    """One picture to draw: a LoRA at a strength (None: the base alone), and a prompt's settings as a job has them."""

    lora: Path | None
    strength: float
    prompt: dict[str, Any]

    def request(self) -> dict[str, Any]:
        """Return it as trainer/render/serve.py takes it."""
        loras = [{"file": str(self.lora), "strength": self.strength}] if self.lora else []
        return {"loras": loras, "prompt": self.prompt}


def grid(loras: Sequence[Path], strengths: Sequence[float], prompts: Sequence[dict[str, Any]]) -> list[GridCell]:
    """Return the cells of a grid in the order in which they are drawn soonest: LoRAs change as rarely as can be."""
    return [GridCell(lora, strength, prompt) for lora, strength, prompt in product(loras, strengths, prompts)]


@dataclass
class RenderJob:
    """What was asked of the engine, and how far it is. The events belong to the thread of the window."""

    cells: tuple[GridCell, ...]
    files: dict[int, Path] = field(default_factory=dict)
    """What is drawn, by the cell's place."""
    stage: str = "starting"
    """starting, loading, drawing, done, cancelled or failed."""
    share: float = 0.0
    """How much of the stage is done, 0 to 1; over all cells while they are drawn."""
    changed: Emitter[None] = field(default_factory=Emitter)
    """It is further, or over."""
    drawn: Emitter[int] = field(default_factory=Emitter)
    """The cell of this place has its picture."""
    noticed: Emitter[str] = field(default_factory=Emitter)
    """A sentence that should be known and hinders nothing."""
    failed: Emitter[ImpastoError] = field(default_factory=Emitter)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.stage in ("done", "cancelled", "failed")


class RenderClient:
    """The resident renderer, one drawing at a time: a new one cancels that before.

    It starts with the first drawing and keeps the base in memory until nothing was asked for a while, the app ends, or
    a training wants the card.
    """

    def __init__(self, post: Post) -> None:
        self._served = ServedProcess(("render", "--serve"), post)
        self._served.answered.connect(self._hear)
        self._served.ended.connect(self._lose)
        self._numbers = count(1)
        self._number = 0
        self._drawing: RenderJob | None = None
        self._warm = self._on_cpu = False

    def draw(self, job: Job, cells: Sequence[GridCell], folder: Path) -> RenderJob:
        """Draw cells into a folder with the base of a job; the pictures come as `RenderJob.drawn`."""
        self._end("cancelled")
        self._number = next(self._numbers)
        drawing = self._drawing = RenderJob(tuple(cells))
        self._ask(
            {
                "id": self._number,
                "base": job.base.model_dump(mode="json", exclude_none=True),
                "clip_skip": job.recipe.clip_skip,
                "out": str(folder),
                "pictures": [cell.request() for cell in cells],
            }
        )
        return drawing

    def cancel(self) -> None:
        """Draw no more; what is drawn stays."""
        if self._drawing and not self._drawing.over:
            self._ask({"id": next(self._numbers), "do": "cancel"})
            self._end("cancelled")

    def free(self) -> None:
        """Give up the card at once, to the last byte: the process ends, the next drawing starts another."""
        self._end("cancelled")
        self._warm = self._on_cpu = False
        self._served.rest()

    def make_way(self, queue: Look) -> None:
        """Give up the card where something waits in the queue for its turn now; on the CPU there is room for both."""
        if self._warm and not self._on_cpu and queue.presses(time.time()):
            sentence = "A training that waits in the queue was given the memory that drawing needs."
            self._fail(RunError("render.way", sentence, "Draw again when it is done, or pause it."))
            self.free()

    def close(self) -> None:
        """End the engine's process."""
        self._drawing = None
        self._served.close()

    def _ask(self, request: dict[str, Any]) -> None:
        self._warm = True
        try:
            self._served.ask(request)
        except OSError as error:
            self._fail(RunError("render.start", f"The engine cannot be started: {error.strerror or error}.", _REMEDY))

    def _hear(self, answer: dict[str, Any]) -> None:
        drawing = self._drawing
        if drawing is None or drawing.over or answer.get("id") != self._number:
            return
        match answer["state"]:
            case "loading":
                self._on_cpu = answer["device"] == "cpu"
                drawing.stage, drawing.share = "loading", answer["done"] / max(1, answer["total"])
            case "drawing":
                drawing.stage = "drawing"
                drawing.share = (answer["picture"] + answer["step"] / answer["steps"]) / len(drawing.cells)
            case "drawn":
                drawing.files[answer["picture"]] = Path(answer["file"])
                drawing.drawn.emit(answer["picture"])
            case "notice":
                drawing.noticed.emit(answer["sentence"])
            case "done" | "cancelled" as stage:
                self._end(stage)
                return
            case "error":
                self._fail(ImpastoError(answer["code"], answer["sentence"], answer["remedy"]))
                return
        drawing.changed.emit(None)

    def _lose(self, words: str) -> None:
        last = words.splitlines()[-1] if words else "it said nothing"
        self._warm = self._on_cpu = False
        self._fail(RunError("render.ended", f"The engine that draws has ended: {last}.", _REMEDY))

    def _fail(self, error: ImpastoError) -> None:
        drawing = self._drawing
        if drawing and not drawing.over:
            self._end("failed")
            drawing.failed.emit(error)

    def _end(self, stage: str) -> None:
        drawing = self._drawing
        if drawing and not drawing.over:
            drawing.stage = stage
            drawing.changed.emit(None)
