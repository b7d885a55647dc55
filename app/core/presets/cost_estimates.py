"""What presets would cost on a card, asked of a resident planner one after the other, first those looked at."""

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
    """How a recipe would be fitted to a card, or what hinders to know it."""

    answer: PlanAnswer | None
    problem: str = ""


class CostEstimates:
    """One planner, which runs while somebody looks; `want` says at what, and each answer is kept."""

    def __init__(self, post: Post) -> None:
        self.gpu = HERE
        self.changed: Emitter[None] = Emitter()
        """There is an answer more, or it is about another card."""
        self._served = ServedProcess(["plan", "--serve"], post)
        self._served.answered.connect(self._hear)
        self._served.ended.connect(self._lose)
        self._numbers = itertools.count()
        self._wanted: list[tuple[Path, Preset]] = []
        self._requested: tuple[int, Path, Preset, str] | None = None
        self._known: dict[tuple[Path, str], tuple[Preset, CostEstimate]] = {}

    def of(self, path: Path, preset: Preset) -> CostEstimate | None:
        """Return what is known of a preset in a file on the card chosen; None where it is not known yet."""
        found = self._known.get((path, self.gpu))
        return found[1] if found and found[0].recipe == preset.recipe else None

    def want(self, presets: Iterable[tuple[Path, Preset]]) -> None:
        """Find these out next, in this order, and nothing else; those without a recipe need no plan."""
        self._wanted = [(path, preset) for path, preset in presets if preset.recipe is not None]
        self._next()

    def choose(self, gpu: str) -> None:
        """Plan for another card, by its name or memory as the planner takes them, or for that of this PC."""
        self.gpu = gpu
        self.changed.emit(None)
        self._next()

    def stop(self) -> None:
        """End the planner; it starts again when something is wanted."""
        self._wanted, self._requested = [], None
        self._served.stop()

    def close(self) -> None:
        """End the planner and wait for its end."""
        self.stop()
        self._served.close()

    def _next(self) -> None:
        if self._requested is not None:
            return
        waiting = ((path, preset) for path, preset in self._wanted if self.of(path, preset) is None)
        path, preset = next(waiting, (None, None))
        if path is not None and preset is not None:
            self._ask(path, preset)

    def _ask(self, path: Path, preset: Preset) -> None:
        number = next(self._numbers)
        self._requested = number, path, preset, self.gpu
        request = {"id": number, "family": preset.base.family, "recipe": str(path), "gpu": self.gpu}
        try:
            self._served.ask(request)
        except OSError as error:
            self._have(CostEstimate(None, problem=f"The planner cannot be started: {error}"))

    def _hear(self, said: dict[str, Any]) -> None:
        if self._requested is None or said.get("id") != self._requested[0]:
            return
        state = said.get("state")
        if state == "done" or (state == "pick" and said["plan"]["complete"]):  # what stands beside it is not shown
            self._have(CostEstimate(answer_from(said["plan"], whole=False)))
        elif state == "error":
            self._have(CostEstimate(None, problem=str(said.get("sentence", ""))))
        elif state == "cancelled":
            self._requested = None
            self._next()

    def _have(self, outlook: CostEstimate) -> None:
        if self._requested is None:
            return
        _, path, preset, gpu = self._requested
        self._known[path, gpu] = preset, outlook
        self._requested = None
        self.changed.emit(None)
        self._next()

    def _lose(self, words: str) -> None:
        """Say what the planner said last, in the place of the answer: the same question would end the next one too."""
        if self._requested is not None:
            self._have(CostEstimate(None, problem=words.splitlines()[-1] if words else "The planner ended."))
