"""Looks at every picture's file behind the user's back: content, fingerprint, damage; and how captions are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.core.edits.backups import Backups, Written
from app.core.library import Library, LibraryImage
from app.core.tasks import Post, Tasks, in_turns
from trainer.dataset.caption_files import SUFFIXES, NotACaptionError, decode_caption
from trainer.dataset.links import Links
from trainer.errors import DatasetError
from trainer.protocol.reading import read_bytes

if TYPE_CHECKING:
    from app.core.health.judging import NearDuplicates
    from trainer.dataset.decoders import DecoderPool
    from trainer.dataset.inspection import Inspection


# Pictures looked at in one go, a second or two when nothing of them is remembered.
_SLICE = 24
_AGAIN = 30.0
"""Seconds after which a look that could not begin is tried again when pictures change."""


class InspectedImage(NamedTuple):
    """What came of one picture; sizes are upright pixels."""

    image: int
    changed_ns: int
    mask_changed_ns: int
    codes: tuple[str, ...]
    """What is doubtful or worth knowing about its file and the files of its captions, as trainer.dataset words it."""
    content: str | None = None
    fingerprint: str | None = None
    width: int | None = None
    height: int | None = None
    problem: str | None = None


class _Asked(NamedTuple):
    """A picture that is to be looked at."""

    image: int
    path: Path
    changed_ns: int
    mask: bool
    mask_changed_ns: int


class Slice(NamedTuple):
    """What came of some pictures, and which are nearly the same as another known by now."""

    seen: list[InspectedImage]
    near: list[tuple[int, int]]


class Inspector:
    """One thread, which lets worker processes decode; what was seen of an unchanged file is remembered on disk.

    It belongs to the library's thread, on which `have` is called with each slice, and `stuck` when there is a `fault`.
    `close` ends it at once, even in the middle of a picture.
    """

    def __init__(self, library: Library, post: Post, have: Callable[[Slice], None], stuck: Callable[[], None]) -> None:
        self._library, self._have, self._stuck = library, have, stuck
        self._tasks = Tasks(post, threads=1, behind=True)
        self._waiting: dict[int, None] = {}
        self._gone: set[int] = set()
        """Those whose files were not there when they were to be looked at."""
        self._running = self._stopped = self._begun = False
        self._again = 0.0
        self.fault: DatasetError | None = None
        """Why no picture can be looked at, where the processes cannot be started; until that is tried again."""
        self._decoders: DecoderPool | None = None
        self._near: NearDuplicates | None = None

    @property
    def pending(self) -> int:
        """How many pictures are still to be looked at."""
        return 0 if self.fault else len(self._waiting)

    def want(self, images: Iterable[int]) -> None:
        """Look at these when those before them are done; where that failed, try again after a while."""
        self._waiting.update(dict.fromkeys(images))
        if self.fault and self._waiting and time.monotonic() > self._again:
            self.begin()
        else:
            self._go_on()

    def take_gone(self) -> set[int]:
        """Return the pictures whose files were not there since this was asked last."""
        gone, self._gone = self._gone, set()
        return gone

    def begin(self) -> None:
        """Look from now on; what was wanted before waits for this."""
        self._begun, self.fault = True, None
        self._go_on()

    def close(self) -> None:
        """End whatever is being looked at."""
        self._stopped = True
        decoders = self._decoders  # the worker may let them go meanwhile
        if decoders:
            decoders.interrupt()
        self._tasks.close()
        if self._decoders:
            self._decoders.__exit__(None, None, None)

    def _go_on(self) -> None:
        if self._running or self._stopped or not self._begun:
            return
        some = list(islice(self._waiting, _SLICE))
        images = [self._library.images[number] for number in some if number in self._library.images]
        self._running = True
        asked = [_Asked(one.id, one.path, one.changed_ns, one.mask, one.mask_changed_ns) for one in images]
        self._tasks.run(lambda: self._look(asked), lambda found: self._looked(some, found), self._failed, kept=False)

    def _look(self, asked: list[_Asked]) -> Slice | None:
        """Look at some pictures, on the worker; for none of them, let the processes go."""
        from app.core.disk.reading import MAX_MEGAPIXELS
        from app.core.health.judging import NearDuplicates
        from trainer.dataset.decoders import PROCESS_COUNT, DecoderPool, inspect_images

        if not asked:
            self._let_go()
            return None
        self._decoders = self._decoders or DecoderPool(max(1, PROCESS_COUNT // 2))  # the user wants cores too
        self._near = self._near or NearDuplicates()
        paths = [one.path for one in asked]
        try:
            found = inspect_images(paths, MAX_MEGAPIXELS, lambda done, total: self._check_stop(), self._decoders)
        except DatasetError:  # no process can be started: those that could be give back their memory
            self._let_go()
            raise
        seen = [each for one in in_turns(asked) if (each := _seen(one, found[one.path]))]
        return Slice(seen, self._near.add((one.image, one.fingerprint) for one in seen if one.fingerprint))

    def _let_go(self) -> None:
        """End the processes; others are started when there is something to look at."""
        if self._decoders:
            self._decoders.__exit__(None, None, None)
            self._decoders = None

    def _check_stop(self) -> None:
        if self._stopped:
            raise _InspectionStopped

    def _looked(self, some: list[int], found: Slice | None) -> None:
        self._running = False
        for number in some:
            self._waiting.pop(number, None)
        if found is not None and not self._stopped:
            self._gone.update(set(some).difference(one.image for one in found.seen))
            self._have(Slice([one for one in found.seen if self._is_current(one)], found.near))
        # Once nothing waits, one more turn lets the processes go.
        if some or self._waiting:
            self._go_on()

    def _is_current(self, seen: InspectedImage) -> bool:
        image: LibraryImage | None = self._library.images.get(seen.image)
        now = image and (image.changed_ns, image.mask_changed_ns)
        return now == (seen.changed_ns, seen.mask_changed_ns)

    def _failed(self, fault: BaseException) -> None:
        if self._stopped:
            return
        if not isinstance(fault, DatasetError):
            raise fault
        self._running, self._begun, self.fault = False, False, fault
        self._again = time.monotonic() + _AGAIN
        self._stuck()


class _InspectionStopped(Exception):
    """The app is closing."""


def _seen(asked: _Asked, found: Inspection) -> InspectedImage | None:
    """Return what came of a picture; None where its file is gone, perhaps with its folder: that is told by others."""
    from app.core.disk.reading import file_state
    from trainer.dataset.dataset import file_findings

    number, path, changed_ns, _, mask_changed_ns = asked
    written = _encodings(path)
    if isinstance(found, DatasetError):
        if found.code == "picture.missing" or file_state(path) is None:
            return None
        return InspectedImage(number, changed_ns, mask_changed_ns, written, problem=found.sentence)
    codes = (*file_findings(path, found), *written, *_mask_doubts(asked, (found.width, found.height)))
    content = found.id, found.fingerprint, found.width, found.height
    return InspectedImage(number, changed_ns, mask_changed_ns, codes, *content)


def _mask_doubts(asked: _Asked, size: tuple[int, int]) -> tuple[str, ...]:
    """Tell by its header whether a mask has another shape than its upright picture, as the trainer judges it."""
    from app.core.disk.reading import read_size
    from app.core.edits.masks import mask_path
    from trainer.dataset.image import crop_loss

    if not asked.mask:
        return ()
    mask = read_size(mask_path(asked.path))
    if not mask["width"]:  # damaged: the trainer's check tells it
        return ()
    return ("mask.size",) if crop_loss(mask["width"], mask["height"], size) > 0.01 else ()


def _encodings(path: Path) -> tuple[str, ...]:
    """Return which other encodings than UTF-8 a picture's caption files are written in, as codes."""
    from trainer.dataset.caption_files import SUFFIXES, NotACaptionError, read_caption_file

    codes = []
    for suffix in SUFFIXES:
        try:
            encoding = read_caption_file(path.with_suffix(suffix)).encoding
        except NotACaptionError:  # there is none, or it is told when the dataset is read
            continue
        if encoding != "utf-8":
            codes.append(f"caption.{encoding}")
    return tuple(dict.fromkeys(codes))


def to_utf8(images: Iterable[tuple[Path, Path]], backups: Backups) -> int:
    """Write the caption files of pictures as UTF-8, by dataset and picture; return how many files changed.

    Each is kept as it was before it is written. Raises DatasetError, naming the file, when the disk refuses; those
    before it are written, those after it are as they were.
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
                    f"{image.with_suffix(suffix)} cannot be written as UTF-8 ({fault.strerror or fault}).",
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
