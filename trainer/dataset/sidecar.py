"""The sidecar file impasto.jsonl in an image folder: exclusions, ratings, crops and folder settings."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from trainer.errors import DatasetError, plain_reason
from trainer.protocol.files import write_text
from trainer.protocol.reading import UnusableFileError, parse_json, read_text, reason_of
from trainer.protocol.records import renamed

FILE_NAME = "impasto.jsonl"

_HALF = re.compile("[\ud800-\udfff]")
"""Unpaired surrogates, which occur in file names that are not valid Unicode; pydantic rejects them in JSON."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def _whole(text: str) -> str:
    if _HALF.search(text):
        raise ValueError("it contains an invalid character (U+D800 to U+DFFF), which could not be read again")
    return text


class _Line(BaseModel):
    # Unknown keys, of other programs or later versions, are kept.
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class FolderSettings(_Line):
    """Settings of the folder, in the first line."""

    impasto: Literal[1] = 1
    repeats: int | None = Field(default=None, ge=1, le=10_000)
    regularization: bool = False
    trigger: Annotated[str, AfterValidator(_whole)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, data: Any) -> Any:
        """Accept the former name of a setting."""
        return renamed(data, "folder")


class ImageSettings(_Line):
    """Settings of one image, in any line after the first.

    `crop` is (left, top, right, bottom) as fractions of the upright image.
    """

    file: str
    excluded: bool = False
    rating: int | None = Field(default=None, ge=0, le=10)
    crop: tuple[Fraction, Fraction, Fraction, Fraction] | None = None

    @model_validator(mode="after")
    def _crop_has_an_inside(self) -> Self:
        if self.crop and not (self.crop[0] < self.crop[2] and self.crop[1] < self.crop[3]):
            raise ValueError("the crop must be left, top, right, bottom, with left < right and top < bottom")
        return self


@dataclass(frozen=True)
class Sidecar:
    """Sidecar data of one folder. Keys of `images` are file names in Unicode NFC, the same on every system."""

    folder: FolderSettings = field(default_factory=FolderSettings)
    images: Mapping[str, ImageSettings] = field(default_factory=dict)

    def of(self, name: str) -> ImageSettings:
        """Return the settings of the image with this file name; the defaults if the sidecar does not list the image."""
        return self.images.get(_composed(name)) or ImageSettings(file=name)

    def changed_since(self, before: Sidecar, names: Iterable[str]) -> list[str]:
        """Return the ``names`` of images whose settings differ from their settings in ``before``."""
        keys = self.images.keys() | before.images.keys()
        changed = {key for key in keys if self.images.get(key) != before.images.get(key)}
        return [name for name in names if _composed(name) in changed] if changed else []

    def with_folder(self, **facts: object) -> Sidecar:
        """Return a copy with changed folder settings; other keys, even unknown ones, are kept."""
        return Sidecar(
            FolderSettings.model_validate({**self.folder.model_dump(exclude_unset=True), **facts}), self.images
        )

    def with_image(self, name: str, **facts: object) -> Sidecar:
        """Return a copy with changed settings for one image; other keys, even unknown ones, are kept."""
        return self.with_images({name: facts})

    def with_images(self, facts: Mapping[str, Mapping[str, object]]) -> Sidecar:
        """Return a copy with changed settings for many images, given by file name; other keys are kept."""
        changed = {
            _composed(name): ImageSettings.model_validate({**self.of(name).model_dump(exclude_unset=True), **more})
            for name, more in facts.items()
        }
        return Sidecar(self.folder, {**self.images, **changed})


def read_sidecar(folder: Path) -> Sidecar:
    """Return the sidecar of a folder; an empty one if the file does not exist.

    Raises DatasetError if the file is damaged, since ignoring it could mean training on excluded images.
    """
    path = folder / FILE_NAME
    try:
        lines = [line for line in read_text(path, "notes").split("\n") if line.strip()]
    except FileNotFoundError:
        return Sidecar()
    except (OSError, UnusableFileError) as fault:
        raise _damaged(path, reason_of(fault)) from fault
    head, images = FolderSettings(), {}
    for number, line in enumerate(lines, start=1):
        try:
            found = parse_json(line)
            if number == 1 and "file" not in found:
                head = FolderSettings.model_validate_json(line)
            else:
                notes = _notes(line, found)
                images[_composed(notes.file)] = notes
        except UnusableFileError as fault:
            raise _damaged(path, f"line {number}: {fault.reason}") from fault
        except (ValueError, TypeError) as fault:  # pydantic's errors are ValueErrors
            raise _damaged(path, f"line {number}: {plain_reason(fault)}") from fault
    return Sidecar(head, images)


def write_sidecar(folder: Path, sidecar: Sidecar) -> None:
    """Write the sidecar of a folder atomically; keys that were neither set nor read from a file are left out."""
    write_text(folder / FILE_NAME, sidecar_text(sidecar))


def sidecar_text(sidecar: Sidecar) -> str:
    """Return the file content of a sidecar."""
    head = sidecar.folder.model_copy(update={"impasto": 1})
    return "".join(f"{_text(line)}\n" for line in (head, *sidecar.images.values()))


def _text(line: _Line) -> str:
    try:
        return line.model_dump_json(exclude_unset=True)
    except ValueError:  # a file name that is not Unicode, as Linux allows: JSON escapes can represent it
        return json.dumps(line.model_dump(exclude_unset=True), separators=(",", ":"))


def _notes(line: str, found: Any) -> ImageSettings:
    try:
        return ImageSettings.model_validate_json(line)
    except ValueError:
        name = found.get("file") if isinstance(found, dict) else None
        if not isinstance(name, str) or not _HALF.search(name):
            raise
        renamed = {**found, "file": "a name"}
        return _notes(json.dumps(renamed), renamed).model_copy(update={"file": name})


def _damaged(path: Path, reason: str) -> DatasetError:
    return DatasetError(
        "sidecar.damaged",
        f"Could not read {path}, which lists exclusions and crops of this folder: {reason}.",
        "Fix that line, or move the file away to train without exclusions and crops.",
    )


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)
