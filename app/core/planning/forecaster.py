"""Asks the resident planner about the job that is being set up; the newest question wins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.core.engine import ServedProcess
from app.core.events import Emitter
from app.core.planning.answer import PlanAnswer, answer_from
from app.core.tasks import Post, Single, Tasks, only
from trainer.errors import ImpastoError
from trainer.files.architecture import NAMES

if TYPE_CHECKING:
    from app.core.jobs.draft import Draft
    from trainer.gpu import Card  # with the driver's library

HERE = "here"
NAMED = "RTX 3060"
"""A GPU to compare with: what most people who train at home have."""
GIGABYTES = (6, 8, 10, 12, 16, 24, 32)
"""Of cards that may be planned for in the place of this PC's."""
_MOST_DEATHS = 2


@dataclass(frozen=True, slots=True)
class ForecastRequest:
    """A job on a card."""

    job: Path
    card: str
    """`HERE`, or a card by name or memory."""
    overrides: tuple[str, ...] = ()
    """What holds in place of what the job says, as `--set` takes it."""

    @classmethod
    def of(cls, draft: Draft, card: str) -> ForecastRequest:
        """A job as its file says; the family of a base that is still to be downloaded is that of its recipe."""
        family = str(draft.get("preset") or "").partition("/")[0]
        unknown = draft.family is None and family in NAMES
        return cls(draft.path, card, (f"base.family={family}",) if unknown else ())


State = Literal["idle", "asked", "reading", "tracing", "picked", "done", "failed"]


class Forecaster:
    """Belongs to the thread of `tasks`. Its child lives from the first question to `rest` or `close`."""

    def __init__(self, tasks: Tasks, post: Post) -> None:
        self.changed: Emitter[None] = Emitter()
        """Something below is another."""
        self.seen: Emitter[None] = Emitter()
        """`cards` has been looked at."""
        self.answer: PlanAnswer | None = None
        """The last forecast for the device that training will use, also while a newer one is awaited."""
        self.compared: PlanAnswer | None = None
        """The last forecast for another GPU, to compare with."""
        self.stale = False
        """Whether `answer` or `compared` is of another question than the last."""
        self.settled = False
        """Whether the last question has its `answer`, or has failed."""
        self.state: State = "idle"
        self.error: ImpastoError | None = None
        """Why the last question has no answer."""
        self.cards: tuple[Card, ...] | None = None
        """The cards of this PC; None until they have been looked at."""
        self.card_error: ImpastoError | None = None
        """Why they cannot be looked at."""
        self._looking = Single(tasks)
        self._served = ServedProcess(["plan", "--serve"], post)
        self._served.answered.connect(self._take)
        self._served.ended.connect(self._lost)
        self._question: ForecastRequest | None = None
        self._compare: str | None = None
        """The GPU to ask about next."""
        self._comparing = False
        """Whether the question under way is about another GPU."""
        self._number = 0
        self._outdated = False
        self._deaths = 0

    @property
    def waiting(self) -> bool:
        """Whether more is to come of the last question."""
        return self.state in ("asked", "reading", "tracing", "picked")

    @property
    def here(self) -> Card | None:
        """This PC's card, of several the one that the planner takes: that with most free memory."""
        return max(self.cards or (), key=lambda card: card.free_bytes, default=None)

    def outdate(self) -> None:
        """Mark the answer as old, also one that is still to come, before a new question can be asked."""
        self._outdated, self.settled = True, False
        if self.answer is not None and not self.stale:
            self.stale = True
            self.changed.emit(None)

    def ask(self, question: ForecastRequest, compare: str | None = None) -> None:
        """Ask about a job, then about the same job on another GPU, if any; drop what was asked before."""
        self._deaths, self._outdated, self.settled = 0, False, False
        if compare is None:
            self.compared = None
        self.stale = self.answer is not None
        self._question, self._compare, self._comparing = question, compare, False
        self._send()

    def rest(self) -> None:
        """End the child until the next question; one under way is given up."""
        self._number += 1
        self._question = None
        self._served.rest()
        if self.waiting:
            self._be("idle")

    def forget(self) -> None:
        """Have no answer, since there is no job."""
        self.rest()
        self.answer, self.compared, self.stale, self.settled = None, None, False, False
        self._be("idle")

    def close(self) -> None:
        """End the child."""
        self._served.close()

    def look(self) -> None:
        """Look at this PC's cards on a worker; `seen` says when that is done."""
        self._looking.run(_cards, self._see, only(ImpastoError, self._fail_to_see))

    # --- inside

    def _send(self) -> None:
        assert self._question is not None
        self._number += 1
        question = self._question
        job, overrides = str(question.job), list(question.overrides)
        request = {"id": self._number, "job": job, "gpu": question.card, "set": overrides}
        try:
            self._served.ask(request)
        except OSError as error:
            self._fail(_cannot_start(str(error)))
            return
        self._be("asked")

    def _take(self, said: dict[str, Any]) -> None:
        if said.get("id") != self._number or self._question is None:
            return
        self._deaths = 0
        state = said.get("state")
        if state == "error":
            self._fail(ImpastoError(said["code"], said["sentence"], said["remedy"]))
        elif state in ("reading", "tracing"):
            self._be(state)
        elif state in ("pick", "done"):
            self._tell(said, whole=state == "done")

    def _tell(self, said: dict[str, Any], *, whole: bool) -> None:
        try:
            answer = answer_from(said["plan"], whole=whole)
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
            self._be("done" if whole else "picked")

    def _ask_to_compare(self, gpu: str) -> None:
        assert self._question is not None
        self._question, self._compare, self._comparing = replace(self._question, card=gpu), None, True
        self._send()

    def _lost(self, words: str) -> None:
        """The child died: the question is asked once more, and given up when that ends likewise."""
        if self._question is None or not self.waiting:
            return
        self._deaths += 1
        if self._deaths < _MOST_DEATHS:
            self._send()
        else:
            self._fail(_died(words))

    def _fail(self, error: ImpastoError) -> None:
        self.error = error
        self.settled = not self._outdated
        if self._comparing:
            self.compared = None
        self._be("failed")

    def _be(self, state: State) -> None:
        self.state = state
        if state != "failed":
            self.error = None
        self.changed.emit(None)

    def _see(self, found: tuple[Card, ...]) -> None:
        self.cards, self.card_error = found, None
        self.seen.emit(None)

    def _fail_to_see(self, fault: ImpastoError) -> None:
        self.cards, self.card_error = (), fault
        self.seen.emit(None)


def _cards() -> tuple[Card, ...]:
    from trainer.gpu import cards  # the driver's library is loaded by a worker

    return tuple(cards())


def _cannot_start(reason: str) -> ImpastoError:
    return ImpastoError(
        "forecast.start",
        f"The planner could not be started: {reason}.",
        "Restart Impasto; if that does not help, install it again.",
    )


def _died(words: str) -> ImpastoError:
    last = words.splitlines()[-1] if words else "it said nothing"
    return ImpastoError(
        "forecast.died",
        f"The planner ended unexpectedly ({last[:200]}).",
        "Change a setting to ask again; if memory is short, close other programs.",
    )


def _not_understood(reason: str) -> ImpastoError:
    return ImpastoError(
        "forecast.answer",
        f"The planner's answer could not be read ({reason[:200]}).",
        "Restart Impasto: it may have been updated while it ran.",
    )
