"""Ask the planner for the configurations that fill a GPU best, in a process of its own."""

from __future__ import annotations

from typing import Any, Literal

from app.core.engine import ServedProcess
from app.core.events import Emitter
from app.core.planning.forecaster import ForecastRequest
from app.core.tasks import Post
from trainer.config.recipe import RecipeConfig
from trainer.errors import ImpastoError
from trainer.protocol.processes import error_in
from trainer.protocol.sweep import Sweep, SweepPoint, sweep_from

SweepState = Literal["idle", "asked", "reading", "tracing", "done", "failed"]


class Sweeper:
    """Client of a plan server that answers sweeps, for the thread that created it.

    It has a process of its own, because a request to the forecast's server drops the forecast that is being computed.
    """

    def __init__(self, post: Post) -> None:
        self.changed: Emitter[None] = Emitter()
        """Emitted when an attribute changes."""
        self.state: SweepState = "idle"
        self.found: Sweep | None = None
        self.error: ImpastoError | None = None
        """Why the last request failed."""
        self._served = ServedProcess(["plan", "--serve"], post)
        self._served.answered.connect(self._on_answered)
        self._served.ended.connect(self._on_ended)

    def ask(self, request: ForecastRequest) -> None:
        """Request the configurations for a job on a GPU."""
        message = {"id": 1, "job": str(request.job), "gpu": request.gpu, "set": list(request.overrides), "sweep": True}
        self.found = None
        try:
            self._served.send(message)
        except OSError as error:
            self._fail(str(error))
            return
        self._set("asked")

    def close(self) -> None:
        """Stop the process, even in the middle of a sweep."""
        self._served.close()

    def _on_answered(self, message: dict[str, Any]) -> None:
        state = message.get("state")
        if state == "error":
            self._set("failed", error_in(message))
        elif state in ("reading", "tracing"):
            self._set(state)
        elif state == "done":
            try:
                self.found = sweep_from(message["sweep"])
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self._fail(f"the answer could not be read, {error}")
                return
            self._served.stop()  # it holds memory that training may need
            self._set("done")

    def _on_ended(self, words: str) -> None:
        if self.state in ("asked", "reading", "tracing"):
            self._fail(words.splitlines()[-1][:200] if words else "the planner stopped unexpectedly")

    def _fail(self, reason: str) -> None:
        sentence = f"Could not look for configurations: {reason}."
        self._set("failed", ImpastoError("sweep.failed", sentence, "Close this window, then try again."))

    def _set(self, state: SweepState, error: ImpastoError | None = None) -> None:
        self.state, self.error = state, error
        self.changed.emit(None)


def settings_of(point: SweepPoint, recipe: RecipeConfig | None) -> dict[str, Any]:
    """Return the job settings of a configuration, as values by key.

    ``recipe`` is that of the job if it has an alpha, which is changed with the rank so that the LoRA keeps its scale.
    """
    blocks = point.gradient_checkpointing
    keys: dict[str, Any] = {
        "recipe.resolution": point.resolution,
        "recipe.rank": point.rank,
        "recipe.effective_batch": point.batch,
        "recipe.optimizer.name": point.optimizer,
        "fit.micro_batch": point.batch,
        "fit.quantize": point.quantize,
        "fit.gradient_checkpointing": blocks if isinstance(blocks, str) else list(blocks),
    }
    if recipe is not None:
        keys["recipe.alpha"] = recipe.alpha_at(point.rank)
    return keys
