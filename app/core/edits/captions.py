"""The caption file of one picture: what stands in it for training, and how another text comes there."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from app.core.edits.safe_files import Seen, look_at
from trainer.dataset.caption_files import (
    LARGEST,
    METADATA_NAME,
    SUFFIXES,
    NotACaptionError,
    decode_caption,
    read_metadata,
)
from trainer.dataset.links import Links
from trainer.errors import DatasetError
from trainer.protocol.files import long_name, long_path

# A picture's name of 250 letters leaves room for .txt but not for .caption: no file has such a name.
_IMPOSSIBLE = (errno.EINVAL if sys.platform == "win32" else errno.ENAMETOOLONG,)


@dataclass(frozen=True, slots=True)
class Caption:
    """What training reads for a picture, and where it stands."""

    text: str | None
    """None where there is no caption at all."""
    file: str
    """The file that is read; where there is none, or another program's list is, the one to make."""
    seen: Seen
    """What it holds."""
    listed: str | None = None
    """What metadata.jsonl says, if it was looked at: only where no caption file counts."""
    encoding: str = "utf-8"


@dataclass
class Neighbours:
    """What lies in folders beside the pictures, looked up once for a batch."""

    root: Path
    links: Links = field(init=False)
    _odd: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _listed: dict[Path, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.links = Links([self.root])

    def require_inside(self, file: str) -> None:
        """Raise DatasetError for a link that leads out of the dataset, such as to the user's own files."""
        if os.path.islink(long_name(file)) and not self.links.allow(Path(file)):  # noqa: PTH114 (five times as fast)
            raise link_outside(file)

    def spelled(self, file: str) -> str | None:
        """Return the file whose ending is this one's in capitals, or partly so; for systems that tell them apart."""
        folder, wanted = os.path.split(file)
        if folder not in self._odd:
            # Where the folder itself is gone this raises: a caption in it is not missing, it cannot be known.
            names = [path.name for path in long_path(Path(folder)).iterdir()]
            odd = [name for name in names if name.lower().endswith(SUFFIXES) and not name.endswith(SUFFIXES)]
            self._odd[folder] = {Path(name).stem + Path(name).suffix.lower(): name for name in odd}
        name = self._odd[folder].get(wanted)
        return os.path.join(folder, name) if name else None  # noqa: PTH118 (ten times as fast)

    def listed(self, picture: Path) -> str | None:
        """Return the caption that metadata.jsonl beside the picture, or at the dataset's root, gives it."""
        own = self._metadata(picture.parent).get(picture.name)
        if own is not None or picture.parent == self.root:
            return own
        return self._metadata(self.root).get(picture.relative_to(self.root).as_posix())

    def _metadata(self, folder: Path) -> Mapping[str, str]:
        if folder not in self._listed:
            path = folder / METADATA_NAME
            self._listed[folder] = read_metadata(path)[0] if self.links.allow_file(path) else {}
        return self._listed[folder]


def link_outside(file: str) -> DatasetError:
    """Return the refusal to read or write through a link."""
    return DatasetError(
        "save.outside",
        f"{file} is a link that leads out of the dataset, so it is neither read nor written.",
        "Replace the link with a copy of the file; what you changed is kept until then.",
    )


def plain(text: str | None) -> str | None:
    r"""Return a caption as it can stand in a file: line ends as "\n", no byte order mark; a blank one is empty."""
    if text is None:
        return None
    text = text.lstrip("\ufeff")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "" if text.isspace() else text


def look(picture: str, around: Neighbours) -> Caption:
    """Return a picture's caption as training reads it: the first of .txt, .caption and metadata.jsonl not blank.

    Raises OSError, and DatasetError where the file that counts is no text.
    """
    first: Caption | None = None
    stem = os.path.splitext(picture)[0]  # noqa: PTH122 (ten times as fast)
    for suffix in SUFFIXES:
        if found := _read(stem + suffix, around):
            if found.text:
                return found
            first = first or found
    listed = around.listed(Path(picture))
    if first:
        return Caption(plain(listed) or "", first.file, first.seen, listed, first.encoding)
    return Caption(plain(listed), stem + SUFFIXES[0], Seen(None), listed)


def _read(file: str, around: Neighbours) -> Caption | None:
    try:
        around.require_inside(file)
        seen = look_at(file, LARGEST + 1)
    except OSError as fault:
        if fault.errno in _IMPOSSIBLE:
            return None
        if not isinstance(fault, FileNotFoundError):
            raise
        spelled = around.spelled(file)
        if spelled is None:
            return None
        around.require_inside(spelled)
        file, seen = spelled, look_at(spelled, LARGEST + 1)
    try:
        decoded = decode_caption(seen.data or b"")
    except NotACaptionError as fault:
        raise DatasetError(
            "caption.unreadable",
            f"{file} is not used as a caption: {fault}.",
            "Move that file away if it is not needed; the caption waits here until then.",
        ) from fault
    return Caption(plain(decoded.text), file, seen, encoding=decoded.encoding)


def encode(text: str) -> bytes:
    """Return a caption's bytes for its file; raises DatasetError where training could not read them again."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as fault:
        raise _unwritable(f"character {fault.start + 1} is half of one and has no form in UTF-8") from fault
    if len(data) > LARGEST:
        raise _unwritable(f"it is longer than {LARGEST:,} bytes")
    if "\0" in text:
        raise _unwritable(f"character {text.index(chr(0)) + 1} is a zero, which stands in no text")
    return data


def _unwritable(reason: str) -> DatasetError:
    return DatasetError(
        "caption.unwritable",
        f"A caption cannot be written: {reason}.",
        "Correct the caption; it waits here until then.",
    )
