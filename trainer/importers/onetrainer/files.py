"""Read a job from OneTrainer's configuration, with the concepts and samples in it or in files that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from trainer.errors import JobError
from trainer.importers.onetrainer.concepts import read_concepts, resolutions_in
from trainer.importers.onetrainer.options import OPTIONS, PROGRAM, RENAMED
from trainer.importers.onetrainer.recipe import preview_of, translate
from trainer.importers.translation import (
    MOST_PROMPTS,
    ImportedJob,
    Moves,
    Translation,
    base_here,
    folder_here,
    relocated,
    shown,
)
from trainer.protocol.reading import read_json, reason_of

_SURE = frozenset(
    ("base_model_name", "concept_file_name", "learning_rate_scheduler", "lora_rank", "model_type", "training_method")
)
_FLAT = ("unet", "text_encoder", "text_encoder_2", "vae", "optimizer")
_BASES = ("base_model_name", "vae.model_name", "lora_model_name")
# OneTrainer's folder has the files that a configuration names, and the configuration in one of its folders.
_LEVELS = 3


def is_config(data: Any) -> bool:
    """Return whether the value of a .json file is a configuration of OneTrainer."""
    return isinstance(data, dict) and len(_SURE & data.keys()) > 1


def read_config(path: Path, moved: Moves = ()) -> ImportedJob:
    """Read a job from a configuration; `moved` says where folders of another PC are on this one.

    Raises ImpastoError and OSError for it and the files that it names.
    """
    data = read_json(path, "config")
    if not isinstance(data, dict):
        sentence = f"Could not import {path}: it has no table of settings, as a configuration of {PROGRAM} has."
        raise JobError("import.unknown", sentence, f"Save the configuration in {PROGRAM}, and import that file.")
    stated = _flattened(data)
    for name in _BASES:
        stated |= {name: base_here(stated[name], path.parent, moved)} if name in stated else {}
    _check_resolution(stated.get("resolution"))
    found = translate(stated)
    imported = ImportedJob(found)
    _read_concepts(data, found, path, imported, moved)
    _read_samples(data, found, path, moved)
    found.finish()
    return imported


def _flattened(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those in tables as "table.name"; of tables that are not read, only that they are there."""
    stated: dict[str, Any] = {}
    for name, value in data.items():
        if name in _FLAT and isinstance(value, Mapping):
            stated.update({f"{name}.{key}": _without_tables(each) for key, each in value.items()})
        else:
            stated[RENAMED.get(name, name)] = _without_tables(value)
    return {name: _or_default(name, value) for name, value in stated.items()}


def _or_default(name: str, value: Any) -> Any:
    """Return a value, or the default of a setting that the program would not leave empty."""
    option = OPTIONS.get(name)
    if name.startswith("optimizer.") and value in ("inf", "-inf"):  # as the program writes infinite numbers
        return None
    if value in (None, "") and option is not None and name != "clip_grad_norm":
        return option.default
    if isinstance(value, bool) and option is not None and option.kind == "text":
        return str(value).lower()  # as it stands in the file
    return value


def _without_tables(value: Any) -> Any:
    if isinstance(value, Mapping | list):
        return f"({len(value)} entries)" if value else None
    return value


def _check_resolution(text: Any) -> None:
    try:
        is_valid = text is None or bool(resolutions_in(text))
    except ValueError:
        is_valid = False
    if not is_valid:
        sentence = f'resolution must be a number or a list such as "512,768", not {shown(text)}.'
        raise JobError("import.value", sentence, f"Correct it in {PROGRAM}'s file.")


def _read_concepts(
    data: Mapping[str, Any], found: Translation, path: Path, imported: ImportedJob, moved: Moves
) -> None:
    """Read the concepts in a configuration or, without any, in the file that it names."""
    source, concepts = path, data.get("concepts")
    if not concepts:
        source = _beside(found["concept_file_name"], path.parent, moved)
        if not source.is_file():
            note = "the file is not there, so there are no images: give their folder with --images"
            found.change("concept_file_name", {}, note)
            found.carry("concepts", {})
            return
        concepts = read_json(source, "list")
    dataset = read_concepts(concepts, source, moved)
    imported.add_dataset(dataset, ())
    ours = dataset.values()
    sides = resolutions_in(found["resolution"])
    if len(sides) > 1:
        imported.folders = tuple(
            folder if folder.resolutions else folder.replaced(resolutions=tuple(sides)) for folder in imported.folders
        )
    found.carry("concepts concept_file_name", ours)


def _read_samples(data: Mapping[str, Any], found: Translation, path: Path, moved: Moves) -> None:
    """Read the prompts of previews in a configuration or, without any, in the file that it names."""
    source, samples = path, data.get("samples")
    if not samples:
        source = _beside(found["sample_definition_file_name"], path.parent, moved)
        if not source.is_file():
            found.change("sample_definition_file_name", {}, "the file is not there, so there are no prompts")
            found.carry("samples", {})
            return
        samples = read_json(source, "list")
    try:
        used = [sample for sample in samples if sample.get("enabled", True)]
        prompts = [preview_of(sample, found.values["base.family"]) for sample in used[:MOST_PROMPTS]]
    except (ValueError, TypeError, AttributeError, OverflowError) as fault:
        sentence = f"Could not read the samples in {source.name}: {reason_of(fault)}."
        raise JobError("import.value", sentence, f"Correct them in {PROGRAM}, or remove them.") from fault
    ours = {"report.previews.prompts": prompts} if prompts else {}
    if len(used) > MOST_PROMPTS:
        found.change("samples sample_definition_file_name", ours, f"only the first {MOST_PROMPTS} samples are used")
    else:
        found.carry("samples sample_definition_file_name", ours)


def _beside(name: str, folder: Path, moved: Moves) -> Path:
    """Return the place of a file that a configuration names: relative to its folder or to one that contains it."""
    if PureWindowsPath(relocated(name, moved)).drive or Path(relocated(name, moved)).is_absolute():
        return Path(folder_here(name, folder, moved))
    places = [root / PureWindowsPath(name) for root in (folder, *folder.absolute().parents[: _LEVELS - 1])]
    return next((place for place in places if place.is_file()), places[0])
