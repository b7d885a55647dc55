"""Lays pictures out side by side with their prompts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

SCALE = 2
COLUMNS = 6
GAP = 12
LABEL_HEIGHT = 90
TITLE_WIDTH = 130
LETTERS_PER_LINE = 30
PAPER, INK, FAINT = "#f6f4f0", "#22201d", "#8a857c"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of pictures, one a prompt, all of one size."""

    title: str
    pictures: Sequence[Image.Image]


def draw_sheet(rows: Sequence[Row], prompts: Sequence[str], inside: int) -> Image.Image:
    """The rows with prompts below, wrapped after COLUMNS; the first ``inside`` prompts are marked as trained on."""
    bands = []
    for start in range(0, len(prompts), COLUMNS):
        part = slice(start, start + COLUMNS)
        cut = [Row(row.title, row.pictures[part]) for row in rows]
        bands.append(draw_band(cut, prompts[part], inside - start))
    size = (bands[0].width, sum(band.height for band in bands))
    sheet = Image.new("RGB", size, PAPER)
    for number, band in enumerate(bands):
        sheet.paste(band, (0, number * bands[0].height))
    return sheet


def draw_band(rows: Sequence[Row], prompts: Sequence[str], inside: int) -> Image.Image:
    """One column a prompt, one row each, prompts below."""
    side = rows[0].pictures[0].width * SCALE
    columns = len(prompts)
    size = (TITLE_WIDTH + columns * (side + GAP) + GAP, GAP + len(rows) * (side + GAP) + LABEL_HEIGHT)
    sheet = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(sheet)
    small, large = ImageFont.load_default(15), ImageFont.load_default(19)
    for line, row in enumerate(rows):
        top = GAP + line * (side + GAP)
        pen.text((GAP, top + side // 2 - 10), row.title, INK, large)
        for column, picture in enumerate(row.pictures):
            enlarged = picture.resize((side, side), Image.Resampling.LANCZOS)
            sheet.paste(enlarged, (TITLE_WIDTH + GAP + column * (side + GAP), top))
    top = GAP + len(rows) * (side + GAP)
    for column, prompt in enumerate(prompts):
        left = TITLE_WIDTH + GAP + column * (side + GAP)
        pen.text((left, top), "in the dataset" if column < inside else "new", FAINT, small)
        pen.multiline_text((left, top + 20), "\n".join(textwrap.wrap(prompt, LETTERS_PER_LINE)), INK, small)
    return sheet
