"""Render images with a run's LoRAs: single images, or grids of steps and strengths."""

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
from trainer.protocol.processes import error_in

if TYPE_CHECKING:
    from app.core.runs.queue import QueueState
    from trainer.config.job import Job

_REMEDY = "Try again. If it happens again, please report this message."


@dataclass(frozen=True, slots=True)
class GridCell:
    """One image to render: a LoRA (None for the base alone), its strength, and prompt settings as in a job."""

    lora: Path | None
    strength: float
    prompt: dict[str, Any]

    def request(self) -> dict[str, Any]:
        """Return a request for this image in the format that trainer/render/serve.py reads."""
        loras = [{"file": str(self.lora), "strength": self.strength}] if self.lora else []
        return {"loras": loras, "prompt": self.prompt}


def grid(loras: Sequence[Path], strengths: Sequence[float], prompts: Sequence[dict[str, Any]]) -> list[GridCell]:
    """Return one cell for each combination of LoRA, strength and prompt, grouped by LoRA."""
    return [GridCell(lora, strength, prompt) for lora, strength, prompt in product(loras, strengths, prompts)]


@dataclass
class RenderJob:
    """A render request and its progress. Its events are emitted on the window's thread."""

    cells: tuple[GridCell, ...]
    files: dict[int, Path] = field(default_factory=dict)
    """Rendered files by cell index."""
    stage: str = "starting"
    """One of starting, loading, drawing, done, cancelled and failed."""
    share: float = 0.0
    """Completed fraction of the current stage, 0 to 1; the stage "drawing" covers all cells of the request."""
    changed: Emitter[None] = field(default_factory=Emitter)
    """Emitted when the stage or its progress changes."""
    image_ready: Emitter[int] = field(default_factory=Emitter)
    """Emitted with a cell's index when its image is ready."""
    noticed: Emitter[str] = field(default_factory=Emitter)
    """Emitted with a notice that does not stop the rendering."""
    failed: Emitter[ImpastoError] = field(default_factory=Emitter)

    @property
    def is_over(self) -> bool:
        """Return whether the job is done, canceled or failed."""
        return self.stage in ("done", "cancelled", "failed")


class RenderClient:
    """Client of the long-running renderer process. A new job cancels the previous one.

    The process starts with the first job and keeps the base in memory until it has been idle for a while, the app
    ends, or a training run needs the GPU.
    """

    def __init__(self, post: Post) -> None:
        self._served = ServedProcess(("render", "--serve"), post)
        self._served.answered.connect(self._on_answered)
        self._served.ended.connect(self._on_ended)
        self._numbers = count(1)
        self._number = 0
        self._drawing: RenderJob | None = None
        self._warm = self._on_cpu = False

    def render(self, job: Job, cells: Sequence[GridCell], folder: Path) -> RenderJob:
        """Render cells into a folder with a job's base; the returned job emits `image_ready` for each image."""
        self._end("cancelled")
        self._number = next(self._numbers)
        current = self._drawing = RenderJob(tuple(cells))
        self._ask(
            {
                "id": self._number,
                "base": job.base.model_dump(mode="json", exclude_none=True),
                "clip_skip": job.recipe.clip_skip,
                "out": str(folder),
                "images": [cell.request() for cell in cells],
            }
        )
        return current

    def cancel(self) -> None:
        """Cancel the current job; finished images stay."""
        if self._drawing and not self._drawing.is_over:
            self._ask({"id": next(self._numbers), "do": "cancel"})
            self._end("cancelled")

    def free(self) -> None:
        """End the process to free all of its GPU memory immediately; the next job starts a new process."""
        self._end("cancelled")
        self._warm = self._on_cpu = False
        self._served.stop()

    def make_way(self, queue: QueueState) -> None:
        """Free the GPU if a queued run is ready to start; a renderer on the CPU keeps running."""
        if self._warm and not self._on_cpu and queue.has_ready_entry(time.time()):
            sentence = "Could not finish rendering: a queued training run needs the GPU memory."
            self._fail(RunError("render.way", sentence, "Render again when the run has ended, or pause the run."))
            self.free()

    def close(self) -> None:
        """End the renderer process."""
        self._drawing = None
        self._served.close()

    def _ask(self, request: dict[str, Any]) -> None:
        self._warm = True
        try:
            self._served.send(request)
        except OSError as error:
            self._fail(RunError("render.start", f"Could not start the renderer: {error.strerror or error}.", _REMEDY))

    def _on_answered(self, answer: dict[str, Any]) -> None:
        current = self._drawing
        if current is None or current.is_over or answer.get("id") != self._number:
            return
        match answer["state"]:
            case "loading":
                self._on_cpu = answer["device"] == "cpu"
                current.stage, current.share = "loading", answer["done"] / max(1, answer["total"])
            case "rendering":
                current.stage = "drawing"
                current.share = (answer["image"] + answer["step"] / answer["steps"]) / len(current.cells)
            case "rendered":
                current.files[answer["image"]] = Path(answer["file"])
                current.image_ready.emit(answer["image"])
            case "notice":
                current.noticed.emit(answer["sentence"])
            case "done" | "cancelled" as stage:
                self._end(stage)
                return
            case "error":
                self._fail(error_in(answer))
                return
        current.changed.emit(None)

    def _on_ended(self, output: str) -> None:
        last = output.splitlines()[-1] if output else "no output"
        self._warm = self._on_cpu = False
        self._fail(RunError("render.ended", f"Could not render: the renderer stopped unexpectedly ({last}).", _REMEDY))

    def _fail(self, error: ImpastoError) -> None:
        current = self._drawing
        if current and not current.is_over:
            self._end("failed")
            current.failed.emit(error)

    def _end(self, stage: str) -> None:
        current = self._drawing
        if current and not current.is_over:
            current.stage = stage
            current.changed.emit(None)
