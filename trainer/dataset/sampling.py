"""Samples of each step: captions, crops, effective batches and micro-batches, all deterministic."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from trainer.config.recipe import CaptionConfig, RecipeConfig
from trainer.dataset.picture import Picture

# The innermost braces that contain a bar; replacing from the inside out also resolves nested wildcards.
_WILDCARD = re.compile(r"\{([^{}|]*(?:\|[^{}|]*)+)\}")
# Images that validation measures: held-out ones, or training images without them. Enough for a smooth curve, and fast.
MOST_HELD_OUT = 64
MOST_TRAINING_PICTURES = 8
T = TypeVar("T")


def compose_caption(
    captions: tuple[str, ...], trigger: str, class_words: str, config: CaptionConfig, stream: np.random.Generator
) -> str:
    """Return the caption of one sample, a pure function of the arguments and the state of the caption stream.

    The order is kohya's (sd-scripts `process_caption`): choose an alternative (or the class words), add the trigger
    word at the front unless the text contains it, prefix and suffix, caption dropout, wildcards, then keep, shuffle and
    drop tags. An added trigger word is always a kept tag, whatever `keep_tokens` is, and a tag that contains the
    trigger word is never dropped.
    """
    text = captions[int(stream.integers(len(captions)))] if len(captions) > 1 else "".join(captions)
    text = text.strip() or class_words
    head = "" if not trigger or holds_trigger(f"{config.prefix} {text}", trigger) else trigger
    if config.dropout and stream.random() < config.dropout:
        return ""
    start = _spaced(config.prefix, head)
    text = f"{start}{_joint(config) if head else ' '}{text}" if start and text else start or text
    text = _spaced(text, config.suffix)
    if config.wildcards:
        text = choose_wildcards(text, stream)
    keep = max(config.keep_tokens, len(_tags(start, config)) if head else 0)
    return _arrange(text, keep, trigger, config, stream)


def without_chance(config: CaptionConfig) -> CaptionConfig:
    """Return the settings without shuffling and dropout; alternatives and wildcards are still chosen."""
    return config.model_copy(update={"dropout": 0.0, "tag_dropout": 0.0, "shuffle": False})


def holds_trigger(text: str, trigger: str) -> bool:
    """Return whether the text contains the trigger as a whole word, ignoring case (as CLIP does)."""
    return re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text, re.IGNORECASE) is not None


def choose_wildcards(text: str, stream: np.random.Generator) -> str:
    """Return the text with every {a|b|c} replaced by one of its options, with equal probability."""
    while found := _WILDCARD.search(text):
        parts = found[1].split("|")
        text = text[: found.start()] + parts[int(stream.integers(len(parts)))] + text[found.end() :]
    return text


def _arrange(text: str, keep: int, trigger: str, config: CaptionConfig, stream: np.random.Generator) -> str:
    """Shuffle and drop the tags that are not kept; without both, return the text unchanged."""
    marked = bool(config.keep_separator) and config.keep_separator in text
    if not (marked or config.shuffle or config.tag_dropout):
        return text
    if marked:
        front, middle, *rest = text.split(config.keep_separator, 2)
        first, loose, last = (_tags(part, config) for part in (front, middle, "".join(rest)))
    else:
        tags = _tags(text, config)
        first, loose, last = tags[:keep], tags[keep:], []
    if config.shuffle:
        loose = [loose[place] for place in stream.permutation(len(loose))]
    if config.tag_dropout:
        dropped = stream.random(len(loose)) < config.tag_dropout
        loose = [
            tag
            for tag, gone in zip(loose, dropped, strict=True)
            if not gone or (trigger and holds_trigger(tag, trigger))
        ]
    return _joint(config).join([*first, *loose, *last])


def _tags(text: str, config: CaptionConfig) -> list[str]:
    return [tag.strip() for tag in text.split(config.separator) if tag.strip()]


def _joint(config: CaptionConfig) -> str:
    """Return the separator followed by a space, as taggers write it."""
    return config.separator.strip() + " "


def _spaced(first: str, second: str) -> str:
    return f"{first} {second}".strip() if first and second else first or second


Purpose = Literal[
    "order",
    "crop",
    "flip",
    "caption",
    "posterior",
    "timestep",
    "noise",
    "perturbation",
    "adapter",
    "preview",
    "validation",
]


def generator(seed: int, purpose: Purpose, *, epoch: int = 0, sample: str = "", repeat: int = 0) -> np.random.Generator:
    """Return a new random stream that depends only on the arguments, identical on every machine.

    The 128-bit Philox key is the start of the SHA-256 of the arguments as a JSON list. Streams of different arguments
    are independent, so no stream's position ever has to be saved or restored.
    """
    packed = json.dumps([seed, purpose, epoch, sample, repeat]).encode("ascii")
    key = int.from_bytes(hashlib.sha256(packed).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


Box = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sample of an image, with all random choices made."""

    picture: Picture
    epoch: int
    repeat: int
    """Index of this content within the epoch; with epoch and image id it identifies every random stream."""
    caption: str
    window: Box
    """Left, top, width and height, in pixels of the upright source, of the region scaled to the bucket."""
    flip: bool


def draw_sample(picture: Picture, recipe: RecipeConfig, epoch: int, repeat: int) -> Sample:
    """Return one sample of an image, a pure function of (seed, epoch, image, repeat)."""
    stream = partial(generator, recipe.seed, epoch=epoch, sample=picture.id, repeat=repeat)
    caption = compose_caption(
        picture.captions, picture.trigger, picture.class_words, recipe.captions, stream("caption")
    )
    across, down = stream("crop").random(2) if recipe.images.crop == "random" else (0.5, 0.5)
    flip = recipe.images.flip and bool(stream("flip").random() < 0.5)
    return Sample(picture, epoch, repeat, caption, crop_window(picture, across, down), flip)


def plain_sample(picture: Picture, recipe: RecipeConfig) -> Sample:
    """Return the validation sample of an image: center crop, no flip, no shuffling or dropout."""
    plain = without_chance(recipe.captions)
    stream = generator(recipe.seed, "validation", sample=picture.id)
    caption = compose_caption(picture.captions, picture.trigger, picture.class_words, plain, stream)
    return Sample(picture, 0, 0, caption, crop_window(picture, 0.5, 0.5), flip=False)


def measured_samples(pictures: Sequence[Picture], recipe: RecipeConfig) -> tuple[Sample, ...]:
    """Return the samples that validation measures: held-out images, or some training images without any."""
    held_out = [picture for picture in pictures if picture.kind == "validation"]
    chosen = held_out or [picture for picture in pictures if picture.kind == "train"]
    most = MOST_HELD_OUT if held_out else MOST_TRAINING_PICTURES
    return tuple(plain_sample(picture, recipe) for picture in sorted(chosen, key=lambda p: p.id)[:most])


def crop_window(picture: Picture, across: float, down: float) -> Box:
    """Return the largest window of the bucket's shape inside the image's region, in pixels of the upright image.

    `across` and `down` (0 to 1) position it where there is room: 0 is left or top, 0.5 the middle.
    """
    return window_in(picture.region(), picture.bucket, across, down)


def window_in(region: Box, bucket: tuple[int, int], across: float, down: float) -> Box:
    """Return `crop_window` of a region; regions are (left, top, width, height), buckets (width, height) in pixels."""
    left, top, width, height = region
    wide = min(max(round(height * bucket[0] / bucket[1]), 1), width)
    high = min(max(round(width * bucket[1] / bucket[0]), 1), height)
    return left + round(across * (width - wide)), top + round(down * (height - high)), wide, high


def micro_conditioning(sample: Sample) -> tuple[int, int, int, int, int, int]:
    """Return SDXL's (original height, width, crop top, left, target height, width) for a sample, in pixels.

    As in diffusers' SDXL LoRA script: the original is the whole upright source image, the crop offset is the true one
    in the scaled image (mirrored for flipped samples), and the target is the bucket. sd-scripts derives its offset
    from the aspect ratios instead.
    """
    picture = sample.picture
    left, top, wide, high = sample.window
    bucket_width, bucket_height = picture.bucket
    if sample.flip:
        left = picture.width - left - wide
    crop_top, crop_left = round(top * bucket_height / high), round(left * bucket_width / wide)
    return picture.height, picture.width, crop_top, crop_left, bucket_height, bucket_width


def epoch_showings(pictures: Iterable[Picture], epoch: int) -> list[tuple[Picture, int]]:
    """Return each (image, repeat) of an epoch, in an order that depends on contents, never on names.

    Training images appear `repeats` times. Regularization images appear, in total, as often as training images: as in
    sd-scripts they are cycled when there are fewer and cut when there are more. Unlike there, each epoch continues the
    cycle (each image `repeats` times, by content hash) where the previous one ended, so none stays unused.
    """
    ordered = sorted(pictures, key=_content_order)
    shown = [picture for picture in ordered if picture.kind == "train" for _ in range(picture.repeats)]
    ring = [picture for picture in ordered if picture.kind == "regularization" for _ in range(picture.repeats)]
    if ring:
        start = epoch * len(shown)
        shown += [ring[place % len(ring)] for place in range(start, start + len(shown))]
    # Files with the same bytes share one count, so that they never share a random stream.
    seen: Counter[str] = Counter()
    showings = []
    for picture in shown:
        showings.append((picture, seen[picture.id]))
        seen[picture.id] += 1
    return showings


def samples_per_epoch(pictures: Iterable[Picture]) -> int:
    """Return the samples per epoch, including regularization images."""
    kept = [picture for picture in pictures if picture.kind != "validation"]
    trained = sum(picture.repeats for picture in kept if picture.kind == "train")
    return trained * (2 if any(picture.kind == "regularization" for picture in kept) else 1)


def steps_per_epoch(pictures: Iterable[Picture], recipe: RecipeConfig) -> int:
    """Return the optimizer steps per epoch: ceil(samples / effective batch size), the same on every machine."""
    return -(-samples_per_epoch(pictures) // recipe.effective_batch)


def epoch_batches(pictures: Iterable[Picture], recipe: RecipeConfig, epoch: int) -> list[tuple[Sample, ...]]:
    """Return the effective batches of an epoch in step order; no sample is dropped or repeated."""
    return [
        tuple(draw_sample(picture, recipe, epoch, repeat) for picture, repeat in showings)
        for showings in dealt_showings(pictures, recipe, epoch)
    ]


def dealt_showings(
    pictures: Iterable[Picture], recipe: RecipeConfig, epoch: int
) -> list[Sequence[tuple[Picture, int]]]:
    """Return the effective batches of an epoch as (image, repeat) pairs, before anything else is drawn.

    Each bucket fills as many batches as it can; the leftovers of all buckets are put, bucket by bucket, into mixed
    batches, so that these split into few micro-batches. Only the last mixed batch may be smaller.
    """
    showings = epoch_showings(pictures, epoch)
    stream = generator(recipe.seed, "order", epoch=epoch)
    by_bucket: defaultdict[tuple[int, int], list[tuple[Picture, int]]] = defaultdict(list)
    for place in stream.random(len(showings)).argsort(kind="stable"):
        picture, repeat = showings[place]
        by_bucket[picture.bucket].append((picture, repeat))
    size = recipe.effective_batch
    full = [members[: len(members) // size * size] for members in by_bucket.values()]
    leftovers = [showing for members in by_bucket.values() for showing in members[len(members) // size * size :]]
    dealt = [part for members in [*full, leftovers] for part in _cut(members, size)]
    return [dealt[place] for place in stream.random(len(dealt)).argsort(kind="stable")]


def micro_batches(batch: Sequence[Sample], size: int) -> list[tuple[Sample, ...]]:
    """Split an effective batch into micro-batches of one bucket and at most `size` samples."""
    by_bucket: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)
    for sample in batch:
        by_bucket[sample.picture.bucket].append(sample)
    return [tuple(part) for members in by_bucket.values() for part in _cut(members, size)]


def _cut(members: list[T], size: int) -> list[list[T]]:
    return [members[start : start + size] for start in range(0, len(members), size)]


def _content_order(picture: Picture) -> tuple[object, ...]:
    return (
        picture.id,
        picture.kind,
        picture.captions,
        picture.trigger,
        picture.class_words,
        picture.repeats,
        picture.weight,
        picture.crop or (),
        picture.mask_id or "",
        picture.path.as_posix(),
    )
