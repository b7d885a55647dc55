"""Forecast the time and memory that presets need on a GPU, with one long-running planner; visible presets first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.core.engine import ServedProcess
from app.core.events import Emitter
from app.core.planning.answer import PlanAnswer, answer_from
from app.core.planning.forecaster import HERE
from app.core.tasks import Post

if TYPE_CHECKING:
    from trainer.config.presets.preset import Preset


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """The plan for a recipe on a GPU, or the reason why there is none."""

    answer: PlanAnswer | None
    problem: str = ""


class CostEstimates:
    """Time and memory forecasts of presets, from a planner that runs while presets are shown; each answer is cached."""

    def __init__(self, post: Post) -> None:
        self.gpu = HERE
        self.changed: Emitter[None] = Emitter()
        """Emitted when an answer has arrived or another GPU was chosen."""
        self._served = ServedProcess(["plan", "--serve"], post)
        self._served.answered.connect(self._on_answered)
        self._served.ended.connect(self._on_ended)
        self._numbers = itertools.count()
        self._wanted: list[tuple[Path, Preset]] = []
        self._requested: tuple[int, Path, Preset, str] | None = None
        self._known: dict[tuple[Path, str], tuple[Preset, CostEstimate]] = {}

    def of(self, path: Path, preset: Preset) -> CostEstimate | None:
        """Return the estimate for a preset file on the chosen GPU; None if it is not known yet."""
        estimated, estimate = self._known.get((path, self.gpu), (None, None))
        # An edited recipe needs a new estimate.
        return estimate if estimated and estimated.recipe == preset.recipe else None

    def request(self, presets: Iterable[tuple[Path, Preset]]) -> None:
        """Request forecasts for these presets, in order, and drop earlier requests; skip presets without a recipe."""
        self._wanted = [(path, preset) for path, preset in presets if preset.recipe is not None]
        self._next()

    def choose(self, gpu: str) -> None:
        """Plan for another GPU: a name or memory size that the planner accepts, or `HERE` for this PC's GPU."""
        self.gpu = gpu
        self.changed.emit(None)
        self._next()

    def stop(self) -> None:
        """Stop the planner; the next `request` starts it again."""
        self._wanted, self._requested = [], None
        self._served.stop()

    def close(self) -> None:
        """Stop the planner and wait until it has ended."""
        self.stop()
        self._served.close()

    def _next(self) -> None:
        if self._requested is not None:
            return
        waiting = ((path, preset) for path, preset in self._wanted if self.of(path, preset) is None)
        path, preset = next(waiting, (None, None))
        if path is not None and preset is not None:
            self._request(path, preset)

    def _request(self, path: Path, preset: Preset) -> None:
        number = next(self._numbers)
        self._requested = number, path, preset, self.gpu
        request = {"id": number, "family": preset.base.family, "recipe": str(path), "gpu": self.gpu}
        try:
            self._served.send(request)
        except OSError as error:
            self._store(CostEstimate(None, problem=f"Could not start the planner: {error}"))

    def _on_answered(self, message: dict[str, Any]) -> None:
        if self._requested is None or message.get("id") != self._requested[0]:
            return
        state = message.get("state")
        # The pick suffices, because alternatives are not shown; while fits are left out, it is preliminary.
        if state == "done" or (state == "pick" and "fits" not in message["plan"]["left_out"]):
            self._store(CostEstimate(answer_from(message["plan"], whole=False)))
        elif state == "error":
            self._store(CostEstimate(None, problem=str(message.get("sentence", ""))))
        elif state == "cancelled":
            self._requested = None
            self._next()

    def _store(self, estimate: CostEstimate) -> None:
        if self._requested is None:
            return
        _, path, preset, gpu = self._requested
        self._known[path, gpu] = preset, estimate
        self._requested = None
        self.changed.emit(None)
        self._next()

    def _on_ended(self, words: str) -> None:
        """Store the planner's last message as the problem; do not retry, as the request would fail again."""
        if self._requested is not None:
            last = words.splitlines()[-1] if words else "The planner stopped unexpectedly."
            self._store(CostEstimate(None, problem=last))
