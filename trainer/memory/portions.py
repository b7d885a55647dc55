"""What of a run's cache does not fit on disk together, and is therefore encoded between epochs. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


NOT_LATER = Later()


def later_portions(job: Job, pictures: Sequence[Picture], text_configs: Iterable[Config]) -> Later:
    """Of a resolved job; ``text_configs`` are those of encoders whose texts are cached.

    Nothing is listed where all showings of the run fit whatever chance makes of them, as they do in most runs. Else the
    second epoch tells how much is new in each: an estimate, for chance may repeat what it had before.
    """
    recipe, shown = job.recipe, samples_per_epoch(pictures)
    if not shown:
        return NOT_LATER
    epochs = -(-(recipe.steps or 1) // steps_per_epoch(pictures, recipe))
    limit = (job.fit.cache_gigabytes or float("inf")) * GIGABYTE
    text = text_bytes(recipe.token_chunks, (int(config["hidden_size"]) for config in text_configs))
    most = max(latent_bytes(picture.bucket) for picture in pictures) + text
    if epochs == 1 or (epochs * shown * most <= limit and epochs * shown <= MOST_SHOWINGS):
        return NOT_LATER
    first, second = (_showings(pictures, recipe, epoch) for epoch in (0, 1))
    new = {key: sample for key, sample in second.items() if key not in first}
    sizes = [sum(latent_bytes(one.picture.bucket) + text for one in some.values()) for some in (first, new)]
    more = int((limit - sizes[0]) // sizes[1]) if sizes[1] and limit < float("inf") else epochs
    together = max(1, min(1 + more, MOST_SHOWINGS // shown, epochs))
    portions = -(-epochs // together) - 1
    encoded, texts = ({key[place] for key in first} for place in (0, 1))
    fresh = {picture for picture, _ in new} - encoded
    return Later(portions, (epochs - together) * len(fresh), (epochs - together) * len({t for _, t in new} - texts))


def _showings(pictures: Sequence[Picture], recipe: RecipeConfig, epoch: int) -> dict[tuple[object, str], Sample]:
    """The different ones of an epoch, by what is encoded: a picture as it is cut and flipped, and a text."""
    samples = (sample for batch in epoch_batches(pictures, recipe, epoch) for sample in batch)
    return {((sample.picture.id, sample.window, sample.flip), sample.caption): sample for sample in samples}
