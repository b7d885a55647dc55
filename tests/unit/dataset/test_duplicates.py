"""Near-duplicates: copies of photographs are found, different photographs and drawings are not."""

import io
from itertools import combinations

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.support.images import photograph
from trainer.dataset.duplicates import Fingerprints, alike, fingerprint, same

# fmt: off
PHOTOS = [
    "astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "clock_motion.png", "coffee.png",
    "coins.png", "color.png", "grass.png", "gravel.png", "horse.png", "hubble_deep_field.jpg", "ihc.png",
    "moon.png", "page.png", "phantom.png", "retina.jpg", "rocket.jpg", "text.png",
]
# fmt: on


def resaved(image: Image.Image, quality: int = 30) -> Image.Image:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=quality)
    with Image.open(data) as copy:
        return copy.convert("RGB")


def cropped(image: Image.Image) -> Image.Image:
    return image.crop((round(image.width * 0.01), round(image.height * 0.01), image.width, image.height))


def halved(image: Image.Image) -> Image.Image:
    return image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS)


def near(*images: Image.Image) -> list[list[int]]:
    return alike([fingerprint(image) for image in images])


@pytest.mark.parametrize("change", [resaved, halved, cropped])
def test_copies_are_found(change: object) -> None:
    assert callable(change)
    missed = [name for name in PHOTOS if near(photograph(name), change(photograph(name))) != [[0, 1]]]
    assert len(missed) <= 1, missed  # a pattern of identical bricks may look like another when cut


def test_a_stereo_pair_is_nearly_the_same() -> None:
    assert near(photograph("motorcycle_left.png"), photograph("motorcycle_right.png")) == [[0, 1]]


def test_different_photographs_are_different() -> None:
    assert not near(*map(photograph, PHOTOS))


def drawing(shape: str, color: str, ground: str, place: int) -> Image.Image:
    image = Image.new("RGB", (128, 128), ground)
    box = [(8, 8, 60, 60), (68, 8, 120, 60), (8, 68, 60, 120), (68, 68, 120, 120)][place]
    draw = ImageDraw.Draw(image)
    (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=color)
    return image


def test_flat_drawings_of_other_colours_and_places_are_different() -> None:
    colors = ("red", "blue", "green")
    drawings = [
        drawing("circle", color, ground, place)
        for color in colors
        for ground in (*colors, "white")
        for place in range(4)
        if ground != color
    ]
    assert not near(*drawings)


def test_chains_make_one_group() -> None:
    image = photograph()
    group = near(photograph("chelsea.png"), image, photograph("coffee.png"), resaved(image), halved(image))
    assert group == [[1, 3, 4]]


def test_none_and_one() -> None:
    assert near() == []
    assert near(photograph()) == []


def test_a_fingerprint_has_the_stated_size() -> None:
    assert len(fingerprint(photograph())) == 64
    assert len(fingerprint(Image.new("RGB", (1, 1)))) == 64


def test_groups_against_all_pairs() -> None:
    """Random fingerprints with planted copies, against the plain definition."""
    random = np.random.default_rng(0)
    prints = [random.bytes(64) for _ in range(60)]
    prints += [bytes([prints[place][0] ^ 7, *prints[place][1:]]) for place in (3, 3, 17)]

    def close(one: bytes, other: bytes) -> bool:
        bits = sum((a ^ b).bit_count() for a, b in zip(one[:16], other[:16], strict=True))
        return bits <= 24 and max(abs(a - b) for a, b in zip(one[16:], other[16:], strict=True)) <= 32

    pairs = {pair for pair in combinations(range(len(prints)), 2) if close(prints[pair[0]], prints[pair[1]])}
    assert pairs == {(3, 60), (3, 61), (60, 61), (17, 62)}
    assert alike(prints) == [[3, 60, 61], [17, 62]]


def test_same_bytes() -> None:
    assert same(["a", "b", "a", "c", "b", "a"]) == [[0, 2, 5], [1, 4]]


def test_fingerprints_taken_in_portions_find_the_same_neighbours_as_all_at_once() -> None:
    draw = np.random.default_rng(7)
    prints = [draw.bytes(64) for _ in range(40)]
    prints += [bytes([one[0] ^ 1, *one[1:-1], max(one[-1] - 3, 0)]) for one in prints[::3]]
    whole = Fingerprints(prints)
    grown = Fingerprints()
    for start in range(0, len(prints), 7):
        grown.add(prints[start : start + 7])
    found = [grown.near(place, slice(0, len(prints))) for place in range(len(prints))]
    assert found == [whole.near(place, slice(None)) for place in range(len(prints))]
    assert found[0] == [0, 40]
    assert sum(map(len, found)) == len(prints) + 2 * 14
