"""Opens many pictures at once to learn what they are: hash, size, kind, and whether they decode to their end."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path

from PIL import ImageFile

from trainer.dataset.duplicates import fingerprint
from trainer.dataset.memory import PictureFacts, PictureMemory, State, picture_memory
from trainer.dataset.pixels import (
    check_megapixels,
    decode,
    exif_orientation,
    faults_named,
    open_picture,
    upright_size,
)
from trainer.dataset.png import is_whole
from trainer.errors import DatasetError
from trainer.protocol.atomic import long_path

Progress = Callable[[int, int], None]
"""Called with the number of files checked and the number of all."""
Inspection = PictureFacts | DatasetError

# Decoding runs in C without Python's lock; more threads than this only take memory.
_THREADS = min(4, os.cpu_count() or 1)
# Larger pictures are decoded one after the other: four at once could take several gigabytes.
_LARGE_MEGAPIXELS = 30.0
_large_picture = threading.Lock()
_DRAFT = (256, 256)


def inspect_pictures(
    paths: Iterable[Path], max_megapixels: float, progress: Progress | None = None
) -> dict[Path, Inspection]:
    """Return for each file what it is, or why it cannot be used; every picture is decoded to its end.

    A file whose size and time are those of an earlier check is not opened again.
    """
    paths = list(dict.fromkeys(paths))
    with picture_memory() as memory, ThreadPoolExecutor(_THREADS) as pool:
        found = {path: facts for path in paths if (facts := _recall(path, max_megapixels, memory))}
        jobs = {pool.submit(_inspect, path, max_megapixels): path for path in paths if path not in found}
        try:
            for job in as_completed(jobs):
                path = jobs[job]
                state, found[path] = job.result()
                if state and isinstance(facts := found[path], PictureFacts):
                    memory.keep(path, state, facts)
                if progress:
                    progress(len(found), len(paths))
        finally:  # Ctrl-C waits for the pictures in hand, not for all
            pool.shutdown(cancel_futures=True)
    return found


def file_state(path: Path) -> State:
    """Return the file's size in bytes and modification time in nanoseconds; raises DatasetError."""
    with faults_named(path):
        facts = long_path(path).stat()
    return facts.st_size, facts.st_mtime_ns


def _recall(path: Path, max_megapixels: float, memory: PictureMemory) -> Inspection | None:
    try:
        facts = memory.recall(path, file_state(path))
        if facts:
            check_megapixels(path, facts.width, facts.height, max_megapixels)
    except DatasetError as error:
        return error
    return facts


def _inspect(path: Path, max_megapixels: float) -> tuple[State | None, Inspection]:
    try:
        # The state is taken first: a file changed meanwhile is then remembered in a state that it no longer has.
        state = file_state(path)
        return state, _facts(path, max_megapixels)
    except DatasetError as error:
        return None, error


def _facts(path: Path, max_megapixels: float) -> PictureFacts:
    with open_picture(path, max_megapixels) as image:
        large = image.width * image.height > _LARGE_MEGAPIXELS * 1e6
        with _large_picture if large else nullcontext():
            return _facts_of(path, image)


def _facts_of(path: Path, image: ImageFile.ImageFile) -> PictureFacts:
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
    with long_path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _animated(image: ImageFile.ImageFile) -> bool:
    # A phone's JPEG may carry a second picture, such as a depth map: that is no animation.
    return image.format != "MPO" and bool(getattr(image, "is_animated", False))
