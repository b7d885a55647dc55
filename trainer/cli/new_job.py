"""The new command: write a job for the user's images, with images of their class, or from another trainer's file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import words
from trainer.cli.common import Commands, add_base, add_command, checked, echo, echo_lines, positive
from trainer.cli.drawing import base_at, render_images
from trainer.cli.jobs import family_of, machine_here, preset_recipe
from trainer.errors import JobError
from trainer.protocol import files
from trainer.protocol.files import safe_name, valid_job_name

if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.config.fit import FitConfig
    from trainer.config.recipe import RecipeConfig
    from trainer.config.resolve import Machine
    from trainer.importers.translation import ImportedJob, Outcome

REGULARIZATION = "regularization"
"""Folder of regularization images beside the job."""


def add_commands(commands: Commands) -> None:
    """Define the command and its arguments."""
    new = add_command(commands, "new", "write a commented job.toml for your images and this PC", run_new)
    new.add_argument(
        "name", metavar="NAME", help="the LoRA's name, also used for its new folder; or a folder: . or ../style"
    )
    add_base(new, required=False)
    new.add_argument("--images", type=Path, help="the folder with your images")
    new.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="take all settings from another trainer's file: a configuration of sd-scripts (.toml) or OneTrainer "
        "(.json), settings of kohya_ss (.json) or LoRA_Easy_Training_Scripts (.toml), a job of ai-toolkit "
        "(.yaml), a LoRA (.safetensors), or a "
        "script or text file with a command line of sd-scripts",
    )
    new.add_argument(
        "--map",
        dest="moved",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="with --from: the folder NEW of this PC has what the folder OLD had on the other one; repeatable",
    )
    new.add_argument(
        "--write-captions",
        action="store_true",
        help="with --from: write captions that the other trainer has in one file for all images into a file beside "
        "each image that has none",
    )
    new.add_argument("--trigger", help="the word that will trigger the LoRA in prompts")
    new.add_argument("--recipe", metavar="PRESET", help="use the recipe of this preset; `presets list` lists them")
    new.add_argument(
        "--family", choices=("sd15", "sdxl"), help="the base's family; only needed if the base is not on this disk yet"
    )
    new.add_argument(
        "--class",
        dest="class_words",
        metavar="WORDS",
        help="what your images show in general, such as 1girl: the caption of images that have none",
    )
    new.add_argument(
        "--make-reg",
        type=positive,
        metavar="N",
        help="render N regularization images of the class with the base, at the training resolution; if this is "
        "interrupted, run the same command again to render the rest",
    )
    new.set_defaults(refuse=new.error)


def run_new(options: argparse.Namespace) -> int:
    """Create a job: write NAME/job.toml, after its regularization images if there are to be any."""
    from trainer.config.write import new_job_text

    if options.source is not None:
        return _import(options)
    if options.base is None or options.images is None:
        options.refuse("the following arguments are required: --base and --images, or --from")
    if options.make_reg and not options.class_words:
        options.refuse("--make-reg needs --class, the words to render the images from")

    name, folder, target = _target(options.name)
    family = family_of(options.base, options.family)
    recipe = preset_recipe(options.recipe, family) if options.recipe else None
    machine = machine_here()
    count = _count_images(options.images)
    text = new_job_text(
        name=name,
        base=options.base,
        images=options.images,
        folder=folder,
        family=family,
        machine=machine,
        trigger=options.trigger,
        class_words=options.class_words,
        regularization=REGULARIZATION if options.make_reg else None,
        count=count,
        recipe=recipe,
        expected=_expected_fit(family, machine),
    )
    if options.make_reg:
        _make_regularization(options, recipe, folder / REGULARIZATION)
    _write(target, text)
    return 0


def _import(options: argparse.Namespace) -> int:
    """Write the job in another trainer's file, and print what became of each of its settings."""
    from trainer.config.toml_file import table_lines
    from trainer.importers.reading import missing, read_job

    name, folder, target = _target(options.name)
    moved = [_pair(text, options) for text in options.moved]
    imported = read_job(options.source, options.family, moved)
    if options.base:
        imported.found.values["base.model"] = options.base
    if options.images:
        imported.folders = ()
        imported.found.values["dataset.folders"] = [{"path": str(options.images.absolute())}]
    _require_complete(imported, options.source)
    imported.job(name)
    echo_lines(report_lines(imported))
    lines = "\n".join(table_lines(imported.table(name), ""))
    head = f"# Read from {imported.found.program}'s {options.source.name} by Impasto. Paths are relative to this file."
    _write(target, f"{head}\n{lines}\n")
    _write_captions(imported, write=options.write_captions)
    for path in missing(imported, folder):
        echo(f"{path} is not on this PC: import the file again with --map OLD=NEW, or change the path in the job.")
    return 0


def _require_complete(imported: ImportedJob, source: Path) -> None:
    """Raise JobError if neither the file nor the command line names a base and images, as with presets of others."""
    values = imported.found.values
    if "base.model" not in values:
        raise JobError("import.base", f"Could not import {source}: it names no base model.", "Add --base MODEL.")
    if not imported.folders and "dataset.folders" not in values:
        raise JobError("import.images", f"Could not import {source}: it names no images.", "Add --images FOLDER.")


def _write_captions(imported: ImportedJob, *, write: bool) -> None:
    """Write the captions that are in one file beside their images, or say how to do so; existing files are kept."""
    from trainer.dataset.caption_files import SUFFIXES

    (suffix, *_) = imported.found.values.get("dataset.caption_sources") or [".txt"]
    suffix = suffix if suffix in SUFFIXES else ".txt"
    absent = {image.with_suffix(suffix): lines for image, lines in imported.captions.items()}
    absent = {file: lines for file, lines in absent.items() if not file.exists()}
    if absent and not write:
        echo(
            f"Captions not imported: {len(absent):,}. They are in one file for all images; delete the job and import "
            "it again with --write-captions to write them beside the images."
        )
        return
    for file, lines in absent.items():
        files.write_text(file, "\n".join(lines) + "\n")
    if absent:
        echo(f"Captions written beside their images: {len(absent):,}.")


def report_lines(imported: ImportedJob) -> Iterator[str]:
    """Yield what became of each setting of another trainer's file, in three lists."""
    from trainer.importers.translation import shown

    titles: dict[Outcome, str] = {"carried": "Carried over", "changed": "Changed", "unavailable": "Not available"}
    for outcome, title in titles.items():
        found = imported.found.of(outcome)
        if not found:
            continue
        yield f"{title}:"
        alike: dict[str, list[str]] = {}  # settings that became nothing, by the reason
        for setting in found:
            if setting.ours:
                ours = ", ".join(f"{key} = {shown(value)}" for key, value in setting.ours.items())
                yield f"  {setting.text} → {ours}{f'; {setting.note}' if setting.note else ''}"
            else:
                alike.setdefault(setting.note, []).append(setting.text)
        for note, texts in alike.items():
            yield f"  {', '.join(texts)}{f'; {note}' if note else ''}"
    yield from imported.notes


def _pair(text: str, options: argparse.Namespace) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        options.refuse(f"--map must be OLD=NEW, not {text}")
    return old, new


def _target(text: str) -> tuple[str, Path, Path]:
    """Return the name, folder and file of a new job; raises JobError if the file exists."""
    name, folder = _name_and_folder(text)
    target = folder / "job.toml"
    if target.exists():
        sentence = f"Could not create a job: {target} already exists."
        raise JobError("job.exists", sentence, "Choose another name, or delete that file first.")
    return name, folder, target


def _write(target: Path, text: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(target, text)
    echo(f"Wrote {target}. Review it, then start training: python -m trainer train {words.quoted(target)}")


def _make_regularization(options: argparse.Namespace, recipe: RecipeConfig | None, folder: Path) -> None:
    """Render the images of the class that the folder does not have yet.

    Rendering names them 000.png, 001.png, etc., and image N has the seed N + 1, so that an interrupted command gives
    the same images when it is repeated.
    """
    from trainer.config.job import PromptConfig

    side = recipe.resolution if recipe else None
    missing = [number for number in range(options.make_reg) if not (folder / f"{number:03d}.png").exists()]
    prompts = [
        checked(PromptConfig, prompt=options.class_words, seed=number + 1, width=side, height=side)
        for number in missing
    ]
    if prompts:
        render_images(
            base_at(options.base),
            prompts,
            folder,
            on_drawn=lambda done, total, file: echo(f"Regularization image {done} of {total}: {file}"),
        )


def _name_and_folder(text: str) -> tuple[str, Path]:
    """Return a new job's name and folder; a name gets a new folder, a path is the folder itself."""
    if not text.strip():
        raise JobError("job.name", "Could not create a job: its name is empty.", 'Give it a name such as "my-style".')
    if text in (".", "..") or any(mark and mark in text for mark in (os.sep, os.altsep)):
        folder = Path(os.path.normpath(Path(text).expanduser()))
        return valid_job_name(folder.resolve().name), folder
    return text, Path(safe_name(text, "job"))


def _expected_fit(family: Family | None, machine: Machine) -> FitConfig | None:
    """Return the built-in fit preset for a machine's GPU; None if there is no GPU or the family is unknown."""
    from trainer.config.presets.library import fit_for, read_library

    if family is None or machine.total_bytes is None:
        return None
    found = fit_for(read_library(), family, machine.total_bytes)
    return found.preset.fit if found else None


def _count_images(folder: Path) -> int:
    """Return the number of images in a dataset folder; raise DatasetError if there is nothing to train on."""
    from trainer.config.job import DatasetConfig, FolderConfig
    from trainer.dataset.folders import scan_folders

    return len(scan_folders(DatasetConfig(folders=(FolderConfig(path=str(folder.absolute())),)), {}).candidates)
