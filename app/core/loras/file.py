"""Read a LoRA file's header: base, trigger words, settings, tags and images. Call it on worker threads.

Metadata is untrusted: texts and tables are truncated to a readable length, and malformed values are skipped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.loras.strength import BlockStrength, Layer, layers_of, read_blocks
from app.core.pixels import Pixels, pixels_of
from trainer.config.base import Family
from trainer.config.presets.creating import preview_image_of
from trainer.files.header import read_header
from trainer.files.identify import lora_of_header
from trainer.protocol.files import long_path
from trainer.protocol.reading import UnusableFileError, parse_json

LONGEST_TEXT = 2000
"""Maximum number of characters to show of a value."""
MOST_ROWS = 1000
"""Maximum number of rows to show of a table."""
_LONGEST_JSON = 2 << 20
_MOST_IMAGES = 4
_UNSET = ("", "None", "none", "null")
_REPEATS = re.compile(r"\d+_")

# Metadata keys of kohya-style trainers that users compare, with their labels.
SETTINGS: Mapping[str, str] = {
    "ss_network_module": "Network",
    "ss_network_dim": "Rank",
    "ss_network_alpha": "Alpha",
    "ss_network_args": "Network arguments",
    "ss_learning_rate": "Learning rate",
    "ss_unet_lr": "Learning rate, UNet",
    "ss_text_encoder_lr": "Learning rate, text encoder",
    "ss_optimizer": "Optimizer",
    "ss_lr_scheduler": "Schedule",
    "ss_lr_warmup_steps": "Warm-up steps",
    "impasto_ema_decay": "EMA decay",
    "ss_steps": "Steps",
    "ss_max_train_steps": "Planned steps",
    "ss_num_epochs": "Epochs",
    "ss_total_batch_size": "Batch size",
    "ss_gradient_accumulation_steps": "Gradient accumulation steps",
    "ss_resolution": "Resolution",
    "ss_clip_skip": "CLIP skip",
    "ss_num_train_images": "Images, with repeats",
    "ss_num_reg_images": "Regularization images",
    "ss_min_snr_gamma": "Min-SNR gamma",
    "ss_noise_offset": "Noise offset",
    "ss_mixed_precision": "Precision",
    "ss_seed": "Seed",
    "ss_training_comment": "Comment",
}
SIDE = 256
"""Maximum side length of a shown image in pixels."""


def to_display_text(text: str) -> str:
    """Return a string as a single line without control characters, truncated to `LONGEST_TEXT` characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[:LONGEST_TEXT])
    return line + ("…" if len(text) > LONGEST_TEXT else "")


def first_set_value(metadata: Mapping[str, str], *keys: str) -> str:
    """Return the display text of the first of these keys that is set; "" if none is."""
    values = (metadata.get(key, "").strip() for key in keys)
    return to_display_text(next((value for value in values if value not in _UNSET), ""))


def summary_of(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the title, author, license, description and base; entries that are not set are omitted."""
    keys = {
        "title": ("modelspec.title", "ss_output_name"),
        "author": ("modelspec.author",),
        "license": ("modelspec.license",),
        "description": ("modelspec.description",),
        "base": ("ss_sd_model_name", "ss_base_model_version", "modelspec.architecture"),
    }
    return {name: text for name, wanted in keys.items() if (text := first_set_value(metadata, *wanted))}


def settings_of(metadata: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the training settings in the metadata as (label from `SETTINGS`, value)."""
    return [
        (name, text) for key, name in SETTINGS.items() if (text := first_set_value(metadata, key)) not in ("", "{}")
    ]


def metadata_rows(metadata: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the metadata as rows (key, value) sorted by key; at most `MOST_ROWS`."""
    return [(to_display_text(key[:200]), to_display_text(metadata[key])) for key in sorted(metadata)[:MOST_ROWS]]


def tags_of(metadata: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the caption tags with their counts, most frequent first."""
    counts: Counter[str] = Counter()
    for tags in _tables(metadata):
        for tag, count in tags.items():
            if isinstance(count, int) and not isinstance(count, bool) and 0 < count < 1 << 53:
                counts[to_display_text(tag.strip()[:200])] += count
    return counts.most_common(MOST_ROWS)


def triggers_of(metadata: Mapping[str, str]) -> tuple[str, bool]:
    """Return the trigger words, and whether the metadata states them; else they come from training folder names.

    kohya's trainers caption images that have no caption with the folder name after the repeats ("10_mika girl").
    """
    words = first_set_value(metadata, "modelspec.trigger_phrase")
    if words:
        return words, True
    folders = _json(metadata.get("ss_tag_frequency"))
    names = [name[:200].partition("_")[2] for name in folders if _REPEATS.match(name)] if folders else []
    return to_display_text(", ".join(dict.fromkeys(name for name in names[:10] if name))), False


def images_of(metadata: Mapping[str, str]) -> Iterator[str]:
    """Yield the images in the metadata as unvalidated base64: the thumbnail and the cover images."""
    thumbnail = metadata.get("modelspec.thumbnail", "")
    if thumbnail.startswith("data:image/"):
        yield thumbnail.partition(",")[2]
    covers = _parsed(metadata.get("ssmd_cover_images"))
    if isinstance(covers, list):
        yield from (cover for cover in covers[:_MOST_IMAGES] if isinstance(cover, str))


def alphas_of(metadata: Mapping[str, str]) -> dict[str, float]:
    """Return the alphas that diffusers stores in the metadata, by model part: "unet", "text_encoder"."""
    table = _json(metadata.get("lora_adapter_metadata")) or {}
    stated = ((key.partition(".")[0], value) for key, value in table.items() if key.endswith(".lora_alpha"))
    return {part: float(value) for part, value in stated if isinstance(value, int | float)}


def _tables(metadata: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the tag counts of each folder; with a dataset config, kohya stores them in each dataset's entry."""
    found = [_json(metadata.get("ss_tag_frequency"))]
    datasets = _parsed(metadata.get("ss_datasets"))
    if not found[0] and isinstance(datasets, list):
        found = [each.get("tag_frequency") for each in datasets if isinstance(each, dict)]
    for folders in found:
        if isinstance(folders, dict):
            yield from (tags for tags in folders.values() if isinstance(tags, dict))


def _json(text: str | None) -> dict[str, Any] | None:
    value = _parsed(text)
    return value if isinstance(value, dict) else None


def _parsed(text: str | None) -> Any:
    if text is None or len(text) > _LONGEST_JSON:
        return None
    try:
        return parse_json(text)
    except UnusableFileError:
        return None


@dataclass(frozen=True, slots=True)
class LoraFile:
    """Contents of a LoRA file's header; all texts have limited length and are safe to show as plain text."""

    path: Path
    bytes: int
    kind: str
    """One of LoRA, LoCon, LoHa, LoKr and DoRA."""
    family: Family | None
    """Family of the base, identified by the layers, else by the metadata."""
    ranks: tuple[int, ...]
    parts: Mapping[str, int]
    """Number of adapted layers by part: "UNet", "text encoder", "text encoder 2"."""
    about: Mapping[str, str]
    """Title, author, license, description and base; entries that are not set are omitted."""
    triggers: str
    triggers_stated: bool
    """Whether the metadata states the trigger words; otherwise they are taken from training folder names."""
    settings: tuple[tuple[str, str], ...]
    tags: tuple[tuple[str, int], ...]
    metadata: tuple[tuple[str, str], ...]
    """All metadata, sorted by key."""
    images: tuple[Pixels, ...]
    layers: Mapping[str, Layer]
    alphas: Mapping[str, float]
    """Alphas from the metadata, for layers without an alpha tensor, by the first part of the layer name."""

    def blocks(self, wanted: Callable[[], bool] = lambda: True) -> list[BlockStrength]:
        """Return the strength of each block, or an empty list if `wanted` returns False. Raises OSError."""
        return read_blocks(self.path, self.layers, lambda layer: self.alphas.get(layer.partition(".")[0]), wanted)


def read_lora(path: Path) -> LoraFile:
    """Read a LoRA's header and preview image; raises LoraFileError if the file is damaged or not a LoRA."""
    header = read_header(path, "lora")
    identity = lora_of_header(path, header)
    data, layers = header.metadata, layers_of(header)
    triggers, stated = triggers_of(data)
    return LoraFile(
        path=path,
        bytes=long_path(path).stat().st_size,
        kind=_kind(identity.kind, layers.values()),
        family=identity.family,
        ranks=identity.ranks,
        parts=identity.layers,
        about=summary_of(data),
        triggers=triggers,
        triggers_stated=stated,
        settings=tuple(settings_of(data)),
        tags=tuple(tags_of(data)),
        metadata=tuple(metadata_rows(data)),
        images=tuple(_images(path, data)),
        layers=layers,
        alphas=alphas_of(data),
    )


def _kind(kind: str, layers: Iterable[Layer]) -> str:
    """Return the kind to show: a LoRA that also adapts convolution kernels is a LoCon."""
    kernels = any(len(layer["down"].shape) == 4 and layer["down"].shape[-1] > 1 for layer in layers if "down" in layer)
    return "LoCon" if kind == "LoRA" and kernels else kind


def _images(path: Path, metadata: Mapping[str, str]) -> Iterator[Pixels]:
    """Yield the images in the metadata, or, if there are none, the image file next to the LoRA."""
    sources = list(images_of(metadata)) or [found["image"] for found in (preview_image_of(path),) if found]
    yield from (pixels for text in sources if (pixels := pixels_of(text, SIDE)))
