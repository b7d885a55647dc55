"""Read jobs from the TOML files of LoRA_Easy_Training_Scripts, a GUI that starts sd-scripts.

What becomes of its settings is decided by utils/validation.py in its backend; the files state all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.base import Family
from trainer.errors import JobError
from trainer.importers.datasets import ImportedDataset, imported_by
from trainer.importers.sd_scripts.dataset import read_tables
from trainer.importers.sd_scripts.files import read_options
from trainer.importers.sd_scripts.options import OPTIONS
from trainer.importers.translation import ImportedJob, Moves, Option, Origin
from trainer.protocol.reading import read_toml

PROGRAM = "LoRA_Easy_Training_Scripts"
_RENAMED = {"batch_size": "train_batch_size", "warmup_ratio": "lr_warmup_steps", "fa": "network_module"}
# Its own schedulers, and the nearest of sd-scripts.
_SCHEDULERS = {"RexAnnealingWarmRestarts": "rex", "CosineAnnealingWarmRestarts": "cosine_with_restarts"}
_NOTES = {
    "only for other kinds of models": (
        "ae apply_t5_attn_mask blocks_to_swap clip_l discrete_flow_shift guidance_scale logit_mean logit_std "
        "mode_scale model_prediction_type sigmoid_scale split_mode t5xxl t5xxl_max_token_length timestep_sampling "
        "weighting_scheme"
    ),
    "only for textual inversion": "init_word num_vectors_per_token token_string",
    "the run's folder has a copy of the job": "save_toml save_toml_location",
    "the LoRA file lists the tags of its captions": "tag_occurrence tag_file_location",
}
_ABOUT = {name: note for note, names in _NOTES.items() for name in names.split()}
_NAMES: Mapping[str, Option] = {
    **OPTIONS,
    **dict.fromkeys((*_RENAMED, *_ABOUT, "easy_name", "sdxl", "subsets", "train_mode"), Option("text")),
}


def is_easy_training(data: Mapping[str, Any]) -> bool:
    """Return whether the tables of a TOML file are sections of its pages, which have their settings in `args`."""
    sections = [name for name in ("general_args", "network_args", "optimizer_args") if _is_section(data.get(name))]
    return len(sections) > 1


def _is_section(table: Any) -> bool:
    return isinstance(table, dict) and isinstance(table.get("args", table.get("dataset_args")), dict)


def read_easy_training(path: Path, moved: Moves = ()) -> ImportedJob:
    """Read a job from a file that the GUI saved; paths are relative to it.

    Raises JobError for textual inversion, other kinds of models and values of a wrong type, and ImpastoError and
    OSError for the files that it names.
    """
    data = read_toml(path, "config")
    stated = {**_settings(data, "dataset_args"), **_settings(data, "args")}
    mode = data.get("train_mode")
    if isinstance(mode, dict) and mode.get("train_mode", "lora") != "lora":
        _refuse(path, "it trains a textual inversion")
    if "guidance_scale" in stated:
        _refuse(path, "it trains Flux, not SD 1.5 or SDXL")
    family: Family = "sdxl" if stated.get("sdxl") else "sd15"
    imported = read_options(_options(stated), path.parent, family, moved, dataset=_dataset(data, path))
    restated = stated | {name: data[name] for name in ("subsets", "train_mode") if name in data}
    imported.found.restate(PROGRAM, restated, _origins(stated), _NAMES)
    return imported


def _dataset(data: Mapping[str, Any], path: Path) -> ImportedDataset | None:
    """Return the folders with what each has of its own and what is common to all; None without any."""
    subsets = data.get("subsets")
    if not isinstance(subsets, list) or not subsets:
        return None
    common = {name: value for name, value in _settings(data, "dataset_args").items() if value}
    return imported_by(lambda file: read_tables(_tables(common, subsets), file.parent), path)


def _tables(common: Mapping[str, Any], subsets: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tables of a dataset file of sd-scripts, to which false and empty settings are not passed on."""
    own = [{name: value for name, value in each.items() if value and name != "name"} for each in subsets]
    return {"general": common, "datasets": [{"subsets": own}]}


def _refuse(path: Path, reason: str) -> None:
    raise JobError("import.model", f"Could not read {path}: {reason}.", "Choose a file for a LoRA of SD 1.5 or SDXL.")


def _settings(data: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the settings of one kind in all sections."""
    found: dict[str, Any] = {}
    for section in data.values():
        if isinstance(section, dict) and isinstance(section.get(kind), dict):
            found.update(section[kind])
    return found


def _options(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that its backend passes on: false and empty settings are left out."""
    options = {_RENAMED.get(name, name): value for name, value in stated.items() if value and name not in _ABOUT}
    arguments = options.get("network_args") or {}
    options["network_module"] = _module(stated, arguments)
    for name in ("network_args", "optimizer_args", "lr_scheduler_args"):
        if isinstance(table := options.get(name), dict):
            options[name] = [f"{key}={_joined(value)}" for key, value in table.items() if value != ""]
    scheduler = str(options.get("lr_scheduler_type", "")).rpartition(".")[2]
    if scheduler in _SCHEDULERS:
        options["lr_scheduler"] = _SCHEDULERS[scheduler]
        del options["lr_scheduler_type"]
    if isinstance(sides := options.get("resolution"), list):
        options["resolution"] = ",".join(map(str, sides))
    if options.get("dim_from_weights"):  # a file, of which sd-scripts takes network_weights
        options["dim_from_weights"] = True
    replaced = str(stated.get("easy_name") or "")
    paths = {name: options[name] for name in ("output_dir", "output_name", "log_prefix", "resume") if name in options}
    options |= {name: str(text).replace("${replace}", replaced) for name, text in paths.items()}
    return {name: value for name, value in options.items() if name not in ("easy_name", "sdxl")}


def _module(stated: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    if "algo" in arguments:
        return "lycoris.kohya"
    if "unit" in arguments:
        return "networks.dylora"
    return "networks.lora_fa" if stated.get("fa") else "networks.lora"


def _joined(value: Any) -> str:
    """Return the value of an argument as the backend passes it on."""
    if value in ("true", "false"):
        return str(value).capitalize()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _origins(stated: Mapping[str, Any]) -> dict[str, Origin]:
    """Return where the outcome of each setting comes from."""
    origins = {name: Origin(options=(_RENAMED.get(name, name),)) for name in (*OPTIONS, *_RENAMED)}
    origins |= {name: Origin(note=note) for name, note in _ABOUT.items()}
    origins |= {name: Origin() for name in ("easy_name", "sdxl", "subsets", "train_mode")}
    if str(stated.get("lr_scheduler_type", "")).rpartition(".")[2] in _SCHEDULERS:
        origins["lr_scheduler_type"] = Origin(options=("lr_scheduler",))
    return origins
