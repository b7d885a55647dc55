"""The model card: a page of Markdown that tells others what a LoRA is, how to use it, and how it was made."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from app.core.after.candidates import Candidate
from app.core.after.export import About

if TYPE_CHECKING:
    from trainer.config.job import Job

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|])")


def model_card(job: Job, told: About, candidate: Candidate, name: str, pictures: int) -> str:
    """Return the card of one saved step of a run of `job`; `pictures` is how many were trained on."""
    recipe = job.recipe
    base = _plain(job.base.name)
    sections = [
        f"# {_plain(told.title or name)}",
        _plain(told.description),
        _use(told, name, base),
        _table(
            {
                "Base": base,
                "Steps": f"{candidate.step:,}",
                "Pictures": f"{pictures:,}",
                "Resolution": f"{recipe.resolution} pixels",
                "Rank": f"{recipe.rank}, alpha {recipe.alpha:g}",
                "Optimizer": f"{recipe.optimizer.name}, learning rate {recipe.learning_rate:g}",
                "Pictures a step": str(recipe.effective_batch),
                "Seed": str(recipe.seed),
                **({"Held-out loss": f"{candidate.held_out:.4f}"} if candidate.held_out is not None else {}),
            }
        ),
        _credits(told),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _use(told: About, name: str, base: str) -> str:
    lines = ["## How to use it", "", f"Made for {base}. Begin with a strength of 1 and go lower where it is too much."]
    if told.triggers:
        lines += ["", f"Trigger words: `{told.triggers.replace('`', '')}`"]
    lines += ["", f"In A1111 and Forge: `<lora:{name}:1>`. In ComfyUI: a Load LoRA node with `{name}.safetensors`."]
    return "\n".join(lines)


def _table(rows: dict[str, str]) -> str:
    lines = ["## How it was made", "", "| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {key} | {value} |" for key, value in rows.items()), "", "Trained with Impasto."])


def _credits(told: About) -> str:
    lines = [f"{title}: {_plain(text)}" for title, text in (("Author", told.author), ("Licence", told.licence)) if text]
    return "\n\n".join(lines)


def _plain(text: str) -> str:
    """Text of people as Markdown that shows it as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
