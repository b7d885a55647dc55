"""Joins what folders say of pictures and what their files turned out to be into the records of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.config.dataset import DatasetConfig
from trainer.config.recipe import RecipeConfig
from trainer.dataset.buckets import choose_bucket, crop_loss, enlargement
from trainer.dataset.findings import Finding
from trainer.dataset.folders import Candidate, Scan
from trainer.dataset.health import CROP_LOSS
from trainer.dataset.inspection import Inspection
from trainer.dataset.memory import PictureFacts
from trainer.dataset.picture import MaskSource, Picture, region_of
from trainer.errors import DatasetError

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
# Enlarging by two per cent cannot be seen; a bucket under half of the full area gives a visibly coarser picture.
_ENLARGED = 1.02
_SMALL_BUCKET = 0.5


def doubts_of_shape(size: tuple[int, int], bucket: tuple[int, int], recipe: RecipeConfig) -> list[str]:
    """Return the codes of what is doubtful about the (width, height) of a picture's region in its bucket."""
    full_area = (recipe.resolution or 0) ** 2
    coarse = size[0] * size[1] < full_area and bucket[0] * bucket[1] < _SMALL_BUCKET * full_area
    doubts = {
        "picture.small": enlargement(*size, bucket) > _ENLARGED or coarse,
        "picture.cropped": crop_loss(*size, bucket) > CROP_LOSS,
    }
    return [code for code, applies in doubts.items() if applies]


def doubts_of_file(path: Path, facts: PictureFacts) -> list[str]:
    """Return the codes of what is doubtful, or worth knowing, about a picture's file."""
    doubts = {
        "picture.profile": facts.profile == "broken",
        "picture.misnamed": path.suffix.lower() not in _ENDINGS.get(facts.format, ()),
        "picture.rotated": facts.rotated,
        "picture.animated": facts.animated,
    }
    return [code for code, applies in doubts.items() if applies]


class Assembler:
    """Makes pictures of candidates, and notes on the scan what is wrong or doubtful with each."""

    def __init__(
        self, dataset: DatasetConfig, recipe: RecipeConfig, inspected: Mapping[Path, Inspection], scan: Scan
    ) -> None:
        self._dataset = dataset
        self._recipe = recipe
        self._inspected = inspected
        self._scan = scan
        # Where no image has a mask, "auto" means that masks are not wanted: then none is missing either.
        wanted = dataset.masks in ("files", "alpha")
        self._masks_wanted = wanted or any(candidate.mask_path for candidate in scan.candidates)

    def picture(self, candidate: Candidate) -> tuple[Picture, PictureFacts] | None:
        """Return the record of a candidate and what its file is; None when it has to be left out."""
        facts = self._sound(candidate.path)
        if facts is None:
            return None
        _, _, width, height = region_of(facts.width, facts.height, candidate.crop)
        bucket = choose_bucket(width, height, self._recipe)
        if bucket is None:
            self._mark("picture.tiny", candidate.path)
            return None
        self._judge(candidate.path, facts, (width, height), bucket)
        source, mask_path, mask_id = self._mask(candidate, facts)
        folder = candidate.folder
        picture = Picture(
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
        )
        return picture, facts

    def _sound(self, path: Path) -> PictureFacts | None:
        found = self._inspected[path]
        if isinstance(found, DatasetError):
            self._scan.findings.append(Finding(found.code, found.sentence, found.remedy, (path,), "error"))
            return None
        return found

    def _judge(self, path: Path, facts: PictureFacts, size: tuple[int, int], bucket: tuple[int, int]) -> None:
        for code in (*doubts_of_shape(size, bucket, self._recipe), *doubts_of_file(path, facts)):
            self._mark(code, path)

    def _mask(self, candidate: Candidate, facts: PictureFacts) -> tuple[MaskSource, Path | None, str | None]:
        """Return where the mask is and the hash of its file; one that cannot be read is reported, and none used."""
        if self._dataset.masks == "alpha" and facts.transparent:
            return "alpha", None, None
        if candidate.mask_path and (mask := self._sound(candidate.mask_path)):
            if crop_loss(mask.width, mask.height, (facts.width, facts.height)) > 0.01:
                self._mark("mask.size", candidate.mask_path)
            return "file", candidate.mask_path, mask.id
        if self._masks_wanted:
            self._mark("mask.missing", candidate.path)
        return "none", None, None

    def _mark(self, code: str, path: Path) -> None:
        self._scan.marks[code].append(path)
