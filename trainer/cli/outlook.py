"""Says how a recipe would be fitted to a card, and what training with it would cost there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.cli import plan_words
from trainer.errors import ImpastoError

if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.config.fit import FitConfig
    from trainer.config.recipe import RecipeConfig


def outlook(recipe: RecipeConfig, family: Family, card: str | None, written: FitConfig | None = None) -> Sequence[str]:
    """Return the plan for `recipe` on `card` (a name or size; None: the card of this machine) in sentences.

    What a fit has `written` stays as it is.

    What hinders a plan is told in its place: a preset may well be kept for another machine. Raises ImpastoError for
    a card that does not exist.
    """
    return _planned(recipe, family, card, written)


def _planned(recipe: RecipeConfig, family: Family, card: str | None, written: FitConfig | None) -> Sequence[str]:
    from trainer.cli.plan import planned_for, traces_of_user
    from trainer.memory.planner.request import question_ahead, situation_of

    situation_of(card)
    try:
        question = question_ahead(family, recipe, card, fit=written)
    except ImpastoError as error:  # keys that only suit a job that states others
        return (f"By itself no job can use it: {error.sentence}",)
    if not question.situation.on_cpu:
        try:
            question.situation.require_budget()
        except ImpastoError as error:
            return (error.sentence, error.remedy)
    with traces_of_user() as traces:
        planned = planned_for(question, traces)
    situation, batch = planned.situation, question.subject.recipe.effective_batch
    if planned.pick is None:
        lighter = plan_words.what_would(planned.lighter, situation, planned.missing, batch)
        return (plan_words.nothing_fits(planned, question.written), lighter)
    sentence = plan_words.sentence(planned.pick, batch)
    return (sentence if situation.on_cpu else f"On {situation.card.name}: {sentence}", *question.remarks)
