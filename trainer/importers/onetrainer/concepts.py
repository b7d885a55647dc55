"""Read OneTrainer's concepts, which are its image folders, from a file of them or from a whole configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.field_names import keys_called
from trainer.config.job import FolderConfig
from trainer.config.recipe import LARGEST_ROTATION
from trainer.dataset.caption_files import SUFFIXES, NotACaptionError, read_caption_file, split_caption
from trainer.dataset.folders import image_files
from trainer.dataset.image import Kind
from trainer.importers.datasets import ImportedDataset, imported_by
from trainer.importers.translation import Moves, folder_here
from trainer.protocol.reading import read_json

Table = Mapping[str, Any]

# Settings of masked training, with the defaults of TrainConfig.default_values.
MASKS: Mapping[str, float | bool] = {
    "unmasked_probability": 0.1,
    "unmasked_weight": 0.1,
    "normalize_masked_area_loss": False,
}
_KINDS: Mapping[str, Kind] = {"VALIDATION": "validation", "PRIOR_PREDICTION": "regularization"}
_COLORS = ("brightness", "contrast", "saturation", "hue")
_USED_AUGMENTATIONS = {"enable_crop_jitter", "enable_random_flip", "enable_random_rotate", "enable_resolution_override"}


def import_concepts(path: Path, moved: Moves = ()) -> ImportedDataset:
    """Import the concepts in a .json file, alone or in a configuration; paths are relative to the file.

    `moved` says where folders of another PC are on this one. Raises DatasetError if the file is unreadable, lists no
    image folder, or has invalid values.
    """
    return imported_by(lambda file: _read(read_json(file, "list"), file.parent, moved), path)


def read_concepts(concepts: Sequence[Table], path: Path, moved: Moves) -> ImportedDataset:
    """Read concepts that stand in the file `path`; raises DatasetError as `import_concepts` does."""
    return imported_by(lambda file: _read(concepts, file.parent, moved), path)


def mask_settings(config: Table) -> dict[str, Any]:
    """Return the recipe's settings of masked training by dotted key; none if a configuration has it off."""
    if not config.get("masked_training"):
        return {}
    return {next(keys_called(name)): type(default)(config.get(name, default)) for name, default in MASKS.items()}


def resolutions_in(text: Any) -> list[int]:
    """Return the resolutions in a text such as "512" or "512,768", or the square with the area of "512x768".

    Each is a multiple of 8. Raises ValueError for anything else.
    """
    stated = str(text).strip()
    if "x" in stated and "," not in stated:
        width, height = (int(side) for side in stated.split("x"))
        return [_to_8(math.sqrt(width * height))]
    return [_to_8(int(side)) for side in stated.split(",") if side.strip()]


def _to_8(side: float) -> int:
    return round(side / 8) * 8


def _read(data: Any, folder: Path, moved: Moves) -> ImportedDataset:
    imported = ImportedDataset()
    if isinstance(data, dict):
        imported.settings.update(mask_settings(data))
    for concept in data["concepts"] if isinstance(data, dict) else data:
        if concept.get("enabled", True):
            _Concept(concept, folder, moved, imported).read()
        else:
            imported.note(f"The concept {_named(concept)} is disabled and was left out.")
    return imported


class _Concept:
    """A concept, and the dataset that it is added to."""

    def __init__(self, concept: Table, folder: Path, moved: Moves, imported: ImportedDataset) -> None:
        self._concept = concept
        self._image: Table = concept.get("image", {})
        self._text: Table = concept.get("text", {})
        self._folder = folder
        self._moved = moved
        self._imported = imported
        self._root = Path(folder_here(concept["path"], folder, moved))

    def read(self) -> None:
        """Add the folder, then what is stated of it."""
        kind = self._concept.get("type", "STANDARD")
        own = self._image.get("enable_resolution_override")
        is_recursive = bool(self._concept.get("include_subdirectories", False))
        self._imported.add(
            FolderConfig(
                path=str(self._root),
                kind=_KINDS.get(kind, "train"),
                repeats=self._repeats(is_recursive),
                recursive=is_recursive,
                weight=float(self._concept.get("loss_weight", 1.0)),
                caption_sources=("filename",) if self._text.get("prompt_source") == "filename" else None,
                resolutions=tuple(resolutions_in(self._image.get("resolution_override", "512"))) if own else None,
            )
        )
        if kind == "PRIOR_PREDICTION":
            self._state("recipe.objective.prior_prediction", True, "prior prediction")
        self._read_image()
        self._read_text()
        self._imported.captions.update(self._prompts(is_recursive))

    def _state(self, key: str, value: object, origin: str) -> None:
        self._imported.state(key, value, origin)

    def _note(self, sentence: str) -> None:
        self._imported.note(sentence)

    def _repeats(self, is_recursive: bool) -> int:
        """Return the repeats of each image; add a note if OneTrainer would not use each one so often."""
        balancing = float(self._concept.get("balancing", 1.0))
        stated = f"{balancing:g} repeats"
        if self._concept.get("balancing_strategy", "REPEATS") != "REPEATS":
            stated = f"{balancing:g} samples per epoch"
            count = len(image_files(self._root, is_recursive)) if self._root.is_dir() else 0
            balancing /= count or balancing or 1
        repeats = max(round(balancing), 1)
        if repeats != balancing or "samples" in stated:
            times = "once" if repeats == 1 else f"{repeats} times"
            self._note(f"{_named(self._concept)} has {stated} in OneTrainer; here each image is used {times}.")
        return repeats

    def _read_image(self) -> None:
        """Read augmentations of images."""
        image = self._image
        self._state("recipe.images.flip", bool(image.get("enable_random_flip", False)), "enable_random_flip")
        crop = "random" if image.get("enable_crop_jitter", True) else "center"
        self._state("recipe.images.crop", crop, "enable_crop_jitter")
        if image.get("enable_random_rotate"):
            stated = float(image.get("random_rotate_max_angle", 0.0))
            angle = min(round(stated), LARGEST_ROTATION)
            self._state("recipe.images.rotation", angle, "random_rotate_max_angle")
            if stated > LARGEST_ROTATION:
                self._note(f"random_rotate_max_angle = {stated:g} becomes {angle}.")
        for name, value in image.items():
            if value and name.startswith("enable_") and name not in _USED_AUGMENTATIONS:
                is_color = name.removeprefix("enable_random_") in _COLORS
                nearest = "; recipe.images.color_jitter is the closest" if is_color else ""
                self._note(f"{name} is not supported{nearest}.")

    def _read_text(self) -> None:
        """Read how captions are changed; each line of a caption file is an alternative, as in OneTrainer."""
        text = self._text
        self._state("dataset.lines", "variants", "prompts")
        drops = bool(text.get("tag_dropout_enable")) and float(text.get("tag_dropout_probability", 0.0)) > 0.0
        mode = str(text.get("tag_dropout_mode", "FULL"))
        shuffles = bool(text.get("enable_tag_shuffling"))
        if shuffles:
            self._state("recipe.captions.shuffle", True, "enable_tag_shuffling")
        if drops:
            self._read_dropout(mode, float(text["tag_dropout_probability"]))
        if shuffles or (drops and mode != "FULL"):
            self._state("recipe.captions.separator", text.get("tag_delimiter", ","), "tag_delimiter")
            self._state("recipe.captions.keep_tokens", int(text.get("keep_tags_count", 1)), "keep_tags_count")
        if text.get("caps_randomize_enable"):
            self._note("caps_randomize_enable has no effect: CLIP reads captions in lowercase.")

    def _read_dropout(self, mode: str, probability: float) -> None:
        if mode == "FULL":
            self._state("recipe.captions.dropout", probability, "tag_dropout_probability")
            if int(self._text.get("keep_tags_count", 1)):
                self._note(
                    "tag_dropout_mode = FULL keeps the first tags in OneTrainer; here whole captions are dropped."
                )
        elif mode == "RANDOM":
            self._state("recipe.captions.tag_dropout", probability, "tag_dropout_probability")
        else:
            # The n-th of N tags has n/N of the probability there.
            self._state("recipe.captions.tag_dropout", probability / 2, "tag_dropout_probability")
            self._note(f"tag_dropout_mode = {mode} drops later tags more often in OneTrainer; here all equally often.")
        if self._text.get("tag_dropout_special_tags_mode", "NONE") != "NONE":
            self._note("tag_dropout_special_tags is not supported: all tags can be dropped.")

    def _prompts(self, is_recursive: bool) -> Iterator[tuple[Path, tuple[str, ...]]]:
        """Yield each image with its captions, if the concept takes them from one common file."""
        if self._text.get("prompt_source", "sample") != "concept":
            return
        stated = self._text["prompt_path"]
        path = Path(folder_here(stated, self._root.parent, self._moved))
        if path.resolve().suffix.lower() not in SUFFIXES:
            # The file may come from a stranger, and this path may point to any of the user's files.
            raise ValueError(f"{path} is not a .txt file")
        if not self._root.is_dir():
            self._note(f"Captions of {_named(self._concept)} are those in {stated}: import the file again on that PC.")
            return
        try:
            prompts = split_caption(read_caption_file(path).text, "variants")
        except NotACaptionError as fault:
            raise ValueError(f"could not read prompts from {stated}: {fault}") from fault
        for image in image_files(self._root, is_recursive):
            yield image, prompts or (image.stem,)


def _named(concept: Table) -> str:
    return concept.get("name") or Path(concept["path"]).name
