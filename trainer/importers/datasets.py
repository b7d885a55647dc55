"""What another program's file says about a dataset: folders, and the settings that are common or of one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.job import CaptionOverlay, DatasetConfig, FolderConfig, ImagesOverlay
from trainer.config.recipe import CaptionConfig, ImagesConfig
from trainer.config.schema import Section
from trainer.config.toml_file import toml_value
from trainer.errors import DatasetError
from trainer.protocol.reading import noting_file, reason_of

_RESOLUTION = "recipe.resolution"
_TABLES: Mapping[str, tuple[type[Section], Iterable[str]]] = {
    "recipe.captions": (CaptionConfig, CaptionOverlay.model_fields),
    "recipe.images": (ImagesConfig, ImagesOverlay.model_fields),
    "dataset": (DatasetConfig, ("lines", "masks")),
}
# Settings that each folder can have, with the values of folders that do not state them.
_FOLDER_DEFAULTS: Mapping[str, object] = {
    **{f"{at}.{name}": table.model_fields[name].default for at, (table, names) in _TABLES.items() for name in names},
    "recipe.captions.secondary_separator": "",
    "recipe.images.color_jitter": False,
    "recipe.images.rotation": 0,
}
_MOST_NOTES = 100


@dataclass
class ImportedDataset:
    """Result of an import."""

    folders: list[FolderConfig] = field(default_factory=list)
    dataset: dict[str, object] = field(default_factory=dict)
    """Values of the job's dataset table by key, except folders."""
    settings: dict[str, object] = field(default_factory=dict)
    """Recipe values from the file, by dotted key such as recipe.captions.shuffle."""
    captions: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    """Captions that are not in files next to the images, to be passed to `read_dataset`."""
    notes: list[str] = field(default_factory=list)
    """Sentences about settings that were not imported."""
    _stated: list[dict[str, object]] = field(default_factory=list)
    """What the file states of each folder, by dotted key of a job; see `settle`."""

    def config(self) -> DatasetConfig:
        """Return the dataset table for a job."""
        return DatasetConfig.model_validate({"folders": self.folders, **self.dataset})

    def values(self) -> dict[str, object]:
        """Return the values of a job, by dotted key, except folders."""
        return {**self.settings, **{f"dataset.{key}": value for key, value in self.dataset.items()}}

    def note(self, sentence: str) -> None:
        """Add a note unless it is already there; after 100 notes, add only that there are more."""
        if len(self.notes) >= _MOST_NOTES:
            sentence = "Other settings in the file were not imported."
        if len(self.notes) <= _MOST_NOTES and sentence not in self.notes:
            self.notes.append(sentence)

    def add(self, folder: FolderConfig) -> None:
        """Add a folder, which the settings that are stated next belong to."""
        self.folders.append(folder)
        self._stated.append({})

    def state(self, key: str, value: object, origin: str) -> None:
        """Set a key of the last folder or, if folders have no such key, of the recipe.

        If the recipe already has another value, it is kept and a note is added.
        """
        if key in _FOLDER_DEFAULTS or key == _RESOLUTION:
            self._stated[-1][key] = value
        elif self.settings.setdefault(key, value) != value:
            self.note(
                f"{origin} differs between parts of the dataset; {toml_value(self.settings[key])} is used for all."
            )

    def settle(self) -> None:
        """Give the job the settings of the first folder, and each other folder those that differ.

        A folder that is listed once for each of several resolutions becomes one folder with these resolutions.
        """
        sides = self._join_resolutions()
        changes: list[dict[str, Any]] = [{} for _ in self.folders]
        for key in dict.fromkeys(key for stated in self._stated for key in stated):
            table, _, name = key.rpartition(".")
            first = self._stated[0].get(key, _FOLDER_DEFAULTS.get(key))
            if key in self._stated[0]:
                (self.dataset if table == "dataset" else self.settings)[name if table == "dataset" else key] = first
            for stated, changed in zip(self._stated, changes, strict=True):
                value = stated.get(key, _FOLDER_DEFAULTS.get(key))
                if value == first or key == _RESOLUTION:
                    continue
                if value is None:  # as in the recipe, so it cannot be switched off for one folder
                    self.note(f"{name} differs between parts of the dataset; {toml_value(first)} is used for all.")
                else:
                    (changed if table == "dataset" else changed.setdefault(table.rpartition(".")[2], {}))[name] = value
        for place, (own, changed) in enumerate(zip(sides, changes, strict=True)):
            if own and own != [self.settings.get(_RESOLUTION)]:
                changed["resolutions"] = own
            self.folders[place] = self.folders[place].replaced(**changed)

    def _join_resolutions(self) -> list[list[object]]:
        """Join the folders that differ only in their resolution, and return the resolutions that each has then."""
        folders, stated, sides = self.folders, self._stated, list[list[object]]()
        self.folders, self._stated = [], []
        for folder, own in zip(folders, stated, strict=True):
            side = own.get(_RESOLUTION)
            same = (
                place
                for place, (other, known) in enumerate(zip(self.folders, self._stated, strict=True))
                if other == folder and {**known, _RESOLUTION: side} == own and side not in sides[place]
            )
            if (place := next(same, None)) is not None:
                sides[place].append(side)
                continue
            self.folders.append(folder)
            self._stated.append(own)
            sides.append([side] if side is not None else [])
        return sides


def imported_by(read: Callable[[Path], ImportedDataset], path: Path) -> ImportedDataset:
    """Return the dataset that `read` finds in a file, with its settings distributed over its folders.

    Raises DatasetError if the file is unreadable, lists no image folder, or has invalid values.
    """
    try:
        with noting_file(path):
            imported = read(path)
            imported.settle()
            imported.config()
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as fault:
        raise DatasetError(
            "import.unreadable",
            f"Could not import {path} as a dataset: {reason_of(fault)}.",
            "Use a kohya dataset .toml or a OneTrainer concepts .json, or list the folders in the job yourself.",
        ) from fault
    return imported
