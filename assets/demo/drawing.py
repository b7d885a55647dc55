"""Draws the captioned pictures that the demo base learns from: shapes, colors, backgrounds, arrangements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIZE = 128
SUPERSAMPLING = 4

Rgb = tuple[int, int, int]
Polygon = list[tuple[float, float]]

COLORS: dict[str, Rgb] = {
    "red": (222, 38, 38),
    "orange": (245, 138, 28),
    "yellow": (250, 218, 50),
    "green": (46, 160, 70),
    "blue": (42, 92, 218),
    "purple": (132, 56, 176),
    "pink": (250, 150, 198),
    "brown": (122, 74, 40),
    "black": (24, 24, 28),
    "white": (250, 250, 250),
}
PATTERNS = ("plain", "gradient", "striped", "dotted")
ARRANGEMENTS = ("one", "big", "small", "beside", "above")


@dataclass(frozen=True)
class Shape:
    """Polygons in a box of -1..1 with y downwards: filled, cut out again, and drawn in a darker tone."""

    fills: tuple[Polygon, ...]
    holes: tuple[Polygon, ...] = ()
    details: tuple[Polygon, ...] = ()


@dataclass(frozen=True)
class Thing:
    """One drawn shape: what it is, its color name, its center in pixels and its half width in pixels."""

    kind: str
    color: str
    x: float
    y: float
    radius: float
    tilt: float = 0.0


@dataclass(frozen=True)
class Scene:
    """All that one picture shows; `caption` and `draw` both read it, so they cannot disagree."""

    arrangement: str
    things: tuple[Thing, ...]
    background: str
    pattern: str


def _ellipse(x: float, y: float, rx: float, ry: float | None = None, points: int = 48) -> Polygon:
    ry = rx if ry is None else ry
    turns = [2 * math.pi * i / points for i in range(points)]
    return [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in turns]


def _star() -> Polygon:
    spokes = [(0.98 if i % 2 == 0 else 0.42, math.pi * i / 5 - math.pi / 2) for i in range(10)]
    return [(r * math.cos(a), r * math.sin(a) + 0.06) for r, a in spokes]


def _heart() -> Polygon:
    turns = [2 * math.pi * i / 64 for i in range(64)]
    return [
        (
            math.sin(a) ** 3 * 0.95,
            -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 17 - 0.08,
        )
        for a in turns
    ]


def _drop() -> Polygon:
    turns = [2 * math.pi * i / 64 for i in range(64)]
    return [(0.78 * math.sin(a) * math.sin(a / 2) ** 1.2, -0.98 * math.cos(a)) for a in turns]


def _box(left: float, top: float, right: float, bottom: float) -> Polygon:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _petals() -> tuple[Polygon, ...]:
    turns = [2 * math.pi * i / 6 for i in range(6)]
    return tuple(_ellipse(0.58 * math.cos(a), 0.58 * math.sin(a), 0.38) for a in turns)


SHAPES: dict[str, Shape] = {
    "circle": Shape((_ellipse(0, 0, 0.9),)),
    "square": Shape((_box(-0.8, -0.8, 0.8, 0.8),)),
    "triangle": Shape(([(0, -0.9), (0.98, 0.8), (-0.98, 0.8)],)),
    "diamond": Shape(([(0, -1.0), (0.68, 0), (0, 1.0), (-0.68, 0)],)),
    "star": Shape((_star(),)),
    "heart": Shape((_heart(),)),
    "cross": Shape((_box(-0.32, -0.92, 0.32, 0.92), _box(-0.92, -0.32, 0.92, 0.32))),
    "ring": Shape((_ellipse(0, 0, 0.95),), holes=(_ellipse(0, 0, 0.52),)),
    "moon": Shape((_ellipse(0, 0, 0.95),), holes=(_ellipse(0.46, -0.16, 0.78),)),
    "arrow": Shape(([(-0.95, -0.28), (0.1, -0.28), (0.1, -0.75), (0.98, 0), (0.1, 0.75), (0.1, 0.28), (-0.95, 0.28)],)),
    "flower": Shape((*_petals(), _ellipse(0, 0, 0.4)), details=(_ellipse(0, 0, 0.3),)),
    "tree": Shape(
        ([(0, -1.0), (0.6, -0.2), (-0.6, -0.2)], [(0, -0.6), (0.85, 0.5), (-0.85, 0.5)], _box(-0.2, 0.45, 0.2, 1.0)),
        details=(_box(-0.2, 0.5, 0.2, 1.0),),
    ),
    "house": Shape(
        ([(0, -0.95), (0.98, -0.1), (-0.98, -0.1)], _box(-0.72, -0.15, 0.72, 0.9)),
        details=(_box(-0.22, 0.25, 0.22, 0.9),),
    ),
    "fish": Shape(
        (_ellipse(-0.2, 0, 0.76, 0.5), [(0.35, 0), (0.98, -0.55), (0.98, 0.55)]),
        details=(_ellipse(-0.55, -0.12, 0.13),),
    ),
    "cloud": Shape(
        (
            _ellipse(-0.5, 0.15, 0.45),
            _ellipse(0.05, -0.2, 0.52),
            _ellipse(0.55, 0.18, 0.42),
            _box(-0.5, 0.1, 0.55, 0.6),
        )
    ),
    "drop": Shape((_drop(),)),
    "boat": Shape(
        (
            [(-0.98, 0.4), (0.98, 0.4), (0.6, 0.9), (-0.6, 0.9)],
            [(0.05, -0.95), (0.05, 0.28), (0.8, 0.28)],
            [(-0.08, -0.75), (-0.08, 0.28), (-0.62, 0.28)],
            _box(-0.08, -0.95, 0.06, 0.42),
        ),
        details=([(-0.98, 0.4), (0.98, 0.4), (0.6, 0.9), (-0.6, 0.9)],),
    ),
    "mushroom": Shape(
        ([p for p in _ellipse(0, 0.1, 0.95) if p[1] <= 0.11], _box(-0.3, 0.05, 0.3, 0.92)),
        details=(_box(-0.3, 0.12, 0.3, 0.92),),
    ),
}


def mask_of(polygons: tuple[Polygon, ...], thing: Thing, cut: tuple[Polygon, ...] = ()) -> Image.Image:
    """Coverage of the polygons at the thing's place, an `L` picture of SIZE x SIZE, antialiased."""
    canvas = Image.new("L", (SIZE * SUPERSAMPLING,) * 2)
    pen = ImageDraw.Draw(canvas)
    cos, sin = math.cos(thing.tilt), math.sin(thing.tilt)
    for group, value in ((polygons, 255), (cut, 0)):
        for polygon in group:
            placed = [
                (
                    (thing.x + thing.radius * (px * cos - py * sin)) * SUPERSAMPLING,
                    (thing.y + thing.radius * (px * sin + py * cos)) * SUPERSAMPLING,
                )
                for px, py in polygon
            ]
            pen.polygon(placed, fill=value)
    return canvas.reduce(SUPERSAMPLING)


def silhouette(thing: Thing) -> Image.Image:
    """Coverage of the whole thing without its holes, an `L` picture."""
    shape = SHAPES[thing.kind]
    return mask_of(shape.fills, thing, shape.holes)


def mix(one: Rgb, other: Rgb, share: float) -> Rgb:
    """`share` of `other` in `one`."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def detail_color(color: Rgb) -> Rgb:
    """The darker tone for doors, trunks and eyes; black things get a lighter one, else it would not show."""
    return mix(color, (255, 255, 255), 0.35) if sum(color) < 120 else mix(color, (0, 0, 0), 0.45)


def _tint(color: Rgb) -> Rgb:
    """The second tone of a patterned background: towards white, but for white towards gray."""
    return mix(color, (150, 150, 160), 0.45) if sum(color) > 720 else mix(color, (255, 255, 255), 0.42)


def _pattern_coverage(pattern: str) -> Image.Image:
    """Where the second tone of a background shows, an `L` picture; the phase is fixed so that it is learnt soon."""
    big = SIZE * SUPERSAMPLING
    canvas = Image.new("L", (big, big))
    pen = ImageDraw.Draw(canvas)
    cell = big // 4
    if pattern == "gradient":
        return Image.linear_gradient("L").resize((SIZE, SIZE))
    if pattern == "striped":
        for left in range(0, big, cell):
            pen.rectangle((left, 0, left + cell // 2 - 1, big), fill=255)
    if pattern == "dotted":
        for x in range(cell // 2, big, cell):
            for y in range(cell // 2, big, cell):
                pen.ellipse((x - cell // 4, y - cell // 4, x + cell // 4, y + cell // 4), fill=255)
    return canvas.reduce(SUPERSAMPLING)


COVERAGE = {pattern: _pattern_coverage(pattern) for pattern in PATTERNS}


def draw(scene: Scene) -> Image.Image:
    """The scene as an RGB picture of SIZE x SIZE in flat colors."""
    ground = COLORS[scene.background]
    picture = Image.new("RGB", (SIZE, SIZE), ground)
    picture.paste(_tint(ground), mask=COVERAGE[scene.pattern])
    for thing in scene.things:
        color = COLORS[thing.color]
        picture.paste(color, mask=silhouette(thing))
        if details := SHAPES[thing.kind].details:
            picture.paste(detail_color(color), mask=mask_of(details, thing))
    return picture


def caption(scene: Scene) -> str:
    """The words for the scene, for instance "a red star above a blue circle on a white dotted background"."""
    names = [f"{thing.color} {thing.kind}" for thing in scene.things]
    size = f"{scene.arrangement} " if scene.arrangement in ("big", "small") else ""
    what = f"a {size}{names[0]}" if len(names) == 1 else f"a {names[0]} {scene.arrangement} a {names[1]}"
    pattern = "" if scene.pattern == "plain" else f"{scene.pattern} "
    # "a orange", not "an": every caption keeps to one template, and a model this small gains from it.
    return f"{what} on a {scene.background} {pattern}background"


PLACES: dict[str, tuple[tuple[float, float, float], ...]] = {
    "one": ((64, 64, 38),),
    "big": ((64, 64, 54),),
    "small": ((64, 64, 21),),
    "beside": ((34, 64, 26), (94, 64, 26)),
    "above": ((64, 34, 26), (64, 94, 26)),
}


def place(arrangement: str, names: list[tuple[str, str]], jitter: np.random.Generator | None = None) -> list[Thing]:
    """Things of the given (kind, color) at the places of the arrangement, moved a little where `jitter` is given."""
    things = []
    for (kind, color), (x, y, radius) in zip(names, PLACES[arrangement], strict=True):
        move = jitter.uniform(-1, 1, 3) if jitter is not None else np.zeros(3)
        reach = 8 if arrangement == "small" else 3
        things.append(Thing(kind, color, x + reach * move[0], y + reach * move[1], radius * (1 + 0.06 * move[2])))
    return things


def scene_of(words: str) -> Scene:
    """The scene that a caption names, everything at its usual place; the inverse of `caption`."""
    what, ground = words.split(" on a ")
    background, *rest = ground.split()
    pattern = rest[0] if len(rest) > 1 else "plain"
    for arrangement in ("beside", "above"):
        if f" {arrangement} " in what:
            names = [(kind, color) for _, color, kind in map(str.split, what.split(f" {arrangement} "))]
            return Scene(arrangement, tuple(place(arrangement, names)), background, pattern)
    *size, color, kind = what.split()[1:]
    arrangement = size[0] if size else "one"
    return Scene(arrangement, tuple(place(arrangement, [(kind, color)])), background, pattern)


def random_scene(rng: np.random.Generator) -> Scene:
    """A scene drawn at random; no thing has its background's color."""
    arrangement = str(rng.choice(ARRANGEMENTS, p=(0.4, 0.12, 0.12, 0.18, 0.18)))
    pattern = str(rng.choice(PATTERNS, p=(0.58, 0.14, 0.14, 0.14)))
    background = str(rng.choice(list(COLORS)))
    others = [color for color in COLORS if color != background]
    names = [(str(rng.choice(list(SHAPES))), str(rng.choice(others))) for _ in PLACES[arrangement]]
    return Scene(arrangement, tuple(place(arrangement, names, rng)), background, pattern)


def scribble(rng: np.random.Generator) -> Image.Image:
    """Lines, ovals and polygons in any color: without them the VAE would know ten colors and nothing else."""
    big = SIZE * 2

    def any_color() -> Rgb:
        red, green, blue = (int(c) for c in rng.integers(0, 256, 3))
        return red, green, blue

    picture = Image.new("RGB", (big, big), any_color())
    picture.paste(any_color(), mask=Image.linear_gradient("L").resize((big, big)).rotate(float(rng.integers(0, 360))))
    pen = ImageDraw.Draw(picture)
    for _ in range(int(rng.integers(3, 9))):
        points = [(float(x), float(y)) for x, y in rng.integers(-20, big + 20, (int(rng.integers(2, 6)), 2))]
        match int(rng.integers(0, 3)):
            case 0:
                pen.line(points, fill=any_color(), width=int(rng.integers(4, 22)), joint="curve")
            case 1:
                x, y = points[0]
                pen.ellipse((x - 50, y - 40, x + 50, y + 40), outline=any_color(), width=int(rng.integers(4, 40)))
            case _:
                pen.polygon(points if len(points) > 2 else [*points, (0.0, 0.0)], fill=any_color())
    return picture.reduce(2)
