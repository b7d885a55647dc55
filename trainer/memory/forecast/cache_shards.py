"""Estimate how much a run encodes before its first step and in later cache shards. Does not require torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from trainer.config.job import Job
from trainer.config.recipe import RecipeConfig
from trainer.config.schema import require_value
from trainer.dataset.cache_keys import GIGABYTE, MAX_SHARD_SAMPLES, CacheKeys, latent_bytes, text_bytes
from trainer.dataset.image import ImageRecord, image_recipe
from trainer.dataset.sampling import (
    Sample,
    draw_sample,
    drops_captions,
    epoch_samples,
    samples_per_epoch,
    steps_per_epoch,
)
from trainer.files.architecture import Config
from trainer.files.tokens import PromptText

# Samples to list before estimating the rest, at 0.03 to 0.06 ms each, so that an answer takes less than a second.
_MAX_LISTED = 2_000
# At least this many images, because captions differ in how many tags there are to shuffle.
_MIN_IMAGES = 8
T = TypeVar("T")


@dataclass(frozen=True)
class LaterShards:
    """Cache shards after the first one, as trainer.training.data.batches divides them."""

    shards: int = 0
    """Number of later shards."""
    images: int = 0
    """Total number of images encoded in the later shards."""
    texts: int = 0
    """Total number of texts encoded in the later shards."""
    epochs_per_shard: int = 0
    """Number of epochs in one shard; 1 also if it holds only part of an epoch."""
    limited: Literal["disk", "listing"] = "disk"
    """What limits the size of a shard: disk space, or the number of samples listed at once."""
    part: float = 1.0
    """Share of an epoch that a shard holds if no whole epoch fits, else 1."""


NO_LATER_SHARDS = LaterShards()

_Cut = tuple[object, ...]


def first_shard(
    job: Job,
    images: Sequence[ImageRecord],
    later: LaterShards,
    *,
    samples: Sequence[Sample] = (),
    texts: Iterable[str | PromptText] = (),
    cached: CacheKeys | None = None,
) -> tuple[int, int]:
    """Return how many images and texts of a resolved job are encoded before the first step.

    Random crops, flips and captions may differ every time an image is shown. The samples in the first shard are listed
    or, if there are too many, extrapolated from some images and the first epochs. ``samples`` and ``texts`` are what
    validation and previews need in addition. Items that are already ``cached`` do not count.
    """
    if not (shown := samples_per_epoch(images)):
        return 0, 0
    last = later.epochs_per_shard or _epochs(job, images)
    epochs = last if _varies_by_epoch(images, job.recipe) else 1
    without_captions = _epochs_without_captions(job.recipe, last)
    some = _subsample(min(shown * epochs // _MAX_LISTED, len(images) // _MIN_IMAGES), images)
    cuts: dict[_Cut, Sample] = {}
    words: dict[str, None] = {}
    other_texts = {*texts, *(sample.caption for sample in samples), *([""] if without_captions else [])}
    cut_counts: list[int] = []
    word_counts: list[int] = []
    # Of three epochs, at least two have captions, which the growth is taken from.
    for epoch in range(min(epochs, max(3 if without_captions else 2, _MAX_LISTED // samples_per_epoch(some)))):
        drawn = list(_drawn(some, job.recipe, epoch))
        for sample in drawn:
            cuts.setdefault(_cut(sample), sample)
        cut_counts.append(len(cuts))
        if not drops_captions(job.recipe.captions, epoch):
            words.update(dict.fromkeys(sample.caption for sample in drawn))
            word_counts.append(len(words))
    # From the subsample to all images or those of the first part of an epoch, and from the listed epochs to all.
    share = later.part * shown / samples_per_epoch(some)
    warmup = _epochs_of_warmup(job.recipe, images)
    images_drawn = share * _extrapolate(cut_counts, epochs)
    texts_drawn = share * _extrapolate(word_counts, max(1, epochs - without_captions - int(warmup)))
    partial_texts, listed = _texts_of_warmup(some, job.recipe, steps_per_epoch(images, job.recipe), min(warmup, last))
    partial_drawn = share * len(partial_texts) * min(warmup, last) / listed if listed else 0.0
    more = [sample for sample in samples if _cut(sample) not in cuts]
    more_texts = other_texts - words.keys()
    # What validation needs from the rest of the epoch.
    images_drawn += (1 - later.part) * (len(samples) - len(more))
    texts_drawn += (1 - later.part) * len({sample.caption for sample in samples} & words.keys())
    if cached is None:
        return round(images_drawn) + len(more), round(texts_drawn + partial_drawn) + len(more_texts)
    texts_absent = texts_drawn * _missing_share(words, cached.has_text)
    texts_absent += partial_drawn * _missing_share(partial_texts, cached.has_text)
    return (
        round(images_drawn * _missing_share(cuts.values(), cached.has_image)) + _count_missing(more, cached.has_image),
        round(texts_absent) + _count_missing(more_texts, cached.has_text),
    )


def later_shards(
    job: Job, images: Sequence[ImageRecord], text_configs: Iterable[Config], cached: CacheKeys | None = None
) -> LaterShards:
    """Return a job's cache shards after the first one; the job is resolved.

    ``text_configs`` are the configs of the text encoders whose outputs are cached.

    In most runs, the first shard would hold all samples even if they were all distinct. Then, none need to be listed.
    Otherwise, the number of new items per epoch is estimated from the second epoch (random choices may repeat), and
    the share that is already ``cached`` from the first epoch after the first shard, both as if they had whole captions.
    """
    recipe = job.recipe.replaced(captions=job.recipe.captions.replaced(dropout_every_epochs=None))
    shown, configs = samples_per_epoch(images), tuple(text_configs)
    if not shown:
        return NO_LATER_SHARDS
    epochs = _epochs(job, images)
    limit = (job.fit.cache_gigabytes or float("inf")) * GIGABYTE
    text = text_bytes(recipe.token_chunks, (int(config["hidden_size"]) for config in configs))
    most = max(map(_latent_bytes, images)) + text  # bytes of the largest sample
    if epochs == 1 or (epochs * shown * most <= limit and epochs * shown <= MAX_SHARD_SAMPLES):
        return NO_LATER_SHARDS
    some = _subsample(shown // _MAX_LISTED, images)
    share = shown / samples_per_epoch(some)
    first, new = _samples(some, recipe, 0), _new_in(some, recipe, 1)
    sizes = [share * sum(_latent_bytes(one.image) + text for one in of.values()) for of in (first, new)]
    without_captions = _epochs_without_captions(job.recipe, epochs)
    if sizes[0] > limit or shown > MAX_SHARD_SAMPLES:
        cuts, texts = {key[0]: sample for key, sample in first.items()}, {key[1] for key in first}
        images_absent = _count_missing(cuts.values(), cached.has_image) if cached else len(cuts)
        texts_absent = _count_missing(texts, cached.has_text) if cached else len(texts)
        return _parts_of_epochs(job, images, sizes[0], share * images_absent, share * texts_absent if configs else 0)
    # Epochs that fit in addition to the first one, at the growth of the second.
    more = int((limit - sizes[0]) // sizes[1]) if sizes[1] and limit < float("inf") else epochs
    if without_captions and sizes[0] * 2 > limit:
        # A shard counts an image with its caption and without it as two, so it ends before an epoch without captions.
        more = min(more, require_value(job.recipe.captions.dropout_every_epochs) - 2)
    warmup = min(_epochs_of_warmup(recipe, images), epochs)
    if warmup and sizes[0] * (1 + warmup) > limit:
        more = min(more, int(limit / sizes[0]) - 1)  # nearly every caption is new in the token warm-up
    listed = MAX_SHARD_SAMPLES // shown
    together = max(1, min(1 + more, listed, epochs))
    shards = -(-epochs // together) - 1
    repeated = share * (epochs - together)
    images_drawn, texts_drawn = (len({key[place] for key in new} - {key[place] for key in first}) for place in (0, 1))
    absent = [1.0, 1.0]
    if cached is not None and shards:
        then = _new_in(some, recipe, together + drops_captions(job.recipe.captions, together)).values()
        absent = [
            _missing_share(then, cached.has_image),
            _missing_share({one.caption for one in then}, cached.has_text),
        ]
    # Captions that are encoded in the training step count for the size of a shard, as in the run, but are not cached.
    encoded = repeated * texts_drawn * (1 - without_captions / epochs) + share * len(first) * max(0, warmup - together)
    texts_encoded = round(encoded * absent[1]) if configs else 0
    limited: Literal["disk", "listing"] = "disk" if 1 + more <= listed else "listing"
    return LaterShards(shards, round(repeated * images_drawn * absent[0]), texts_encoded, together, limited)


def _parts_of_epochs(
    job: Job, images: Sequence[ImageRecord], size: float, encoded: float, encoded_texts: float
) -> LaterShards:
    """Return the shards of a run in which one epoch, of ``size`` bytes, is more than a shard may hold.

    ``encoded`` and ``encoded_texts`` are the images and texts to encode for an epoch. Each epoch encodes them again,
    since the next part replaces the previous one, unless only the number of samples is limited.
    """
    limit = (job.fit.cache_gigabytes or float("inf")) * GIGABYTE
    an_epoch, shown = steps_per_epoch(images, job.recipe), samples_per_epoch(images)
    steps = max(1, int(an_epoch * min(limit / size, MAX_SHARD_SAMPLES / shown)))
    epochs = _epochs(job, images)
    repeated = (epochs if size > limit or _varies_by_epoch(images, job.recipe) else 1) - steps / an_epoch
    return LaterShards(
        shards=epochs * -(-an_epoch // steps) - 1,
        images=round(repeated * encoded),
        texts=round(repeated * encoded_texts * (1 - _epochs_without_captions(job.recipe, epochs) / epochs)),
        epochs_per_shard=1,
        limited="disk" if size > limit else "listing",
        part=steps / an_epoch,
    )


def _latent_bytes(image: ImageRecord) -> int:
    return latent_bytes(image.bucket, masked=image.mask != "none")


def _epochs(job: Job, images: Sequence[ImageRecord]) -> int:
    """Return the number of epochs of a run; a partial last epoch counts as a whole one."""
    return -(-(job.recipe.steps or 1) // steps_per_epoch(images, job.recipe))


def _epochs_without_captions(recipe: RecipeConfig, epochs: int) -> int:
    """Return how many of the first ``epochs`` epochs drop all captions."""
    every = recipe.captions.dropout_every_epochs
    return epochs // every if every else 0


def _epochs_of_warmup(recipe: RecipeConfig, images: Sequence[ImageRecord]) -> float:
    """Return the epochs in which captions of some folder grow, possibly a fraction."""
    of_each_folder = {image.overlay: image for image in images}.values()
    steps = max(image_recipe(image, recipe).captions.warmup_steps(recipe.steps) for image in of_each_folder)
    return steps / steps_per_epoch(images, recipe)


def _texts_of_warmup(
    images: Sequence[ImageRecord], recipe: RecipeConfig, per_epoch: int, epochs: float
) -> tuple[dict[str, None], float]:
    """Return the cut-off captions of the first ``epochs`` epochs, or of fewer, and the number of epochs listed."""
    shown = samples_per_epoch(images)
    listed = min(epochs, max(1, _MAX_LISTED // shown))
    found: dict[str, None] = {}
    for epoch in range(math.ceil(listed)):
        # Samples are listed in the order of their content hashes, which is as random as that of the run.
        for place, (image, repeat) in enumerate(epoch_samples(images, epoch)):
            step = int((epoch + (place + 0.5) / shown) * per_epoch)
            if step < min(listed * per_epoch, image_recipe(image, recipe).captions.warmup_steps(recipe.steps)):
                found[draw_sample(image, recipe, epoch, repeat, step).caption] = None
    return found, listed


def _varies_by_epoch(images: Iterable[ImageRecord], recipe: RecipeConfig) -> bool:
    """Return whether an epoch may contain samples that no earlier epoch contained."""
    return any(
        len(image.captions) > 1 or image.kind == "regularization" or _is_random(image_recipe(image, recipe))
        for image in images
    )


def _is_random(recipe: RecipeConfig) -> bool:
    """Return whether an image's caption or pixels may differ from sample to sample."""
    captions, images = recipe.captions, recipe.images
    text = captions.wildcards or captions.shuffle or captions.dropout > 0 or captions.tag_dropout > 0
    return bool(text or images.flip or images.crop == "random" or images.rotation or images.color_jitter)


def _subsample(step: int, images: Sequence[ImageRecord]) -> Sequence[ImageRecord]:
    """Return every ``step``-th image, or all images if none of the selected ones is trained on."""
    some = images[:: max(1, step)]
    return some if samples_per_epoch(some) else images


def _drawn(images: Iterable[ImageRecord], recipe: RecipeConfig, epoch: int) -> Iterator[Sample]:
    return (draw_sample(image, recipe, epoch, repeat) for image, repeat in epoch_samples(images, epoch))


def _cut(sample: Sample) -> _Cut:
    """Return the identity of an encoded image: its id and what was drawn for its pixels."""
    return sample.image.id, *sample.pixels


def _samples(images: Iterable[ImageRecord], recipe: RecipeConfig, epoch: int) -> dict[tuple[_Cut, str], Sample]:
    """Return the distinct samples of an epoch, keyed by what is encoded: image crop and text."""
    return {(_cut(sample), sample.caption): sample for sample in _drawn(images, recipe, epoch)}


def _new_in(images: Iterable[ImageRecord], recipe: RecipeConfig, epoch: int) -> dict[tuple[_Cut, str], Sample]:
    """Return the samples of an epoch that the previous epoch did not contain."""
    former, now = (_samples(images, recipe, one) for one in (epoch - 1, epoch))
    return {key: sample for key, sample in now.items() if key not in former}


def _extrapolate(sizes: Sequence[int], epochs: int) -> float:
    """Return the total after all epochs, extrapolated from ``sizes``, the totals after each of the first epochs.

    The total keeps growing at the rate of the second half of ``sizes``.
    """
    half = len(sizes) // 2
    rate = (sizes[-1] - sizes[half - 1]) / (len(sizes) - half) if half else 0.0
    return sizes[-1] + rate * (epochs - len(sizes))


def _count_missing(things: Iterable[T], has: Callable[[T], bool]) -> int:
    return sum(not has(thing) for thing in things)


def _missing_share(things: Collection[T], has: Callable[[T], bool]) -> float:
    """Return the share of items for which ``has`` returns False; 0 if there are no items."""
    return _count_missing(things, has) / len(things) if things else 0.0
