"""Reads what lies in and beside pictures: captions, notes, and sizes from their headers. For worker threads."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import ImageFile

from app.core.disk.listing import file_state
from trainer.config.job import DatasetConfig
from trainer.dataset.caption_files import NotACaptionError, read_caption_file, split_caption
from trainer.dataset.pixels import exif_orientation, open_picture, upright_size
from trainer.dataset.sidecar import PictureNotes
from trainer.errors import DatasetError
from trainer.protocol.reading import open_file

MOST_MEGAPIXELS: float = DatasetConfig.model_fields["max_megapixels"].default
"""Larger pictures are refused, as the trainer does unless a job says otherwise."""

# Only these chunks of a PNG can tell how it is turned.
_TELLING = (b"eXIf", b"zTXt", b"tEXt", b"iTXt")


class Words(NamedTuple):
    """A picture's caption as it stands, whether another of its captions differs, and what is wrong with the files."""

    caption: str | None
    clash: bool
    faults: list[DatasetError]
    whole: bool = True
    """Whether all files were still there; else they, or the disk, went while they were read."""


def read_caption(folder: Path, sources: Sequence[str], listed: str | None) -> Words:
    """Return what a picture's captions are.

    `sources` are its caption files, the one that counts first, `listed` what metadata.jsonl says. The first that is
    not blank counts, as in training; blank ones give an empty caption, none at all gives None.
    """
    texts, faults, whole = list[str](), [], True
    for name in sources:
        try:
            texts.append(read_caption_file(folder / name).text)
        except NotACaptionError as fault:
            if _has_gone(folder / name, fault):
                whole = False
            else:
                faults.append(_no_caption(folder / name, fault))
    if listed is not None:
        texts.append(listed)
    read = [split_caption(text, "caption") for text in texts]
    used = next((text for text, words in zip(texts, read, strict=True) if words), "" if texts else None)
    return Words(used, len(set(read)) > 1, faults, whole)


def noted(notes: PictureNotes) -> dict[str, Any]:
    """Return what notes say of a picture, as the library keeps it."""
    return {"excluded": notes.excluded, "rating": notes.rating, "crop": notes.crop}


def read_size(path: Path) -> Mapping[str, Any]:
    """Return what a picture's header tells: its upright size, or the problem that it has, as the library keeps them."""
    try:
        with open_picture(path, MOST_MEGAPIXELS) as image:
            width, height = _size(path, image)
    except DatasetError as error:
        return {"width": None, "height": None, "problem": error.sentence}
    return {"width": width, "height": height, "problem": None}


def _size(path: Path, image: ImageFile.ImageFile) -> tuple[int, int]:
    if image.format != "PNG" or _tells_later(path):
        return upright_size(image)
    # Pillow would decode all of a PNG to see whether EXIF comes after the pixels. Here it does not.
    image.info.setdefault("exif", None)
    width, height = image.size
    return (height, width) if exif_orientation(image) >= 5 else (width, height)


def _tells_later(path: Path) -> bool:
    """Tell whether a PNG has chunks after its pixels that could hold EXIF, without reading pixels."""
    pixels = False
    with open_file(path, "image") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            pixels |= kind == b"IDAT"
            if pixels and kind in _TELLING:
                return True
            if kind == b"IEND":
                return False
            file.seek(length + 4, 1)
    return False


def _has_gone(path: Path, fault: NotACaptionError) -> bool:
    """Tell whether a file could not be read for not being there any more, or its disk."""
    cause = fault.__cause__
    return isinstance(cause, FileNotFoundError) or (isinstance(cause, OSError) and file_state(path) is None)


def _no_caption(path: Path, fault: NotACaptionError) -> DatasetError:
    sentence = f"{path} is not used as a caption: {fault}."
    return DatasetError("caption.unreadable", sentence, "Write the caption again as plain text.")
