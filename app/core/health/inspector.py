"""Background inspection of image files (content, fingerprint, damage) and of caption encodings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.core.edits.backups import Backups, Written
from app.core.library import Library, LibraryImage
from app.core.tasks import Post, Tasks, iterate_yielding
from trainer.dataset.caption_files import SUFFIXES, NotACaptionError, decode_caption
from trainer.errors import DatasetError
from trainer.protocol.files import Links
from trainer.protocol.reading import read_bytes

if TYPE_CHECKING:
    from app.core.health.judging import NearDuplicates
    from trainer.dataset.decoders import DecoderPool
    from trainer.dataset.inspection import Inspection


# Images inspected at once: a second or two of work when no result is cached.
_BATCH = 24
_RETRY_SECONDS = 30.0
"""Minimum seconds between a failed start of the worker processes and a request that tries to start them again."""


class InspectedImage(NamedTuple):
    """Result of inspecting one image; width and height are in upright pixels."""

    image: int
    changed_ns: int
    mask_changed_ns: int
    codes: tuple[str, ...]
    """Finding codes of trainer.dataset for the image file, its mask and its caption files."""
    content: str | None = None
    fingerprint: str | None = None
    width: int | None = None
    height: int | None = None
    problem: str | None = None


class _Request(NamedTuple):
    """An image to inspect, with the state of its files when it was requested."""

    image: int
    path: Path
    changed_ns: int
    mask: bool
    mask_changed_ns: int


class InspectionBatch(NamedTuple):
    """Results for some images, and their pairs with near duplicates among the images inspected so far."""

    seen: list[InspectedImage]
    near: list[tuple[int, int]]


class Inspector:
    """Background inspector that uses worker processes; results for unchanged files are cached on disk.

    Use it only on the library's thread. On that thread, it calls `have` with each batch of results, and `stuck` when it
    has set `fault`. `close` stops it immediately, even in the middle of an image.
    """

    def __init__(
        self, library: Library, post: Post, have: Callable[[InspectionBatch], None], stuck: Callable[[], None]
    ) -> None:
        self._library, self._on_slice, self._on_failed_start = library, have, stuck
        self._tasks = Tasks(post, threads=1, behind=True)
        self._waiting: dict[int, None] = {}
        self._missing: set[int] = set()
        """Images whose files were missing when they should have been inspected."""
        self._running = self._stopped = self._started = False
        self._retry_at = 0.0
        self.fault: DatasetError | None = None
        """Why no worker process could be started; None after a new attempt begins."""
        self._decoders: DecoderPool | None = None
        self._near: NearDuplicates | None = None

    @property
    def pending(self) -> int:
        """Return the number of images still to be inspected."""
        return 0 if self.fault else len(self._waiting)

    def request(self, images: Iterable[int]) -> None:
        """Queue images for inspection; if the last start failed at least _RETRY_SECONDS seconds ago, try it again."""
        self._waiting.update(dict.fromkeys(images))
        if self.fault and self._waiting and time.monotonic() > self._retry_at:
            self.start()
        else:
            self._start_next()

    def take_missing(self) -> set[int]:
        """Return and clear the images whose files were missing."""
        missing, self._missing = self._missing, set()
        return missing

    def start(self) -> None:
        """Start inspecting, including the images queued before this call."""
        self._started, self.fault = True, None
        self._start_next()

    def close(self) -> None:
        """Stop the inspection and its worker processes."""
        self._stopped = True
        decoders = self._decoders  # the worker may set it to None at any time
        if decoders:
            decoders.interrupt()
        self._tasks.close()
        if self._decoders:
            self._decoders.__exit__(None, None, None)

    def _start_next(self) -> None:
        if self._running or self._stopped or not self._started:
            return
        numbers = list(islice(self._waiting, _BATCH))
        images = [self._library.images[number] for number in numbers if number in self._library.images]
        self._running = True
        requests = [_Request(i.id, i.path, i.changed_ns, i.mask, i.mask_changed_ns) for i in images]
        self._tasks.run(
            lambda: self._inspect(requests),
            lambda result: self._on_inspected(numbers, result),
            self._on_failed,
            kept=False,
        )

    def _inspect(self, requests: list[_Request]) -> InspectionBatch | None:
        """Inspect some images on the worker thread; if `requests` is empty, end the worker processes."""
        from app.core.disk.reading import MAX_MEGAPIXELS
        from app.core.health.judging import NearDuplicates
        from trainer.dataset.decoders import PROCESS_COUNT, DecoderPool, inspect_images

        if not requests:
            self._end_processes()
            return None
        self._decoders = self._decoders or DecoderPool(max(1, PROCESS_COUNT // 2))  # leave cores for the window
        self._near = self._near or NearDuplicates()
        paths = [request.path for request in requests]
        try:
            found = inspect_images(paths, MAX_MEGAPIXELS, lambda done, total: self._check_stop(), self._decoders)
        except DatasetError:  # a process failed to start: end the others to free their memory
            self._end_processes()
            raise
        seen = [image for request in iterate_yielding(requests) if (image := _inspected(request, found[request.path]))]
        return InspectionBatch(
            seen, self._near.add((image.image, image.fingerprint) for image in seen if image.fingerprint)
        )

    def _end_processes(self) -> None:
        """End the worker processes; new ones are started when there is something to inspect."""
        if self._decoders:
            self._decoders.__exit__(None, None, None)
            self._decoders = None

    def _check_stop(self) -> None:
        if self._stopped:
            raise _InspectionStopped

    def _on_inspected(self, numbers: list[int], found: InspectionBatch | None) -> None:
        self._running = False
        for number in numbers:
            self._waiting.pop(number, None)
        if found is not None and not self._stopped:
            self._missing.update(set(numbers).difference(result.image for result in found.seen))
            self._on_slice(InspectionBatch([result for result in found.seen if self._is_current(result)], found.near))
        # When nothing is left, one more run without images ends the worker processes.
        if numbers or self._waiting:
            self._start_next()

    def _is_current(self, seen: InspectedImage) -> bool:
        image: LibraryImage | None = self._library.images.get(seen.image)
        now = image and (image.changed_ns, image.mask_changed_ns)
        return now == (seen.changed_ns, seen.mask_changed_ns)

    def _on_failed(self, fault: BaseException) -> None:
        if self._stopped:
            return
        if not isinstance(fault, DatasetError):
            raise fault
        self._running, self._started, self.fault = False, False, fault
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        self._on_failed_start()


class _InspectionStopped(Exception):
    """Raised on the worker when the app is closing."""


def _inspected(request: _Request, found: Inspection) -> InspectedImage | None:
    """Return the result for one image; None if its file or folder is missing, which the scanner reports."""
    from app.core.disk.reading import file_state
    from trainer.dataset.dataset import file_findings

    number, path, changed_ns, _, mask_changed_ns = request
    encodings = _encodings(path)
    if isinstance(found, DatasetError):
        if found.code == "image.missing" or file_state(path) is None:
            return None
        return InspectedImage(number, changed_ns, mask_changed_ns, encodings, problem=found.sentence)
    codes = (*file_findings(path, found), *encodings, *_mask_findings(request, (found.width, found.height)))
    content = found.id, found.fingerprint, found.width, found.height
    return InspectedImage(number, changed_ns, mask_changed_ns, codes, *content)


def _mask_findings(request: _Request, size: tuple[int, int]) -> tuple[str, ...]:
    """Return the finding for a mask whose aspect ratio, according to its header, differs from the image's."""
    from app.core.disk.reading import read_size
    from app.core.edits.masks import mask_path
    from trainer.dataset.image import crop_loss

    if not request.mask:
        return ()
    mask = read_size(mask_path(request.path))
    if not mask["width"]:  # damaged: the trainer's check reports it
        return ()
    return ("mask.size",) if crop_loss(mask["width"], mask["height"], size) > 0.01 else ()


def _encodings(path: Path) -> tuple[str, ...]:
    """Return the finding codes for encodings other than UTF-8 in an image's caption files."""
    from trainer.dataset.caption_files import SUFFIXES, NotACaptionError, read_caption_file

    codes = []
    for suffix in SUFFIXES:
        try:
            encoding = read_caption_file(path.with_suffix(suffix)).encoding
        except NotACaptionError:  # no such file, or reading the dataset reports it
            continue
        if encoding != "utf-8":
            codes.append(f"caption.{encoding}")
    return tuple(dict.fromkeys(codes))


def to_utf8(images: Iterable[tuple[Path, Path]], backups: Backups) -> int:
    """Convert the caption files of images to UTF-8 and return how many files changed.

    `images` are pairs of dataset root and image path. Each file is backed up first. If a file cannot be written, raises
    a DatasetError that names it; earlier files are already converted, later ones are unchanged.
    """
    changed = 0
    for root, image in images:
        for suffix in SUFFIXES:
            try:
                changed += _convert(root, image.with_suffix(suffix), backups)
            except (FileNotFoundError, NotACaptionError):
                continue
            except OSError as fault:
                raise DatasetError(
                    "caption.unconverted",
                    f"Could not convert {image.with_suffix(suffix)} to UTF-8: {fault.strerror or fault}.",
                    "Make the folder writable and free some disk space, then try again. Nothing is lost.",
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
