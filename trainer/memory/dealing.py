"""How the pictures of a run come to the card: effective batches by shape, and what they are split into. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from trainer.config.recipe import RecipeConfig
from trainer.dataset.picture import Picture
from trainer.dataset.sampling import dealt_showings, steps_per_epoch
from trainer.memory.subject import sizes_of_parts
from trainer.memory.tape import Work

Size = tuple[int, int]
Part = tuple[Size, int]
"""Pictures of one shape: width and height in pixels, and how many."""
Makeup = tuple[Part, ...]
"""What an effective batch is made of, in the order in which its shapes are trained on."""

# Epochs differ in how leftovers meet, a little; listing all of a long run's would take seconds.
MOST_EPOCHS = 8


def makeups(pictures: Sequence[Picture], recipe: RecipeConfig) -> tuple[tuple[Makeup, int], ...]:
    """Return how often each makeup is trained on in the first epochs of a run of ``recipe.steps``.

    Dealt by the run's own hand, so that mixed and short batches occur as often as they will.
    """
    an_epoch, steps = steps_per_epoch(pictures, recipe), recipe.steps or 1
    found: Counter[Makeup] = Counter()
    for epoch in range(min(MOST_EPOCHS, -(-steps // an_epoch)) if an_epoch else 0):
        for showings in dealt_showings(pictures, recipe, epoch)[: steps - epoch * an_epoch]:
            found[tuple(Counter(picture.bucket for picture, _ in showings).items())] += 1
    return tuple(found.items())


def split(makeup: Iterable[Part], most: int) -> list[Part]:
    """Return an effective batch as micro-batches of one shape each and at most ``most`` pictures."""
    return [(size, part) for size, count in makeup for part in sizes_of_parts(count, most)]


def lessened(work: Iterable[Work], share: float) -> Iterator[Work]:
    """Yield the work of a micro-batch with this share of the pictures: as many operations, each of them smaller."""
    return (replace(one, flops=round(one.flops * share), bytes=round(one.bytes * share)) for one in work)
