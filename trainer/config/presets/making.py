"""Makes presets of jobs: what travels is taken over, what may not is left out and named."""

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
from trainer.config.presets.picture import make_picture
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
from trainer.config.problems import faults_sentence, problems
from trainer.config.recipe import RecipeConfig
from trainer.config.schema import fields
from trainer.errors import JobError, LoraFileError
from trainer.files.identify import LoraIdentity, identify_lora
from trainer.protocol.files import safe_name
from trainer.protocol.reading import UnusableFileError, parse_json

Data = dict[str, Any]

_MOST_EXAMPLES = 8
_MOST_TRIGGERS = 20
# What may be left out of a preset when it cannot travel; without the rest there is none.
_DISPENSABLE = ("author", "licence", "notes", "trigger_words", "base.name", "base.sha256", "recipe", "fit", "examples")

# The folders of a diffusers base whose models a LoRA may be for.
_LEARNED = ("text_encoder/", "text_encoder_2/", "unet/")
_LONGEST = 64 * 1024
# Side pictures as ComfyUI and A1111 find them.
_PICTURES = (".png", ".preview.png", ".jpg", ".webp")
# Other ways to state a length, and what follows from other keys where it is not stated.
_NOT_ASKED_FOR = re.compile(r"adapter|epochs|pictures_seen|conv_.*|text_encoder(_2)?\.(rank|alpha)|optimizer(\[.*)?")


@dataclass(frozen=True, slots=True)
class CreatedPreset:
    """A preset that was made of something else."""

    preset: Preset
    left_out: tuple[str, ...] = ()
    """What was there and is not in the preset, "key: reason"."""
    not_found: tuple[str, ...] = ()
    """Keys of the recipe that the source says nothing about."""


def preset_of_job(
    job: Job,
    family: Family,
    *,
    base_sha256: str | None = None,
    triggers: Sequence[str] = (),
    picture: str | None = None,
    with_fit: bool = False,
) -> CreatedPreset:
    """Make a preset of a job, as it is written or frozen in a run.

    ``triggers`` are the words found in the dataset, beside those that the job states; ``picture`` is base64 from
    ``make_picture``. Folders, pictures, paths and what belongs to one machine stay behind.
    """
    stated = [folder.trigger for folder in job.dataset.folders if folder.trigger and folder.kind == "train"]
    fit = job.fit.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude=set(MACHINE_KEYS))
    examples = [
        prompt.model_dump(mode="json", exclude_unset=True, exclude_none=True) for prompt in job.report.previews.prompts
    ]
    return made_of(
        {
            "name": job.name,
            "author": job.output.author,
            "licence": job.output.licence,
            "notes": job.output.description,
            "trigger_words": list(dict.fromkeys([*stated, *triggers])),
            "base": {"family": family, "name": job.base.name, "sha256": base_sha256},
            "recipe": stated_recipe(job.recipe),
            "fit": fit if with_fit else None,
            "examples": examples,
            "preview": {"picture": picture} if picture else None,
        }
    )


def stated_recipe(recipe: RecipeConfig) -> Data:
    """What a recipe states, as JSON values; all of it when it states nothing, for defaults may change."""
    stated = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return stated or recipe.model_dump(mode="json", by_alias=True, exclude_none=True)


def made_of(data: Data, left_out: Sequence[str] = (), not_found: Sequence[str] = ()) -> CreatedPreset:
    """Make a preset of values as they stand in its file; what no preset may hold is left out and named.

    Empty values, and what a recipe says of a text encoder that the family has not, are dropped without a word. Raises
    JobError when what is left is no preset.
    """
    if data["base"]["family"] != "sdxl" and data["recipe"]:
        data["recipe"] = {key: value for key, value in data["recipe"].items() if key != "text_encoder_2"}
    data = {key: value for key, value in data.items() if value}
    data["schema"] = SCHEMA
    name = safe_name(str(data.get("name", "")), "preset")[:LONGEST_NAME].rstrip(". ")
    data["name"] = "preset" if text_fault(name) else name
    data["base"] = {key: value for key, value in data["base"].items() if value}
    gone = list(left_out)
    for key, most in (("examples", _MOST_EXAMPLES), ("trigger_words", _MOST_TRIGGERS)):
        if len(data.get(key, ())) > most:
            gone.append(f"{key}: only the first {most} of {len(data[key])} are kept")
            data[key] = data[key][:most]
    while fault := _first_fault(data):
        key = fault.partition(": ")[0]
        if not key.startswith(_DISPENSABLE) or not _remove(data, key.split(".")):
            sentence = f"No preset can be made of this: {fault}."
            raise JobError("preset.unmade", sentence, "Correct what is named where the preset is made from.", (fault,))
        gone.append(fault)
    return CreatedPreset(Preset.model_validate(data), tuple(gone), tuple(not_found))


def revised(preset: Preset, details: Mapping[str, object]) -> Preset:
    """Return the preset with some details replaced, as its own file reads.

    Raises JobError that names what may not stand there.
    """
    try:
        changed = preset.changed(**details)
    except ValidationError as error:
        faults = problems(error, Preset)
        sentence = faults_sentence("The preset", faults)
        raise JobError("preset.invalid", sentence, "Correct what is named.", faults) from None
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
    """Take the value at a dotted key out; of a list, the whole item that holds it. False when it is not there."""
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
    """Return the hash of a base from those of its weight files by their path in it; None where it has none.

    Of a single file, called `name`, it is that file's. Of a folder it is that of what the command sha256sum prints for
    the weights of the UNet and the text encoders, in the order of their paths; not the VAE's, since a job may take
    another. So it costs nothing where the files have been hashed, as every run does.
    """
    if name in files:
        return files[name]
    weights = [f"{files[path]}  {path}\n" for path in sorted(files) if path.startswith(_LEARNED)]
    return hashlib.sha256("".join(weights).encode("utf-8")).hexdigest() if weights else None


def preset_of_lora(path: Path) -> CreatedPreset:
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
    mapped = Conversion(own) if own is not None else _mapped(identity, family)
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


def _mapped(identity: LoraIdentity, family: Family) -> Conversion:
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
