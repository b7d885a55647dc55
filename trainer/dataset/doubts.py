"""Marks what is doubtful about a dataset's pictures taken together: duplicates, captions as read, lonely buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from trainer.config.recipe import RecipeConfig
from trainer.dataset.captions import compose_caption, holds_trigger, without_chance
from trainer.dataset.duplicates import same
from trainer.dataset.folders import Scan
from trainer.dataset.health import word_copies
from trainer.dataset.picture import Picture
from trainer.files.tokens import ClipTokens


def mark_pictures(
    pictures: Sequence[Picture], alike: Iterable[Sequence[int]], recipe: RecipeConfig, scan: Scan
) -> None:
    """Note on the scan which pictures are doubtful; `alike` are the groups of places of nearly equal pictures."""
    _mark_copies(pictures, alike, scan)
    _mark_captions(pictures, recipe, scan)
    shown = Counter[tuple[int, int]]()
    for picture in pictures:
        if picture.kind == "train":
            shown[picture.bucket] += picture.repeats
    lonely = {bucket for bucket, count in shown.items() if count < recipe.effective_batch and len(shown) > 1}
    scan.marks["bucket.lonely"] += [p.path for p in pictures if p.kind == "train" and p.bucket in lonely]


def _mark_copies(pictures: Sequence[Picture], alike: Iterable[Sequence[int]], scan: Scan) -> None:
    copies = [Counter(pictures[place].path for place in places) for places in same([p.id for p in pictures])]
    for paths in copies:
        scan.marks["picture.twice"] += [path for path, count in paths.items() if count > 1]
    groups = [[pictures[place] for place in places] for places in alike]
    for group in groups:
        if {"train", "validation"} <= {picture.kind for picture in group}:
            scan.marks["picture.held_out_near"] += [p.path for p in group if p.kind == "validation"]
    near = [[picture.path for picture in group] for group in groups if len({picture.id for picture in group}) > 1]
    scan.findings += word_copies([list(paths) for paths in copies if len(paths) > 1], exact=True)
    scan.findings += word_copies(near, exact=False)


def _mark_captions(pictures: Iterable[Picture], recipe: RecipeConfig, scan: Scan) -> None:
    tokens = ClipTokens()
    for picture in pictures:
        if any(tokens.count(text) > recipe.token_chunks for text in _texts(picture, recipe)):
            scan.marks["caption.long"].append(picture.path)
        if picture.trigger and not all(holds_trigger(text, picture.trigger) for text in picture.captions):
            scan.marks["trigger.absent"].append(picture.path)


def _texts(picture: Picture, recipe: RecipeConfig) -> Iterator[str]:
    """Yield each of a picture's alternatives as it is read when nothing is dropped, with any part of wildcards."""
    whole = without_chance(recipe.captions)
    for caption in picture.captions or ("",):
        yield compose_caption((caption,), picture.trigger, picture.class_words, whole, np.random.default_rng(0))
