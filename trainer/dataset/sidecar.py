"""impasto.jsonl, the notes in a folder of pictures: what is excluded, ratings, crops, and facts of the folder."""

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

FILE_NAME = "impasto.jsonl"

_HALF = re.compile("[\ud800-\udfff]")
"""What stands in names that are no Unicode; pydantic takes it in no JSON."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def _whole(text: str) -> str:
    if _HALF.search(text):
        raise ValueError("it holds half a letter (U+D800 to U+DFFF), which could be written and not be read again")
    return text


class _Line(BaseModel):
    # Keys of other programs and of later versions stay in the file.
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class FolderNotes(_Line):
    """The first line: facts of the whole folder."""

    impasto: Literal[1] = 1
    repeats: int | None = Field(default=None, ge=1, le=10_000)
    regularisation: bool = False
    trigger: Annotated[str, AfterValidator(_whole)] | None = None


class PictureNotes(_Line):
    """Any other line: facts of one picture of this very folder; its crop is left, top, right, bottom when upright."""

    file: str
    excluded: bool = False
    rating: int | None = Field(default=None, ge=0, le=10)
    crop: tuple[Fraction, Fraction, Fraction, Fraction] | None = None

    @model_validator(mode="after")
    def _crop_has_an_inside(self) -> Self:
        if self.crop and not (self.crop[0] < self.crop[2] and self.crop[1] < self.crop[3]):
            raise ValueError("the crop has to be left, top, right, bottom, with left < right and top < bottom")
        return self


@dataclass(frozen=True)
class Sidecar:
    """The notes of one folder; pictures by file name, in Unicode's composed form, the same on every system."""

    folder: FolderNotes = field(default_factory=FolderNotes)
    pictures: Mapping[str, PictureNotes] = field(default_factory=dict)

    def of(self, name: str) -> PictureNotes:
        """Return what is noted of the picture with this file name; nothing, for most."""
        return self.pictures.get(_composed(name)) or PictureNotes(file=name)

    def changed_since(self, before: Sidecar, names: Iterable[str]) -> list[str]:
        """Return those of these file names of which something else is noted than before."""
        keys = self.pictures.keys() | before.pictures.keys()
        changed = {key for key in keys if self.pictures.get(key) != before.pictures.get(key)}
        return [name for name in names if _composed(name) in changed] if changed else []

    def with_folder(self, **facts: object) -> Sidecar:
        """Return the notes with facts of the folder changed; other keys, unknown ones too, stay."""
        return Sidecar(
            FolderNotes.model_validate({**self.folder.model_dump(exclude_unset=True), **facts}), self.pictures
        )

    def with_picture(self, name: str, **facts: object) -> Sidecar:
        """Return the notes with facts of one picture changed; other keys, unknown ones too, stay."""
        return self.with_pictures({name: facts})

    def with_pictures(self, facts: Mapping[str, Mapping[str, object]]) -> Sidecar:
        """Return the notes with facts of many pictures changed, by their file names; other keys stay."""
        changed = {
            _composed(name): PictureNotes.model_validate({**self.of(name).model_dump(exclude_unset=True), **more})
            for name, more in facts.items()
        }
        return Sidecar(self.folder, {**self.pictures, **changed})


def read_sidecar(folder: Path) -> Sidecar:
    """Return the notes of a folder; empty ones when it has none.

    Raises DatasetError when the file is damaged: to train on pictures that may be excluded would be worse.
    """
    path = folder / FILE_NAME
    try:
        lines = [line for line in read_text(path, "notes").split("\n") if line.strip()]
    except FileNotFoundError:
        return Sidecar()
    except (OSError, UnusableFileError) as fault:
        raise _damaged(path, reason_of(fault)) from fault
    head, pictures = FolderNotes(), {}
    for number, line in enumerate(lines, start=1):
        try:
            found = parse_json(line)
            if number == 1 and "file" not in found:
                head = FolderNotes.model_validate_json(line)
            else:
                notes = _notes(line, found)
                pictures[_composed(notes.file)] = notes
        except UnusableFileError as fault:
            raise _damaged(path, f"line {number}: {fault.reason}") from fault
        except (ValueError, TypeError) as fault:  # pydantic's errors are ValueErrors
            raise _damaged(path, f"line {number}: {plain_reason(fault)}") from fault
    return Sidecar(head, pictures)


def write_sidecar(folder: Path, sidecar: Sidecar) -> None:
    """Write the notes of a folder in one step; keys that were not set or read are not written."""
    write_text(folder / FILE_NAME, sidecar_text(sidecar))


def sidecar_text(sidecar: Sidecar) -> str:
    """Return what the file says for these notes."""
    head = sidecar.folder.model_copy(update={"impasto": 1})
    return "".join(f"{_text(line)}\n" for line in (head, *sidecar.pictures.values()))


def _text(line: _Line) -> str:
    try:
        return line.model_dump_json(exclude_unset=True)
    except ValueError:  # a name that is no Unicode, as Linux allows: JSON's escapes can spell it
        return json.dumps(line.model_dump(exclude_unset=True), separators=(",", ":"))


def _notes(line: str, found: Any) -> PictureNotes:
    try:
        return PictureNotes.model_validate_json(line)
    except ValueError:
        name = found.get("file") if isinstance(found, dict) else None
        if not isinstance(name, str) or not _HALF.search(name):
            raise
        renamed = {**found, "file": "a name"}
        return _notes(json.dumps(renamed), renamed).model_copy(update={"file": name})


def _damaged(path: Path, reason: str) -> DatasetError:
    return DatasetError(
        "sidecar.damaged",
        f"{path}, which says what is excluded and cropped in this folder, cannot be read: {reason}.",
        "Correct that line, or move the file away to train without exclusions and crops.",
    )


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)
