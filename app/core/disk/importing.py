"""Copies pictures into a dataset's folder, with captions and masks beside them; overwrites nothing. For workers."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.core.disk.reading import file_state
from trainer.dataset.caption_files import SUFFIXES as CAPTION_SUFFIXES
from trainer.dataset.folders import MASK, is_picture, picture_files
from trainer.errors import DatasetError
from trainer.protocol.files import long_path, staged, write_bytes
from trainer.protocol.places import is_disk_full

_LONGEST = 255
"""Bytes that common file systems allow for a name."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What came of an import."""

    copied: tuple[Path, ...]
    """The new pictures."""
    problems: tuple[DatasetError, ...]
    passed_over: int
    """Files that are no pictures, or lie in the folder already."""


def copy_in(sources: Iterable[Path], target: Path) -> Imported:
    """Copy pictures, and those of whole folders, into `target`; captions and masks beside them come along.

    A name that is taken gets -2, -3 and so on. What fails is told and the rest goes on; a full disk ends it.
    """
    copied, problems, passed_over = list[Path](), list[DatasetError](), 0
    taken = _stems(target)
    try:
        for source, inside in _pictures(sources, problems):
            if not is_picture(source) or source.parent == target / inside:
                passed_over += 1
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
    return Imported(tuple(copied), tuple(problems), passed_over)


def keep_pasted(data: bytes, target: Path, stem: str) -> Imported:
    """Write a picture that was pasted, given as PNG, into `target` under a name that is not taken."""
    path = target / f"{_free(stem, _stems(target))}.png"
    try:
        write_bytes(path, data)
    except OSError as fault:
        return Imported((), (_failed(path, target, fault),), 0)
    return Imported((path,), (), 0)


def _pictures(sources: Iterable[Path], problems: list[DatasetError]) -> Iterator[tuple[Path, Path]]:
    """Yield each file with the folder inside the target that it goes to."""
    for source in sources:
        if not source.is_dir():
            yield source, Path()
            continue
        try:
            files = picture_files(source, recursive=True)
        except DatasetError as error:
            problems.append(error)
            continue
        for file in files:
            yield file, Path(source.name) / file.parent.relative_to(source)


def _copy_one(source: Path, folder: Path, taken: set[str]) -> Path:
    """Copy a picture and what belongs to it; the picture last, so that it is never seen without its caption."""
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
    """Return the stem, or with a number that makes it free, and take it; captions and masks go by stems."""
    name, number = stem, 1
    while name.casefold() in taken:
        number += 1
        ending = f"-{number}"
        room = _LONGEST - len(f"{MASK}.png") - len(ending)
        name = stem.encode()[:room].decode(errors="ignore") + ending if len(stem.encode()) > room else stem + ending
    taken.add(name.casefold())
    return name


def _failed(source: Path, target: Path, fault: OSError) -> DatasetError:
    if is_disk_full(fault):
        sentence = f"{source.name} could not be copied: the disk of {target} is full."
        return DatasetError("import.disk_full", sentence, "Make room there and import the rest again.")
    sentence = f"{source.name} could not be copied into {target} ({fault.strerror or fault})."
    return DatasetError("import.failed", sentence, "Check that the file can be read and the folder written to.")
