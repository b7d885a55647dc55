"""Says in lines of text what an epoch of a dataset will show: counts, buckets, crops, captions, steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from trainer.config.recipe import RecipeConfig
from trainer.dataset.buckets import crop_loss
from trainer.dataset.listing import Dataset
from trainer.dataset.picture import Picture
from trainer.dataset.sampling import draw_sample, epoch_showings, plain_sample, samples_per_epoch, steps_per_epoch

_KINDS = {"train": "to learn from", "regularisation": "for regularisation", "validation": "held out for validation"}


def describe(dataset: Dataset, recipe: RecipeConfig, *, show_captions: bool = False) -> list[str]:
    """Return what an epoch will show, line by line; with captions, also each text as the first epoch reads it."""
    pictures = dataset.pictures
    side = recipe.resolution
    training = (
        [f"Resolution: {side} × {side}, or another shape of that area"] if side and recipe.pictures.buckets else []
    )
    lines = [*_counts(pictures), *training, *_buckets(pictures), _epoch(pictures, recipe)]
    if show_captions:
        lines += ["", "Captions as the first epoch reads them:", *_captions(pictures, recipe)]
    return lines


def _counts(pictures: Sequence[Picture]) -> Iterator[str]:
    for kind, purpose in _KINDS.items():
        repeats = [picture.repeats for picture in pictures if picture.kind == kind]
        if not repeats:
            continue
        shown = f", shown {sum(repeats)} times an epoch" if kind == "train" and sum(repeats) > len(repeats) else ""
        yield f"{_plural(len(repeats), 'picture')} {purpose}{shown}"
    if masked := sum(picture.mask != "none" for picture in pictures):
        yield f"{masked} of {_plural(len(pictures), 'picture')} with a mask"


def _buckets(pictures: Sequence[Picture]) -> Iterator[str]:
    by_bucket: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for picture in pictures:
        width, height = picture.region()[2:]
        by_bucket[picture.bucket].append(crop_loss(width, height, picture.bucket))
    yield "Buckets (width×height: pictures, area cropped away on average and at most):"
    for bucket, losses in sorted(by_bucket.items(), key=lambda item: (-len(item[1]), item[0])):
        mean = sum(losses) / len(losses)
        yield f"  {bucket[0]}×{bucket[1]}: {len(losses)}, {mean:.1%}, {max(losses):.1%}"


def _epoch(pictures: Sequence[Picture], recipe: RecipeConfig) -> str:
    steps = _plural(steps_per_epoch(pictures, recipe), "step")
    shown = _plural(samples_per_epoch(pictures), "showing")
    return f"An epoch: {shown} in {steps} of {_plural(recipe.effective_batch, 'picture')}"


def _captions(pictures: Sequence[Picture], recipe: RecipeConfig) -> Iterator[str]:
    shown = [draw_sample(picture, recipe, 0, repeat) for picture, repeat in epoch_showings(pictures, 0)]
    shown += [plain_sample(picture, recipe) for picture in pictures if picture.kind == "validation"]
    times = Counter((sample.picture.path, sample.picture.kind, sample.caption) for sample in shown)
    for (path, kind, caption), count in sorted(times.items()):
        note = " (held out)" if kind == "validation" else f" (×{count})" if count > 1 else ""
        yield f"  {path.name}: {caption or '(empty)'}{note}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
