"""Draw the singular values of a LoRA's layers as an image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.sweep import Scale
from trainer.errors import RunError
from trainer.protocol.places import write_remedy

if TYPE_CHECKING:
    from trainer.adapter.rewriting import LayerError

SIZE = (1000, 640)
_LEFT, _TOP, _RIGHT, _BOTTOM = 90, 50, 200, 70
_INK, _PAPER = "#222222", "#ffffff"
_LOWEST = 1e-4
# Okabe and Ito's colors, which people with color blindness can tell apart.
_COLORS = {"unet": "#0072b2", "text_encoder": "#e69f00", "text_encoder_2": "#009e73"}
_TITLES = {"unet": "UNet", "text_encoder": "Text encoder", "text_encoder_2": "Text encoder 2"}


def curves(errors: Sequence[LayerError]) -> Iterator[tuple[str, int, list[float]]]:
    """Yield each layer's part, its new rank, and its singular values divided by the largest."""
    for each in errors:
        if each.sizes and each.sizes[0] > 0:
            yield each.slot.part, each.after, [max(size / each.sizes[0], _LOWEST) for size in each.sizes]


def draw(errors: Sequence[LayerError], path: Path) -> None:
    """Write an image (PNG) with a line for each layer and a dot at its new rank; raises RunError."""
    from PIL import Image, ImageDraw, ImageFont

    found = list(curves(errors))
    width, height = SIZE
    most = max((len(values) for *_, values in found), default=2)
    x = Scale(1, max(most, 2), _LEFT, width - _RIGHT)
    y = Scale(_LOWEST, 1.0, height - _BOTTOM, _TOP, logarithmic=True)
    image = Image.new("RGB", SIZE, _PAPER)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    for part, _, values in found:
        pen.line([(x.place(number), y.place(value)) for number, value in enumerate(values, 1)], _COLORS[part])
    for part, rank, values in found:
        across, down = x.place(min(rank, len(values))), y.place(values[min(rank, len(values)) - 1])
        pen.ellipse((across - 3, down - 3, across + 3, down + 3), fill=_COLORS[part], outline=_PAPER)
    pen.line((_LEFT, height - _BOTTOM, width - _RIGHT, height - _BOTTOM), _INK)
    for number in sorted({1, (most + 1) // 2, most}):
        pen.text((x.place(number), height - _BOTTOM + 8), str(number), _INK, font, anchor="ma")
    for value in (1.0, 0.1, 0.01, 0.001, _LOWEST):
        pen.text((_LEFT - 8, y.place(value)), f"{value:g}", _INK, font, anchor="rm")
    pen.text((12, 14), "Singular values of each layer, relative to its largest; dots: the new ranks", _INK, font)
    pen.text(((_LEFT + width - _RIGHT) / 2, height - 28), "Rank", _INK, font, anchor="ma")
    for row, part in enumerate(part for part in _COLORS if any(part == each[0] for each in found)):
        pen.text((width - _RIGHT + 16, _TOP + 24 * row), _TITLES[part], _COLORS[part], font)
    try:
        image.save(path, format="PNG")
    except OSError as error:
        sentence = f"Could not write the chart {path}: {error.strerror or error}."
        raise RunError("lora.chart", sentence, write_remedy(error)) from error
