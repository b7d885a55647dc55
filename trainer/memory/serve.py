"""Answers plans over two streams, for a program that stays: JSON lines in, JSON lines out. Needs no torch itself.

What trainer/protocol/serving.py says of requests holds. One has what is asked:

    {"id": 1, "job": "path/job.toml", "set": ["recipe.rank=8"], "gpu": "8GB"}
    {"id": 2, "family": "sdxl", "recipe": "style", "gpu": "here"}

``set`` and ``gpu`` may be absent. Answers:

    {"id": 1, "state": "tracing", "stale": {...}}    figures are missing and are being made, which takes seconds;
                                                     "stale" is the last plan for that job or recipe, or null
    {"id": 1, "state": "done", "plan": {...}}        the plan, as `plan --json` prints it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from trainer.protocol.serving import Answer, Request, Server, Turn

Plan = Callable[[Mapping[str, Any], Callable[[], None]], Answer]
"""Works out a request; calls its second argument before anything that takes seconds. Raises ImpastoError."""


def plan_server(plan: Plan, output: TextIO) -> Server:
    """Return a server that answers with plans."""
    former: dict[str, Answer] = {}

    def work(turn: Turn) -> Answer:
        request = turn.request
        subject = json.dumps([request.get("job"), request.get("family"), request.get("recipe")])
        told = False

        def before_tracing() -> None:
            nonlocal told
            turn.go_on()
            if not told:
                turn.tell("tracing", stale=former.get(subject))
                told = True

        former[subject] = found = plan(request, before_tracing)
        return {"plan": found}

    return Server(work, _fault, output, code="plan.request", guide="trainer/memory/serve.py")


def _fault(request: Request) -> str | None:
    if ("job" in request) == ("family" in request):
        return 'it has to have either "job" or "family"'
    for key in ("job", "family", "recipe", "gpu"):
        if not isinstance(request.get(key, ""), str):
            return f'"{key}" is no text'
    settings = request.get("set", [])
    if not isinstance(settings, list) or not all(isinstance(text, str) for text in settings):
        return '"set" is no list of texts'
    if unknown := sorted(request.keys() - {"id", "job", "family", "recipe", "gpu", "set"}):
        return f'"{unknown[0]}" is not known'
    return None
