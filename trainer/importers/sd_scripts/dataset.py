"""Read kohya's dataset TOML, and the captions in its metadata JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.field_names import keys_called
from trainer.config.job import FolderConfig
from trainer.config.toml_file import toml_value
from trainer.dataset.caption_files import SUFFIXES, require_short
from trainer.dataset.folders import image_files
from trainer.importers.datasets import ImportedDataset, imported_by
from trainer.importers.translation import folder_here
from trainer.protocol.reading import parse_json, read_text, read_toml
from trainer.protocol.text import printable

Table = Mapping[str, Any]

# Recipe settings in a subset of kohya's TOML, with the conversion of each value.
_KOHYA_SETTINGS: Mapping[str, Callable[[Any], object]] = {
    "resolution": lambda value: _square(value),
    "batch_size": int,
    "enable_bucket": bool,
    "min_bucket_reso": int,
    "max_bucket_reso": int,
    "bucket_reso_steps": int,
    "bucket_no_upscale": lambda value: 1.0 if value else 16.0,
    "flip_aug": bool,
    "color_aug": bool,
    "random_crop": lambda value: "random" if value else "center",
    "shuffle_caption": bool,
    "caption_separator": str,
    "keep_tokens": int,
    "keep_tokens_separator": str,
    "secondary_separator": str,
    "enable_wildcard": bool,
    "caption_prefix": lambda value: value or "",
    "caption_suffix": lambda value: value or "",
    "caption_dropout_rate": float,
    "caption_tag_dropout_rate": float,
    "token_warmup_step": lambda value: value or None,
    "token_warmup_min": int,
    "caption_dropout_every_n_epochs": lambda value: int(value) or None,  # 0 is off
}
_KOHYA_FOLDER = {
    "image_dir",
    "metadata_file",
    "num_repeats",
    "class_tokens",
    "is_reg",
    "caption_extension",
    "conditioning_data_dir",
}
_KOHYA_DATASET = {"alpha_mask", "validation_split"}
_KOHYA_HARMLESS = {"cache_info", "network_multiplier", "resize_interpolation", "validation_seed", "subsets"}


def import_dataset(path: Path) -> ImportedDataset:
    """Import kohya's dataset TOML; paths are relative to the file.

    Raises DatasetError if the file is unreadable, lists no image folder, or has invalid values.
    """
    return imported_by(lambda file: read_tables(read_toml(file, "list"), file.parent), path)


def read_tables(data: Table, folder: Path) -> ImportedDataset:
    """Return what the tables of kohya's dataset TOML state, with paths relative to `folder`."""
    imported = ImportedDataset()
    for dataset in data.get("datasets", []):
        for subset in dataset.get("subsets", []):
            # The inner level wins, as in sd-scripts.
            _read_subset({**data.get("general", {}), **dataset, **subset}, folder, imported)
    return imported


def _read_subset(table: Table, folder: Path, imported: ImportedDataset) -> None:
    images, masks = Path(folder_here(table["image_dir"], folder)), table.get("conditioning_data_dir")
    imported.add(
        FolderConfig(
            path=str(images),
            kind="regularization" if table.get("is_reg") else "train",
            repeats=table.get("num_repeats"),
            class_words=table.get("class_tokens"),
            caption_sources=_caption_sources(table.get("caption_extension")),
            mask_folder=folder_here(masks, folder) if masks else None,
        )
    )
    if "metadata_file" in table:
        separator = table.get("caption_separator", ",")
        captions, missing = read_kohya_metadata(folder / table["metadata_file"], images, separator)
        imported.captions.update(captions)
        if missing:
            imported.note(f"{missing} images listed in {table['metadata_file']} do not exist.")
    if table.get("alpha_mask"):
        imported.state("dataset.masks", "alpha", "alpha_mask")
    if table.get("validation_split"):
        imported.dataset["validation_share"] = table["validation_split"]
    if table.get("enable_wildcard"):
        imported.state("dataset.lines", "variants", "enable_wildcard")
    if masks or table.get("alpha_mask"):
        # sd-scripts multiplies the loss by the mask.
        imported.state("recipe.objective.unmasked_weight", 0.0, "the weight outside masks")
    for key, value in table.items():
        if key in _KOHYA_SETTINGS:
            if (converted := _converted(key, value)) is not None:
                imported.state(next(keys_called(key)), converted, key)
        elif value and key not in _KOHYA_FOLDER | _KOHYA_DATASET | _KOHYA_HARMLESS:
            imported.note(f"{key} = {printable(toml_value(value), 60)} is not supported.")


def _caption_sources(extension: str | None) -> tuple[str, ...] | None:
    """Return where captions come from; like sd-scripts, an extension may lack its dot. None if it is a usual one."""
    stated = f".{extension.removeprefix('.')}" if extension else None
    return None if stated in (None, *SUFFIXES) else (stated,)


def _converted(key: str, value: Any) -> object:
    try:
        return _KOHYA_SETTINGS[key](value)
    except (ValueError, TypeError, ArithmeticError):
        raise ValueError(f"{key} = {printable(toml_value(value), 60)} is not a valid value") from None


def read_kohya_metadata(path: Path, images: Path, separator: str = ",") -> tuple[dict[Path, tuple[str, ...]], int]:
    """Return the captions in kohya's metadata by image, and the number of entries whose image is missing.

    The file is .json, with paths or stems as keys, or .jsonl. An image's caption and tags are joined with the
    separator, as in sd-scripts. Raises OSError if it is unreadable, and ValueError if it is invalid.
    """
    text = read_text(path, "notes")
    if path.suffix.lower() == ".jsonl":
        rows = [parse_json(line, path) for line in text.split("\n") if line.strip()]
        entries = [(row["image_path"], row) for row in rows]
    else:
        entries = list(parse_json(text, path).items())
    present = {image: image for image in image_files(images)} if images.is_dir() else {}
    by_stem = {image.stem: image for image in present}
    captions: dict[Path, tuple[str, ...]] = {}
    missing = 0
    for key, row in entries:
        image = present.get(images / key) or by_stem.get(key)
        for name in ("caption", "tags"):
            require_short(name, row.get(name) or "")
        words = [part.strip() for part in (row.get("caption"), row.get("tags")) if part and part.strip()]
        if image is None:
            missing += 1
        elif words:
            captions[image] = (f"{separator.strip()} ".join(words),)
    return captions, missing


def _square(resolution: Any) -> int:
    """Return a square's side: a number unchanged, or from [width, height] the same area, rounded to a multiple of 8."""
    if isinstance(resolution, list):
        return round(math.sqrt(math.prod(resolution)) / 8) * 8
    return int(resolution)
