"""Says of one picture what is wrong or doubtful, and which bars of the charts it belongs to. About 20 microseconds.

Imports what the trainer judges by, so a worker loads this module first.

What training shows of a picture, and another part of it that the artist chooses, in the shape of its bucket.

Imports what the trainer computes by, so the app loads it when crops are chosen.
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
"""Tokens that one bar of the chart stands for; the marks at 75, 150 and 225 are bounds of bars."""
TOKEN_BARS = 20
"""From the last bar on all longer captions are together."""
CELLS_PER_DOUBLING = 4
"""Steps of the chart of sizes within one doubling of a side."""

CountTokens = Callable[[str], int | None]
LEAST = 64
"""Pixels: no side of a crop is made smaller."""


@dataclass
class Judge:
    """The yardsticks; `tokens` returns None for a text that is not counted yet, and has it counted."""

    recipe: RecipeConfig
    tokens: CountTokens
    lines: Lines = "caption"
    _class_words: dict[Folder, str] = field(default_factory=dict)

    def keys(self, image: LibraryImage, known: Sequence[str] = ()) -> list[Key]:
        """Return all that a picture is filed under; `known` are the codes that a look at its files gave."""
        if image.excluded:
            return [("mark", "picture.excluded")]
        if image.problem:
            return [("mark", "picture.unusable")]
        keys: list[Key] = [("mark", code) for code in known]
        keys += self._shape(image)
        keys += self._caption(image)
        keys.append(("mask", "with") if image.mask else ("mark", "mask.missing"))
        keys.append(("folder", image.folder))
        return keys

    def captions(self, image: LibraryImage) -> list[str]:
        """Return the texts that are trained, but for chance: the trigger first unless the caption holds it."""
        return self._trained(image, self._written(image))

    def _written(self, image: LibraryImage) -> tuple[str, ...]:
        return split_caption(image.caption or "", self.lines)

    def _trained(self, image: LibraryImage, written: Sequence[str]) -> list[str]:
        trigger = (image.folder.trigger or "").strip()
        return [_led(text, trigger) for text in written or (self._words(image.folder),)]

    def _shape(self, image: LibraryImage) -> list[Key]:
        if not image.width or not image.height:
            return []
        _, _, *size = region_of(image.width, image.height, image.crop)
        width, height = size
        cell = ("cell", (cell_of(width), cell_of(height)))
        bucket = choose_bucket(width, height, self.recipe)
        if bucket is None:
            return [cell, ("mark", "picture.tiny")]
        doubts = shape_findings((width, height), bucket, self.recipe)
        shape: list[Key] = [] if image.folder.regularization else [("shape", bucket)]
        return [cell, ("bucket", bucket), *shape, *(("mark", code) for code in doubts)]

    def _caption(self, image: LibraryImage) -> list[Key]:
        keys: list[Key] = [("mark", "caption.clash")] if image.clash else []
        written = self._written(image)
        trained = self._trained(image, written)
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

    def _words(self, folder: Folder) -> str:
        """Return the class words that the names of folders give, as 10_cat does."""
        if folder not in self._class_words:
            chain = [(path.name, FolderSettings()) for path in chain_of(folder.root, folder.path)]
            self._class_words[folder] = folder_marks(chain).class_words or ""
        return self._class_words[folder]


def _led(text: str, trigger: str) -> str:
    if not trigger or holds_trigger(text, trigger):
        return text
    return f"{trigger}, {text}" if text else trigger


@lru_cache(maxsize=65536)
def cell_of(side: int) -> int:
    """Return the row or column of a side in the chart of sizes, whose steps are even on a logarithmic scale."""
    return floor(log2(max(side, 1)) * CELLS_PER_DOUBLING)


@dataclass(frozen=True, slots=True)
class CropPreview:
    """What a centred showing of a picture holds."""

    bucket: tuple[int, int]
    """Width and height in pixels of what the model sees."""
    frame: Crop
    """The part of the upright picture that is left, as fractions."""
    lost: float
    """Share of the picture's area that lies outside."""
    enlarged: float
    """By which factor its sides grow; below 1 they shrink."""


def shown_of(width: int, height: int, crop: Crop | None, recipe: RecipeConfig) -> CropPreview | None:
    """Return what training shows of an upright picture of this many pixels; None: too small for any bucket."""
    region = region_of(width, height, crop)
    bucket = choose_bucket(region[2], region[3], recipe)
    if bucket is None:
        return None
    left, top, wide, high = window_in(region, bucket, 0.5, 0.5)
    frame = (left / width, top / height, (left + wide) / width, (top + high) / height)
    return CropPreview(bucket, frame, 1.0 - wide * high / (width * height), enlargement(wide, high, bucket))


def largest(width: int, height: int, shape: tuple[int, int]) -> Crop:
    """Return the largest frame of a shape in the middle of a picture, as fractions."""
    left, top, wide, high = window_in((0, 0, width, height), shape, 0.5, 0.5)
    return left / width, top / height, (left + wide) / width, (top + high) / height


def moved(frame: Crop, across: float, down: float) -> Crop:
    """Return a frame moved by fractions of the picture, kept inside it."""
    across = min(max(across, -frame[0]), 1.0 - frame[2])
    down = min(max(down, -frame[1]), 1.0 - frame[3])
    return frame[0] + across, frame[1] + down, frame[2] + across, frame[3] + down


def scaled(frame: Crop, factor: float, size: tuple[int, int], anchor: tuple[float, float] = (0.5, 0.5)) -> Crop:
    """Return a frame of the same shape, its sides times a factor; what is at `anchor` (0 to 1 within it) stays there.

    It stays inside the picture of `size` pixels, and its sides above LEAST pixels.
    """
    wide, high = frame[2] - frame[0], frame[3] - frame[1]
    least = max(min(LEAST / (wide * size[0]), 1.0), min(LEAST / (high * size[1]), 1.0))
    factor = min(max(factor, least), 1.0 / wide, 1.0 / high)
    left = frame[0] + anchor[0] * wide * (1.0 - factor)
    top = frame[1] + anchor[1] * high * (1.0 - factor)
    left = min(max(left, 0.0), 1.0 - wide * factor)
    top = min(max(top, 0.0), 1.0 - high * factor)
    return left, top, left + wide * factor, top + high * factor


def crop_to(image: LibraryImage, frame: Crop | None) -> Edit:
    """Train on this part of a picture; None: on all of it, as its bucket allows."""
    crop = None
    if frame is not None:
        left, top, right, bottom = (round(min(max(side, 0.0), 1.0), 6) for side in frame)
        crop = left, top, right, bottom
    name = f"Crop {image.name}" if crop else f"Remove the crop of {image.name}"
    return Edit(name, (ValueChange(image.id, "crop", image.crop, crop),) if crop != image.crop else ())


class NearDuplicates:
    """All fingerprints so far: a new one is compared with all others, 0.3 ms at 100,000."""

    def __init__(self) -> None:
        self._prints = Fingerprints()
        self._images: list[int] = []
        self._place: dict[int, int] = {}

    def add(self, known: Iterable[tuple[int, str]]) -> list[tuple[int, int]]:
        """Take pictures with their fingerprints in hex; return the pairs that each makes with one known already."""
        known = list(known)
        start = len(self._prints)
        self._prints.add([bytes.fromhex(fingerprint) for _, fingerprint in known])
        pairs = []
        for place, (image, _) in enumerate(known, start):
            if image in self._place:  # its file has changed
                self._images[self._place[image]] = 0
            self._place[image] = place
            self._images.append(image)
            others = (self._images[other] for other in self._prints.near(place, slice(0, place)))
            pairs += [(other, image) for other in others if other]
        return pairs
