"""Findings and chart keys of a single image (about 20 microseconds each), crop previews and near duplicates.

Importing it loads trainer modules, so a worker imports it first, which keeps the window's thread responsive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import floor, log2

from app.core.edits.history import Edit
from app.core.health.groups import Key
from app.core.library import Crop, Folder, LibraryImage, ValueChange
from app.core.tags.splitting import Lines, split_tags
from trainer.config.recipe import RecipeConfig
from trainer.dataset.caption_files import split_caption
from trainer.dataset.dataset import shape_findings
from trainer.dataset.duplicates import Fingerprints
from trainer.dataset.folders import chain_of, folder_marks
from trainer.dataset.image import choose_bucket, enlargement, region_of
from trainer.dataset.sampling import holds_trigger, window_in
from trainer.dataset.sidecar import FolderSettings

TOKEN_STEP = 15
"""Tokens per bar of the caption chart; a divisor of 75, 150 and 225, so that the chunk limits fall between bars."""
TOKEN_BARS = 20
"""Maximum number of bars; the last one includes all longer captions."""
CELLS_PER_DOUBLING = 4
"""Number of size chart cells per doubling of a side length."""

CountTokens = Callable[[str], int | None]
MIN_CROP_SIDE = 64
"""Minimum side of a crop in pixels."""


@dataclass
class Judge:
    """Computes the index keys of images for a recipe; `tokens` returns None if a text's tokens are not counted yet."""

    recipe: RecipeConfig
    tokens: CountTokens
    lines: Lines = "caption"
    _class_words: dict[Folder, str] = field(default_factory=dict)

    def keys(self, image: LibraryImage, known: Sequence[str] = ()) -> list[Key]:
        """Return all index keys of an image; `known` contains the finding codes of its file inspection."""
        if image.excluded:
            return [("mark", "image.excluded")]
        if image.problem:
            return [("mark", "image.unusable")]
        keys: list[Key] = [("mark", code) for code in known]
        keys += self._shape(image)
        keys += self._caption(image)
        keys.append(("mask", "with") if image.mask else ("mark", "mask.missing"))
        keys.append(("folder", image.folder))
        return keys

    def captions(self, image: LibraryImage) -> list[str]:
        """Return the caption texts used in training, before random changes such as tag shuffling.

        The trigger word is put in front of texts that do not contain it.
        """
        return self._trained_texts(image, self._caption_texts(image))

    def _caption_texts(self, image: LibraryImage) -> tuple[str, ...]:
        return split_caption(image.caption or "", self.lines)

    def _trained_texts(self, image: LibraryImage, written: Sequence[str]) -> list[str]:
        trigger = (image.folder.trigger or "").strip()
        return [_with_trigger(text, trigger) for text in written or (self._class_words_of(image.folder),)]

    def _shape(self, image: LibraryImage) -> list[Key]:
        if not image.width or not image.height:
            return []
        _, _, *size = region_of(image.width, image.height, image.crop)
        width, height = size
        cell = ("cell", (cell_of(width), cell_of(height)))
        bucket = choose_bucket(width, height, self.recipe)
        if bucket is None:
            return [cell, ("mark", "image.tiny")]
        codes = shape_findings((width, height), bucket, self.recipe)
        shape: list[Key] = [] if image.folder.regularization else [("shape", bucket)]
        return [cell, ("bucket", bucket), *shape, *(("mark", code) for code in codes)]

    def _caption(self, image: LibraryImage) -> list[Key]:
        keys: list[Key] = [("mark", "caption.clash")] if image.clash else []
        written = self._caption_texts(image)
        trained = self._trained_texts(image, written)
        if not written:
            missing = "missing" if image.caption is None else "empty"
            keys.append(("mark", f"caption.{'words' if any(trained) else missing}"))
        elif trained != [*written]:
            keys.append(("mark", "trigger.absent"))
        if written and any(len(tag) == 1 for tag in split_tags(image.caption, self.lines)):
            keys.append(("mark", "tag.one_letter"))
        counts = [self.tokens(text) for text in trained]
        if None in counts:
            return [*keys, ("uncounted", "tokens")]
        count = max(count for count in counts if count is not None)
        keys.append(("tokens", min(max(count - 1, 0) // TOKEN_STEP, TOKEN_BARS - 1)))
        if count > self.recipe.token_chunks:
            keys.append(("mark", "caption.long"))
        return keys

    def _class_words_of(self, folder: Folder) -> str:
        """Return the class words from folder names such as "10_cat", or ""."""
        if folder not in self._class_words:
            chain = [(path.name, FolderSettings()) for path in chain_of(folder.root, folder.path)]
            self._class_words[folder] = folder_marks(chain).class_words or ""
        return self._class_words[folder]


def _with_trigger(text: str, trigger: str) -> str:
    if not trigger or holds_trigger(text, trigger):
        return text
    return f"{trigger}, {text}" if text else trigger


@lru_cache(maxsize=65536)
def cell_of(side: int) -> int:
    """Return the row or column of a side length in the size chart, which has a logarithmic scale."""
    return floor(log2(max(side, 1)) * CELLS_PER_DOUBLING)


@dataclass(frozen=True, slots=True)
class CropPreview:
    """What training sees of an image if the crop is centered."""

    bucket: tuple[int, int]
    """Bucket width and height in pixels."""
    frame: Crop
    """Visible part of the upright image, as fractions."""
    lost: float
    """Fraction of the image area that is cropped away."""
    enlarged: float
    """Scale factor of the sides; a value below 1 means downscaling."""


def crop_preview(width: int, height: int, crop: Crop | None, recipe: RecipeConfig) -> CropPreview | None:
    """Return what training sees of an upright image of this size; None if it is too small for any bucket."""
    region = region_of(width, height, crop)
    bucket = choose_bucket(region[2], region[3], recipe)
    if bucket is None:
        return None
    left, top, wide, high = window_in(region, bucket, 0.5, 0.5)
    frame = (left / width, top / height, (left + wide) / width, (top + high) / height)
    return CropPreview(bucket, frame, 1.0 - wide * high / (width * height), enlargement(wide, high, bucket))


def largest_frame(width: int, height: int, shape: tuple[int, int]) -> Crop:
    """Return the largest centered frame with the aspect ratio of `shape`, as fractions."""
    left, top, wide, high = window_in((0, 0, width, height), shape, 0.5, 0.5)
    return left / width, top / height, (left + wide) / width, (top + high) / height


def moved(frame: Crop, across: float, down: float) -> Crop:
    """Return a frame moved by fractions of the image, clamped to the image."""
    across = min(max(across, -frame[0]), 1.0 - frame[2])
    down = min(max(down, -frame[1]), 1.0 - frame[3])
    return frame[0] + across, frame[1] + down, frame[2] + across, frame[3] + down


def scaled(frame: Crop, factor: float, size: tuple[int, int], anchor: tuple[float, float] = (0.5, 0.5)) -> Crop:
    """Return a frame scaled around `anchor` (0 to 1 within the frame), with the same aspect ratio.

    It is clamped to the image of `size` pixels, and its sides are not scaled below MIN_CROP_SIDE pixels.
    """
    wide, high = frame[2] - frame[0], frame[3] - frame[1]
    least = max(min(MIN_CROP_SIDE / (wide * size[0]), 1.0), min(MIN_CROP_SIDE / (high * size[1]), 1.0))
    factor = min(max(factor, least), 1.0 / wide, 1.0 / high)
    left = frame[0] + anchor[0] * wide * (1.0 - factor)
    top = frame[1] + anchor[1] * high * (1.0 - factor)
    left = min(max(left, 0.0), 1.0 - wide * factor)
    top = min(max(top, 0.0), 1.0 - high * factor)
    return left, top, left + wide * factor, top + high * factor


def crop_to(image: LibraryImage, frame: Crop | None) -> Edit:
    """Return the edit that sets the crop of an image; None removes the crop."""
    crop = None
    if frame is not None:
        left, top, right, bottom = (round(min(max(side, 0.0), 1.0), 6) for side in frame)
        crop = left, top, right, bottom
    name = f"Crop {image.name}" if crop else f"Remove the crop of {image.name}"
    return Edit(name, (ValueChange(image.id, "crop", image.crop, crop),) if crop != image.crop else ())


class NearDuplicates:
    """Fingerprints of the images added so far; comparing a new one with 100,000 others takes 0.3 ms."""

    def __init__(self) -> None:
        self._prints = Fingerprints()
        self._images: list[int] = []
        self._position: dict[int, int] = {}

    def add(self, known: Iterable[tuple[int, str]]) -> list[tuple[int, int]]:
        """Add images with their hex fingerprints; return their pairs with near duplicates added earlier."""
        known = list(known)
        start = len(self._prints)
        self._prints.add([bytes.fromhex(fingerprint) for _, fingerprint in known])
        pairs = []
        for place, (image, _) in enumerate(known, start):
            if image in self._position:  # its file has changed
                self._images[self._position[image]] = 0  # ids start at 1, so 0 marks the old entry as unused
            self._position[image] = place
            self._images.append(image)
            others = (self._images[other] for other in self._prints.near(place, slice(0, place)))
            pairs += [(other, image) for other in others if other]
        return pairs
