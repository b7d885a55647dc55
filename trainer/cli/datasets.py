"""The commands that look at files before anything is trained: check a dataset, inspect a model file."""

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
_COPIES = {"picture.same", "picture.near"}  # which of them are alike is the point
# What users ask of a LoRA first, by the keys of its metadata with the unit behind each.
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
    """Define the words of each command."""
    what = "say all that is wrong or doubtful in a dataset, and what an epoch will see"
    check = add_command(commands, "check", what, run_check)
    check.add_argument(
        "dataset",
        metavar="DATASET",
        type=Path,
        help="a folder of pictures, a job.toml, kohya's dataset .toml or OneTrainer's concepts .json",
    )
    check.add_argument("--recursive", action="store_true", help="with a folder: look into its subfolders too")
    check.add_argument(
        "--resolution", type=int, metavar="PIXELS", help="512 for SD 1.5, 1024 for SDXL (default: the job's)"
    )
    check.add_argument(
        "--show-captions", action="store_true", help="show the text of every picture as the first epoch reads it"
    )
    check.add_argument("--all", action="store_true", help=f"name all files of a finding, not just {_MOST_PATHS}")

    inspect = add_command(commands, "inspect", "say what a base model or LoRA file is", run_inspect)
    inspect.add_argument("file", metavar="FILE", type=Path, help="a .safetensors file or a diffusers folder")


def run_check(options: argparse.Namespace) -> int:
    """Check a dataset; the exit code is 2 when pictures cannot be used."""
    from trainer.dataset.dataset import describe, read_dataset

    dataset, recipe, captions = _what_to_check(options)
    with _progress() as progress:
        found = read_dataset(dataset, recipe, progress, captions)
    if found.pictures:
        echo_lines(describe(found, recipe, show_captions=options.show_captions))
    roots = [Path(folder.path).absolute() for folder in dataset.folders]
    for finding in found.findings:
        _print_finding(finding, roots, {picture.path for picture in found.pictures}, show_all=options.all)
    return EXIT_BAD_INPUT if any(finding.severity == "error" for finding in found.findings) else EXIT_DONE


def _what_to_check(options: argparse.Namespace) -> tuple[DatasetConfig, RecipeConfig, Imported]:
    """Return dataset and recipe of a job, a folder or another trainer's file, and captions that only this one holds."""
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
        return job.dataset, job.recipe.changed(resolution=resolution), {}
    if path.is_file():
        remedy = "Name the folder that holds the pictures, or a job.toml."
        raise DatasetError("dataset.file", f"{path} is a file.", remedy)
    folder = FolderConfig(path=str(path.absolute()), recursive=options.recursive)
    return DatasetConfig(folders=(folder,)), RecipeConfig(resolution=stated or _assumed()), {}


def _is_kohya(path: Path) -> bool:
    """Tell whether a TOML file is kohya's dataset file: it has [[datasets]], where a job has [dataset]."""
    if path.suffix.lower() != ".toml" or not path.is_file():
        return False
    with open_file(path, "text") as file:
        return b"[[datasets" in file.read()


def _import(path: Path, resolution: int | None) -> tuple[DatasetConfig, RecipeConfig, Imported]:
    """Read another trainer's file, and say what it asks of the recipe and what is not carried over."""
    from trainer.config.recipe import RecipeConfig
    from trainer.config.toml_file import toml_value
    from trainer.dataset.importers import import_dataset

    imported = import_dataset(path)
    for key, value in imported.settings.items():
        echo(f"It asks for {key} = {toml_value(value)}: write that into the job.")
    echo_lines(imported.notes)
    asked = resolution or imported.settings.get("recipe.resolution") or _assumed()
    return imported.config(), checked(RecipeConfig, resolution=asked), imported.captions


def _native_resolution(base: BaseConfig) -> int:
    """Return the resolution that a base was made for; SDXL's where nothing here says what it is."""
    from trainer.config.base import NATIVE_RESOLUTION
    from trainer.files.identify import identify_base

    if base.family != "auto":
        return NATIVE_RESOLUTION[base.family]
    return NATIVE_RESOLUTION[identify_base(Path(base.model)).family] if Path(base.model).exists() else _assumed()


def _assumed() -> int:
    """Return the resolution that is assumed where nothing states one, and say so."""
    from trainer.config.base import NATIVE_RESOLUTION

    resolution = NATIVE_RESOLUTION["sdxl"]
    echo(f"Assumed: training at {resolution} × {resolution}, as for SDXL; for SD 1.5 add --resolution 512.")
    return resolution


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows how far the check is, on stderr: the findings are the result."""
    from trainer.cli.display import open_display

    with open_display(sys.stderr, as_json=False) as show:
        show(events.PhaseStarted("check", None))
        yield lambda done, total: show(events.PhaseProgress("check", done, total))


def _print_finding(finding: Finding, roots: Sequence[Path], used: Set[Path], *, show_all: bool) -> None:
    """Print a finding with file names relative to the dataset; a list of every image is left out."""
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
        echo(f"  and {len(paths) - len(shown):,} more; --all names them")


def _within(text: str, roots: Sequence[Path]) -> str:
    """Return a text with the paths in it relative to the dataset; of several folders each keeps its own name."""
    for root in sorted(roots, key=lambda root: -len(str(root))):
        text = text.replace(f"{root}{os.sep}", "" if len(roots) == 1 else f"{root.name}{os.sep}")
    return text


def run_inspect(options: argparse.Namespace) -> int:
    """Say what a file is: a base, a LoRA, or what else."""
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
    echo(f"{path} is a base that LoRAs can be trained on.")
    for sentence in identity.evidence:
        echo(f"  {sentence}")
    if identity.prediction is None:
        echo('  It is uncertain what it predicts: set base.prediction = "epsilon" or "v" in the job.')
    elif identity.zero_terminal_snr is None:
        echo("  It is uncertain how its noise schedule ends: set base.zero_terminal_snr = true or false in the job.")
    if not identity.has_vae:
        echo("  It has no VAE: name one under base.vae in the job.")


def _print_lora(path: Path) -> bool:
    """Say what a LoRA holds; False when the file is none."""
    from trainer.files.identify import identify_lora

    try:
        identity = identify_lora(path)
    except LoraFileError:
        return False
    echo_lines(_lora_lines(path, identity))
    return True


def _lora_lines(path: Path, identity: LoraIdentity) -> Iterator[str]:
    """Yield what a LoRA is and what a user asks first, then all of its metadata."""
    yield f"{path} is {identity.evidence[0].removeprefix('It is ')}"
    yield from (f"  {sentence}" for sentence in identity.evidence[1:])
    stated = {key: printable(value, _LONGEST_VALUE) for key, value in identity.metadata.items() if value != "None"}
    for title, keys in _FIRST_FACTS.items():
        if values := [f"{stated[key]}{unit}" for key, unit in keys.items() if stated.get(key)]:
            yield f"  {title}: {', '.join(values)}"
    if stated:
        yield "  Metadata:"
        yield from (f"    {printable(key, _LONGEST_VALUE)}: {value}" for key, value in sorted(stated.items()))
