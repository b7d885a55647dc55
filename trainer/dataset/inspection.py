"""Inspect one image file: its hash, size and format, and whether it can be decoded completely."""

from __future__ import annotations

import hashlib
import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from PIL import ImageFile

from trainer.dataset.duplicates import fingerprint
from trainer.dataset.pixels import decode, exif_orientation, faults_named, open_image, upright_size
from trainer.errors import DatasetError
from trainer.protocol.files import long_path
from trainer.protocol.places import cache_folder
from trainer.protocol.reading import UnusableFileError, decoded, open_file, parse_json
from trainer.protocol.records import build, json_keys, to_record
from trainer.protocol.row_store import RowStore, key_of

State = tuple[int, int]
"""Size in bytes and modification time in ns; a file counts as unchanged if both are the same."""

# Increase this if ImageFacts or its computation changes, so that older entries are ignored.
_VERSION = 1
_LARGEST = 512_000_000  # bytes: about a million images
# A file changed more recently than this may change again within one tick of the file system clock.
_SETTLED_NS = 2_000_000_000
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# Adam7: the first column and row of each pass, and the steps between its columns and rows (PNG, 3rd edition, 8.1).
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_BLOCK = 1 << 20
# Larger images are decoded one at a time: four at once could take several gigabytes.
_LARGE_MEGAPIXELS = 30.0
_DRAFT = (256, 256)


@json_keys("id", "width", "height", "format", "animated", "rotated", "transparent", "profile", "fingerprint")
@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Facts about an image file in one state; the size is of the upright image, and the fingerprint is in hex."""

    id: str
    width: int
    height: int
    format: str
    animated: bool
    rotated: bool
    transparent: bool
    profile: Literal["none", "good", "broken"]
    fingerprint: str


class InspectionCache:
    """Cache of facts by path and state. If its storage fails, images are inspected again."""

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def recall(self, path: Path, state: State) -> ImageFacts | None:
        """Return the cached facts about a file in this state; None if they are missing or damaged."""
        row = self._store.get(key_of(path, *state, _VERSION))
        if row is None:
            return None
        try:
            return decoded(parse_json(row), lambda found: build(ImageFacts, found), path)
        except UnusableFileError:  # another version wrote it
            return None

    def keep(self, path: Path, state: State, facts: ImageFacts) -> None:
        """Cache the facts about a file, unless it changed so recently that its state is unreliable."""
        if time.time_ns() - state[1] > _SETTLED_NS:
            self._store.put(key_of(path, *state, _VERSION), json.dumps(to_record(facts)).encode())


@contextmanager
def inspection_cache() -> Iterator[InspectionCache]:
    """Open the cache in the per-user cache folder."""
    store = RowStore(cache_folder() / "pictures.sqlite", _LARGEST)
    try:
        yield InspectionCache(store)
    finally:
        store.close()


def is_whole(path: Path) -> bool:
    """Return whether a PNG file's image data is complete: it must decompress to at least the size of all rows.

    The decompressed data is discarded, so memory use stays at 1 MB regardless of the header. Raises OSError, zlib.error
    and struct.error.
    """
    with open_file(path, "image") as file:
        file.seek(16)
        width, height, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", file.read(13))
        missing = _row_bytes(width, height, depth * _CHANNELS[color], bool(interlaced))
        file.seek(8)
        unpacker = zlib.decompressobj()
        for packed in _data_chunks(file):
            while packed and missing > 0:
                missing -= len(unpacker.decompress(packed, _BLOCK))
                packed = unpacker.unconsumed_tail
        return missing <= 0


def _row_bytes(width: int, height: int, bits: int, interlaced: bool) -> int:
    """Return the size in bytes of all rows of a PNG image, each including its filter byte."""
    total = 0
    for left, top, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        total += rows * (1 + -(-columns * bits // 8)) if columns > 0 and rows > 0 else 0
    return total


def _data_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the image data chunks up to the end of the file, skipping all others."""
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"IDAT":
            yield file.read(length)
        elif kind == b"IEND":
            return
        else:
            file.seek(length, 1)
        file.seek(4, 1)


Inspection = ImageFacts | DatasetError
Turn = Callable[[], AbstractContextManager[object]]


def file_state(path: Path) -> State:
    """Return the file's size in bytes and modification time in nanoseconds; raises DatasetError."""
    with faults_named(path):
        facts = long_path(path).stat()
    return facts.st_size, facts.st_mtime_ns


def inspect(path: Path, max_megapixels: float, turn: Turn) -> tuple[State | None, Inspection]:
    """Return the state of an image file and the facts about it, or None and the error if it cannot be used.

    A large image is decoded inside `turn`, which must keep other large images from being decoded at the same time.
    """
    try:
        # Read the state first: if the file changes now, its facts are cached under an old state and never found.
        state = file_state(path)
        with open_image(path, max_megapixels) as image:
            large = image.width * image.height > _LARGE_MEGAPIXELS * 1e6
            with turn() if large else nullcontext():
                return state, _facts(path, image)
    except DatasetError as error:
        return None, error


def _facts(path: Path, image: ImageFile.ImageFile) -> ImageFacts:
    width, height = upright_size(image)
    rotated = exif_orientation(image) != 1
    # A JPEG decoded at reduced size is still read to its end, in a third of the time.
    image.draft(None, _DRAFT)
    layers = decode(image)
    if image.format == "PNG" and not is_whole(path):
        raise OSError("its data ends before the last row")
    return ImageFacts(
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
    """Return the SHA-256 of an image file in hex, which is its id; raises OSError."""
    with open_file(path, "image") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _animated(image: ImageFile.ImageFile) -> bool:
    # A phone's JPEG may contain a second image, such as a depth map, which is not an animation.
    return image.format != "MPO" and bool(getattr(image, "is_animated", False))
