"""Sends a saved LoRA out: a copy with title, author, picture and trigger words, where other programs look for it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

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
    """What a file says of itself; what is empty is not said."""

    title: str
    author: str = ""
    licence: str = ""
    description: str = ""
    triggers: str = ""
    """Trigger words, with commas between them."""
    picture: Path | None = None
    """A picture of what it does."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote."""

    file: Path
    beside: tuple[Path, ...]


class TakenError(LoraFileError):
    """Files that an export would overwrite; it asks first."""

    def __init__(self, files: list[Path]) -> None:
        names = ", ".join(file.name for file in files)
        sentence = f"There is already {names} in {files[0].parent}."
        super().__init__("export.taken", sentence, "Choose another name, or replace what is there.")
        self.files = files


def about(lora: Path) -> LoraSummary:
    """Return what a LoRA file says of itself now; raises LoraFileError."""
    from trainer.files.header import read_header

    said = read_header(lora, "lora").metadata
    title, author, licence, description, triggers = (
        said.get(f"modelspec.{key}", "") for key in ("title", "author", "license", "description", "trigger_phrase")
    )
    return LoraSummary(title, author, licence, description, triggers)


def export(lora: Path, folder: Path, name: str, told: LoraSummary, *, replace: bool = False) -> Exported:
    """Write a copy of a LoRA into a folder as NAME.safetensors, with its picture and its words beside it.

    NAME.png and NAME.json are what ComfyUI, A1111, Forge, InvokeAI and SwarmUI show of a LoRA; the picture is in the
    file as well. Raises TakenError where one of them exists and `replace` is not given, LoraFileError when the LoRA is
    no good file, the picture none or the folder cannot be written.
    """
    name = safe_name(name, "lora")
    target = folder / f"{name}.safetensors"
    if target.absolute() == lora.absolute():
        raise LoraFileError("export.itself", f"{target} is the run's own file.", "Choose another folder or name.")
    beside = [target.with_suffix(".json"), *([target.with_suffix(".png")] if told.picture else [])]
    taken = [path for path in (target, *beside) if long_path(path).exists()]
    if taken and not replace:
        raise TakenError(taken)
    try:
        long_path(folder).mkdir(parents=True, exist_ok=True)
        _write(lora, target, name, told)
    except OSError as error:
        raise LoraFileError(
            "export.folder",
            f"The LoRA cannot be written into {folder}: {error.strerror or error}.",
            write_remedy(error),
        ) from error
    return Exported(target, tuple(beside))


def _write(lora: Path, target: Path, name: str, told: LoraSummary) -> None:
    """Write the small files first: where the LoRA is, the others are."""
    from trainer.files.header import read_header
    from trainer.files.rewriting import UnusablePictureError, rewrite_metadata, thumbnail

    header = read_header(lora, "lora")
    changes: dict[str, str | None] = {
        "ss_output_name": name,  # the name by which A1111's and Forge's prompts call it
        "modelspec.title": told.title or name,
        "modelspec.author": told.author or None,
        "modelspec.license": told.licence or None,
        "modelspec.description": told.description or None,
        "modelspec.trigger_phrase": told.triggers or None,
    }
    if told.picture:
        try:
            changes["modelspec.thumbnail"] = thumbnail(told.picture)
            picture = _as_png(told.picture)
        except UnusablePictureError as fault:
            sentence = f"{told.picture} cannot be used as the preview image: {fault}."
            raise LoraFileError("export.picture", sentence, "Choose another image, or none.") from None
        write_bytes(target.with_suffix(".png"), picture)
    write_json(target.with_suffix(".json"), _words(header, told))
    rewrite_metadata(lora, target, changes)


def _words(header: Header, told: LoraSummary) -> dict[str, object]:
    """Return the contents of NAME.json, as A1111, Forge and InvokeAI read it."""
    from trainer.config.base import ARCHITECTURES, SIDE_FILE_VERSIONS

    versions = {name: SIDE_FILE_VERSIONS[family] for family, name in ARCHITECTURES.items()}
    architecture = header.metadata.get("modelspec.architecture", "").partition("/")[0]
    return {
        "description": told.description,
        "sd version": versions.get(architecture, "Unknown"),
        "activation text": told.triggers,
        "preferred weight": 1.0,
        "negative text": "",
        "notes": f"By {told.author}." if told.author else "",
    }


def _as_png(picture: Path) -> bytes:
    """Return a picture as a PNG without anything but pixels: what was drawn with it is the artist's to tell."""
    from io import BytesIO

    from PIL import Image

    with open_file(picture, "image") as file, Image.open(file) as opened:
        plain = opened.convert("RGB")
    plain.info.clear()
    data = BytesIO()
    plain.save(data, "PNG")
    return data.getvalue()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A saved LoRA."""

    step: int
    file: Path
    held_out: float | None = None
    """The loss on held-out pictures at that step; None where it was not measured."""
    best: bool = False
    """Whether no other has a lower one."""
    last: bool = False
    """Whether it is the result of the whole run."""
    pictures: dict[int, Path] = field(default_factory=dict)
    """The previews of that step, by the number of their prompt."""


@dataclass(frozen=True, slots=True)
class SavedSteps:
    """What the events of a run say of its saved steps; a copy, to be looked at on a worker."""

    folder: Path
    saved: tuple[events.Saved, ...]
    validations: tuple[events.Validation, ...]
    previews: tuple[events.Preview, ...]

    @classmethod
    def of(cls, run: Run) -> SavedSteps:
        """Copy what is known of a run."""
        return cls(run.directory.path, tuple(run.saved), tuple(run.validations), tuple(run.previews))


def candidates(told: SavedSteps) -> list[Candidate]:
    """Return the saved steps whose files are there, by step; looks at the disk."""
    files = _files(told)
    losses = {one.step: one.loss for one in told.validations if one.held_out}
    measured = {step: loss for step in files if (loss := losses.get(step)) is not None and math.isfinite(loss)}
    best = lowest(measured)
    pictures: dict[int, dict[int, Path]] = {}
    for preview in told.previews:
        pictures.setdefault(preview.step, {})[preview.index] = told.folder / preview.file
    return [
        Candidate(step, file, measured.get(step), step == best, last, dict(sorted(pictures.get(step, {}).items())))
        for step, (file, last) in sorted(files.items())
    ]


def _files(told: SavedSteps) -> dict[int, tuple[Path, bool]]:
    """The file of each step that is there, and whether it is the run's result, whose name does not end in its step."""
    files: dict[int, tuple[Path, bool]] = {}
    for saved in told.saved:
        path, last = told.folder / saved.file, not Path(saved.file).stem.endswith(step_ending(saved.step))
        if path.is_file() and (last or saved.step not in files):
            files[saved.step] = path, last
    results = [step for step, (_, last) in files.items() if last]
    for step in results[:-1]:  # a run that went on after its end wrote its result again: the latest holds
        files[step] = files[step][0], False
    return files


def named(found: Iterable[Candidate], step: int) -> Candidate | None:
    """Return the candidate of a step."""
    return next((one for one in found if one.step == step), None)


def model_card(job: Job, told: LoraSummary, candidate: Candidate, name: str, pictures: int) -> str:
    """Return the card of one saved step of a run of `job`; `pictures` is how many were trained on."""
    recipe = job.recipe
    base = _plain(job.base.name)
    sections = [
        f"# {_plain(told.title or name)}",
        _plain(told.description),
        _use(told, name, base),
        _table(
            {
                "Base": base,
                "Steps": f"{candidate.step:,}",
                "Images": f"{pictures:,}",
                "Resolution": f"{recipe.resolution} pixels",
                "Rank": f"{recipe.rank}, alpha {recipe.alpha:g}",
                "Optimizer": f"{recipe.optimizer.name}, learning rate {recipe.learning_rate:g}",
                "Images per step": str(recipe.effective_batch),
                "Seed": str(recipe.seed),
                **({"Validation loss": f"{candidate.held_out:.4f}"} if candidate.held_out is not None else {}),
            }
        ),
        _credits(told),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _use(told: LoraSummary, name: str, base: str) -> str:
    lines = ["## How to use it", "", f"Made for {base}. Begin with a strength of 1 and go lower where it is too much."]
    if told.triggers:
        lines += ["", f"Trigger words: `{told.triggers.replace('`', '')}`"]
    lines += ["", f"In A1111 and Forge: `<lora:{name}:1>`. In ComfyUI: a Load LoRA node with `{name}.safetensors`."]
    return "\n".join(lines)


def _table(rows: dict[str, str]) -> str:
    lines = ["## How it was made", "", "| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {key} | {value} |" for key, value in rows.items()), "", "Trained with Impasto."])


def _credits(told: LoraSummary) -> str:
    lines = [f"{title}: {_plain(text)}" for title, text in (("Author", told.author), ("Licence", told.licence)) if text]
    return "\n\n".join(lines)


def _plain(text: str) -> str:
    """Text of people as Markdown that shows it as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
