"""Commands that examine files before training: check a dataset, inspect a model file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.common import Commands, add_command, checked, echo, echo_lines
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, DatasetError, LoraFileError
from trainer.protocol import events
from trainer.protocol.reading import open_file
from trainer.protocol.text import printable

if TYPE_CHECKING:
    from trainer.config.base import BaseConfig
    from trainer.config.job import DatasetConfig
    from trainer.config.recipe import RecipeConfig
    from trainer.dataset.findings import Finding
    from trainer.dataset.folders import Imported
    from trainer.files.identify import BaseIdentity, LoraIdentity

_SEVERITIES = {"error": "Error", "warning": "Warning", "info": "Note"}
_MOST_PATHS = 10
_LONGEST_VALUE = 100
_COPIES = {"image.same", "image.near"}  # always list these files: users need to know which images are alike
# What users want to know about a LoRA first: title -> metadata keys, each with the unit that follows its value.
_FIRST_FACTS: Mapping[str, Mapping[str, str]] = {
    "Title": {"modelspec.title": ""},
    "Trigger words": {"modelspec.trigger_phrase": ""},
    "Trained on": {"ss_sd_model_name": ""},
    "Training": {"ss_steps": " steps", "ss_num_epochs": " epochs", "ss_num_train_images": " images"},
    "Resolution": {"ss_resolution": ""},
    "Learning rates": {"ss_unet_lr": " UNet", "ss_text_encoder_lr": " text encoder"},
    "By": {"modelspec.author": "", "modelspec.license": ""},
}


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    what = "list problems in a dataset and show what an epoch contains"
    check = add_command(commands, "check", what, run_check)
    check.add_argument(
        "dataset",
        metavar="DATASET",
        type=Path,
        help="a folder of images, a job.toml, a kohya dataset .toml or a OneTrainer concepts .json",
    )
    check.add_argument("--recursive", action="store_true", help="with a folder: include its subfolders")
    check.add_argument(
        "--resolution",
        type=int,
        metavar="PIXELS",
        help="training resolution: 512 for SD 1.5, 1024 for SDXL (default: from the job)",
    )
    check.add_argument(
        "--show-captions", action="store_true", help="show the caption of every image as used in the first epoch"
    )
    check.add_argument(
        "--all", action="store_true", help=f"list every file with each problem, not just the first {_MOST_PATHS}"
    )

    inspect = add_command(commands, "inspect", "show what a base model or LoRA file contains", run_inspect)
    inspect.add_argument("file", metavar="FILE", type=Path, help="a .safetensors file or a diffusers folder")


def run_check(options: argparse.Namespace) -> int:
    """Check a dataset; return exit code 2 if it has errors."""
    from trainer.dataset.dataset import describe, read_dataset

    dataset, recipe, captions = _what_to_check(options)
    with _progress() as progress:
        found = read_dataset(dataset, recipe, progress, captions)
    if found.images:
        echo_lines(describe(found, recipe, show_captions=options.show_captions))
    roots = [Path(folder.path).absolute() for folder in dataset.folders]
    for finding in found.findings:
        _print_finding(finding, roots, {image.path for image in found.images}, show_all=options.all)
    return EXIT_BAD_INPUT if any(finding.severity == "error" for finding in found.findings) else EXIT_DONE


def _what_to_check(options: argparse.Namespace) -> tuple[DatasetConfig, RecipeConfig, Imported]:
    """Return the dataset, recipe and imported captions from a job, a folder or another trainer's file.

    Captions are returned only if another trainer's file contains them; otherwise, they are in files next to the images.
    """
    from trainer.config.job import DatasetConfig, FolderConfig
    from trainer.config.load import load_job
    from trainer.config.recipe import RecipeConfig

    path: Path = options.dataset
    stated = checked(RecipeConfig, resolution=options.resolution).resolution
    if path.suffix.lower() == ".json" or _is_kohya(path):
        return _import(path, stated)
    if path.suffix.lower() == ".toml":
        job = load_job(path)
        resolution = stated or job.recipe.resolution or _native_resolution(job.base)
        return job.dataset, job.recipe.replaced(resolution=resolution), {}
    if path.is_file():
        remedy = "Specify the folder that contains the images, or a job.toml."
        raise DatasetError("dataset.file", f"Could not check {path}: it is not a folder.", remedy)
    folder = FolderConfig(path=str(path.absolute()), recursive=options.recursive)
    return DatasetConfig(folders=(folder,)), RecipeConfig(resolution=stated or _assumed()), {}


def _is_kohya(path: Path) -> bool:
    """Return whether a file is a kohya dataset file, which is TOML with [[datasets]]; a job has [dataset]."""
    if path.suffix.lower() != ".toml" or not path.is_file():
        return False
    with open_file(path, "text") as file:
        return b"[[datasets" in file.read()


def _import(path: Path, resolution: int | None) -> tuple[DatasetConfig, RecipeConfig, Imported]:
    """Read another trainer's dataset file; print the recipe settings that it implies and what is not imported."""
    from trainer.config.recipe import RecipeConfig
    from trainer.config.resolve import flatten
    from trainer.config.toml_file import toml_value
    from trainer.importers.reading import read_dataset_list

    imported = read_dataset_list(path)
    for key, value in imported.settings.items():
        echo(f"The file sets {key} = {toml_value(value)}: add that to the job.")
    for folder in imported.folders:
        own = folder.model_dump(include={"lines", "masks", "resolutions", "captions", "images"}, exclude_none=True)
        for key, value in flatten(own, ""):
            echo(f"The file sets {key} = {toml_value(value)} for {folder.path}: add that to its folder in the job.")
    echo_lines(imported.notes)
    asked = resolution or imported.settings.get("recipe.resolution") or _assumed()
    return imported.config(), checked(RecipeConfig, resolution=asked), imported.captions


def _native_resolution(base: BaseConfig) -> int:
    """Return a base's native resolution, or SDXL's if the family is unknown."""
    from trainer.config.base import NATIVE_RESOLUTION
    from trainer.files.identify import identify_base

    if base.family != "auto":
        return NATIVE_RESOLUTION[base.family]
    return NATIVE_RESOLUTION[identify_base(Path(base.model)).family] if Path(base.model).exists() else _assumed()


def _assumed() -> int:
    """Return the default resolution, and print that it is an assumption."""
    from trainer.config.base import NATIVE_RESOLUTION

    resolution = NATIVE_RESOLUTION["sdxl"]
    echo(f"Assuming SDXL: training at {resolution} × {resolution}. For SD 1.5, add --resolution 512.")
    return resolution


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Yield a callback (done, total) that shows progress on stderr, because the findings go to stdout."""
    from trainer.cli.display import open_display

    with open_display(sys.stderr, as_json=False) as show:
        show(events.PhaseStarted("check", None))
        yield lambda done, total: show(events.PhaseProgress("check", done, total))


def _print_finding(finding: Finding, roots: Sequence[Path], used: Set[Path], *, show_all: bool) -> None:
    """Print a finding with paths relative to the dataset; omit the paths if they would list every image."""
    sentence, paths, total = finding.sentence, finding.paths, len(used)
    every = sentence.startswith(f"{total} ") and set(paths) == used and finding.code not in _COPIES
    if every and not show_all:
        sentence, paths = sentence.replace(f"{total} ", f"{total} of {total} ", 1), ()
    echo()
    echo(f"{_SEVERITIES[finding.severity]}: {_within(sentence, roots)}")
    if finding.remedy:
        echo(f"  What to do: {finding.remedy}")
    shown = paths if show_all else paths[:_MOST_PATHS]
    for path in shown:
        echo(f"  {_within(str(path), roots)}")
    if len(paths) > len(shown):
        echo(f"  and {len(paths) - len(shown):,} more; --all lists them")


def _within(text: str, roots: Sequence[Path]) -> str:
    """Return the text with its paths made relative to the dataset; if it has several folders, keep their names."""
    for root in sorted(roots, key=lambda root: -len(str(root))):
        text = text.replace(f"{root}{os.sep}", "" if len(roots) == 1 else f"{root.name}{os.sep}")
    return text


def run_inspect(options: argparse.Namespace) -> int:
    """Print what a file is: a base, a LoRA or another model."""
    from trainer.errors import BaseModelError
    from trainer.files.identify import identify_base

    try:
        identity = identify_base(options.file)
    except BaseModelError as error:
        if error.code != "base.other_model" or not _print_lora(options.file):
            raise
        return EXIT_DONE
    _print_base(options.file, identity)
    return EXIT_DONE


def _print_base(path: Path, identity: BaseIdentity) -> None:
    echo(f"{path} is a base model that LoRAs can be trained on.")
    for sentence in identity.evidence:
        echo(f"  {sentence}")
    if identity.prediction is None:
        echo('  Prediction type unknown: set base.prediction = "epsilon", "v" or "flow" in the job.')
    elif identity.zero_terminal_snr is None:
        echo("  Zero terminal SNR unknown: set base.zero_terminal_snr = true or false in the job.")
    if not identity.has_vae:
        echo("  No VAE: set base.vae in the job.")


def _print_lora(path: Path) -> bool:
    """Print what a LoRA contains; return False if the file is not a LoRA."""
    from trainer.files.identify import identify_lora

    try:
        identity = identify_lora(path)
    except LoraFileError:
        return False
    echo_lines(_lora_lines(path, identity))
    return True


def _lora_lines(path: Path, identity: LoraIdentity) -> Iterator[str]:
    """Yield lines that describe a LoRA: its kind, the facts that users look for first, then all metadata."""
    yield f"{path} is {identity.evidence[0].removeprefix('It is ')}"
    yield from (f"  {sentence}" for sentence in identity.evidence[1:])
    stated = {key: printable(value, _LONGEST_VALUE) for key, value in identity.metadata.items() if value != "None"}
    for title, keys in _FIRST_FACTS.items():
        if values := [f"{stated[key]}{unit}" for key, unit in keys.items() if stated.get(key)]:
            yield f"  {title}: {', '.join(values)}"
    if stated:
        yield "  Metadata:"
        yield from (f"    {printable(key, _LONGEST_VALUE)}: {value}" for key, value in sorted(stated.items()))
