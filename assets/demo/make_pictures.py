"""Draws the demo dataset: captioned pictures in a neon style that the demo base has never seen."""

from __future__ import annotations

import tomllib
from pathlib import Path

import drawing
from PIL import Image, ImageChops, ImageFilter

HERE = Path(__file__).parent
NIGHT: drawing.Rgb = (12, 14, 52)


def outline(mask: Image.Image) -> Image.Image:
    """The border of a coverage mask as a line of about five pixels, an `L` picture."""
    inner = mask.filter(ImageFilter.MinFilter(5))
    outer = mask.filter(ImageFilter.MaxFilter(5))
    return ImageChops.subtract(outer, inner).filter(ImageFilter.GaussianBlur(0.6))


def draw_neon(scene: drawing.Scene) -> Image.Image:
    """The scene at night: a dark blue ground tinted by its background, things as bright lines with a glow."""
    ground = drawing.mix(NIGHT, drawing.COLOURS[scene.background], 0.1)
    picture = Image.new("RGB", (drawing.SIZE, drawing.SIZE), ground)
    for thing in scene.things:
        colour = drawing.COLOURS[thing.colour]
        silhouette = drawing.silhouette(thing)
        line = outline(silhouette)
        for polygons in drawing.SHAPES[thing.kind].details:
            line = ImageChops.lighter(line, outline(drawing.mask_of((polygons,), thing)))
        glow = line.filter(ImageFilter.GaussianBlur(5)).point(lambda value: min(255, value * 1.1))
        picture.paste(drawing.mix(ground, colour, 0.15), mask=silhouette)
        picture.paste(colour, mask=glow)
        picture.paste(drawing.mix(colour, (255, 255, 255), 0.45), mask=line)
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
