"""Read jobs from what sd-scripts writes into LoRA files (ss_*), which are its options as text, and facts of the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config.base import Family
from trainer.config.methods import ADAPTERS
from trainer.config.presets.creating import own_recipe
from trainer.config.presets.kohya import MODULES
from trainer.config.presets.preset import RECIPE_KEY
from trainer.config.resolve import flatten
from trainer.errors import JobError, LoraFileError
from trainer.files.identify import LoraIdentity, identify_lora
from trainer.importers.sd_scripts.files import read_options
from trainer.importers.sd_scripts.options import OPTIONS, PATHS
from trainer.importers.translation import ImportedJob, Option, Origin, Translation
from trainer.protocol.reading import UnusableFileError, parse_json

PROGRAM = "sd-scripts"
_LONGEST = 1 << 20  # characters of JSON to parse; the tags of a large dataset take less
_NONE = ("", "None", "none", "null")
_RENAMED = {
    "ss_batch_size_per_device": "train_batch_size",
    "ss_debiased_estimation": "debiased_estimation_loss",
    "ss_optimizer": "optimizer_type",
    "modelspec.author": "metadata_author",
    "modelspec.description": "metadata_description",
    "modelspec.license": "metadata_license",
    "modelspec.title": "metadata_title",
}
_KEYS: Mapping[str, str] = {f"ss_{name}": name for name in OPTIONS if name not in PATHS} | _RENAMED
"""The option that each key has the value of."""
_FACTS = (
    "ss_base_model_version ss_bucket_info ss_dataset_dirs ss_epoch ss_new_sd_model_hash ss_new_vae_hash "
    "ss_num_batches_per_epoch ss_num_epochs ss_num_reg_images ss_num_train_images ss_num_validation_images "
    "ss_reg_dataset_dirs ss_sd_model_hash ss_sd_model_name ss_sd_scripts_commit_hash ss_session_id ss_steps "
    "ss_tag_frequency ss_total_batch_size ss_training_finished_at ss_training_started_at ss_vae_hash ss_vae_name "
    "sshs_legacy_hash sshs_model_hash"
)
"""Keys that say what happened in a run, and are no settings."""
_MODULES = {ADAPTERS[kind].title: module for module, kind in MODULES.items()}
_PARTS = {
    "UNet": "recipe.learning_rate",
    "text encoder": "recipe.text_encoder.learning_rate",
    "text encoder 2": "recipe.text_encoder_2.learning_rate",
}
_ARGUMENT = re.compile(r"\w{1,40}=(?:\([^()]{0,100}\)|[^,()]{0,100})(?=,|$)")
_MOST_TEXT = 2000


def read_lora(path: Path) -> ImportedJob:
    """Read a job like the one that a LoRA was trained with; the base and the images are not in it.

    Raises LoraFileError if the file is damaged, not a LoRA, for an unknown family, or says nothing about its training.
    """
    identity = identify_lora(path)
    family = identity.family
    if family is None:
        raise LoraFileError(
            "lora.kind",
            f"Could not read {path.name}: it is not for SD 1.5 or SDXL.",
            "Choose a LoRA for SD 1.5 or SDXL.",
        )
    if (recipe := own_recipe(identity.metadata)) is not None:
        return _own(recipe)
    stated = {key: text for key, text in identity.metadata.items() if key.startswith(("ss_", "modelspec.", "sshs_"))}
    if not any(key.startswith("ss_") for key in stated):
        raise LoraFileError(
            "lora.no_metadata",
            f"Could not read {path.name}: it has no training metadata (ss_*).",
            "Ask its author for the settings; some programs and sites remove the metadata.",
        )
    given = dict(_options(stated, identity))
    options = {name: value for name, value in given.items() if _is_valid(name, value)}
    imported = read_options(options, path.parent, family, ())
    _leave_untrained(imported.found, identity, family)
    invalid = given.keys() - options.keys()
    origins = {
        key: Origin(note="is no valid value") if option in invalid else Origin(options=(option,))
        for key, option in _KEYS.items()
    }
    facts = {*_FACTS.split(), *(key for key in stated if key.startswith(("modelspec.", "ss_datasets")))}
    origins |= {key: Origin() for key in facts - _KEYS.keys()}
    imported.found.restate(
        PROGRAM, stated, origins, dict.fromkeys((*_KEYS, *_FACTS.split(), "ss_datasets"), Option("text"))
    )
    return imported


def _own(recipe: Mapping[str, Any]) -> ImportedJob:
    """Return a job with the recipe that Impasto wrote into a LoRA."""
    found = Translation("Impasto", {RECIPE_KEY: "recipe"}, {RECIPE_KEY: Option("text")})
    found.carry(RECIPE_KEY, dict(flatten(recipe, "recipe")))
    return ImportedJob(found)


def _is_valid(name: str, value: Any) -> bool:
    """Return whether a value has its option's type: others are left out, since anybody can edit metadata."""
    try:
        Translation(PROGRAM, {name: value}, OPTIONS)
    except JobError:
        return False
    return True


def _options(stated: Mapping[str, str], identity: LoraIdentity) -> Iterator[tuple[str, Any]]:
    """Yield the options in a LoRA's metadata; the tensors say what is missing or wrong there."""
    values = _of_datasets(stated) | {
        _KEYS[key]: text for key, text in stated.items() if key in _KEYS and text not in _NONE
    }
    name, _, arguments = str(values.get("optimizer_type", "")).partition("(")
    values |= {"optimizer_type": name, "optimizer_args": _ARGUMENT.findall(arguments.removesuffix(")")[:_MOST_TEXT])}
    total = stated.get("ss_total_batch_size", "")
    if total.isdecimal():
        values |= {"train_batch_size": total, "gradient_accumulation_steps": 1}
    for key in ("text_encoder_lr", "resolution"):
        if key in values:
            numbers = re.findall(r"[^\[\](), ]+", str(values[key])[:_MOST_TEXT])[:2]
            values[key] = numbers if key == "text_encoder_lr" else ",".join(numbers)
    given = _json(values.get("network_args"))
    network = {str(key): value for key, value in given.items()} if isinstance(given, dict) else {}
    if identity.kind in _MODULES and "algo" not in network:
        values["network_module"] = _MODULES[identity.kind]
    values["network_args"] = [f"{key}={value}" for key, value in network.items()]
    if identity.ranks:
        values.setdefault("network_dim", identity.ranks[-1])
    yield from values.items()


def _of_datasets(stated: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of the first dataset and its first folder, which are there for runs with a dataset file."""
    datasets = _json(stated.get("ss_datasets"))
    first = datasets[0] if isinstance(datasets, list) and datasets else None
    if not isinstance(first, dict):
        return {}
    subsets = first.get("subsets")
    trained = [
        each
        for each in (subsets if isinstance(subsets, list) else ())
        if isinstance(each, dict) and not each.get("is_reg")
    ]
    both = {**first, **(trained[0] if trained else {})}
    both["train_batch_size"] = both.get("batch_size_per_device")
    wanted = OPTIONS.keys() - {*PATHS, "caption_extension"}
    return {name: _plain(value) for name, value in both.items() if name in wanted and value is not None}


def _plain(value: Any) -> Any:
    return ",".join(map(str, value[:2])) if isinstance(value, list) else value


def _leave_untrained(found: Translation, identity: LoraIdentity, family: Family) -> None:
    """Set the rate of each part that is not in the file to 0."""
    for part, key in _PARTS.items():
        if part not in identity.layers and (family == "sdxl" or part != "text encoder 2"):
            found.values[key] = 0.0


def _json(text: Any) -> Any:
    if not isinstance(text, str) or len(text) > _LONGEST:
        return None
    try:
        return parse_json(text)
    except UnusableFileError:
        return None
