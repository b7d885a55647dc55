"""Paint training masks: 8-bit grayscale at the image's upright size; white is trained, black is left out.

`Mask` paints with undo. `read_mask`, `write_mask` and `remove_mask` access the file NAME-masklabel.png, which the
trainer reads unless dataset.masks is "none" or "alpha". The module imports numpy, so import it only when the painter
opens.
"""

from __future__ import annotations

import errno
import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from app.core.disk.reading import MAX_MEGAPIXELS
from app.core.edits.backups import Backups, Written
from trainer.dataset.folders import MASK
from trainer.dataset.pixels import load_upright
from trainer.errors import DatasetError
from trainer.protocol.files import Links
from trainer.protocol.reading import read_bytes, reason_of

TRAINED, LEFT_OUT = 255, 0
Gray = npt.NDArray[np.uint8]


class Box(NamedTuple):
    """A region of rows and columns; `bottom` and `right` are exclusive."""

    top: int
    bottom: int
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class _Step:
    box: Box
    before: bytes
    after: bytes


class Mask:
    """A mask of shape (height, width) with its undo history."""

    def __init__(self, pixels: Gray) -> None:
        self.pixels = pixels
        self._undo: list[_Step] = []
        self._redo: list[_Step] = []
        self._base: Gray | None = None
        self._cover = np.empty((0, 0), np.float32)
        self._touched: Box | None = None

    @property
    def can_undo(self) -> bool:
        """Return whether there is a step to undo."""
        return bool(self._undo)

    @property
    def can_redo(self) -> bool:
        """Return whether there is a step to redo."""
        return bool(self._redo)

    # Strokes

    def begin(self) -> None:
        """Begin a stroke; until `end`, crossing its own path does not add more paint."""
        self.end()
        self._base = self.pixels.copy()
        self._cover = np.zeros(self.pixels.shape, np.float32)

    def stroke(
        self, start: tuple[float, float], end: tuple[float, float], radius: float, hardness: float, value: int
    ) -> None:
        """Paint a segment of the stroke with a round brush; `start` and `end` are (x, y) in pixels.

        Coverage is full within `hardness` (0 to 1) times the radius and falls to zero at the edge.
        """
        assert self._base is not None, "a stroke needs a beginning"
        box = self._clipped(start, end, radius)
        if box is None:
            return
        reach = _distance(box, start, end)
        soft = max(radius * (1.0 - hardness), 0.5)
        cover = np.clip((radius - reach) / soft, 0.0, 1.0, dtype=np.float32)
        part = np.s_[box.top : box.bottom, box.left : box.right]
        # Blend the pixels from before the stroke with its maximum coverage: blending each segment onto the last one
        # would paint the overlaps twice, and show as beads along a soft stroke.
        np.maximum(self._cover[part], cover, out=self._cover[part])
        base = self._base[part].astype(np.float32)
        self.pixels[part] = np.rint(base + (value - base) * self._cover[part]).astype(np.uint8)
        self._touched = box if self._touched is None else _joined(self._touched, box)

    def end(self) -> None:
        """End the stroke and add it to the undo history."""
        base, box, self._base, self._touched = self._base, self._touched, None, None
        if base is not None and box is not None:
            self._remember(box, base)

    def _clipped(self, start: tuple[float, float], end: tuple[float, float], radius: float) -> Box | None:
        height, width = self.pixels.shape
        top, bottom = sorted((start[1], end[1]))
        left, right = sorted((start[0], end[0]))
        box = Box(
            max(int(top - radius) - 1, 0),
            min(int(bottom + radius) + 2, height),
            max(int(left - radius) - 1, 0),
            min(int(right + radius) + 2, width),
        )
        return box if box.top < box.bottom and box.left < box.right else None

    # Whole mask

    def fill(self, value: int) -> None:
        """Fill the whole mask with `value`."""
        self._change(lambda pixels: np.full_like(pixels, value))

    def invert(self) -> None:
        """Swap trained and left-out areas."""
        self._change(lambda pixels: 255 - pixels)

    def flood(self, x: int, y: int, value: int) -> None:
        """Fill the connected area around (x, y) in which gray levels are close to the one at (x, y)."""
        height, width = self.pixels.shape
        if 0 <= x < width and 0 <= y < height:
            alike = np.abs(self.pixels.astype(np.int16) - int(self.pixels[y, x])) <= _ALIKE
            area = connected_area(alike, x, y)
            self._change(lambda pixels: np.where(area, np.uint8(value), pixels))

    def _change(self, make: Callable[[Gray], Gray]) -> None:
        self.end()
        before, self.pixels = self.pixels, make(self.pixels)
        rows, columns = np.nonzero((before != self.pixels).any(1))[0], np.nonzero((before != self.pixels).any(0))[0]
        if len(rows):
            self._remember(Box(int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1), before)

    # Undo and redo

    def undo(self) -> None:
        """Undo the last step."""
        self.end()
        if self._undo:
            step = self._undo.pop()
            self._put(step.box, step.before)
            self._redo.append(step)

    def redo(self) -> None:
        """Redo the last undone step."""
        self.end()
        if self._redo:
            step = self._redo.pop()
            self._put(step.box, step.after)
            self._undo.append(step)

    def _remember(self, box: Box, before: Gray) -> None:
        step = _Step(box, _packed(before, box), _packed(self.pixels, box))
        if step.before != step.after:
            self._undo.append(step)
            self._redo.clear()

    def _put(self, box: Box, packed: bytes) -> None:
        pixels = np.frombuffer(zlib.decompress(packed), np.uint8)
        shape = box.bottom - box.top, box.right - box.left
        self.pixels[box.top : box.bottom, box.left : box.right] = pixels.reshape(shape)


# Gray levels that a flood fill treats as equal, because the rim of a soft brush changes in steps of one.
_ALIKE = 8


def connected_area(alike: npt.NDArray[np.bool_], x: int, y: int) -> npt.NDArray[np.bool_]:
    """Return the True pixels that are 4-connected to (x, y).

    Sweeps down and up over whole rows until nothing is added; painted masks take two or three sweeps.
    """
    area = np.zeros_like(alike)
    area[y, x] = True
    rows = range(len(alike))
    spans = [_spans(row) for row in alike]
    grown, before = 1, 0
    while grown != before:
        before = grown
        for order in (rows, reversed(rows)):
            former: npt.NDArray[np.bool_] | None = None
            for number in order:
                seeds = area[number] if former is None else (area[number] | former) & alike[number]
                area[number] = _whole_spans(seeds, spans[number])
                former = area[number]
        grown = int(np.count_nonzero(area))
    return area


def _spans(row: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the starts and exclusive ends of the runs of True in a row."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], row, [False]))))
    return edges[::2], edges[1::2]


def _whole_spans(
    seeds: npt.NDArray[np.bool_], spans: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]
) -> npt.NDArray[np.bool_]:
    """Return a boolean row that is True in those `spans` that contain at least one seed."""
    filled = np.zeros_like(seeds)
    if seeds.any():
        sums = np.concatenate(([0], np.cumsum(seeds)))  # makes the number of seeds in each run a subtraction
        starts, ends = spans
        for start, end in zip(starts, ends, strict=True):
            if sums[end] > sums[start]:
                filled[start:end] = True
    return filled


def _distance(box: Box, start: tuple[float, float], end: tuple[float, float]) -> npt.NDArray[np.float32]:
    """Return the distance in pixels between each pixel center in a box and a line segment."""
    y = np.arange(box.top, box.bottom, dtype=np.float32)[:, None] + np.float32(0.5 - start[1])
    x = np.arange(box.left, box.right, dtype=np.float32)[None, :] + np.float32(0.5 - start[0])
    across, down = end[0] - start[0], end[1] - start[1]
    length = across * across + down * down
    along = np.clip((x * across + y * down) / length, 0.0, 1.0) if length else np.float32(0.0)
    reach: npt.NDArray[np.float32] = np.hypot(x - along * across, y - along * down, dtype=np.float32)
    return reach


def _joined(first: Box, second: Box) -> Box:
    return Box(
        min(first.top, second.top),
        max(first.bottom, second.bottom),
        min(first.left, second.left),
        max(first.right, second.right),
    )


def _packed(pixels: Gray, box: Box) -> bytes:
    # Level 1: a higher level costs time at the end of each stroke, and masks are mostly flat areas anyway.
    return zlib.compress(np.ascontiguousarray(pixels[box.top : box.bottom, box.left : box.right]).tobytes(), 1)


# The file


class OpenedMask(NamedTuple):
    """A mask read from disk; `state` is the hash of its file, or None if there is no file."""

    pixels: Gray
    state: str | None
    stretched: bool
    """Whether the mask was resized because its size differed from the image's."""


class MaskChanged(DatasetError):
    """Raised when another program changed the mask file while the user was painting."""


def mask_path(image: Path) -> Path:
    """Return the path of an image's mask."""
    return image.with_name(f"{image.stem}{MASK}.png")


def read_mask(image_file: Path, width: int, height: int) -> OpenedMask:
    """Return an image's mask at the image's upright size, all white if there is no file; for workers.

    Raises DatasetError if the file cannot be read as an image; it stays unchanged.
    """
    path = mask_path(image_file)
    try:
        state = state_of(_content(path))
    except OSError as fault:
        sentence = f"Could not read the mask {path}: {reason_of(fault)}."
        raise DatasetError("mask.unreadable", sentence, "Replace it with a readable copy, or delete it.") from fault
    if state is None:
        return OpenedMask(np.full((height, width), TRAINED, np.uint8), None, False)
    image = load_upright(path, "#000000", MAX_MEGAPIXELS).convert("L")
    stretched = image.size != (width, height)
    if stretched:
        image = image.resize((width, height), Image.Resampling.BOX)
    return OpenedMask(np.array(image), state, stretched)


def write_mask(
    image: Path, root: Path, pixels: Gray, state: str | None, backups: Backups, *, over: bool = False
) -> Written:
    """Write a mask atomically after backing up the old file; return the old and new contents. For workers.

    Raises MaskChanged without writing if the file is no longer in `state` and `over` is not set, and DatasetError if
    writing fails.
    """
    return _write(mask_path(image), root, _png(pixels), state, backups, over)


def _png(pixels: Gray) -> bytes:
    image = BytesIO()
    Image.fromarray(pixels).save(image, "PNG")
    return image.getvalue()


def remove_mask(image: Path, root: Path, state: str | None, backups: Backups, *, over: bool = False) -> Written:
    """Remove a mask file after backing it up; raises the same errors as `write_mask`. For workers."""
    return _write(mask_path(image), root, None, state, backups, over)


def _write(path: Path, root: Path, after: bytes | None, state: str | None, backups: Backups, over: bool) -> Written:
    """Back up a mask file, then write or remove it, unless another program changed it."""
    while True:
        try:
            before = _content(path)
            if not over and state_of(before) != state:
                raise MaskChanged(
                    "mask.changed",
                    f"Could not save {path.name}: another program changed it while you painted.",
                    "Overwrite it (the current version is kept as a backup), or close without saving to see it.",
                )
            backups.keep(str(root), [(path.relative_to(root).as_posix(), before)])
            written = Written(path, before, after)
            if written.write():
                return written
        except OSError as fault:
            raise _refused(path, fault) from fault


def state_of(data: bytes | None) -> str | None:
    """Return the state of a mask file: the hash of its contents, or None if it does not exist."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def _content(path: Path) -> bytes | None:
    if not Links([path.parent]).allow_file(
        path
    ):  # a link could expose any of the user's images and copy it to the backups
        raise PermissionError(errno.EPERM, "it is a link to outside its folder", str(path))
    try:
        return read_bytes(path, "image")
    except FileNotFoundError:
        return None


def _refused(path: Path, fault: OSError) -> DatasetError:
    return DatasetError(
        "mask.unwritten",
        f"Could not write {path}: {fault.strerror or fault}.",
        "Check that the folder is writable and the disk has space, then save again. Your painting stays open.",
    )


def shrunk(pixels: Gray, rows: Sequence[int] | npt.NDArray[np.intp], columns: npt.NDArray[np.intp]) -> Gray:
    """Return a mask sampled at these rows and columns, in contiguous memory as Qt requires."""
    return np.ascontiguousarray(pixels[np.ix_(np.asarray(rows), columns)])
