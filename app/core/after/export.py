"""Export a saved LoRA, with its title, author, preview image and trigger words where other programs expect them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.core.runs.series import lowest
from trainer.errors import LoraFileError
from trainer.protocol import events
from trainer.protocol.files import long_path, safe_name, step_ending, write_bytes, write_json
from trainer.protocol.places import write_remedy
from trainer.protocol.reading import open_file

if TYPE_CHECKING:
    from app.core.runs.run import Run
    from trainer.config.job import Job
    from trainer.files.header import Header

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|])")


@dataclass(frozen=True, slots=True)
class LoraSummary:
    """Human-readable metadata of a LoRA file; empty fields are omitted."""

    title: str
    author: str = ""
    license: str = ""
    description: str = ""
    triggers: str = ""
    """Trigger words, separated by commas."""
    image: Path | None = None
    """Example image made with the LoRA."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Files written by an export."""

    file: Path
    extra_files: tuple[Path, ...]


class FileExistsConflict(LoraFileError):
    """Raised when an export would overwrite files and the user has not agreed to it."""

    def __init__(self, files: list[Path]) -> None:
        names = ", ".join(file.name for file in files)
        sentence = f"Could not export: {files[0].parent} already contains {names}."
        super().__init__("export.taken", sentence, "Choose another name, or replace the existing files.")
        self.files = files


def read_summary(lora: Path) -> LoraSummary:
    """Return the current metadata of a LoRA file; raises LoraFileError."""
    from trainer.files.header import read_header

    said = read_header(lora, "lora").metadata
    title, author, license, description, triggers = (
        said.get(f"modelspec.{key}", "") for key in ("title", "author", "license", "description", "trigger_phrase")
    )
    return LoraSummary(title, author, license, description, triggers)


def export(lora: Path, folder: Path, name: str, summary: LoraSummary, *, replace: bool = False) -> Exported:
    """Copy a LoRA into a folder as NAME.safetensors, along with a preview image and a description.

    ComfyUI, A1111, Forge, InvokeAI and SwarmUI show NAME.png and NAME.json with a LoRA; the image is also embedded in
    the file. Raises FileExistsConflict if any of the files exists and `replace` is not set, and LoraFileError if the
    LoRA or the image is unusable or the folder cannot be written to.
    """
    name = safe_name(name, "lora")
    target = folder / f"{name}.safetensors"
    if target.absolute() == lora.absolute():
        raise LoraFileError(
            "export.itself",
            f"Could not export to {target}: it is the run's own file.",
            "Choose another folder or name.",
        )
    extra_files = [target.with_suffix(".json"), *([target.with_suffix(".png")] if summary.image else [])]
    taken = [path for path in (target, *extra_files) if long_path(path).exists()]
    if taken and not replace:
        raise FileExistsConflict(taken)
    try:
        long_path(folder).mkdir(parents=True, exist_ok=True)
        _write(lora, target, name, summary)
    except OSError as error:
        raise LoraFileError(
            "export.folder",
            f"Could not write the LoRA to {folder}: {error.strerror or error}.",
            write_remedy(error),
        ) from error
    return Exported(target, tuple(extra_files))


def _write(lora: Path, target: Path, name: str, summary: LoraSummary) -> None:
    """Write the files of an export; the LoRA comes last, so that it never appears without the others."""
    from trainer.files.header import read_header
    from trainer.files.rewriting import UnusableImageError, rewrite_metadata, thumbnail

    header = read_header(lora, "lora")
    changes: dict[str, str | None] = {
        "ss_output_name": name,  # A1111 and Forge use this name in prompts
        "modelspec.title": summary.title or name,
        "modelspec.author": summary.author or None,
        "modelspec.license": summary.license or None,
        "modelspec.description": summary.description or None,
        "modelspec.trigger_phrase": summary.triggers or None,
    }
    if summary.image:
        try:
            changes["modelspec.thumbnail"] = thumbnail(summary.image)
            image = _as_png(summary.image)
        except UnusableImageError as fault:
            sentence = f"Could not use {summary.image} as the preview image: {fault}."
            raise LoraFileError("export.image", sentence, "Choose another image, or none.") from None
        write_bytes(target.with_suffix(".png"), image)
    write_json(target.with_suffix(".json"), _description(header, summary))
    rewrite_metadata(lora, target, changes)


def _description(header: Header, summary: LoraSummary) -> dict[str, object]:
    """Return the contents of NAME.json in the format of A1111, Forge and InvokeAI."""
    from trainer.config.base import ARCHITECTURES, SIDE_FILE_VERSIONS

    versions = {name: SIDE_FILE_VERSIONS[family] for family, name in ARCHITECTURES.items()}
    architecture = header.metadata.get("modelspec.architecture", "").partition("/")[0]
    return {
        "description": summary.description,
        "sd version": versions.get(architecture, "Unknown"),
        "activation text": summary.triggers,
        "preferred weight": 1.0,
        "negative text": "",
        "notes": f"By {summary.author}." if summary.author else "",
    }


def _as_png(image: Path) -> bytes:
    """Return an image as a PNG without metadata, which could reveal the artist's prompts."""
    from io import BytesIO

    from PIL import Image

    with open_file(image, "image") as file, Image.open(file) as opened:
        plain = opened.convert("RGB")
    plain.info.clear()
    data = BytesIO()
    plain.save(data, "PNG")
    return data.getvalue()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A saved LoRA of a run, with its loss at fixed noise and previews."""

    step: int
    file: Path
    loss: float | None = None
    """Validation loss at this step, or loss on training images; None if it was not measured."""
    held_out: bool = True
    """Whether the loss was measured on images held out of training."""
    best: bool = False
    """Whether its loss is the lowest."""
    last: bool = False
    """Whether it is the final result of the run."""
    images: dict[int, Path] = field(default_factory=dict)
    """Preview images of this step by prompt index."""
    ema: bool = False
    """Whether its file and previews are of the moving average (recipe.ema_decay)."""


@dataclass(frozen=True, slots=True)
class SavedSteps:
    """Snapshot of a run's events about saved steps, safe to use on a worker thread."""

    folder: Path
    saved: tuple[events.Saved, ...]
    validations: tuple[events.Validation, ...]
    previews: tuple[events.Preview, ...]

    @classmethod
    def of(cls, run: Run) -> SavedSteps:
        """Return a snapshot of a run."""
        return cls(run.directory.path, tuple(run.saved), tuple(run.validations), tuple(run.previews))


def candidates(snapshot: SavedSteps) -> list[Candidate]:
    """Return the saved steps whose files still exist, sorted by step; accesses the disk."""
    files = _files(snapshot)
    held_out = any(one.held_out for one in snapshot.validations)
    losses = {one.step: one.loss for one in snapshot.validations if one.held_out == held_out}
    measured = {step: loss for step in files if (loss := losses.get(step)) is not None and math.isfinite(loss)}
    best = lowest(measured)
    images: dict[int, dict[int, Path]] = {}
    for preview in snapshot.previews:
        images.setdefault(preview.step, {})[preview.index] = snapshot.folder / preview.file
    return [
        Candidate(
            step,
            file.path,
            measured.get(step),
            held_out,
            step == best,
            file.is_last,
            dict(sorted(images.get(step, {}).items())),
            file.ema,
        )
        for step, file in sorted(files.items())
    ]


class _SavedFile(NamedTuple):
    path: Path
    is_last: bool
    """Whether it is the final result, which has no step number in its name."""
    ema: bool
    """Whether it is of the moving average."""


def _files(snapshot: SavedSteps) -> dict[int, _SavedFile]:
    """Return each step's file if it still exists."""
    files: dict[int, _SavedFile] = {}
    for saved in snapshot.saved:
        stem = Path(saved.file).stem.removesuffix("-ema" if saved.ema else "")
        path, last = snapshot.folder / saved.file, not stem.endswith(step_ending(saved.step))
        # Previews show the moving average, if there is one, so its file is the one to choose by them.
        if path.is_file() and (last or saved.ema or saved.step not in files):
            files[saved.step] = _SavedFile(path, last, bool(saved.ema))
    results = [step for step, file in files.items() if file.is_last]
    for step in results[:-1]:  # an extended run writes its result again: only the latest is final
        files[step] = files[step]._replace(is_last=False)
    return files


def named(found: Iterable[Candidate], step: int) -> Candidate | None:
    """Return the candidate with this step number, or None."""
    return next((one for one in found if one.step == step), None)


def model_card(job: Job, summary: LoraSummary, candidate: Candidate, name: str, images: int) -> str:
    """Return the model card of one saved step; `images` is the number of training images."""
    recipe = job.recipe
    base = _plain(job.base.name)
    sections = [
        f"# {_plain(summary.title or name)}",
        _plain(summary.description),
        _use(summary, name, base),
        _table(
            {
                "Base": base,
                "Steps": f"{candidate.step:,}",
                "Images": f"{images:,}",
                "Resolution": f"{recipe.resolution} pixels",
                "Rank": f"{recipe.rank}, alpha {recipe.alpha:g}",
                "Optimizer": f"{recipe.optimizer.name}, learning rate {recipe.learning_rate:g}",
                "Images per step": str(recipe.effective_batch),
                "Seed": str(recipe.seed),
                **({} if candidate.loss is None else {_loss_name(candidate): f"{candidate.loss:.4f}"}),
            }
        ),
        _credits(summary),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _loss_name(candidate: Candidate) -> str:
    return "Validation loss" if candidate.held_out else "Loss on training images"


def _use(summary: LoraSummary, name: str, base: str) -> str:
    lines = [
        "## How to use it",
        "",
        f"Made for {base}. Start with a strength of 1; lower it if the effect is too strong.",
    ]
    if summary.triggers:
        lines += ["", f"Trigger words: `{summary.triggers.replace('`', '')}`"]
    lines += ["", f"In A1111 and Forge: `<lora:{name}:1>`. In ComfyUI: a Load LoRA node with `{name}.safetensors`."]
    return "\n".join(lines)


def _table(rows: dict[str, str]) -> str:
    lines = ["## Training details", "", "| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {key} | {value} |" for key, value in rows.items()), "", "Trained with Impasto."])


def _credits(summary: LoraSummary) -> str:
    lines = [
        f"{title}: {_plain(text)}" for title, text in (("Author", summary.author), ("License", summary.license)) if text
    ]
    return "\n\n".join(lines)


def _plain(text: str) -> str:
    """Escape user text so that Markdown shows it as plain text, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
