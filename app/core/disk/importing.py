"""Import images with captions and masks into a dataset folder without overwriting. For worker threads."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.core.disk.reading import file_state
from trainer.dataset.caption_files import SUFFIXES as CAPTION_SUFFIXES
from trainer.dataset.folders import MASK, image_files, is_image
from trainer.errors import DatasetError
from trainer.protocol.files import long_path, staged, write_bytes
from trainer.protocol.places import is_disk_full

_MAX_NAME_BYTES = 255
"""Maximum length of a file name, in bytes, on common file systems."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Result of an import."""

    copied: tuple[Path, ...]
    """Paths of the new images."""
    problems: tuple[DatasetError, ...]
    skipped: int
    """Number of files that are not images or are already in the folder."""


def copy_in(sources: Iterable[Path], target: Path) -> Imported:
    """Copy image files and folders of images into `target`, with their captions and masks.

    If a name is taken, -2, -3 or a higher number is appended. Files that cannot be copied are reported and skipped, but
    a full disk ends the import.
    """
    copied, problems, skipped = list[Path](), list[DatasetError](), 0
    taken = _stems(target)
    try:
        for source, inside in _images(sources, problems):
            if not is_image(source) or source.parent == target / inside:
                skipped += 1
                continue
            try:
                stems = taken if inside == Path() else _stems(target / inside)
                copied.append(_copy_one(source, target / inside, stems))
            except OSError as fault:
                problems.append(_failed(source, target, fault))
                if is_disk_full(fault):
                    break
    except OSError as fault:
        problems.append(_failed(target, target, fault))
    return Imported(tuple(copied), tuple(problems), skipped)


def keep_pasted(data: bytes, target: Path, stem: str) -> Imported:
    """Save a pasted image, given as PNG data, in `target` under an unused name."""
    path = target / f"{_free(stem, _stems(target))}.png"
    try:
        write_bytes(path, data)
    except OSError as fault:
        return Imported((), (_failed(path, target, fault),), 0)
    return Imported((path,), (), 0)


def _images(sources: Iterable[Path], problems: list[DatasetError]) -> Iterator[tuple[Path, Path]]:
    """Yield each source file with its destination folder relative to the target."""
    for source in sources:
        if not source.is_dir():
            yield source, Path()
            continue
        try:
            files = image_files(source, recursive=True)
        except DatasetError as error:
            problems.append(error)
            continue
        for file in files:
            yield file, Path(source.name) / file.parent.relative_to(source)


def _copy_one(source: Path, folder: Path, taken: set[str]) -> Path:
    """Copy an image after its caption and mask, so that it never appears without them; return the new path."""
    long_path(folder).mkdir(parents=True, exist_ok=True)
    stem = _free(source.stem, taken)
    for companion, ending in _companions(source):
        _copy(companion, folder / f"{stem}{ending}")
    path = folder / f"{stem}{source.suffix}"
    _copy(source, path)
    return path


def _companions(source: Path) -> list[tuple[Path, str]]:
    endings = [*CAPTION_SUFFIXES, f"{MASK}.png"]
    found = [(source.with_name(source.stem + ending), ending) for ending in endings]
    return [(path, ending) for path, ending in found if file_state(path)]


def _copy(source: Path, target: Path) -> None:
    with staged(target, durable=False) as temporary:
        shutil.copy2(long_path(source), temporary)


def _stems(folder: Path) -> set[str]:
    if not folder.is_dir():
        return set()
    return {path.stem.casefold().removesuffix(MASK) for path in long_path(folder).iterdir()}


def _free(stem: str, taken: set[str]) -> str:
    """Return an unused stem, numbered if necessary, and add it to `taken`; captions and masks share it."""
    name, number = stem, 1
    while name.casefold() in taken:
        number += 1
        ending = f"-{number}"
        limit = _MAX_NAME_BYTES - len(f"{MASK}.png") - len(ending)
        name = stem.encode()[:limit].decode(errors="ignore") + ending if len(stem.encode()) > limit else stem + ending
    taken.add(name.casefold())
    return name


def _failed(source: Path, target: Path, fault: OSError) -> DatasetError:
    if is_disk_full(fault):
        sentence = f"Could not copy {source.name}: the disk of {target} is full."
        return DatasetError("import.disk_full", sentence, "Free up disk space, then import the remaining files again.")
    sentence = f"Could not copy {source.name} to {target}: {fault.strerror or fault}."
    return DatasetError("import.failed", sentence, "Check that you can read the file and write to the folder.")
