"""Looks at one picture's file: hash, size, kind, and whether it decodes to its end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from PIL import ImageFile

from trainer.dataset.duplicates import fingerprint
from trainer.dataset.memory import PictureFacts, State
from trainer.dataset.pixels import decode, exif_orientation, faults_named, open_picture, upright_size
from trainer.dataset.png import is_whole
from trainer.errors import DatasetError
from trainer.protocol.files import long_path
from trainer.protocol.reading import open_file

Inspection = PictureFacts | DatasetError
Turn = Callable[[], AbstractContextManager[object]]

# Larger pictures are decoded one after the other: four at once could take several gigabytes.
_LARGE_MEGAPIXELS = 30.0
_DRAFT = (256, 256)


def file_state(path: Path) -> State:
    """Return the file's size in bytes and modification time in nanoseconds; raises DatasetError."""
    with faults_named(path):
        facts = long_path(path).stat()
    return facts.st_size, facts.st_mtime_ns


def inspect(path: Path, max_megapixels: float, turn: Turn) -> tuple[State | None, Inspection]:
    """Return the state of a picture's file and what it is, or None and why it cannot be used.

    A large picture is decoded within `turn`, which is to keep others from being decoded meanwhile.
    """
    try:
        # The state is taken first: a file changed meanwhile is then remembered in a state that it no longer has.
        state = file_state(path)
        with open_picture(path, max_megapixels) as image:
            large = image.width * image.height > _LARGE_MEGAPIXELS * 1e6
            with turn() if large else nullcontext():
                return state, _facts(path, image)
    except DatasetError as error:
        return None, error


def _facts(path: Path, image: ImageFile.ImageFile) -> PictureFacts:
    width, height = upright_size(image)
    rotated = exif_orientation(image) != 1
    # A JPEG decoded small is read to its end all the same, in a third of the time.
    image.draft(None, _DRAFT)
    layers = decode(image)
    if image.format == "PNG" and not is_whole(path):
        raise OSError("its data end before its last row")
    return PictureFacts(
        id=sha256_of(path),
        width=width,
        height=height,
        format=image.format or "",
        animated=_animated(image),
        rotated=rotated,
        transparent=layers.alpha is not None,
        profile=layers.profile,
        fingerprint=fingerprint(layers.on("#ffffff")).hex(),
    )


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a picture's bytes in hex, which is its id; raises OSError."""
    with open_file(path, "image") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _animated(image: ImageFile.ImageFile) -> bool:
    # A phone's JPEG may carry a second picture, such as a depth map: that is no animation.
    return image.format != "MPO" and bool(getattr(image, "is_animated", False))
