"""Makes a preset of what a LoRA file says of itself: fully of Impasto's own, as far as it goes of others'."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config.base import Family
from trainer.config.credentials import base_name
from trainer.config.describe import fields
from trainer.config.presets.kohya import LoraParts, Mapped, recipe_of_metadata
from trainer.config.presets.making import Made, made_of
from trainer.config.presets.picture import make_picture
from trainer.config.presets.preset import RECIPE_KEY
from trainer.config.recipe import RecipeConfig
from trainer.errors import JobError, LoraFileError
from trainer.files.identify import LoraIdentity, identify_lora
from trainer.protocol.reading import UnusableFileError, parse_json

_LONGEST = 64 * 1024
# Side pictures as ComfyUI and A1111 find them.
_PICTURES = (".png", ".preview.png", ".jpg", ".webp")
# Other ways to state a length, and what follows from other keys where it is not stated.
_NOT_ASKED_FOR = re.compile(r"adapter|epochs|pictures_seen|conv_.*|text_encoder(_2)?\.(rank|alpha)|optimizer(\[.*)?")


def preset_of_lora(path: Path) -> Made:
    """Make a preset of a LoRA's metadata, tensors' shapes and the picture beside it.

    Raises LoraFileError when the file is broken, no LoRA, of a kind that is not trained here, or of no known family.
    """
    identity = identify_lora(path)
    family = identity.family
    if identity.kind != "LoRA" or family is None:
        what = f"a {identity.kind}" if identity.kind != "LoRA" else "for no base that Impasto trains on"
        raise LoraFileError(
            "lora.kind",
            f"No preset can be made of {path.name}: it is {what}.",
            "Choose a plain LoRA or LoCon of SD 1.5 or SDXL.",
        )
    told = identity.metadata
    own = _own_recipe(told)
    mapped = Mapped(own) if own is not None else _mapped(identity, family)
    stated = set(_leaves(mapped.recipe, ""))
    not_found = [] if own is not None else [key for key in _asked_for(family) if key not in stated]
    data = {
        "name": told.get("modelspec.title") or told.get("ss_output_name") or path.stem,
        "author": told.get("modelspec.author"),
        "licence": told.get("modelspec.license"),
        "notes": told.get("modelspec.description"),
        "trigger_words": [word.strip() for word in told.get("modelspec.trigger_phrase", "").split(",") if word.strip()],
        "base": {
            "family": family,
            "name": base_name(_stated(told, "ss_sd_model_name")),
            "sha256": _sha256(told.get("ss_new_sd_model_hash", "")),
        },
        "recipe": mapped.recipe,
        "preview": picture_beside(path),
    }
    return made_of(data, mapped.notes, not_found)


def picture_beside(lora: Path) -> dict[str, str] | None:
    """Return the picture that browsers of LoRAs show, as a preset holds it; one that cannot be read is passed over."""
    for suffix in _PICTURES:
        beside = lora.with_suffix(suffix)
        if beside.is_file():
            try:
                return {"picture": make_picture(beside)}
            except JobError:
                return None
    return None


def _mapped(identity: LoraIdentity, family: Family) -> Mapped:
    """The recipe as far as kohya's keys tell it."""
    if not any(key.startswith("ss_") for key in identity.metadata):
        raise LoraFileError(
            "lora.no_metadata",
            "The LoRA says nothing of how it was made: its metadata hold no ss_* keys.",
            "Ask its maker for a preset; some programs and sites strip what files say of themselves.",
        )
    parts = LoraParts(
        family=family,
        unet="UNet" in identity.layers,
        text_encoder="text encoder" in identity.layers,
        text_encoder_2="text encoder 2" in identity.layers,
        ranks=identity.ranks,
    )
    return recipe_of_metadata(identity.metadata, parts)


def _own_recipe(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """The whole recipe that Impasto writes into its files; what of it cannot be used is left out later, by name."""
    text = metadata.get(RECIPE_KEY)
    if text is None or len(text) > _LONGEST:
        return None
    try:
        recipe = parse_json(text)
    except UnusableFileError:
        return None
    return recipe if isinstance(recipe, dict) else None


def _asked_for(family: Family) -> Iterator[str]:
    """The keys of a recipe that a full account of it would state."""
    for found in fields(RecipeConfig):
        second = found.key.startswith("text_encoder_2.") or found.key == "clip_skip"
        foreign = second and (family == "sd15") != (found.key == "clip_skip")
        if found.values != "a table" and not foreign and not _NOT_ASKED_FOR.fullmatch(found.key):
            yield found.key


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, inner in value.items():
        yield prefix + key
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{prefix}{key}.")


def _stated(metadata: Mapping[str, str], key: str) -> str:
    text = metadata.get(key, "")
    return "" if text == "None" else text


def _sha256(text: str) -> str | None:
    return text.lower() if re.fullmatch(r"[0-9a-fA-F]{64}", text) else None
