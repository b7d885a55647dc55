"""Deterministic samples for each step: captions, crops, effective batches and micro-batches."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, TypeVar

import numpy as np

from trainer.config.job import PromptConfig, RecipeOverlay
from trainer.config.recipe import CaptionConfig, RecipeConfig
from trainer.dataset.image import ImageRecord, image_recipe
from trainer.files.tokens import CHUNK, PromptText, has_weights, padded_length

# The innermost braces that contain a bar; replacing from the inside out also resolves nested wildcards.
_WILDCARD = re.compile(r"\{([^{}|]*(?:\|[^{}|]*)+)\}")
# Images that validation measures: held-out ones, or training images without them. Enough for a smooth curve, and fast.
MAX_HELD_OUT = 64
MAX_TRAINING_IMAGES = 8
T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


def compose_caption(
    captions: tuple[str, ...],
    trigger: str,
    class_words: str,
    config: CaptionConfig,
    stream: np.random.Generator,
    warmup: tuple[int, int] = (0, 0),
) -> str:
    """Return the caption of one sample, as a pure function of the arguments and the caption stream's state.

    The order is kohya's (sd-scripts `process_caption`): choose an alternative (or the class words), put the trigger
    word in front unless the text contains it, add prefix and suffix, apply caption dropout and wildcards, keep, warm
    up, shuffle and drop tags, then replace the secondary separator. An added trigger word is always a kept tag,
    regardless of `keep_tokens`, and a tag that contains the trigger word is never dropped. ``warmup`` is the step,
    from 0, and the number of steps of the token warm-up.
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
    text = _arrange(text, keep, trigger, config, stream, warmup)
    return text.replace(config.secondary_separator, config.separator) if config.secondary_separator else text


def drops_captions(config: CaptionConfig, epoch: int) -> bool:
    """Return whether all captions of an epoch, counted from 0, are dropped.

    As in sd-scripts, epochs count from 1 (`set_current_epoch`), so that the first epoch dropped is the Nth.
    """
    return config.dropout_every_epochs is not None and (epoch + 1) % config.dropout_every_epochs == 0


def without_randomness(config: CaptionConfig) -> CaptionConfig:
    """Return the settings without shuffling, dropout or warm-up; alternatives and wildcards are still chosen."""
    off = {"dropout": 0.0, "tag_dropout": 0.0, "shuffle": False, "token_warmup_step": None}
    return config.model_copy(update=off)


def holds_trigger(text: str, trigger: str) -> bool:
    """Return whether the text contains the trigger word as a whole word, ignoring case as CLIP does."""
    return re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text, re.IGNORECASE) is not None


def choose_wildcards(text: str, stream: np.random.Generator) -> str:
    """Return the text with every {a|b|c} replaced by one of its options, with equal probability."""
    while found := _WILDCARD.search(text):
        parts = found[1].split("|")
        text = text[: found.start()] + parts[int(stream.integers(len(parts)))] + text[found.end() :]
    return text


def _arrange(
    text: str, keep: int, trigger: str, config: CaptionConfig, stream: np.random.Generator, warmup: tuple[int, int]
) -> str:
    """Cut off, shuffle and drop tags that are not kept; return the text unchanged if no setting requires any of it."""
    marked = bool(config.keep_separator) and config.keep_separator in text
    if not (marked or config.shuffle or config.tag_dropout or config.token_warmup_step):
        return text
    if marked:
        front, middle, *rest = text.split(config.keep_separator, 2)
        first, loose, last = (_tags(part, config) for part in (front, middle, "".join(rest)))
    else:
        tags = _tags(text, config)
        first, loose, last = tags[:keep], tags[keep:], []
    count = _warmed_up(len(loose), config, *warmup)
    loose = [tag for place, tag in enumerate(loose) if place < count or _has_trigger(tag, trigger)]
    if config.shuffle:
        loose = [loose[place] for place in stream.permutation(len(loose))]
    if config.tag_dropout:
        dropped = stream.random(len(loose)) < config.tag_dropout
        loose = [tag for tag, gone in zip(loose, dropped, strict=True) if not gone or _has_trigger(tag, trigger)]
    return _joint(config).join([*first, *loose, *last])


def _warmed_up(tags: int, config: CaptionConfig, step: int, steps: int) -> int:
    """Return how many of an image's tags are used in a step, as in sd-scripts; all after the warm-up of ``steps``."""
    if step >= steps:
        return tags
    least = 1 if config.token_warmup_min is None else config.token_warmup_min
    return step * (tags - least) // steps + least


def _has_trigger(tag: str, trigger: str) -> bool:
    return bool(trigger) and holds_trigger(tag, trigger)


def _tags(text: str, config: CaptionConfig) -> list[str]:
    return [tag.strip() for tag in text.split(config.separator) if tag.strip()]


def _joint(config: CaptionConfig) -> str:
    """Return the tag separator followed by one space, as in captions written by tagging programs."""
    return config.separator.strip() + " "


def _spaced(first: str, second: str) -> str:
    return f"{first} {second}".strip() if first and second else first or second


Purpose = Literal[
    "order",
    "crop",
    "flip",
    "rotation",
    "color",
    "caption",
    "posterior",
    "timestep",
    "noise",
    "perturbation",
    "mask",
    "adapter",
    "preview",
    "validation",
]


def generator(seed: int, purpose: Purpose, *, epoch: int = 0, sample: str = "", repeat: int = 0) -> np.random.Generator:
    """Return a new random stream that depends only on the arguments and is identical on every machine.

    The 128-bit Philox key is the start of the SHA-256 of the arguments as a JSON list. Streams for different
    arguments are independent, so stream positions never have to be saved or restored.
    """
    packed = json.dumps([seed, purpose, epoch, sample, repeat]).encode("ascii")
    key = int.from_bytes(hashlib.sha256(packed).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


# sd-scripts' color_aug: a hue shift in half of these samples, in degrees, and a gamma in the others. Both are rounded,
# so that encoded images are used again.
_JITTERED, _LARGEST_HUE_SHIFT, _LARGEST_GAMMA_CHANGE = 0.33, 16, 0.05
Box = tuple[int, int, int, int]
Shape = tuple[int, int, int]
"""Width and height of a bucket in pixels, and the tokens that captions are padded to: equal in a micro-batch."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sample of an image, with the results of all random choices."""

    image: ImageRecord
    epoch: int
    repeat: int
    """Index of this sample among those of the same image in the epoch; part of the key of its random streams."""
    caption: str
    window: Box
    """Region that is scaled to the bucket: left, top, width and height in pixels of the upright image."""
    flip: bool
    tokens: int = CHUNK
    """Tokens that the caption is padded to: 75, 150 or 225."""
    angle: int = 0
    """Counterclockwise turn around the window's center, in degrees."""
    hue: int = 0
    """Shift of the hue in degrees."""
    gamma: float = 1.0
    """Exponent of the colors, from 0 to 1."""

    @property
    def shape(self) -> Shape:
        """Return the shape of the micro-batches that can contain the sample."""
        return *self.image.bucket, self.tokens

    @property
    def pixels(self) -> tuple[object, ...]:
        """Return all that the pixels of an image depend on, apart from the image; the last ones only if they are on."""
        changes = (self.angle, self.hue, self.gamma)
        return self.window, self.image.bucket, self.flip, *(changes if changes != (0, 0, 1.0) else ())

    @property
    def zoom(self) -> float:
        """Return the share of the window's sides that a turned rectangle of its shape may have to lie inside it."""
        _, _, width, height = self.window
        turn = math.radians(abs(self.angle))
        cosine, sine = math.cos(turn), math.sin(turn)
        return min(width / (width * cosine + height * sine), height / (width * sine + height * cosine))


def prompt_texts(prompt: PromptConfig, recipe: RecipeConfig) -> tuple[str | PromptText, str | PromptText]:
    """Return a preview's prompt and negative prompt; as plain strings if they are encoded as captions would be."""
    weighted = bool(recipe.weighted_captions) if prompt.weights is None else prompt.weights

    def read(text: str) -> str | PromptText:
        differs = weighted != bool(recipe.weighted_captions) and has_weights(text)
        return PromptText(text, weighted) if differs else text

    return read(prompt.prompt), read(prompt.negative)


def as_prompt_text(text: str | PromptText, recipe: RecipeConfig) -> PromptText:
    """Return a text with the way in which it is read: as captions are, unless it says so itself."""
    return text if isinstance(text, PromptText) else PromptText(text, bool(recipe.weighted_captions))


def padded_tokens(text: str | PromptText, recipe: RecipeConfig) -> int:
    """Return the tokens that a text is padded to: the recipe's limit, or the multiple of 75 that the text needs.

    This depends only on the text as drawn, so shuffled, shortened and dropped captions have their own lengths, equal
    texts have equal ones, and no machine or micro-batch affects them.
    """
    if not recipe.has_caption_lengths:
        return recipe.token_chunks
    words, weighted = as_prompt_text(text, recipe)
    return padded_length(words, recipe.token_chunks, weighted=weighted)


@dataclass(frozen=True, slots=True)
class CaptionLengths:
    """Tokens that an image's captions are padded to."""

    shortest: int
    usual: int
    """Length of the whole caption; of several, that of one chosen at random."""
    longest: int
    """Length of the longest caption with the longest options of its wildcards."""


def caption_lengths(image: ImageRecord, recipe: RecipeConfig) -> CaptionLengths:
    """Return which lengths an image's captions can have in training, without drawing samples."""
    if not recipe.has_caption_lengths:
        return CaptionLengths(*[recipe.token_chunks] * 3)
    captions = image_recipe(image, recipe).captions
    usual = plain_sample(image, recipe).tokens
    if captions.wildcards or len(image.captions) > 1:
        whole = without_randomness(captions).replaced(wildcards=False)
        stream = generator(recipe.seed, "validation", sample=image.stream)  # draws nothing: nothing is left to chance
        composed = (
            compose_caption((caption,), image.trigger, image.class_words, whole, stream) for caption in image.captions
        )
        lengths = [padded_tokens(_longest_options(text) if captions.wildcards else text, recipe) for text in composed]
    else:
        lengths = [usual]
    drops = captions.dropout or captions.dropout_every_epochs or captions.tag_dropout
    shortens = drops or captions.token_warmup_step or captions.wildcards
    return CaptionLengths(CHUNK if shortens else min(lengths, default=usual), usual, max(lengths, default=usual))


def usual_shape(image: ImageRecord, recipe: RecipeConfig) -> Shape:
    """Return the shape of an image with its whole caption, without drawing a sample."""
    return *image.bucket, caption_lengths(image, recipe).usual


def _longest_options(text: str) -> str:
    """Return the text with every {a|b|c} replaced by its longest option, which is about the one of most tokens."""
    while found := _WILDCARD.search(text):
        text = text[: found.start()] + max(found[1].split("|"), key=len) + text[found.end() :]
    return text


def draw_sample(image: ImageRecord, recipe: RecipeConfig, epoch: int, repeat: int, step: int | None = None) -> Sample:
    """Return one sample of an image, as a pure function of (seed, epoch, image, repeat) and the step for its caption.

    The token warm-up gives the caption that it has in optimizer step ``step``, from 0; None: the whole one.
    """
    recipe = image_recipe(image, recipe)
    stream = partial(generator, recipe.seed, epoch=epoch, sample=image.stream, repeat=repeat)
    captions, caption = recipe.captions, ""
    if not drops_captions(captions, epoch):
        warmup = (step, captions.warmup_steps(recipe.steps)) if step is not None else (0, 0)
        drawn = stream("caption")
        caption = compose_caption(image.captions, image.trigger, image.class_words, captions, drawn, warmup)
    across, down = stream("crop").random(2) if recipe.images.crop == "random" else (0.5, 0.5)
    flip = recipe.images.flip and bool(stream("flip").random() < 0.5)
    window = crop_window(image, across, down)
    angle = round(stream("rotation").uniform(-1, 1) * recipe.images.rotation) if recipe.images.rotation else 0
    hue, gamma = _draw_color(stream("color")) if recipe.images.color_jitter else (0, 1.0)
    return Sample(image, epoch, repeat, caption, window, flip, padded_tokens(caption, recipe), angle, hue, gamma)


def _draw_color(stream: np.random.Generator) -> tuple[int, float]:
    """Return a hue shift in degrees and a gamma, at most one of which changes anything.

    The shares and limits are those of sd-scripts' `color_aug`. Its gamma is of values from 0 to 255, which also darkens
    or brightens the whole image by up to a quarter; here it is of values from 0 to 1, as in albumentations, which
    sd-scripts names as its source.
    """
    jittered, which, amount = stream.random(3)
    if jittered > _JITTERED:
        return 0, 1.0
    amount = 2 * amount - 1
    if which > 0.5:
        return round(amount * _LARGEST_HUE_SHIFT), 1.0
    return 0, round(1 + amount * _LARGEST_GAMMA_CHANGE, 2)


def plain_sample(image: ImageRecord, recipe: RecipeConfig) -> Sample:
    """Return the validation sample of an image: center crop, no flip, no shuffling or dropout."""
    plain = without_randomness(image_recipe(image, recipe).captions)
    stream = generator(recipe.seed, "validation", sample=image.stream)
    caption = compose_caption(image.captions, image.trigger, image.class_words, plain, stream)
    window = crop_window(image, 0.5, 0.5)
    return Sample(image, 0, 0, caption, window, flip=False, tokens=padded_tokens(caption, recipe))


def measured_samples(images: Sequence[ImageRecord], recipe: RecipeConfig) -> tuple[Sample, ...]:
    """Return the samples used for validation: held-out images or, if there are none, some training images."""
    held_out = [image for image in images if image.kind == "validation"]
    chosen = held_out or [image for image in images if image.kind == "train"]
    most = MAX_HELD_OUT if held_out else MAX_TRAINING_IMAGES
    return tuple(plain_sample(image, recipe) for image in sorted(chosen, key=lambda p: p.stream)[:most])


def crop_window(image: ImageRecord, across: float, down: float) -> Box:
    """Return the largest window of the bucket's shape inside the image's region, in pixels of the upright image.

    `across` and `down` (0 to 1) position the window if it can move: 0 is left or top, 0.5 is the middle.
    """
    return window_in(image.region(), image.bucket, across, down)


def window_in(region: Box, bucket: tuple[int, int], across: float, down: float) -> Box:
    """Return the `crop_window` for a region (left, top, width, height) and a bucket (width, height) in pixels."""
    left, top, width, height = region
    wide = min(max(round(height * bucket[0] / bucket[1]), 1), width)
    high = min(max(round(width * bucket[1] / bucket[0]), 1), height)
    return left + round(across * (width - wide)), top + round(down * (height - high)), wide, high


def micro_conditioning(sample: Sample) -> tuple[int, int, int, int, int, int]:
    """Return SDXL's (original height, width, crop top, left, target height, width) for a sample, in pixels.

    As in diffusers' SDXL LoRA script: the original is the whole upright source image, the crop offset is the actual one
    in the scaled image (mirrored for flipped samples), and the target is the bucket. sd-scripts derives its offset
    from the aspect ratios instead.
    """
    image = sample.image
    left, top, wide, high = map(float, sample.window)
    bucket_width, bucket_height = image.bucket
    if sample.flip:
        left = image.width - left - wide
    zoom = sample.zoom
    top, left = top + (1 - zoom) * high / 2, left + (1 - zoom) * wide / 2
    crop_top, crop_left = round(top * bucket_height / (high * zoom)), round(left * bucket_width / (wide * zoom))
    return image.height, image.width, crop_top, crop_left, bucket_height, bucket_width


def epoch_samples(images: Iterable[ImageRecord], epoch: int) -> list[tuple[ImageRecord, int]]:
    """Return each (image, repeat) of an epoch in an order that depends only on contents, never on names.

    Training images appear `repeats` times. Regularization images appear as often in total as training images: as in
    sd-scripts, they are cycled if there are fewer and cut off if there are more. A cycle contains each image `repeats`
    times, sorted by content hash. Unlike in sd-scripts, each epoch continues the cycle where the previous epoch ended,
    so that all images are used.
    """
    ordered = sorted(images, key=_content_order)
    shown = [image for image in ordered if image.kind == "train" for _ in range(image.repeats)]
    ring = [image for image in ordered if image.kind == "regularization" for _ in range(image.repeats)]
    if ring:
        start = epoch * len(shown)
        shown += [ring[place % len(ring)] for place in range(start, start + len(shown))]
    # Files with the same bytes share one count, so that they never share a random stream.
    seen: Counter[str] = Counter()
    showings = []
    for image in shown:
        showings.append((image, seen[image.stream]))
        seen[image.stream] += 1
    return showings


def samples_per_epoch(images: Iterable[ImageRecord]) -> int:
    """Return the number of samples per epoch, including regularization images."""
    kept = [image for image in images if image.kind != "validation"]
    trained = sum(image.repeats for image in kept if image.kind == "train")
    return trained * (2 if any(image.kind == "regularization" for image in kept) else 1)


def most_per_epoch(images: Iterable[ImageRecord], shapes: Callable[[ImageRecord], Iterable[H]]) -> Counter[H]:
    """Return the most samples that any epoch can have of each shape; ``shapes`` returns those an image can have."""
    kept = [image for image in images if image.kind != "validation"]
    trained = sum(image.repeats for image in kept if image.kind == "train")
    ring = sum(image.repeats for image in kept if image.kind == "regularization")
    rounds = -(-trained // ring) if ring else 0  # an epoch starts anywhere in the cycle of regularization images
    found: Counter[H] = Counter()
    for image in kept:
        count = image.repeats * (1 if image.kind == "train" else rounds)
        found.update(dict.fromkeys(shapes(image), count))
    return found


def steps_per_epoch(images: Iterable[ImageRecord], recipe: RecipeConfig) -> int:
    """Return the optimizer steps per epoch: ceil(samples / effective batch size), the same on every machine."""
    return -(-samples_per_epoch(images) // recipe.effective_batch)


class EpochBatches:
    """The effective batches of an epoch in step order; no sample is dropped or repeated.

    Samples are drawn when their batch is accessed. Drawn in advance, those of 200,000 images would take 80 MB. The
    token warm-up depends on the step, which batching decides, so samples are batched by the shapes of whole captions.
    """

    def __init__(self, images: Iterable[ImageRecord], recipe: RecipeConfig, epoch: int) -> None:
        self._recipe = recipe
        self._epoch = epoch
        showings = epoch_samples(images, epoch)
        shapes = [_shape(image, recipe, epoch, repeat) for image, repeat in showings]
        batched = _batched(range(len(showings)), shapes.__getitem__, recipe, epoch)
        self._batches = [[showings[place] for place in batch] for batch in batched]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[Sample, ...]:
        step = self._epoch * len(self) + index
        return tuple(
            draw_sample(image, self._recipe, self._epoch, repeat, step) for image, repeat in self._batches[index]
        )

    def __iter__(self) -> Iterator[tuple[Sample, ...]]:
        return (self[index] for index in range(len(self)))


def _shape(image: ImageRecord, recipe: RecipeConfig, epoch: int, repeat: int) -> Shape:
    """Return the shape of a sample, which is only drawn if its caption matters."""
    if recipe.has_caption_lengths:
        return draw_sample(image, recipe, epoch, repeat).shape
    return *image.bucket, recipe.token_chunks


def batched_shapes(
    images: Iterable[ImageRecord], recipe: RecipeConfig, epoch: int, shape: Callable[[ImageRecord], Shape]
) -> list[list[Shape]]:
    """Return the shapes in each effective batch of an epoch, from the ``shape`` of each image.

    No sample is drawn: if captions change their lengths from epoch to epoch, batches are only about those of
    `EpochBatches`.
    """
    shapes = [shape(image) for image, _ in epoch_samples(images, epoch)]
    return _batched(shapes, lambda shape: shape, recipe, epoch)


def _batched(samples: Sequence[T], shape: Callable[[T], Shape], recipe: RecipeConfig, epoch: int) -> list[list[T]]:
    """Return the samples of an epoch in effective batches.

    The samples of each shape fill as many batches as possible; the leftovers of all shapes are put into mixed batches,
    shape by shape, so that they split into few micro-batches. Only the last mixed batch may be smaller.
    """
    stream = generator(recipe.seed, "order", epoch=epoch)
    by_shape: defaultdict[Shape, list[T]] = defaultdict(list)
    for place in stream.random(len(samples)).argsort(kind="stable"):
        by_shape[shape(samples[place])].append(samples[place])
    size = recipe.effective_batch
    full = [members[: len(members) // size * size] for members in by_shape.values()]
    leftovers = [sample for members in by_shape.values() for sample in members[len(members) // size * size :]]
    dealt = [part for members in [*full, leftovers] for part in _cut(members, size)]
    return [dealt[place] for place in stream.random(len(dealt)).argsort(kind="stable")]


def micro_batches(batch: Sequence[Sample], size: int) -> list[tuple[Sample, ...]]:
    """Split an effective batch into micro-batches of at most `size` samples of one shape."""
    by_shape: defaultdict[Shape, list[Sample]] = defaultdict(list)
    for sample in batch:
        by_shape[sample.shape].append(sample)
    return [tuple(part) for members in by_shape.values() for part in _cut(members, size)]


def _cut(members: list[T], size: int) -> list[list[T]]:
    return [members[start : start + size] for start in range(0, len(members), size)]


def _content_order(image: ImageRecord) -> tuple[object, ...]:
    return (
        image.id,
        image.kind,
        image.captions,
        image.trigger,
        image.class_words,
        image.repeats,
        image.weight,
        image.crop or (),
        image.mask_id or "",
        _overlay_order(image.overlay),
        image.path.as_posix(),
    )


@lru_cache(maxsize=4096)
def _overlay_order(overlay: RecipeOverlay | None) -> str:
    """Return a text that sorts images of equal contents by the settings of their folders."""
    return "" if overlay is None else overlay.model_dump_json(exclude_none=True)
