"""Sends a saved LoRA out: a copy with title, author, picture and trigger words, where other programs look for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import LoraFileError
from trainer.protocol import files as atomic
from trainer.protocol.files import safe_name
from trainer.protocol.places import write_remedy
from trainer.protocol.reading import open_file

if TYPE_CHECKING:
    from trainer.files.header import Header


@dataclass(frozen=True, slots=True)
class About:
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


def about(lora: Path) -> About:
    """Return what a LoRA file says of itself now; raises LoraFileError."""
    from trainer.files.header import read_header

    said = read_header(lora, "lora").metadata
    title, author, licence, description, triggers = (
        said.get(f"modelspec.{key}", "") for key in ("title", "author", "license", "description", "trigger_phrase")
    )
    return About(title, author, licence, description, triggers)


def export(lora: Path, folder: Path, name: str, told: About, *, replace: bool = False) -> Exported:
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
    taken = [path for path in (target, *beside) if atomic.long_path(path).exists()]
    if taken and not replace:
        raise TakenError(taken)
    try:
        atomic.long_path(folder).mkdir(parents=True, exist_ok=True)
        _write(lora, target, name, told)
    except OSError as error:
        raise LoraFileError(
            "export.folder",
            f"The LoRA cannot be written into {folder}: {error.strerror or error}.",
            write_remedy(error),
        ) from error
    return Exported(target, tuple(beside))


def _write(lora: Path, target: Path, name: str, told: About) -> None:
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
            sentence = f"{told.picture} cannot be used as the picture: {fault}."
            raise LoraFileError("export.picture", sentence, "Choose another picture, or none.") from None
        atomic.write_bytes(target.with_suffix(".png"), picture)
    atomic.write_json(target.with_suffix(".json"), _words(header, told))
    rewrite_metadata(lora, target, changes)


def _words(header: Header, told: About) -> dict[str, object]:
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
