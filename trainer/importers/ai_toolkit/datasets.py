"""Read the image folders of ai-toolkit's jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.job import FolderConfig
from trainer.config.toml_file import toml_value
from trainer.dataset.caption_files import SUFFIXES
from trainer.importers.datasets import ImportedDataset, imported_by
from trainer.importers.translation import Moves, folder_here, plain
from trainer.protocol.text import printable

Table = Mapping[str, Any]

# Settings that are read, and those that change how fast images are loaded.
_READ = (
    "folder_path dataset_path default_caption trigger_word caption_ext caption_type random_crop resolution buckets "
    "bucket_tolerance is_reg prior_reg token_dropout_rate shuffle_tokens caption_dropout_rate keep_tokens flip_x "
    "alpha_mask mask_path mask_min_value num_repeats loss_multiplier square_crop"
)
_HARMLESS = (
    "cache_latents cache_latents_to_disk cache_tensors_to_disk cache_clip_vision_to_disk cache_text_embeddings "
    "load_image_when_caching_latents num_workers prefetch_factor cache_latents_num_workers fast_image_size debug "
    "replay_transforms full_size_control_images control_transparent_color num_controls_from_same_folder "
    "random_triggers_max guidance_type num_frames shrink_video_to_frames fps trim_auto_frame_count_tail "
    "auto_frame_count audio_preserve_pitch audio_normalize do_audio do_i2v"
)
# Other settings are unavailable unless they are off, or have these values.
_OFF: Mapping[str, Any] = {"type": "image", "network_weight": 1.0, "scale": 1.0}
_NEAREST = {
    "flip_y": "images are flipped from left to right only",
    "augmentations": "recipe.images.rotation and color_jitter are available",
    "augments": "recipe.images.rotation and color_jitter are available",
    "random_triggers": "wildcards in captions are the closest: {cat|kitten}",
    "invert_mask": "white is trained; invert the masks in an image editor",
    "control_path": "conditioning images are not available",
}


def read_datasets(datasets: Sequence[Table], trigger: str | None, path: Path, moved: Moves) -> ImportedDataset:
    """Read the datasets of a job in the file `path`, with the job's trigger word.

    Raises DatasetError if there is no image folder, or for invalid values.
    """

    def read(file: Path) -> ImportedDataset:
        imported = ImportedDataset()
        for dataset in datasets:
            _read(dataset, trigger, file.parent, moved, imported)
        return imported

    return imported_by(read, path)


def resolutions_of(stated: Any) -> tuple[int, ...]:
    """Return the resolutions of a dataset, which are one number or a list; each becomes a multiple of 8."""
    listed = stated if isinstance(stated, list) else [512 if plain(stated) is None else stated]
    return tuple(dict.fromkeys(round(int(plain(side)) / 8) * 8 for side in listed))


def _read(dataset: Table, trigger: str | None, folder: Path, moved: Moves, imported: ImportedDataset) -> None:
    stated = dataset.get("folder_path") or dataset["dataset_path"]
    if stated.lower().endswith(".json"):
        imported.note(f"{printable(stated, 80)} is not read: give a folder with images and caption files.")
        return
    values = {name: plain(value) for name, value in dataset.items()}
    is_reg = bool(values.get("is_reg"))
    flips = bool(values.get("flip_x"))
    masks = dataset.get("mask_path") if values.get("mask_path") else None
    own = dataset.get("trigger_word") if values.get("trigger_word") else trigger
    imported.add(
        FolderConfig(
            path=folder_here(stated, folder, moved),
            kind="regularization" if is_reg else "train",
            repeats=int(values.get("num_repeats") or 1) * (2 if flips else 1),
            trigger=None if is_reg else own,
            class_words=dataset.get("default_caption") if values.get("default_caption") else None,
            weight=float(values.get("loss_multiplier", 1.0)),
            caption_sources=_caption_sources(dataset),
            mask_folder=folder_here(masks, folder, moved) if masks else None,
            resolutions=resolutions_of(dataset.get("resolution")),
        )
    )
    if flips:
        imported.note("flip_x adds a mirrored copy of each image in ai-toolkit; here images are mirrored at random.")
    _read_images(values, imported)
    _read_captions(values, imported)
    if masks or values.get("alpha_mask"):
        imported.state("recipe.objective.unmasked_weight", float(values.get("mask_min_value") or 0.0), "mask_min_value")
        # ai-toolkit divides a batch's masks by their mean.
        imported.state("recipe.objective.normalize_masked_loss", value=True, origin="the weight of masks")
    if is_reg and values.get("prior_reg"):
        imported.state("recipe.objective.prior_prediction", value=True, origin="prior_reg")
    _note_others(values, dataset, imported)


def _caption_sources(dataset: Table) -> tuple[str, ...] | None:
    """Return where captions come from, if it is not a usual place; `caption_type` is a former name."""
    extension = dataset.get("caption_type") or dataset.get("caption_ext") or ".txt"
    stated = f".{extension.removeprefix('.')}"
    return None if stated in SUFFIXES else (stated,)


def _read_images(values: Table, imported: ImportedDataset) -> None:
    buckets = bool(values.get("buckets", True)) and not values.get("square_crop")
    imported.state("recipe.images.buckets", buckets, "buckets")
    if buckets:
        imported.state("recipe.images.bucket_step", int(values.get("bucket_tolerance") or 64), "bucket_tolerance")
    imported.state("recipe.images.crop", "random" if values.get("random_crop") else "center", "random_crop")
    imported.state("recipe.images.flip", bool(values.get("flip_x")), "flip_x")
    if values.get("alpha_mask"):
        imported.state("dataset.masks", "alpha", "alpha_mask")


def _read_captions(values: Table, imported: ImportedDataset) -> None:
    for theirs, ours in (("caption_dropout_rate", "dropout"), ("token_dropout_rate", "tag_dropout")):
        imported.state(f"recipe.captions.{ours}", float(values.get(theirs) or 0.0), theirs)
    shuffles = bool(values.get("shuffle_tokens"))
    imported.state("recipe.captions.shuffle", shuffles, "shuffle_tokens")
    # Tokens are kept only from dropout there, not from shuffling.
    imported.state("recipe.captions.keep_tokens", 0 if shuffles else int(values.get("keep_tokens") or 0), "keep_tokens")


def _note_others(values: Table, dataset: Table, imported: ImportedDataset) -> None:
    known = {*_READ.split(), *_HARMLESS.split()}
    for name, value in values.items():
        if name in known or value in (None, False, "", 0, [], _OFF.get(name)):
            continue
        nearest = _NEAREST.get("control_path" if name.startswith("control") else name, "")
        shown = printable(toml_value(value) if isinstance(value, str | int | float) else str(dataset[name]), 60)
        imported.note(f"{name} = {shown} is not supported{'; ' if nearest else ''}{nearest}.")
