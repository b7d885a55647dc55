"""Change the essentials of a job: images, recipe, trigger word, prompts and length, each as one undo step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.jobs.draft import Draft, stated
from app.core.jobs.job_file import Values, drop, put, value_at
from app.core.library import Folder, Library
from app.core.words import QT_TRANSLATE_NOOP
from trainer.config.base import Family
from trainer.config.job import SCHEMA
from trainer.config.paths import absolute
from trainer.config.presets.library import PresetEntry, read_library, same_name
from trainer.config.presets.preset import Preset
from trainer.config.recipe import LENGTH_KEYS
from trainer.config.resolve import resolve_length
from trainer.config.write import default_prompts, near_path

FOLDERS = "dataset.folders"
PROMPTS = "report.previews.prompts"
RECIPE_CHOSEN = QT_TRANSLATE_NOOP("Train", "choosing a recipe")
FOLDER_ADDED = QT_TRANSLATE_NOOP("Train", "adding images")
FOLDER_REMOVED = QT_TRANSLATE_NOOP("Train", "removing images")
PROMPT_ADDED = QT_TRANSLATE_NOOP("Train", "adding a prompt")
PROMPT_REMOVED = QT_TRANSLATE_NOOP("Train", "removing a prompt")
BLOCK_ADDED = QT_TRANSLATE_NOOP("Train", "adding settings of layers")
BLOCK_REMOVED = QT_TRANSLATE_NOOP("Train", "removing settings of layers")
TRIGGER = QT_TRANSLATE_NOOP("Train", "trigger word")
_OF_IMAGES = ("recipe.resolution", "recipe.token_chunks")


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """An image folder that a job can use."""

    path: Path
    recursive: bool
    """Whether its subfolders contain images too."""
    count: int


def open_images(library: Library, folders: Iterable[Path]) -> list[ImageFolder]:
    """Return the open image folders, each with the number of its images that a job would train on."""
    trained: dict[Folder, int] = {}  # by folder first: to hash and compare 100,000 paths takes 0.2 s
    for image in library.images.values():
        folder = image.folder
        trained[folder] = trained.get(folder, 0) + (not image.excluded and not image.problem)
    counts: dict[Path, int] = dict.fromkeys(folders, 0)
    for folder, count in trained.items():
        counts[folder.root] = counts.get(folder.root, 0) + count
    deeper = {folder.root for folder in trained if folder.path != folder.root}
    return [ImageFolder(root, root in deeper, count) for root, count in counts.items()]


def new_values(name: str, images: Sequence[ImageFolder], folder: Path, stated: Mapping[str, Any]) -> Values:
    """Return the values of a new job whose file will be in `folder`, including those in `stated`, by dotted key."""
    values: Values = {"schema": SCHEMA, "name": name}
    for key, value in stated.items():
        put(values, key, value)
    if images:
        put(values, FOLDERS, [_folder(each, folder) for each in images])
    put(values, PROMPTS, _prompts(None))
    return values


def recipes() -> tuple[PresetEntry, ...]:
    """Return the presets that have a recipe and are not for a specific GPU, the user's own first; reads files."""
    return tuple(each for each in read_library().presets if each.preset.recipe is not None and each.preset.gpu is None)


def preset_of(draft: Draft, presets: Iterable[PresetEntry]) -> Preset | None:
    """Return the preset that a job names; None if it names none or the preset is missing."""
    family, _, name = str(draft.get("preset") or "").partition("/")
    fitting = (each.preset for each in presets if each.preset.base.family == family)
    return next((preset for preset in fitting if same_name(preset.name, name)), None)


def find_recipe(name: str, presets: Iterable[PresetEntry], family: Family | None) -> Preset | None:
    """Return the preset with this name, such as "sdxl/style" or "style"; None if there is none.

    The family is taken from the name; if the name has none, it is `family`, or SDXL if that is None. If this family has
    no such preset, another family's preset is returned.
    """
    stated, _, plain = name.rpartition("/")
    named = [each.preset for each in presets if same_name(each.preset.name, plain)]
    wanted = stated or family or "sdxl"
    return next((preset for preset in named if preset.base.family == wanted), named[0] if named else None)


def choose_recipe(draft: Draft, preset: Preset) -> None:
    """Apply a preset's recipe: drop unchanged values of the previous preset, then set the values of the new one.

    Resolution and token limit are never changed, since they were chosen for the images.
    """
    previous = draft.origin.values.get("recipe", {})

    def work(values: Values) -> None:
        _drop_equal(values, previous, "recipe")
        chosen = {key: value for key in _OF_IMAGES if (value := value_at(values, key)) is not None}
        _merge(values, stated(preset), "recipe")
        for key, value in chosen.items():
            put(values, key, value)
        values["preset"] = f"{preset.base.family}/{preset.name}"
        if preset.examples and value_at(values, PROMPTS) in (None, _prompts(trigger(values))):
            put(values, PROMPTS, [each.model_dump(exclude_unset=True, exclude_none=True) for each in preset.examples])

    draft.edit(RECIPE_CHOSEN, work)
    draft.compare_with(preset)


def trigger(values: Values) -> str | None:
    """Return the trigger word of the training folders; None if they have none or different ones."""
    found = {folder.get("trigger") for folder in _trained(values)}
    word = found.pop() if len(found) == 1 else None
    return word if isinstance(word, str) else None


def set_trigger(draft: Draft, word: str, *, typing: bool = False) -> None:
    """Set the trigger word of all training folders and update the default prompts; "" removes it."""

    def work(values: Values) -> None:
        proposed = value_at(values, PROMPTS) == _prompts(trigger(values))
        if not _trained(values):
            put(values, FOLDERS, [*(value_at(values, FOLDERS) or []), {}])
        for folder in _trained(values):
            folder.pop("trigger", None)
            if word:
                folder["trigger"] = word
        folders = [folder for folder in value_at(values, FOLDERS) if folder]
        put(values, FOLDERS, folders) if folders else drop(values, FOLDERS)
        if proposed:
            put(values, PROMPTS, _prompts(word or None))

    draft.edit(TRIGGER, work, typing=typing)


def add_images(draft: Draft, images: Sequence[ImageFolder]) -> None:
    """Add folders to the dataset, skipping those it already has."""
    here, new = draft.path.parent, not_in_job(draft, images)

    def work(values: Values) -> None:
        listed = folders(values)
        for each in new:
            placeholder = next((folder for folder in listed if not folder.get("path")), None)
            if placeholder is None:
                word = trigger(values)
                listed.append(_folder(each, here) | ({"trigger": word} if word else {}))
            else:  # an entry without a path, which keeps a trigger word typed before any images were added
                placeholder.update(_folder(each, here))
        put(values, FOLDERS, listed)

    if new:
        draft.edit(FOLDER_ADDED, work)


def not_in_job(draft: Draft, images: Iterable[ImageFolder]) -> list[ImageFolder]:
    """Return the folders that are not in the dataset yet."""
    held = {_normalized(draft, str(folder.get("path"))) for folder in folders(draft.values)}
    return [each for each in images if _normalized(draft, str(each.path)) not in held]


def folders(values: Values) -> list[dict[str, Any]]:
    """Return the dataset folders that a job states, skipping entries that are not tables."""
    listed = value_at(values, FOLDERS)
    return [folder for folder in listed if isinstance(folder, dict)] if isinstance(listed, list) else []


def counts(draft: Draft, images: Iterable[ImageFolder]) -> list[int | None]:
    """Return the image count of each folder of the dataset, in order, with None for folders that are not open."""
    known = {_normalized(draft, str(each.path)): each.count for each in images}
    return [known.get(_normalized(draft, str(folder.get("path")))) for folder in folders(draft.values)]


def samples(draft: Draft, images: Iterable[ImageFolder]) -> int | None:
    """Return the samples per epoch, with repeats and resolutions; None if a folder's images are not counted."""
    total = 0
    for folder, count in zip(folders(draft.values), counts(draft, images), strict=True):
        repeats, sides = folder.get("repeats"), folder.get("resolutions")
        if count is None:
            return None
        if folder.get("kind") != "validation":
            times = repeats if isinstance(repeats, int) else 1
            total += count * times * (len(sides) if isinstance(sides, list) else 1)
    return total or None


def stated_length(values: Values) -> tuple[str, Any]:
    """Return the key and value of the length that a job states; ("images_seen", None) if it states none."""
    recipe = value_at(values, "recipe") or {}
    return next(((key, recipe[key]) for key in LENGTH_KEYS if key in recipe), ("images_seen", None))


def change_length_unit(draft: Draft, key: str, samples_per_epoch: int | None) -> None:
    """Replace the job's length setting with the one at `key`, such as "epochs".

    The value is converted if the samples per epoch are known; otherwise the number stays the same.
    """
    previous, value = stated_length(draft.values)
    if draft.valid_part is not None and samples_per_epoch:
        length = resolve_length(draft.valid_part.recipe, samples_per_epoch)
        value = {"steps": length.steps, "epochs": max(1, round(length.epochs)), "images_seen": length.images}[key]
    if previous != key and value is not None:
        draft.set(f"recipe.{key}", value)


def _normalized(draft: Draft, path: str) -> str:
    """Return the normalized absolute path of a folder that a job names, for comparison."""
    return os.path.normcase(absolute(path, draft.path.parent))


def _trained(values: Values) -> list[dict[str, Any]]:
    return [folder for folder in folders(values) if folder.get("kind", "train") == "train"]


def _folder(images: ImageFolder, here: Path) -> dict[str, Any]:
    return {"path": near_path(images.path, here)} | ({"recursive": True} if images.recursive else {})


def _prompts(word: str | None) -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in default_prompts(word)]


def _drop_equal(values: Values, previous: Values, path: str) -> None:
    for key, value in previous.items():
        if isinstance(value, dict):
            _drop_equal(values, value, f"{path}.{key}")
        elif value_at(values, f"{path}.{key}") == value:
            drop(values, f"{path}.{key}")


def _merge(values: Values, new: Values, path: str) -> None:
    if path == "recipe.optimizer":  # arguments of the previous optimizer must not remain
        drop(values, path)
    if path == "recipe" and any(key in new for key in LENGTH_KEYS):
        for key in LENGTH_KEYS:
            drop(values, f"{path}.{key}")
    for key, value in new.items():
        if isinstance(value, dict):
            _merge(values, value, f"{path}.{key}")
        else:
            put(values, f"{path}.{key}", value)
