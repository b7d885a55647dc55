"""Show the configurations that fill a GPU best: as a table, and as an image of memory against time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainer.cli import plan_text, words
from trainer.errors import RunError
from trainer.protocol.sweep import Sweep, SweepPoint, round_numbers

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

BASES = {"none": "16 bits", "int8": "int8", "int8_products": "int8 products", "nf4": "NF4"}
CHECKPOINTING = {"none": "no", "full": "yes"}

SIZE = (1000, 640)
_LEFT, _TOP, _RIGHT, _BOTTOM = 90, 50, 170, 70
_GIB = 2**30
_INK, _FAINT, _PAPER = "#222222", "#dddddd", "#ffffff"
# Okabe and Ito's colors, which people with color blindness can tell apart.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#000000")


def table(found: Sweep) -> Iterator[str]:
    """Yield the table of configurations, then what was skipped or left out."""
    if found.points:
        header = ("FILL", "RESERVED", "BATCH", "SIDE", "RANK", "BASE", "CHECKPOINTED", "OPTIMIZER", "PER IMAGE")
        yield from plan_text.aligned([header, *map(_row, found.points)], ">>>>><<<>")
    else:
        yield "No configuration fits." if found.computed else "No configuration could be computed."
    yield ""
    yield from _paragraph(summary(found))
    if found.left_out:
        methods = ", ".join(f"{BASES[bits]}{_with(blocks)}" for bits, blocks in found.left_out)
        yield from _paragraph(
            f"Incomplete by {found.missing:,}, because traces are missing: {methods}. Run again to add more."
        )
    yield from _paragraph(
        "Memory of training with the whole batch at once. Encoding, validation and previews can be tiled and "
        "offloaded; `plan` forecasts the whole run of one configuration."
    )


def summary(found: Sweep) -> str:
    """Return how many configurations were computed, and why the others were not."""
    return (
        f"{words.counted(found.total, 'combination', 'combinations')} in {found.seconds:.1f} s: {found.computed:,} "
        f"computed, {found.skipped:,} skipped because a smaller one is too large or a larger batch fits. Of the "
        f"computed ones, {found.too_large:,} do not fit, and {found.dominated:,} are in no way better than another."
    )


def _with(blocks: str) -> str:
    return {"none": "", "full": " with checkpointing"}.get(blocks, " with some blocks checkpointed")


def _row(point: SweepPoint) -> tuple[str, ...]:
    blocks = point.gradient_checkpointing
    return (
        f"{point.fill:.1%}",
        words.size(point.reserved or point.allocated),
        str(point.batch),
        str(point.resolution),
        str(point.rank),
        BASES[point.quantize],
        CHECKPOINTING[blocks] if isinstance(blocks, str) else words.counted(len(blocks), "block", "blocks"),
        point.optimizer,
        f"{point.seconds_per_image:.3g} s",
    )


def _paragraph(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, plan_text.WIDTH)


class Scale(NamedTuple):
    """Position of values along an axis of the image."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, value = (math.log(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def draw(found: Sweep, title: str, path: Path) -> None:
    """Write an image (PNG) of memory against time, with the Pareto front of each resolution.

    Raises RunError if the file cannot be written.
    """
    from PIL import Image, ImageDraw, ImageFont

    from trainer.protocol.places import write_remedy

    image = Image.new("RGB", SIZE, _PAPER)
    _Chart(found, ImageDraw.Draw(image), ImageFont.load_default(14)).draw(title)
    try:
        image.save(path, format="PNG")
    except OSError as error:
        sentence = f"Could not write the chart {path}: {error.strerror or error}."
        raise RunError("plan.chart", sentence, write_remedy(error)) from error


class _Chart:
    """Chart of a sweep that is being drawn."""

    def __init__(self, found: Sweep, pen: ImageDraw, font: FreeTypeFont | ImageFont) -> None:
        self.points = [*found.others, *found.points]
        self.found = found
        self.pen = pen
        self.font = font
        self.sides = sorted({point.resolution for point in self.points})
        times = [point.seconds_per_image for point in self.points] or [1.0]
        width, height = SIZE
        # A decade at least, so that equal times do not divide by zero.
        self.x = Scale(min(times) / 1.5, max(max(times) * 1.5, min(times) * 7), _LEFT, width - _RIGHT, logarithmic=True)
        self.y = Scale(0.0, 1.05 * found.budget, height - _BOTTOM, _TOP)

    def draw(self, title: str) -> None:
        """Draw axes, fronts, points and the legend."""
        self._write(_LEFT, 14, title)
        self._axes()
        for side, color in zip(self.sides, _cycle(len(self.sides)), strict=True):
            self._series([point for point in self.points if point.resolution == side], color)
        self._legend()

    def _axes(self) -> None:
        width, height = SIZE
        for gigabytes in [0.0, *round_numbers(self.found.budget / _GIB / 8, self.found.budget / _GIB)]:
            row = self.y.place(gigabytes * _GIB)
            self.pen.line((_LEFT, row, width - _RIGHT, row), _FAINT if gigabytes else _INK)
            self._write(_LEFT - 8, row, f"{gigabytes:g} GiB", anchor="rm")
        row = self.y.place(self.found.budget)
        self.pen.line((_LEFT, row, width - _RIGHT, row), _INK)
        self._write(width - _RIGHT, row - 4, f"usable memory: {words.size(self.found.budget)}", anchor="rb")
        for seconds in round_numbers(self.x.low, self.x.high):
            column = self.x.place(seconds)
            self.pen.line((column, height - _BOTTOM, column, height - _BOTTOM + 5), _INK)
            self._write(column, height - _BOTTOM + 8, f"{seconds:g} s", anchor="ma")
        self._write((_LEFT + width - _RIGHT) / 2, height - 28, "Time per image", anchor="ma")
        self._write(12, 34, "Memory in use")

    def _series(self, points: Sequence[SweepPoint], color: str) -> None:
        """Draw the configurations of a resolution: its front as a line, simulated ones filled."""
        front = sorted((point for point in points if point.front), key=lambda point: point.allocated)
        places = [(self.x.place(point.seconds_per_image), self.y.place(point.allocated)) for point in front]
        if len(places) > 1:
            self.pen.line(places, color, width=2)
        for point in points:
            column, row = self.x.place(point.seconds_per_image), self.y.place(point.allocated)
            simulated = point.reserved is not None
            reach = 5 if simulated else 3
            box = (column - reach, row - reach, column + reach, row + reach)
            self.pen.ellipse(box, fill=color if simulated else None, outline=color)

    def _legend(self) -> None:
        column, row = SIZE[0] - _RIGHT + 16, _TOP + 30
        for side, color in zip(self.sides, _cycle(len(self.sides)), strict=True):
            self.pen.ellipse((column, row - 5, column + 10, row + 5), fill=color, outline=color)
            self._write(column + 18, row, f"{side} px", anchor="lm")
            row += 24
        for text in ("line: Pareto front", "filled: in the table"):
            self._write(column, row + 12, text, anchor="lm")
            row += 22

    def _write(self, column: float, row: float, text: str, anchor: str = "la") -> None:
        self.pen.text((column, row), text, fill=_INK, font=self.font, anchor=anchor)


def _cycle(count: int) -> list[str]:
    return [_COLORS[place % len(_COLORS)] for place in range(count)]
