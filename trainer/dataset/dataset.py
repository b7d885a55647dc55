"""Read and check a whole dataset, and write the frozen listing (dataset.jsonl) that a run trains from."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainer.config.job import DatasetConfig, RecipeOverlay, stated_weight
from trainer.config.recipe import RecipeConfig
from trainer.dataset.decoders import Progress, inspect_images
from trainer.dataset.duplicates import alike, same
from trainer.dataset.findings import CROP_LOSS, Finding, by_severity, word_copies, word_marks
from trainer.dataset.folders import ImageFile, Imported, Scan, scan_folders
from trainer.dataset.image import (
    ImageRecord,
    MaskSource,
    Size,
    choose_bucket,
    count_files,
    crop_loss,
    enlargement,
    image_recipe,
    region_of,
)
from trainer.dataset.inspection import ImageFacts, Inspection
from trainer.dataset.sampling import (
    EpochBatches,
    compose_caption,
    holds_trigger,
    plain_sample,
    samples_per_epoch,
    steps_per_epoch,
    without_randomness,
)
from trainer.errors import DatasetError
from trainer.files.tokens import ClipTokens
from trainer.protocol.files import staged
from trainer.protocol.reading import UnusableFileError, decoded, open_file, parse_json, reason_of
from trainer.protocol.records import build, renamed, to_record

# A weight as people write it, unlike (16:9); and brackets that stand for a weight, as those of many booru tags would.
_BRACKETS = re.compile(r"(?<!\\)(\([^()\[\]:\\]*\)|\[[^()\[\]:\\]*\])")
_ENDINGS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "MPO": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png", ".apng"),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "AVIF": (".avif",),
    "JXL": (".jxl",),
}
# Enlarging by 2% is invisible; a bucket below half of the full area makes the image visibly coarser.
_ENLARGED = 1.02
_SMALL_BUCKET = 0.5
AUTO_SHARE = 0.05
_AUTO_LEAST = 40
INSPECTED_AT_ONCE = 4096
"""Image files whose facts are in memory at the same time; decoders are started again after as many."""
_KINDS = {"train": "for training", "regularization": "for regularization", "validation": "held out for validation"}


def shape_findings(size: tuple[int, int], bucket: tuple[int, int], recipe: RecipeConfig) -> list[str]:
    """Return the codes of findings about the size (width, height) of an image's region compared to its bucket."""
    full_area = (recipe.resolution or 0) ** 2
    coarse = size[0] * size[1] < full_area and bucket[0] * bucket[1] < _SMALL_BUCKET * full_area
    doubts = {
        "image.small": enlargement(*size, bucket) > _ENLARGED or coarse,
        "image.cropped": crop_loss(*size, bucket) > CROP_LOSS,
    }
    return [code for code, applies in doubts.items() if applies]


def file_findings(path: Path, facts: ImageFacts) -> list[str]:
    """Return the codes of findings about an image file."""
    doubts = {
        "image.profile": facts.profile == "broken",
        "image.misnamed": path.suffix.lower() not in _ENDINGS.get(facts.format, ()),
        "image.rotated": facts.rotated,
        "image.animated": facts.animated,
    }
    return [code for code, applies in doubts.items() if applies]


class DatasetBuilder:
    """Builder that turns candidates into image records, and adds findings about each image to the scan."""

    def __init__(self, dataset: DatasetConfig, recipe: RecipeConfig, scan: Scan) -> None:
        self._dataset = dataset
        self._recipe = recipe
        self._scan = scan
        self._inspected: Mapping[Path, Inspection] = {}
        # With "auto" and no mask in the dataset, masks are not wanted, so none is reported as missing.
        found = any(candidate.mask_path for candidate in scan.candidates)
        self._has_masks = found or any(folder.mask_folder for folder in dataset.folders)

    def images(self, progress: Progress | None) -> Iterator[tuple[list[ImageRecord], bytes]]:
        """Inspect all candidates and yield the records and the fingerprint of each image that can be used.

        An image has a record for each resolution of its folder.
        They are inspected in parts, because the facts about a file take more memory than what is kept of them.
        """
        candidates, limit, done = self._scan.candidates, self._dataset.max_megapixels, 0
        total = len(candidates) + sum(candidate.mask_path is not None for candidate in candidates)
        report = progress and (lambda count, _: progress(done + count, total))
        for start in range(0, len(candidates), INSPECTED_AT_ONCE):
            part = candidates[start : start + INSPECTED_AT_ONCE]
            masks = [candidate.mask_path for candidate in part if candidate.mask_path]
            paths = [*(candidate.path for candidate in part), *masks]
            self._inspected = inspect_images(paths, limit, report)
            done += len(paths)
            yield from (made for candidate in part if (made := self._image(candidate)))

    def _image(self, candidate: ImageFile) -> tuple[list[ImageRecord], bytes] | None:
        """Return the records and the fingerprint of a candidate; None if the image must be left out."""
        facts = self._sound(candidate.path)
        if facts is None:
            return None
        buckets = self._buckets(candidate, facts)
        if not buckets:
            self._mark("image.tiny", candidate.path)
            return None
        for code in file_findings(candidate.path, facts):
            self._mark(code, candidate.path)
        first = self._record(candidate, facts, *buckets[0])
        others = [replace(first, bucket=bucket, overlay=overlay) for bucket, overlay in buckets[1:]]
        return [first, *others], bytes.fromhex(facts.fingerprint)

    def _buckets(self, candidate: ImageFile, facts: ImageFacts) -> list[tuple[Size, RecipeOverlay | None]]:
        """Return the bucket and the settings at each resolution at which the image is large enough."""
        size = region_of(facts.width, facts.height, candidate.crop)[2:]
        found: list[tuple[Size, RecipeOverlay | None]] = []
        codes: dict[str, None] = {}
        for overlay in candidate.folder.overlays:
            recipe = overlay.applied_to(self._recipe) if overlay else self._recipe
            if bucket := choose_bucket(*size, recipe):
                found.append((bucket, overlay))
                codes |= dict.fromkeys(shape_findings(size, bucket, recipe))
        for code in codes:
            self._mark(code, candidate.path)
        return found

    def _record(
        self, candidate: ImageFile, facts: ImageFacts, bucket: Size, overlay: RecipeOverlay | None
    ) -> ImageRecord:
        source, mask_path, mask_id = self._mask(candidate, facts)
        folder = candidate.folder
        return ImageRecord(
            id=facts.id,
            path=candidate.path,
            width=facts.width,
            height=facts.height,
            kind=folder.kind,
            repeats=folder.repeats,
            weight=folder.weight,
            captions=candidate.captions,
            trigger=folder.trigger,
            class_words=folder.class_words,
            mask=source,
            mask_path=mask_path,
            mask_id=mask_id,
            crop=candidate.crop,
            bucket=bucket,
            overlay=overlay,
        )

    def _sound(self, path: Path) -> ImageFacts | None:
        found = self._inspected[path]
        if isinstance(found, DatasetError):
            self._scan.findings.append(Finding(found.code, found.values, (path,), "error"))
            return None
        return found

    def _mask(self, candidate: ImageFile, facts: ImageFacts) -> tuple[MaskSource, Path | None, str | None]:
        """Return the source, path and hash of an image's mask; an unreadable mask is reported and not used."""
        masks = candidate.folder.masks
        if masks == "alpha" and facts.transparent:
            return "alpha", None, None
        if candidate.mask_path and (mask := self._sound(candidate.mask_path)):
            if crop_loss(mask.width, mask.height, (facts.width, facts.height)) > 0.01:
                self._mark("mask.size", candidate.mask_path)
            return "file", candidate.mask_path, mask.id
        if masks in ("files", "alpha") or (masks == "auto" and self._has_masks):
            self._mark("mask.missing", candidate.path)
        return "none", None, None

    def _mark(self, code: str, path: Path) -> None:
        self._scan.marks[code].append(path)


def record_image_findings(
    images: Sequence[ImageRecord],
    others: Iterable[ImageRecord],
    alike: Iterable[Sequence[int]],
    recipe: RecipeConfig,
    scan: Scan,
) -> None:
    """Add findings about images to the scan; `alike` contains groups of indexes of similar images.

    `others` are records of the same images at further resolutions.
    """
    _mark_copies(images, alike, scan)
    _mark_captions(images, recipe, scan)
    trained = [image for image in (*images, *others) if image.kind == "train"]
    shown = Counter[tuple[int, int]]()
    for image in trained:
        shown[image.bucket] += image.repeats
    lonely = {bucket for bucket, count in shown.items() if count < recipe.effective_batch and len(shown) > 1}
    scan.marks["bucket.lonely"] += dict.fromkeys(image.path for image in trained if image.bucket in lonely)


def _mark_copies(images: Sequence[ImageRecord], alike: Iterable[Sequence[int]], scan: Scan) -> None:
    copies = [Counter(images[place].path for place in places) for places in same([p.id for p in images])]
    for paths in copies:
        scan.marks["image.twice"] += [path for path, count in paths.items() if count > 1]
    groups = [[images[place] for place in places] for places in alike]
    for group in groups:
        if {"train", "validation"} <= {image.kind for image in group}:
            scan.marks["image.held_out_near"] += [p.path for p in group if p.kind == "validation"]
    near = [[image.path for image in group] for group in groups if len({image.id for image in group}) > 1]
    scan.findings += word_copies([list(paths) for paths in copies if len(paths) > 1], exact=True)
    scan.findings += word_copies(near, exact=False)


def _mark_captions(images: Iterable[ImageRecord], recipe: RecipeConfig, scan: Scan) -> None:
    tokens, weighted = ClipTokens(), bool(recipe.weighted_captions)
    find, code = (_BRACKETS.search, "caption.brackets") if weighted else (stated_weight, "caption.weights")
    for image in images:
        texts = list(_texts(image, recipe))
        if any(tokens.count(text, weighted=weighted) > recipe.token_chunks for text in texts):
            scan.marks["caption.long"].append(image.path)
        if any(find(text) for text in texts):
            scan.marks[code].append(image.path)
        if image.trigger and not all(holds_trigger(text, image.trigger) for text in image.captions):
            scan.marks["trigger.absent"].append(image.path)


def _texts(image: ImageRecord, recipe: RecipeConfig) -> Iterator[str]:
    """Yield each alternative caption as used in training, but without dropout and with fixed wildcard choices."""
    whole = without_randomness(image_recipe(image, recipe).captions)
    for caption in image.captions or ("",):
        yield compose_caption((caption,), image.trigger, image.class_words, whole, np.random.default_rng(0))


def held_out(ids: Sequence[str], alike: Iterable[Sequence[int]], share: float | Literal["auto"]) -> set[int]:
    """Return the indexes of training images to hold out for validation; `ids` are their content hashes.

    "auto" holds out 5% if there are at least 40 images, else none. Similar images (`alike`: groups of indexes) stay
    together to prevent held-out images from resembling training images. Groups are taken in the order of their smallest
    hashes; those that would exceed the share are skipped. The choice thus depends only on contents, and a new image
    changes it little.
    """
    if share == "auto":
        share = AUTO_SHARE if len(ids) >= _AUTO_LEAST else 0.0
    wanted = round(share * len(ids))
    together = {place: tuple(group) for group in alike for place in group}
    groups = {together.get(place, (place,)) for place in range(len(ids))}
    chosen: set[int] = set()
    for group in sorted(groups, key=lambda group: min(ids[place] for place in group)):
        if len(chosen) + len(group) <= wanted:
            chosen.update(group)
    return chosen


@dataclass(frozen=True, slots=True)
class Dataset:
    """Usable images, including validation images, and all findings."""

    images: tuple[ImageRecord, ...]
    findings: tuple[Finding, ...]


def read_dataset(
    dataset: DatasetConfig, recipe: RecipeConfig, progress: Progress | None = None, imported: Imported | None = None
) -> Dataset:
    """Read and check a whole dataset; an image is hashed and decoded only if it is new or has changed.

    `recipe.resolution` must be resolved, since it determines the buckets, but its limits of bucket sides are those that
    the user sets, because others follow from the resolution of each folder. `imported` maps images to captions from
    another trainer's files. Unusable images are left out and reported as findings of severity "error". DatasetError is
    raised only for folders that are missing, unreadable or without images, and for damaged impasto.jsonl files.
    """
    scan = scan_folders(dataset, imported or {})
    images: list[ImageRecord] = []
    others: list[tuple[int, ImageRecord]] = []  # records at further resolutions, with the index of their image
    fingerprints: list[bytes] = []
    for (image, *more), fingerprint in DatasetBuilder(dataset, recipe, scan).images(progress):
        others += [(len(images), record) for record in more]
        images.append(image)
        fingerprints.append(fingerprint)
    scan.candidates.clear()  # all these are dropped as soon as possible, since each takes memory for every image
    groups = alike(fingerprints)
    del fingerprints
    record_image_findings(images, [record for _, record in others], groups, recipe, scan)
    chosen = _hold_out(images, groups, dataset)
    split = (
        replace(image, kind="validation") if place in chosen else image
        for place, image in chain(enumerate(images), others)
    )
    return Dataset(tuple(split), by_severity([*scan.findings, *word_marks(scan.marks)]))


def _hold_out(images: Sequence[ImageRecord], groups: Iterable[Sequence[int]], dataset: DatasetConfig) -> set[int]:
    """Return the indexes of images to hold out for validation; with a validation folder, "auto" holds out none."""
    share = dataset.validation_share
    if share == "auto" and any(image.kind == "validation" for image in images):
        return set()
    trained = [place for place, image in enumerate(images) if image.kind == "train"]
    within = {place: rank for rank, place in enumerate(trained)}
    kin = [[within[place] for place in group if place in within] for group in groups]
    return {trained[rank] for rank in held_out([images[place].id for place in trained], kin, share)}


def write_listing(path: Path, images: Iterable[ImageRecord]) -> None:
    """Write the listing of ``images`` atomically, line by line: all lines take more memory than the images."""
    with staged(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(_line(image) + "\n" for image in images)


def read_listing(path: Path) -> tuple[ImageRecord, ...]:
    """Return the images in a listing exactly as they were written; its text is read line by line, like `write_listing`.

    Raises DatasetError if the file is missing or damaged.
    """
    try:
        with open_file(path, "listing") as file:
            return tuple(decoded(parse_json(line, path), _image, path) for line in file if line.strip())
    except (OSError, UnusableFileError) as fault:
        raise DatasetError(
            "listing.damaged",
            f"Could not read the run's list of images {path}: {reason_of(fault)}.",
            "Restore the file from a backup, or start the job as a new run.",
        ) from fault


def _line(image: ImageRecord) -> str:
    record = to_record(image)
    if (overlay := record.pop("overlay")) is not None:
        record["overlay"] = overlay.stated()
    # ASCII only: file names on Linux may not be valid Unicode, and must be preserved.
    return json.dumps(record, default=str)


def _image(facts: Mapping[str, Any]) -> ImageRecord:
    crop, mask_path = facts["crop"], facts["mask_path"]
    typed = {
        "path": Path(facts["path"]),
        "captions": tuple(facts["captions"]),
        "mask_path": None if mask_path is None else Path(mask_path),
        "crop": None if crop is None else tuple(crop),
        "bucket": tuple(facts["bucket"]),
        "kind": renamed(facts["kind"], "dataset.folders.kind"),
        "overlay": _overlay(json.dumps(renamed(facts["overlay"], "recipe"))) if "overlay" in facts else None,
    }
    values = {**facts, **typed}
    # Every line would have its own copies of these values, which would take as much memory as the rest of the record.
    shared = {key: _shared(values[key]) for key in ("kind", "trigger", "class_words", "mask", "bucket")}
    return build(ImageRecord, {**values, **shared})


@lru_cache(maxsize=4096)
def _overlay(text: str) -> RecipeOverlay:
    """Return the same object for equal settings of folders, given as JSON."""
    return RecipeOverlay.model_validate_json(text)


@lru_cache(maxsize=4096)
def _shared(value: Hashable) -> Hashable:
    """Return the same object for equal values."""
    return value


def describe(dataset: Dataset, recipe: RecipeConfig, *, show_captions: bool = False) -> list[str]:
    """Return a description of the dataset and its epochs as lines, optionally with the first epoch's captions."""
    images = dataset.images
    lines = [*_counts(images), *_resolutions(images, recipe), *_buckets(images), _epoch(images, recipe)]
    if show_captions:
        lines += ["", "Captions in the first epoch:", *_captions(images, recipe)]
    return lines


def _counts(images: Sequence[ImageRecord]) -> Iterator[str]:
    for kind, purpose in _KINDS.items():
        samples = sum(image.repeats for image in images if image.kind == kind)
        if not (files := count_files(image for image in images if image.kind == kind)):
            continue
        shown = f", {samples} samples per epoch" if kind == "train" and samples > files else ""
        yield f"{_plural(files, 'image')} {purpose}{shown}"
    if masked := count_files(image for image in images if image.mask != "none"):
        yield f"{masked} of {_plural(count_files(images), 'image')} with a mask"


def _resolutions(images: Sequence[ImageRecord], recipe: RecipeConfig) -> Iterator[str]:
    sides = sorted({image_recipe(image, recipe).resolution or 0 for image in images})
    if recipe.images.buckets and sides:
        squares = ", ".join(f"{side} × {side}" for side in sides)
        one = len(sides) == 1
        yield f"Resolution{'' if one else 's'}: {squares}, or other aspect ratios of the same area{'' if one else 's'}"


def _buckets(images: Sequence[ImageRecord]) -> Iterator[str]:
    by_bucket: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for image in images:
        width, height = image.region()[2:]
        by_bucket[image.bucket].append(crop_loss(width, height, image.bucket))
    yield "Buckets (width×height: images, cropped area on average and at most):"
    for bucket, losses in sorted(by_bucket.items(), key=lambda item: (-len(item[1]), item[0])):
        mean = sum(losses) / len(losses)
        yield f"  {bucket[0]}×{bucket[1]}: {len(losses)}, {mean:.1%}, {max(losses):.1%}"


def _epoch(images: Sequence[ImageRecord], recipe: RecipeConfig) -> str:
    steps = _plural(steps_per_epoch(images, recipe), "step")
    samples = _plural(samples_per_epoch(images), "sample")
    return f"Epoch: {samples} in {steps} of up to {_plural(recipe.effective_batch, 'image')}"


def _captions(images: Sequence[ImageRecord], recipe: RecipeConfig) -> Iterator[str]:
    shown = [sample for batch in EpochBatches(images, recipe, 0) for sample in batch]
    shown += [plain_sample(image, recipe) for image in images if image.kind == "validation"]
    times = Counter((sample.image.path, sample.image.kind, sample.caption) for sample in shown)
    for (path, kind, caption), count in sorted(times.items()):
        note = " (held out)" if kind == "validation" else f" (×{count})" if count > 1 else ""
        yield f"  {path.name}: {caption or '(empty)'}{note}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
