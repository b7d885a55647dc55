"""Answers plans over two streams, for a program that stays: JSON lines in, JSON lines out. Needs no torch itself.

A request is one line, an object with an ``id`` (a text or number of the asker's), and what is asked:

    {"id": 1, "job": "path/job.toml", "set": ["recipe.rank=8"], "gpu": "8GB"}
    {"id": 2, "family": "sdxl", "recipe": "style", "gpu": "here"}

``set`` and ``gpu`` may be absent. Answers carry the id of what they answer:

    {"id": 1, "state": "tracing", "stale": {...}}    figures are missing and are being made, which takes seconds;
                                                     "stale" is the last plan for that job or recipe, or null
    {"id": 1, "state": "done", "plan": {...}}        the plan, as `plan --json` prints it
    {"id": 1, "state": "cancelled"}                  another request came before it was done: only the last counts
    {"id": 1, "state": "error", "code": ..., "sentence": ..., "remedy": ...}

A line that is no request is answered by an error with the id it has, or null. The end of the input ends the process;
a request under way is finished first.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from trainer.errors import ImpastoError

Answer = dict[str, Any]
Plan = Callable[[Mapping[str, Any], Callable[[], None]], Answer]
"""Works out a request; calls its second argument before anything that takes seconds. Raises ImpastoError."""

LONGEST_LINE = 1 << 20


class _CancelledError(Exception):
    """Another request came."""


class Server:
    """One asker's requests, in order; the newest wins."""

    def __init__(self, plan: Plan, output: TextIO) -> None:
        self._plan = plan
        self._output = output
        self._waiting: queue.Queue[str | None] = queue.Queue()
        self._former: dict[str, Answer] = {}

    def run(self, lines: Iterable[str]) -> None:
        """Answers until ``lines`` end; they are read in a thread of their own, so that a new one is noticed at once."""
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        while (line := self._waiting.get()) is not None:
            self._answer(line)

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line.strip():
                self._waiting.put(line)
        self._waiting.put(None)

    def _answer(self, line: str) -> None:
        identity: Any = None
        try:
            request = _request(line)
            identity = request["id"]
            self._say({"id": identity, **self._outcome(request)})
        except ImpastoError as error:
            told = {"code": error.code, "sentence": error.sentence, "remedy": error.remedy}
            self._say({"id": identity if identity is not None else _identity(line), "state": "error", **told})

    def _outcome(self, request: Mapping[str, Any]) -> Answer:
        subject = json.dumps([request.get("job"), request.get("family"), request.get("recipe")])
        told = False

        def before_tracing() -> None:
            nonlocal told
            if self._overtaken():
                raise _CancelledError
            if not told:
                self._say({"id": request["id"], "state": "tracing", "stale": self._former.get(subject)})
                told = True

        try:
            if self._overtaken():
                raise _CancelledError
            self._former[subject] = plan = self._plan(request, before_tracing)
        except _CancelledError:
            return {"state": "cancelled"}
        return {"state": "done", "plan": plan}

    def _overtaken(self) -> bool:
        """Whether another line waits; the end of the input is none."""
        return any(line is not None for line in tuple(self._waiting.queue))

    def _say(self, answer: Answer) -> None:
        self._output.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._output.flush()


def _request(line: str) -> dict[str, Any]:
    """A line as a request; raises ImpastoError that says what is wrong with it."""
    if len(line) > LONGEST_LINE:
        raise _unusable("it is longer than a million characters")
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _unusable(f"it is no JSON: {error}") from error
    if not isinstance(request, dict):
        raise _unusable("it is no object")
    if not isinstance(request.get("id"), str | int):
        raise _unusable('it has no "id"')
    if ("job" in request) == ("family" in request):
        raise _unusable('it has to have either "job" or "family"')
    for key in ("job", "family", "recipe", "gpu"):
        if not isinstance(request.get(key, ""), str):
            raise _unusable(f'"{key}" is no text')
    settings = request.get("set", [])
    if not isinstance(settings, list) or not all(isinstance(text, str) for text in settings):
        raise _unusable('"set" is no list of texts')
    if unknown := sorted(request.keys() - {"id", "job", "family", "recipe", "gpu", "set"}):
        raise _unusable(f'"{unknown[0]}" is not known')
    return request


def _unusable(reason: str) -> ImpastoError:
    return ImpastoError("plan.request", f"This request cannot be answered: {reason}.", "See trainer/memory/serve.py.")


def _identity(line: str) -> Any:
    """The id of a line that is no request otherwise; None where it has none."""
    try:
        found = json.loads(line[:LONGEST_LINE])
    except (ValueError, RecursionError):
        return None
    identity = found.get("id") if isinstance(found, dict) else None
    return identity if isinstance(identity, str | int) else None
