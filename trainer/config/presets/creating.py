"""Create presets from jobs and LoRA files; whatever must not be shared is left out and reported."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.base import Family
from trainer.config.credentials import base_name
from trainer.config.job import Job
from trainer.config.presets.exchange import parse_preset
from trainer.config.presets.kohya import Conversion, LoraParts, recipe_of_metadata
from trainer.config.presets.preset import (
    LONGEST_NAME,
    MACHINE_KEYS,
    RECIPE_KEY,
    SCHEMA,
    Preset,
    dump_preset,
    text_fault,
    text_faults,
)
from trainer.config.presets.preview_image import make_preview
from trainer.config.problems import faults_sentence, problems
from trainer.config.recipe import RecipeConfig
from trainer.config.schema import fields
from trainer.errors import JobError, LoraFileError
from trainer.files.identify import LoraIdentity, identify_lora
from trainer.protocol.files import safe_name
from trainer.protocol.reading import UnusableFileError, parse_json
from trainer.protocol.records import renamed

Data = dict[str, Any]

_MOST_EXAMPLES = 8
_MOST_TRIGGERS = 20
# Parts that may be left out when they must not be shared; all others are required.
_OPTIONAL = ("author", "license", "notes", "trigger_words", "base.name", "base.sha256", "recipe", "fit", "examples")

# Folders of a diffusers base with the models that a LoRA adapts.
_TRAINABLE = ("text_encoder/", "text_encoder_2/", "unet/")
_LONGEST = 64 * 1024
# Suffixes of preview images beside a LoRA in ComfyUI and A1111.
_IMAGE_SUFFIXES = (".png", ".preview.png", ".jpg", ".webp")
# Alternative lengths, and keys that follow from others where they are not set.
_NOT_EXPECTED = re.compile(r"adapter|epochs|images_seen|conv_.*|text_encoder(_2)?\.(rank|alpha)|optimizer(\[.*)?")


@dataclass(frozen=True, slots=True)
class CreatedPreset:
    """A preset created from a job or a LoRA file."""

    preset: Preset
    left_out: tuple[str, ...] = ()
    """What was left out of the preset, as "key: reason"."""
    not_found: tuple[str, ...] = ()
    """Recipe keys that the source does not contain."""


def preset_of_job(
    job: Job,
    family: Family,
    *,
    base_sha256: str | None = None,
    triggers: Sequence[str] = (),
    image: str | None = None,
    with_fit: bool = False,
) -> CreatedPreset:
    """Create a preset from a job, either as written or as frozen in a run.

    ``triggers`` are trigger words found in the dataset, in addition to the job's; ``image`` is the base64
    text that ``make_preview`` returns. Folders, images, paths and machine-specific fit keys are left out.
    """
    stated = [folder.trigger for folder in job.dataset.folders if folder.trigger and folder.kind == "train"]
    fit = job.fit.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude=set(MACHINE_KEYS))
    examples = [
        prompt.model_dump(mode="json", exclude_unset=True, exclude_none=True) for prompt in job.report.previews.prompts
    ]
    return create_preset(
        {
            "name": job.name,
            "author": job.output.author,
            "license": job.output.license,
            "notes": job.output.description,
            "trigger_words": list(dict.fromkeys([*stated, *triggers])),
            "base": {"family": family, "name": job.base.name, "sha256": base_sha256},
            "recipe": stated_recipe(job.recipe),
            "fit": fit if with_fit else None,
            "examples": examples,
            "preview": {"image": image} if image else None,
        }
    )


def stated_recipe(recipe: RecipeConfig) -> Data:
    """Return the keys set in a recipe, with JSON values; if none is set, return all keys, since defaults may change."""
    stated = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return stated or recipe.model_dump(mode="json", by_alias=True, exclude_none=True)


def create_preset(data: Data, left_out: Sequence[str] = (), not_found: Sequence[str] = ()) -> CreatedPreset:
    """Create a preset from the values of a preset file; values not allowed there are left out and reported.

    Empty values, and settings for a text encoder that the family does not have, are dropped silently. Raises JobError
    if the rest is not a valid preset.
    """
    if data["base"]["family"] != "sdxl" and data["recipe"]:
        data["recipe"] = {key: value for key, value in data["recipe"].items() if key != "text_encoder_2"}
    data = {key: value for key, value in data.items() if value}
    data["schema"] = SCHEMA
    name = safe_name(str(data.get("name", "")), "preset")[:LONGEST_NAME].rstrip(". ")
    data["name"] = "preset" if text_fault(name) else name
    data["base"] = {key: value for key, value in data["base"].items() if value}
    dropped = list(left_out)
    for key, most in (("examples", _MOST_EXAMPLES), ("trigger_words", _MOST_TRIGGERS)):
        if len(data.get(key, ())) > most:
            dropped.append(f"{key}: only the first {most} of {len(data[key])} are kept")
            data[key] = data[key][:most]
    while fault := _first_fault(data):
        key = fault.partition(": ")[0]
        if not key.startswith(_OPTIONAL) or not _remove(data, key.split(".")):
            sentence = f"Could not create a preset: {fault}."
            raise JobError(
                "preset.unmade", sentence, "Fix this in the job or LoRA that the preset is made from.", (fault,)
            )
        dropped.append(fault)
    return CreatedPreset(Preset.model_validate(data), tuple(dropped), tuple(not_found))


def revised(preset: Preset, details: Mapping[str, object]) -> Preset:
    """Return the preset with ``details`` replaced, after validating the result like a preset file.

    Raises JobError for values that are not allowed.
    """
    try:
        changed = preset.replaced(**details)
    except ValidationError as error:
        faults = problems(error, Preset)
        sentence = faults_sentence("The preset", faults)
        raise JobError("preset.invalid", sentence, "Fix these values.", faults) from None
    return parse_preset(dump_preset(changed), "The preset")


def _first_fault(data: Data) -> str | None:
    if faults := text_faults(data):
        return faults[0]
    try:
        Preset.model_validate(data)
    except ValidationError as error:
        return problems(error, Preset)[0]
    return None


def _remove(data: Data, steps: Sequence[str]) -> bool:
    """Remove the value at a dotted key, or the list item that contains it; return False if it does not exist."""
    place: Any = data
    for number, step in enumerate(steps):
        if isinstance(place, list):
            del place[int(step)]
            return True
        if not isinstance(place, dict) or step not in place:
            return False
        if number == len(steps) - 1:
            del place[step]
            return True
        place = place[step]
    return False


def hash_of_base(files: Mapping[str, str], name: str) -> str | None:
    """Return a base's SHA-256, given its weight files' hashes by relative path; None if there are none.

    For a single file, called `name`, this is the file's hash. For a folder, it is the hash of what sha256sum prints for
    the UNet and text encoder weights, sorted by path; the VAE is left out, since a job may use another. Every run
    hashes these files anyway, so this adds no work.
    """
    if name in files:
        return files[name]
    weights = [f"{files[path]}  {path}\n" for path in sorted(files) if path.startswith(_TRAINABLE)]
    return hashlib.sha256("".join(weights).encode("utf-8")).hexdigest() if weights else None


def preset_of_lora(path: Path) -> CreatedPreset:
    """Create a preset from a LoRA's metadata, its tensor shapes and the image next to it.

    Raises LoraFileError if the file is damaged, not a LoRA, or for an unknown base family.
    """
    identity = identify_lora(path)
    family = identity.family
    if family is None:
        raise LoraFileError(
            "lora.kind",
            f"Could not create a preset from {path.name}: it is not for SD 1.5 or SDXL.",
            "Choose a LoRA for SD 1.5 or SDXL.",
        )
    metadata = identity.metadata
    own = own_recipe(metadata)
    mapped = Conversion(own) if own is not None else _mapped(identity, family)
    stated = set(_leaves(mapped.recipe, ""))
    not_found = [] if own is not None else [key for key in _expected_keys(family) if key not in stated]
    data = {
        "name": metadata.get("modelspec.title") or metadata.get("ss_output_name") or path.stem,
        "author": metadata.get("modelspec.author"),
        "license": metadata.get("modelspec.license"),
        "notes": metadata.get("modelspec.description"),
        "trigger_words": [
            word.strip() for word in metadata.get("modelspec.trigger_phrase", "").split(",") if word.strip()
        ],
        "base": {
            "family": family,
            "name": base_name(_stated(metadata, "ss_sd_model_name")),
            "sha256": _sha256(metadata.get("ss_new_sd_model_hash", "")),
        },
        "recipe": mapped.recipe,
        "preview": preview_image_of(path),
    }
    return create_preset(data, mapped.notes, not_found)


def preview_image_of(lora: Path) -> dict[str, str] | None:
    """Return the image next to a LoRA as a preset's `preview` table; None if it is missing or unreadable."""
    for suffix in _IMAGE_SUFFIXES:
        preview = lora.with_suffix(suffix)
        if preview.is_file():
            try:
                return {"image": make_preview(preview)}
            except JobError:
                return None
    return None


def _mapped(identity: LoraIdentity, family: Family) -> Conversion:
    """Convert kohya's metadata to a recipe; raises LoraFileError if the file has no such metadata."""
    if not any(key.startswith("ss_") for key in identity.metadata):
        raise LoraFileError(
            "lora.no_metadata",
            "Could not create a preset: the LoRA has no training metadata (ss_*).",
            "Ask its author for a preset; some programs and sites remove the metadata.",
        )
    parts = LoraParts(
        family=family,
        unet="UNet" in identity.layers,
        text_encoder="text encoder" in identity.layers,
        text_encoder_2="text encoder 2" in identity.layers,
        ranks=identity.ranks,
    )
    return recipe_of_metadata(identity.metadata, parts)


def own_recipe(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the recipe stored in a LoRA made by Impasto, or None; invalid keys are removed and reported later."""
    text = metadata.get(RECIPE_KEY)
    if text is None or len(text) > _LONGEST:
        return None
    try:
        recipe = parse_json(text)
    except UnusableFileError:
        return None
    return renamed(recipe, "recipe") if isinstance(recipe, dict) else None


def _expected_keys(family: Family) -> Iterator[str]:
    """Yield the keys that a complete recipe for this family contains."""
    for found in fields(RecipeConfig):
        second = found.key.startswith("text_encoder_2.") or found.key == "clip_skip"
        foreign = second and (family == "sd15") != (found.key == "clip_skip")
        if found.values != "a table" and not foreign and not _NOT_EXPECTED.fullmatch(found.key):
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
