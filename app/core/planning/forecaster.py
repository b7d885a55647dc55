"""Request forecasts from the plan server for the job that is being set up; the newest request wins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.core.engine import ServedProcess
from app.core.events import Emitter
from app.core.planning.answer import PlanAnswer, answer_from
from app.core.tasks import ExclusiveTask, Post, Tasks, handle_only
from trainer.errors import ImpastoError
from trainer.files.architecture import NAMES
from trainer.protocol.plan import PlanEstimate
from trainer.protocol.processes import error_in
from trainer.protocol.records import build

if TYPE_CHECKING:
    from app.core.jobs.draft import Draft
    from trainer.gpu import Gpu  # loads the driver's library

HERE = "here"
REFERENCE_GPU = "RTX 3060"
"""GPU to compare with, common among people who train at home."""
GPU_MEMORY_SIZES = (6, 8, 10, 12, 16, 24, 32)
"""Memory sizes, in GB, of GPUs to compare with."""
_MAX_CRASHES = 2
"""Number of server crashes during a request after which the request fails."""


@dataclass(frozen=True, slots=True)
class ForecastRequest:
    """A job to forecast, and the GPU to forecast it for."""

    job: Path
    gpu: str
    """`HERE`, or a GPU by name or memory size."""
    overrides: tuple[str, ...] = ()
    """Settings that override the job, in the form that `--set` takes."""

    @classmethod
    def of(cls, draft: Draft, gpu: str) -> ForecastRequest:
        """Return the request for a draft; a base not downloaded yet is assumed to be of its recipe's family."""
        family = str(draft.get("preset") or "").partition("/")[0]
        unknown = draft.family is None and family in NAMES
        return cls(draft.path, gpu, (f"base.family={family}",) if unknown else ())


State = Literal["idle", "asked", "reading", "tracing", "picked", "done", "failed"]


class Forecaster:
    """Client of the plan server, for the thread of `tasks`. The server runs from the first request until `stop`."""

    def __init__(self, tasks: Tasks, post: Post) -> None:
        self.changed: Emitter[None] = Emitter()
        """Emitted when an attribute other than `gpus` and `gpu_error` changes."""
        self.gpus_read: Emitter[None] = Emitter()
        """Emitted when this PC's GPUs have been read or could not be read; see `gpus` and `gpu_error`."""
        self.answer: PlanAnswer | None = None
        """The last forecast for the device that training will use, kept while a newer one is computed."""
        self.compared: PlanAnswer | None = None
        """The last forecast for another GPU, to compare with."""
        self.estimate: PlanEstimate | None = None
        """What a similar recipe needs, while the traces of new settings are recorded; None if nothing similar is known.
        """
        self.stale = False
        """Whether `answer` or `compared` belongs to an earlier request."""
        self.settled = False
        """Whether the last request has been answered or has failed."""
        self.state: State = "idle"
        self.error: ImpastoError | None = None
        """Why the last request failed."""
        self.gpus: tuple[Gpu, ...] | None = None
        """The GPUs of this PC; None until they have been read."""
        self.gpu_error: ImpastoError | None = None
        """Why the GPUs could not be read."""
        self._gpu_reader = ExclusiveTask(tasks)
        self._served = ServedProcess(["plan", "--serve"], post)
        self._served.answered.connect(self._on_answered)
        self._served.ended.connect(self._on_ended)
        self._request: ForecastRequest | None = None
        self._compare: str | None = None
        """The GPU to compare with, whose forecast is requested next."""
        self._comparing = False
        """Whether the current request is for the GPU to compare with."""
        self._number = 0
        self._outdated = False
        self._crashes = 0

    @property
    def waiting(self) -> bool:
        """Return whether the last request is still being answered."""
        return self.state in ("asked", "reading", "tracing", "picked")

    @property
    def here(self) -> Gpu | None:
        """Return this PC's GPU with the most free memory, which the planner uses too; None if there is none."""
        return max(self.gpus or (), key=lambda gpu: gpu.free_bytes, default=None)

    def mark_outdated(self) -> None:
        """Mark the current answer, even one still being computed, as outdated.

        Call it as soon as the job or the chosen GPU changes; the new request follows later.
        """
        self._outdated, self.settled = True, False
        if self.answer is not None and not self.stale:
            self.stale = True
            self.changed.emit(None)

    def ask(self, request: ForecastRequest, compare: str | None = None) -> None:
        """Request a forecast, then one for the GPU `compare`, if given; drop earlier requests."""
        self._crashes, self._outdated, self.settled = 0, False, False
        if compare is None:
            self.compared = None
        self.stale = self.answer is not None
        self._request, self._compare, self._comparing = request, compare, False
        self._send()

    def stop(self) -> None:
        """Stop the server until the next request; drop the current request."""
        self._number += 1
        self._request = None
        self._served.stop()
        if self.waiting:
            self._set_state("idle")

    def clear(self) -> None:
        """Stop the server and drop the answers, which belong to a job that is no longer shown."""
        self.stop()
        self.answer, self.compared, self.stale, self.settled = None, None, False, False
        self._set_state("idle")

    def close(self) -> None:
        """Stop the server."""
        self._served.close()

    def read_gpus(self) -> None:
        """Read this PC's GPUs on a worker; emit `gpus_read` when done."""
        self._gpu_reader.run(_gpus, self._on_gpus_read, handle_only(ImpastoError, self._on_gpus_failed))

    def _send(self) -> None:
        assert self._request is not None
        self._number += 1
        request = self._request
        job, overrides = str(request.job), list(request.overrides)
        try:
            self._served.send({"id": self._number, "job": job, "gpu": request.gpu, "set": overrides})
        except OSError as error:
            self._fail(_cannot_start(str(error)))
            return
        self._set_state("asked")

    def _on_answered(self, message: dict[str, Any]) -> None:
        if message.get("id") != self._number or self._request is None:
            return
        self._crashes = 0
        state = message.get("state")
        if state == "error":
            self._fail(error_in(message))
        elif state in ("reading", "tracing"):
            self.estimate = build(PlanEstimate, found) if (found := message.get("estimate")) else None
            self._set_state(state)
        elif state in ("pick", "done"):
            self._on_plan(message, whole=state == "done")

    def _on_plan(self, message: dict[str, Any], *, whole: bool) -> None:
        try:
            answer = answer_from(message["plan"], whole=whole)
        except (ValueError, KeyError) as error:
            self._fail(_not_understood(str(error)))
            return
        if self._comparing:
            self.compared = answer
        else:
            self.answer, self.settled = answer, not self._outdated
        self.stale = self._outdated or (self._compare is not None and self.compared is not None)
        if whole and self._compare is not None:
            self._ask_to_compare(self._compare)
        else:
            self._set_state("done" if whole else "picked")

    def _ask_to_compare(self, gpu: str) -> None:
        assert self._request is not None
        self._request, self._compare, self._comparing = replace(self._request, gpu=gpu), None, True
        self._send()

    def _on_ended(self, words: str) -> None:
        """Repeat the request after a server crash; fail if the server crashes again."""
        if self._request is None or not self.waiting:
            return
        self._crashes += 1
        if self._crashes < _MAX_CRASHES:
            self._send()
        else:
            self._fail(_died(words))

    def _fail(self, error: ImpastoError) -> None:
        self.error = error
        self.settled = not self._outdated
        if self._comparing:
            self.compared = None
        self._set_state("failed")

    def _set_state(self, state: State) -> None:
        self.state = state
        if state != "failed":
            self.error = None
        self.changed.emit(None)

    def _on_gpus_read(self, found: tuple[Gpu, ...]) -> None:
        self.gpus, self.gpu_error = found, None
        self.gpus_read.emit(None)

    def _on_gpus_failed(self, fault: ImpastoError) -> None:
        self.gpus, self.gpu_error = (), fault
        self.gpus_read.emit(None)


def _gpus() -> tuple[Gpu, ...]:
    from trainer.gpu import list_gpus  # the driver's library is loaded by a worker

    return tuple(list_gpus())


def _cannot_start(reason: str) -> ImpastoError:
    return ImpastoError(
        "forecast.start",
        f"Could not start the planner: {reason}.",
        "Restart Impasto; if that does not help, reinstall it.",
    )


def _died(words: str) -> ImpastoError:
    last = words.splitlines()[-1] if words else "no message"
    return ImpastoError(
        "forecast.died",
        f"The planner stopped unexpectedly ({last[:200]}).",
        "Change a setting to try again; if memory is low, close other programs.",
    )


def _not_understood(reason: str) -> ImpastoError:
    return ImpastoError(
        "forecast.answer",
        f"Could not read the planner's answer ({reason[:200]}).",
        "Restart Impasto, which may have been updated while it was running.",
    )
