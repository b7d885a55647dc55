"""The resident planner behind `plan --serve`: what it has found out for one request serves the next."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.plan import PATIENCE, PATIENCE_BESIDE, as_json, once, planned_for, question_ahead_of
from trainer.errors import EXIT_DONE, JobError
from trainer.memory.forecast.forecast import Runs
from trainer.memory.planner.planner import plan
from trainer.memory.planner.request import question_of_job
from trainer.memory.serve import plan_server
from trainer.memory.trace.library import Traces, prepare
from trainer.memory.trace.store import TapeStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.config.fit import FitConfig
    from trainer.memory.allocator.settings import AllocatorSettings
    from trainer.memory.device.device_state import Situation
    from trainer.memory.planner.planner import Planned
    from trainer.memory.planner.request import Question
    from trainer.protocol.processes import Answer, Turn


# Seconds without a request after which a planner looks ahead: whoever sets up a job has then read the answer.
IDLE = 3.0


def serve() -> int:
    """Answer requests until the input ends."""
    planner = _Planner()
    with planner.traces.helped():
        plan_server(planner.answer, sys.stdout, idle=IDLE, on_idle=planner.look_ahead).run(sys.stdin)
    return EXIT_DONE


@dataclass
class _Planner:
    """Tapes, what was played, and the last plans, kept from request to request."""

    traces: Traces = field(default_factory=lambda: Traces(TapeStore.of_user()))
    runs: dict[tuple[int, float, AllocatorSettings], Runs] = field(default_factory=dict)
    """By a card's workspaces and its allocator's settings, all that replays depend on beside tapes and limit."""
    told: dict[str, Answer] = field(default_factory=dict)
    """The last whole plan for each job or recipe."""
    picked: dict[str, FitConfig] = field(default_factory=dict)

    def answer(self, turn: Turn) -> Answer:
        """The whole plan for a request; its pick is told as soon as it is known."""
        try:
            return self._answer(turn)
        finally:
            self.traces.relax()

    def look_ahead(self) -> None:
        """Import in a thread, which nobody waits for, what the first missing tape would wait for."""
        self.traces.rest()
        threading.Thread(target=prepare, name="preparing").start()

    def _answer(self, turn: Turn) -> Answer:
        subject = json.dumps([turn.request.get(key) for key in ("job", "family", "recipe")])
        self.traces.before_tracing = self._before_tracing(turn, self.told.get(subject))
        question = _requested(turn)

        def tell(planned: Planned) -> None:
            self._remember(subject, planned)
            turn.go_on()
            turn.tell("pick", plan=as_json(question, planned, whole=False))

        if question.situation.on_cpu:
            self.told[subject] = told = as_json(question, planned_for(question, self.traces))
            return {"plan": told}
        now = time.monotonic()
        planned = plan(
            question.subject,
            question.written,
            question.situation,
            self.traces,
            question.occasions,
            until=now + PATIENCE,
            until_beside=now + PATIENCE_BESIDE,
            runs=self._runs(question.situation, turn),
            likely=self.picked.get(subject),
            on_soon=tell,
            on_pick=tell,
        )
        self._remember(subject, planned)
        self.told[subject] = told = as_json(question, planned)
        return {"plan": told}

    def _before_tracing(self, turn: Turn, stale: Answer | None) -> Callable[[], None]:
        tell = once(lambda: turn.tell("tracing", stale=stale))

        def before_tracing() -> None:
            turn.go_on()
            tell()

        return before_tracing

    def _remember(self, subject: str, planned: Planned) -> None:
        if planned.pick is not None:
            self.picked[subject] = planned.pick.fit

    def _runs(self, situation: Situation, turn: Turn) -> Runs:
        overheads = situation.overheads
        key = overheads.cublas_workspace_bytes, overheads.cudnn_workspace_share, situation.allocator
        runs = self.runs.setdefault(key, Runs(situation))
        runs.before_playing = turn.go_on
        return runs


def _requested(turn: Turn) -> Question:
    request = turn.request
    if "job" in request:
        tell = once(lambda: turn.tell("reading"))

        def progress(*_: object) -> None:
            turn.go_on()
            tell()

        return question_of_job(Path(request["job"]), request.get("set", ()), request.get("gpu"), progress)
    family = request["family"]
    if family not in ("sd15", "sdxl"):
        raise JobError("plan.family", f'There is no family "{family[:40]}".', 'Ask for "sd15" or "sdxl".')
    return question_ahead_of(family, request.get("recipe"), request.get("gpu"))
