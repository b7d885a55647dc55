"""Find out what another program's file is, read the job in it, and find its paths on this PC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.config.base import Family
from trainer.config.paths import is_base_path
from trainer.errors import JobError
from trainer.importers.ai_toolkit.files import is_job, read_job_file, read_tree
from trainer.importers.datasets import ImportedDataset
from trainer.importers.onetrainer.concepts import import_concepts
from trainer.importers.onetrainer.files import is_config, read_config
from trainer.importers.sd_scripts.dataset import import_dataset
from trainer.importers.sd_scripts.easy_training import is_easy_training, read_easy_training
from trainer.importers.sd_scripts.files import read_command, read_toml_job
from trainer.importers.sd_scripts.kohya_ss import is_kohya_ss, read_kohya_ss
from trainer.importers.sd_scripts.metadata import read_lora
from trainer.importers.sd_scripts.options import OPTIONS
from trainer.importers.translation import ImportedJob, Moves
from trainer.protocol.reading import read_text, read_toml
from trainer.protocol.text import printable

COMMANDS = (".bat", ".cmd", ".ps1", ".sh", ".txt")
_PATHS = ("base.model", "base.vae", "base.continue_from", "output.runs")
_READABLE = (
    "a --config_file .toml of sd-scripts, a script or text file with its command line, a .json of kohya_ss, a .toml of "
    "LoRA_Easy_Training_Scripts, a configuration .json of OneTrainer, a job .yaml of ai-toolkit, or a LoRA"
)
# Two options that stand in every configuration, so that a file of another program is not taken for one.
_SURE = {"pretrained_model_name_or_path", "network_module", "train_data_dir", "dataset_config", "network_dim"}


def read_job(path: Path, family: Family | None = None, moved: Moves = ()) -> ImportedJob:
    """Read the job in another program's file, for a base of this family if it is known.

    `moved` says where folders of the PC that the file comes from are on this one. Raises JobError if it is none that
    can be read, and ImpastoError and OSError for it and the files that it names.
    """
    suffix = path.suffix.lower()
    if suffix in COMMANDS:
        return read_command(read_text(path, "text"), path.parent, family, moved)
    if suffix == ".safetensors":
        return read_lora(path)
    if suffix in (".json", ".yaml", ".yml"):
        data = read_tree(path)
        if is_kohya_ss(data):
            return read_kohya_ss(path, moved)
        if is_config(data):
            imported = read_config(path, moved)
            imported.settle()
            return imported
        if is_job(data):
            imported = read_job_file(path, moved)
            imported.settle()
            return imported
    names: set[str] = set()
    if suffix == ".toml":
        data = read_toml(path, "config")
        if is_easy_training(data):
            return read_easy_training(path, moved)
        names = {*data, *(name for table in data.values() if isinstance(table, dict) for name in table)}
        if len(names & _SURE) > 1 and len(names & OPTIONS.keys()) > 2:
            return read_toml_job(path, family, moved)
    what, remedy = _other(names)
    raise JobError("import.unknown", f"Could not read {path}: it is {what}.", remedy)


def _other(names: set[str]) -> tuple[str, str]:
    """Return what a file with these keys is instead, and what to do with it."""
    if {"schema", "base", "dataset"} <= names:
        return "a job of Impasto already", "Train it, or copy it and change the copy."
    if "datasets" in names:
        return (
            "a dataset file of sd-scripts, without the settings of training",
            "Give the configuration that names it as dataset_config, or look at its images with check.",
        )
    return "no configuration of a trainer that Impasto knows", f"Give {_READABLE}."


def read_dataset_list(path: Path) -> ImportedDataset:
    """Read the image folders in kohya's dataset .toml, or in OneTrainer's concepts or configuration (.json).

    Raises DatasetError if the file is unreadable, lists no image folder, or has invalid values.
    """
    return import_concepts(path) if path.suffix.lower() == ".json" else import_dataset(path)


def missing(imported: ImportedJob, folder: Path) -> Iterator[str]:
    """Yield the paths of a job in `folder` that are not on this PC, each once and printable."""
    values = imported.found.values
    stated = [values[key] for key in _PATHS[:3] if values.get(key)]
    stated = [path for path in stated if is_base_path(path, folder)]
    stated += [each["path"] for each in values.get("dataset.folders", ())]
    stated += [each.path for each in imported.folders]
    yield from (printable(path, 300) for path in dict.fromkeys(stated) if not (folder / path).exists())
