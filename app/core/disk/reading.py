"""Reads what lies in and beside pictures: captions, notes, and sizes from their headers. For worker threads."""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from PIL import ImageFile

from app.core.library import in_natural_order, natural_key
from app.core.tasks import in_turns
from trainer.config.job import DatasetConfig
from trainer.dataset.caption_files import METADATA_NAME, NotACaptionError, read_caption_file, split_caption
from trainer.dataset.caption_files import SUFFIXES as CAPTION_SUFFIXES
from trainer.dataset.folders import MASK, is_picture_name
from trainer.dataset.links import Links
from trainer.dataset.pixels import exif_orientation, open_picture, upright_size
from trainer.dataset.sidecar import FILE_NAME, PictureNotes
from trainer.errors import DatasetError
from trainer.protocol.files import long_name, long_path
from trainer.protocol.reading import open_file

_UNSETTLED_NS = 3_000_000_000
"""Disks keep times as coarsely as two seconds (FAT): what changed just before a look may change again unseen."""
MOST_MEGAPIXELS: float = DatasetConfig.model_fields["max_megapixels"].default
"""Larger pictures are refused, as the trainer does unless a job says otherwise."""
# Only these chunks of a PNG can tell how it is turned.
_TELLING = (b"eXIf", b"zTXt", b"tEXt", b"iTXt")


class State(NamedTuple):
    """A file's size in bytes and when it was last written."""

    bytes: int
    changed_ns: int


@dataclass(slots=True)
class Listing:
    """The files of a directory that matter to a dataset, at one moment."""

    pictures: dict[str, State] = field(default_factory=dict)
    """In natural order."""
    texts: dict[str, State] = field(default_factory=dict)
    """Caption files, impasto.jsonl and metadata.jsonl."""
    masks: dict[str, State] = field(default_factory=dict)
    """Mask files by the stems of their pictures."""
    inside: tuple[str, ...] = ()
    """Folders in it, in natural order, hidden ones and links aside."""
    identity: tuple[int, int] | None = None
    """Device and number of the directory, where the system gives one."""
    changed_ns: int = -1
    settled: bool = False
    """Whether the directory had been left alone long enough for its time to tell of the next change."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """By stem its caption files, the one that counts first."""
    outside: tuple[str, ...] = ()
    """Links that lead out of the dataset: not read, only reported."""

    def captions_of(self, name: str) -> list[str]:
        """Return the caption files of a picture, the one that counts first."""
        return self.sources.get(stem_of(name), [])

    def strays(self, besides: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return files that are not used, by the code of their kind: links to elsewhere, and those without an image.

        Captions and masks belong to no image that is here or in `besides`. Where there is no image at all they are not
        reported: such a folder is not for training.
        """
        stems = {stem_of(name) for names in (self.pictures, besides) for name in names}
        found = {"file.outside": list(self.outside)}
        if stems:
            named = [(stem, names) for stem, names in self.sources.items() if stem not in stems]
            found["caption.orphan"] = [name for _, names in named for name in names]
            found["mask.orphan"] = [f"{stem}{MASK}.png" for stem in self.masks if stem not in stems]
        return {code: tuple(sorted(names, key=natural_key)) for code, names in found.items() if names}

    def is_other(self, folder: Path, name: str) -> bool:
        """Tell whether a picture or caption file of this listing is another on disk by now, or gone."""
        known = self.pictures.get(name) or self.texts.get(name)
        return known is not None and _state_of(f"{folder}{os.sep}{name}") != known

    def mask_of(self, name: str) -> State | None:
        """Return the mask beside a picture, None where there is none."""
        return self.masks.get(stem_of(name))


def list_directory(path: Path, links: Links, alive: Callable[[], None] = lambda: None) -> Listing:
    """Look at a directory: one read of its names and one question a file, with `alive` as `in_turns` takes it.

    Raises OSError.

    Links to folders are not followed, as the trainer does not, so that links in circles end; links to files only where
    `links` allows it. A file that vanishes meanwhile, or a link that leads nowhere or in a circle, counts as not there.
    """
    facts = long_path(path).stat()
    pictures: dict[str, State] = {}
    texts: dict[str, State] = {}
    masks: dict[str, State] = {}
    inside, outside = list[str](), list[str]()
    with os.scandir(long_path(path)) as entries:
        for entry in in_turns(entries, alive):
            name = entry.name
            if name.startswith("."):
                continue
            if name in (FILE_NAME, METADATA_NAME) and not entry.is_symlink() and (state := _state_of(entry.path)):
                texts[name] = state  # a folder or pipe too: reading it reports what is wrong, as training does
                continue
            if entry.is_dir(follow_symlinks=False):
                # To Python 3.11 Windows' junctions are plain folders.
                (inside if sys.platform != "win32" or links.allow(path / name) else outside).append(name)
                continue
            stem, suffix = _split(name)
            kind = _kind(name, stem, suffix)
            if kind and entry.is_symlink() and not links.allow(path / name):
                outside.append(name)
            elif kind and (state := _state(entry)):
                if kind == "mask":
                    masks[stem.removesuffix(MASK)] = state
                else:
                    (pictures if kind == "picture" else texts)[name] = state
    return Listing(
        pictures={name: pictures[name] for name in in_natural_order(pictures)},
        texts=texts,
        masks=masks,
        inside=tuple(sorted(inside, key=natural_key)),
        identity=(facts.st_dev, facts.st_ino) if facts.st_ino else None,
        changed_ns=facts.st_mtime_ns,
        settled=time.time_ns() - facts.st_mtime_ns > _UNSETTLED_NS,
        sources=_sources(texts),
        outside=tuple(sorted(outside, key=natural_key)),
    )


def look_again(path: Path, known: Listing, names: Iterable[str]) -> bool:
    """Tell whether a directory, or one of some files in it, is another than is known; raises OSError.

    The directory's own time tells of files that came, went or were replaced, not of those written in place.
    """
    if not known.settled or long_path(path).stat().st_mtime_ns != known.changed_ns:
        return True
    return any(known.is_other(path, name) for name in names)


def file_state(path: Path) -> State | None:
    """Return a file's state now, None when it is not there."""
    return _state_of(str(path))


def _state_of(file: str) -> State | None:
    # With pathlib this takes six times as long, and of a large dataset thousands are asked for at every look.
    try:
        facts = os.stat(long_name(file))  # noqa: PTH116
    except OSError:
        return None
    return State(facts.st_size, facts.st_mtime_ns)


def is_settled(state: State) -> bool:
    """Tell whether a file was left alone long enough for its time to tell of the next change."""
    return time.time_ns() - state.changed_ns > _UNSETTLED_NS


def _state(entry: os.DirEntry[str]) -> State | None:
    try:
        if not entry.is_file():
            return None
        facts = entry.stat()
    except OSError:  # a link in a circle, or a file that went meanwhile
        return None
    return State(facts.st_size, facts.st_mtime_ns)


def _kind(name: str, stem: str, suffix: str) -> str | None:
    if is_picture_name(stem, suffix):
        return "picture"
    if suffix.lower() in CAPTION_SUFFIXES or name in (FILE_NAME, METADATA_NAME):
        return "text"
    return "mask" if stem.endswith(MASK) and suffix.lower() == ".png" else None


def _sources(texts: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for ending in CAPTION_SUFFIXES:
        for name in texts:
            stem, suffix = _split(name)
            if suffix.lower() == ending:
                found.setdefault(stem, []).append(name)
    return found


def stem_of(name: str) -> str:
    """Return a name without its ending."""
    return _split(name)[0]


def _split(name: str) -> tuple[str, str]:
    """Return stem and ending of a name, much faster than Path does."""
    stem, dot, ending = name.rpartition(".")
    return (stem, dot + ending) if stem else (name, "")


class CaptionRead(NamedTuple):
    """A picture's caption as it stands, whether another of its captions differs, and what is wrong with the files."""

    caption: str | None
    clash: bool
    faults: list[DatasetError]
    whole: bool = True
    """Whether all files were still there; else they, or the disk, went while they were read."""


def read_caption(folder: Path, sources: Sequence[str], listed: str | None) -> CaptionRead:
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
    return CaptionRead(used, len(set(read)) > 1, faults, whole)


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
