"""Answers plans over two streams, for a program that stays: JSON lines in, JSON lines out. Needs no torch itself.

What trainer/protocol/processes.py says of requests holds. One has what is asked:

    {"id": 1, "job": "path/job.toml", "set": ["recipe.rank=8"], "gpu": "8GB"}
    {"id": 2, "family": "sdxl", "recipe": "style", "gpu": "here"}

``set`` and ``gpu`` may be absent. Answers:

    {"id": 1, "state": "reading"}                    pictures are looked at that are not known yet
    {"id": 1, "state": "tracing", "stale": {...}}    figures are missing and are being made, which takes seconds;
                                                     "stale" is the last plan for that job or recipe, or null
    {"id": 1, "state": "pick", "plan": {...}}        the pick, before what stands beside it is known; where figures are
                                                     missing, first a fit that works, "complete" false: that of the
                                                     last plan, or one that saves most
    {"id": 1, "state": "done", "plan": {...}}        the whole plan, as `plan --json` prints it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from trainer.protocol.processes import Request, Server, Work


def plan_server(
    work: Work, output: TextIO, *, idle: float | None = None, on_idle: Callable[[], None] = lambda: None
) -> Server:
    """Return a server that answers with plans, as ``work`` finds them; for ``on_idle`` see `Server`."""
    guide = "trainer/memory/serve.py"
    return Server(work, _fault, output, code="plan.request", guide=guide, idle=idle, on_idle=on_idle)


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
