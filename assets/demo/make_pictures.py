"""Draws the demo dataset: captioned pictures in a neon style that the demo base has never seen."""

from __future__ import annotations

import tomllib
from pathlib import Path

import drawing
from PIL import Image, ImageChops, ImageFilter

HERE = Path(__file__).parent
NIGHT: drawing.Rgb = (12, 14, 52)


def tube(mask: Image.Image, width: int) -> Image.Image:
    """The border of a coverage mask as a line of about `width` pixels (odd), an `L` picture."""
    inner = mask.filter(ImageFilter.MinFilter(width))
    outer = mask.filter(ImageFilter.MaxFilter(3))
    return ImageChops.subtract(outer, inner)


def draw_neon(scene: drawing.Scene) -> Image.Image:
    """The scene at night: hollow neon tubes in the things' colors on dark blue, tinted by the background's color."""
    ground = drawing.mix(NIGHT, drawing.COLORS[scene.background], 0.12)
    picture = Image.new("RGB", (drawing.SIZE, drawing.SIZE), ground)
    for thing in scene.things:
        color = drawing.COLORS[thing.color]
        silhouette = drawing.silhouette(thing)
        line = tube(silhouette, 13)
        core = tube(silhouette.filter(ImageFilter.MinFilter(5)), 3)
        picture.paste(color, mask=line)
        picture.paste(drawing.mix(color, (255, 255, 255), 0.6), mask=core)
    return picture


def make_pictures(folder: Path) -> None:
    """Write one PNG and its caption for every line of the dataset in prompts.toml."""
    captions: list[str] = tomllib.loads((HERE / "prompts.toml").read_text(encoding="utf-8"))["dataset"]
    folder.mkdir(parents=True, exist_ok=True)
    for number, caption in enumerate(captions, 1):
        draw_neon(drawing.scene_of(caption)).save(folder / f"neon-{number:02}.png", optimize=True)
        (folder / f"neon-{number:02}.txt").write_text(f"{caption}\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    make_pictures(HERE / "pictures")
