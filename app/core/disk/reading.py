"""List directories and read captions, notes and image sizes. For worker threads."""

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
from app.core.tasks import iterate_yielding
from trainer.config.job import DatasetConfig
from trainer.dataset.caption_files import METADATA_NAME, NotACaptionError, read_caption_file, split_caption
from trainer.dataset.caption_files import SUFFIXES as CAPTION_SUFFIXES
from trainer.dataset.folders import MASK, is_image_name
from trainer.dataset.pixels import exif_orientation, open_image, upright_size
from trainer.dataset.sidecar import FILE_NAME, ImageSettings
from trainer.errors import DatasetError
from trainer.protocol.files import Links, long_name, long_path
from trainer.protocol.reading import open_file

_UNSETTLED_NS = 3_000_000_000
"""Nanoseconds after a change in which another change may get the same timestamp: FAT rounds to two seconds."""
MAX_MEGAPIXELS: float = DatasetConfig.model_fields["max_megapixels"].default
"""Default size limit of the trainer in megapixels; larger images are refused."""
# Only these PNG chunks can hold the EXIF orientation.
_EXIF_CHUNKS = (b"eXIf", b"zTXt", b"tEXt", b"iTXt")


class FileState(NamedTuple):
    """A file's size in bytes and modification time in nanoseconds."""

    bytes: int
    changed_ns: int


@dataclass(slots=True)
class Listing:
    """Dataset files in a directory at one point in time."""

    images: dict[str, FileState] = field(default_factory=dict)
    """Image files by name, in natural order."""
    texts: dict[str, FileState] = field(default_factory=dict)
    """Caption files, impasto.jsonl and metadata.jsonl."""
    masks: dict[str, FileState] = field(default_factory=dict)
    """Mask files by image stem."""
    inside: tuple[str, ...] = ()
    """Names of subfolders in natural order, except hidden ones and links."""
    identity: tuple[int, int] | None = None
    """Device and inode of the directory, if the system has them."""
    changed_ns: int = -1
    settled: bool = False
    """Whether the directory's timestamp is old enough that any later change alters it."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Caption files by stem, in order of precedence."""
    outside: tuple[str, ...] = ()
    """Names of links that point outside the dataset; they are reported but never read."""

    def captions_of(self, name: str) -> list[str]:
        """Return an image's caption files in order of precedence."""
        return self.sources.get(stem_of(name), [])

    def orphans(self, present: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return unused files by issue code: links to outside the dataset, and captions and masks without an image.

        Images in `present` count as existing even if this listing lacks them. A folder without images is not used in
        training, so its captions and masks are not reported.
        """
        stems = {stem_of(name) for names in (self.images, present) for name in names}
        found = {"file.outside": list(self.outside)}
        if stems:
            named = [(stem, names) for stem, names in self.sources.items() if stem not in stems]
            found["caption.orphan"] = [name for _, names in named for name in names]
            found["mask.orphan"] = [f"{stem}{MASK}.png" for stem in self.masks if stem not in stems]
        return {code: tuple(sorted(names, key=natural_key)) for code, names in found.items() if names}

    def is_changed(self, folder: Path, name: str) -> bool:
        """Return whether an image or caption file of this listing has changed on disk, or is gone."""
        known = self.images.get(name) or self.texts.get(name)
        return known is not None and _state_of(f"{folder}{os.sep}{name}") != known

    def mask_of(self, name: str) -> FileState | None:
        """Return the state of an image's mask file, or None if it has none."""
        return self.masks.get(stem_of(name))


def list_directory(path: Path, links: Links, alive: Callable[[], None] = lambda: None) -> Listing:
    """Return a directory's listing, using one scan and one stat call per file; raises OSError.

    `alive` is called repeatedly during the scan. As in the trainer, links to folders are not followed, which avoids
    endless loops; links to files are followed only if `links` allows it. Files that vanish during the scan and broken
    or circular links are left out.
    """
    facts = long_path(path).stat()
    images: dict[str, FileState] = {}
    texts: dict[str, FileState] = {}
    masks: dict[str, FileState] = {}
    inside, outside = list[str](), list[str]()
    with os.scandir(long_path(path)) as entries:
        for entry in iterate_yielding(entries, alive):
            name = entry.name
            if name.startswith("."):
                continue
            if name in (FILE_NAME, METADATA_NAME) and not entry.is_symlink() and (state := _state_of(entry.path)):
                texts[name] = state  # even if it is a folder or pipe: reading it reports the fault, as training does
                continue
            if entry.is_dir(follow_symlinks=False):
                # Python 3.11 reports Windows junctions as plain folders.
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
                    (images if kind == "image" else texts)[name] = state
    return Listing(
        images={name: images[name] for name in in_natural_order(images)},
        texts=texts,
        masks=masks,
        inside=tuple(sorted(inside, key=natural_key)),
        identity=(facts.st_dev, facts.st_ino) if facts.st_ino else None,
        changed_ns=facts.st_mtime_ns,
        settled=time.time_ns() - facts.st_mtime_ns > _UNSETTLED_NS,
        sources=_sources(texts),
        outside=tuple(sorted(outside, key=natural_key)),
    )


def has_changed(path: Path, known: Listing, names: Iterable[str]) -> bool:
    """Return whether a directory or one of the named files in it has changed since it was listed; raises OSError.

    The directory's timestamp reveals files that were added, removed or replaced, but not files written in place.
    """
    if not known.settled or long_path(path).stat().st_mtime_ns != known.changed_ns:
        return True
    return any(known.is_changed(path, name) for name in names)


def file_state(path: Path) -> FileState | None:
    """Return a file's current state, or None if it does not exist."""
    return _state_of(str(path))


def _state_of(file: str) -> FileState | None:
    # pathlib takes six times as long, and a scan of a large dataset makes thousands of these calls.
    try:
        facts = os.stat(long_name(file))  # noqa: PTH116
    except OSError:
        return None
    return FileState(facts.st_size, facts.st_mtime_ns)


def is_settled(state: FileState) -> bool:
    """Return whether a file's timestamp is old enough that any later change alters it."""
    return time.time_ns() - state.changed_ns > _UNSETTLED_NS


def _state(entry: os.DirEntry[str]) -> FileState | None:
    try:
        if not entry.is_file():
            return None
        facts = entry.stat()
    except OSError:  # a circular link, or a file that has just vanished
        return None
    return FileState(facts.st_size, facts.st_mtime_ns)


def _kind(name: str, stem: str, suffix: str) -> str | None:
    if is_image_name(stem, suffix):
        return "image"
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
    """Return a file name without its suffix."""
    return _split(name)[0]


def _split(name: str) -> tuple[str, str]:
    """Return the stem and suffix of a file name, much faster than pathlib does."""
    stem, dot, ending = name.rpartition(".")
    return (stem, dot + ending) if stem else (name, "")


class CaptionRead(NamedTuple):
    """An image's caption, whether its sources contain different captions, and errors in its caption files."""

    caption: str | None
    clash: bool
    faults: list[DatasetError]
    whole: bool = True
    """False if a file or the whole disk disappeared during the read."""


def read_caption(folder: Path, sources: Sequence[str], listed: str | None) -> CaptionRead:
    """Read the caption of an image from its sources.

    `sources` are its caption files in order of precedence; `listed` is its caption in metadata.jsonl. As in training,
    the first source that is not blank is used. If all are blank, the caption is empty; without sources, it is None.
    """
    texts, faults, whole = list[str](), [], True
    for name in sources:
        try:
            texts.append(read_caption_file(folder / name).text)
        except NotACaptionError as fault:
            if _is_gone(folder / name, fault):
                whole = False
            else:
                faults.append(_unreadable(folder / name, fault))
    if listed is not None:
        texts.append(listed)
    read = [split_caption(text, "caption") for text in texts]
    used = next((text for text, words in zip(texts, read, strict=True) if words), "" if texts else None)
    return CaptionRead(used, len(set(read)) > 1, faults, whole)


def note_values(notes: ImageSettings) -> dict[str, Any]:
    """Return an image's notes as library fields."""
    return {"excluded": notes.excluded, "rating": notes.rating, "crop": notes.crop}


def read_size(path: Path) -> Mapping[str, Any]:
    """Read an image's header and return its upright size, or why it is unusable, as library fields."""
    try:
        with open_image(path, MAX_MEGAPIXELS) as image:
            width, height = _size(path, image)
    except DatasetError as error:
        return {"width": None, "height": None, "problem": error.sentence}
    return {"width": width, "height": height, "problem": None}


def _size(path: Path, image: ImageFile.ImageFile) -> tuple[int, int]:
    if image.format != "PNG" or _has_late_exif(path):
        return upright_size(image)
    # Pillow would decode the whole PNG to look for EXIF after the pixels, which this file does not have.
    image.info.setdefault("exif", None)
    width, height = image.size
    return (height, width) if exif_orientation(image) >= 5 else (width, height)


def _has_late_exif(path: Path) -> bool:
    """Return whether a PNG has chunks after its pixels that could contain EXIF, without reading the pixels."""
    pixels = False
    with open_file(path, "image") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            pixels |= kind == b"IDAT"
            if pixels and kind in _EXIF_CHUNKS:
                return True
            if kind == b"IEND":
                return False
            file.seek(length + 4, 1)
    return False


def _is_gone(path: Path, fault: NotACaptionError) -> bool:
    """Return whether a file could not be read because it or its disk is gone."""
    cause = fault.__cause__
    return isinstance(cause, FileNotFoundError) or (isinstance(cause, OSError) and file_state(path) is None)


def _unreadable(path: Path, fault: NotACaptionError) -> DatasetError:
    sentence = f"Could not read the caption {path}: {fault}."
    return DatasetError("caption.unreadable", sentence, "Save the caption as a plain text file.")
