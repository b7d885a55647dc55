"""Writes captions that stand in another encoding as UTF-8, keeping what was there. For a worker."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from app.core.edits.backups import Backups, Written
from trainer.dataset.caption_files import SUFFIXES, NotACaptionError, decode_caption
from trainer.dataset.links import Links
from trainer.errors import DatasetError
from trainer.protocol.reading import read_bytes


def to_utf8(pictures: Iterable[tuple[Path, Path]], backups: Backups) -> int:
    """Write the caption files of pictures as UTF-8, by dataset and picture; return how many files changed.

    Each is kept as it was before it is written. Raises DatasetError, naming the file, when the disk refuses; those
    before it are written, those after it are as they were.
    """
    changed = 0
    for root, picture in pictures:
        for suffix in SUFFIXES:
            try:
                changed += _convert(root, picture.with_suffix(suffix), backups)
            except (FileNotFoundError, NotACaptionError):
                continue
            except OSError as fault:
                raise DatasetError(
                    "caption.unconverted",
                    f"{picture.with_suffix(suffix)} cannot be written as UTF-8 ({fault.strerror or fault}).",
                    "Make the folder writable and the disk free, then try again; nothing is lost.",
                ) from fault
    return changed


def _convert(root: Path, file: Path, backups: Backups) -> bool:
    if not Links([root]).allow_file(file):
        return False
    data = read_bytes(file, "text")
    found = decode_caption(data)
    if found.encoding == "utf-8":
        return False
    backups.keep(str(root), [(file.relative_to(root).as_posix(), data)])
    return Written(file, data, found.text.encode("utf-8")).write()
