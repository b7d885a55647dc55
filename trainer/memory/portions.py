"""What of a run's cache does not fit on disk together, and is therefore encoded between epochs. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.config.job import Job
from trainer.config.recipe import RecipeConfig
from trainer.dataset.picture import Picture
from trainer.dataset.portions import GIGABYTE, MOST_SHOWINGS, latent_bytes, text_bytes
from trainer.dataset.sampling import Sample, epoch_batches, samples_per_epoch, steps_per_epoch
from trainer.files.architecture import Config


@dataclass(frozen=True)
class Later:
    """The portions of a cache after the first, as trainer.training.feed cuts them."""

    portions: int = 0
    pictures: int = 0
    """How many are encoded in all of them."""
    texts: int = 0
    together: int = 0
    """How many epochs lie on disk together."""
    limited: Literal["disk", "listing"] = "disk"
    """Whether the disk limit cuts them, or how many showings are listed at once."""


NOT_LATER = Later()
# Showings of an epoch that are listed to know the others by, at 0.1 ms each: a question is answered within a second.
_LISTED = 2_000


def later_portions(job: Job, pictures: Sequence[Picture], text_configs: Iterable[Config]) -> Later:
    """Of a resolved job; ``text_configs`` are those of encoders whose texts are cached.

    Nothing is listed where all showings of the run fit whatever chance makes of them, as they do in most runs. Else the
    second epoch tells how much is new in each: an estimate, for chance may repeat what it had before.
    """
    recipe, shown, configs = job.recipe, samples_per_epoch(pictures), tuple(text_configs)
    if not shown:
        return NOT_LATER
    epochs = -(-(recipe.steps or 1) // steps_per_epoch(pictures, recipe))
    limit = (job.fit.cache_gigabytes or float("inf")) * GIGABYTE
    text = text_bytes(recipe.token_chunks, (int(config["hidden_size"]) for config in configs))
    most = max(latent_bytes(picture.bucket) for picture in pictures) + text
    if epochs == 1 or (epochs * shown * most <= limit and epochs * shown <= MOST_SHOWINGS):
        return NOT_LATER
    some = _some(pictures, shown)
    share = shown / samples_per_epoch(some)
    first, second = (_showings(some, recipe, epoch) for epoch in (0, 1))
    new = {key: sample for key, sample in second.items() if key not in first}
    sizes = [share * sum(latent_bytes(one.picture.bucket) + text for one in of.values()) for of in (first, new)]
    more = int((limit - sizes[0]) // sizes[1]) if sizes[1] and limit < float("inf") else epochs
    listed = MOST_SHOWINGS // shown
    together = max(1, min(1 + more, listed, epochs))
    portions = -(-epochs // together) - 1
    repeated = share * (epochs - together)
    pictured, told = (len({key[place] for key in new} - {key[place] for key in first}) for place in (0, 1))
    # Where encoders learn, a caption is encoded in the step: it cuts portions as the feed does, but is cached in none.
    texts = round(repeated * told) if configs else 0
    return Later(portions, round(repeated * pictured), texts, together, "disk" if 1 + more <= listed else "listing")


def _some(pictures: Sequence[Picture], shown: int) -> Sequence[Picture]:
    """Return so many pictures from all over the dataset that few enough showings of them are listed."""
    some = pictures[:: max(1, shown // _LISTED)]
    return some if samples_per_epoch(some) else pictures


def _showings(pictures: Sequence[Picture], recipe: RecipeConfig, epoch: int) -> dict[tuple[object, str], Sample]:
    """The different ones of an epoch, by what is encoded: a picture as it is cut and flipped, and a text."""
    samples = (sample for batch in epoch_batches(pictures, recipe, epoch) for sample in batch)
    return {((sample.picture.id, sample.window, sample.flip), sample.caption): sample for sample in samples}
