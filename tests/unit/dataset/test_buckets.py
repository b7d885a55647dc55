"""Buckets: which shapes there are, which one a picture gets, and what is lost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.images import recipe_of
from trainer.config.recipe import RecipeConfig
from trainer.dataset.image import choose_bucket, crop_loss, enlargement

SIDES = st.integers(1, 9000)


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        ((1024, 1024), (1024, 1024)),
        ((832, 1216), (832, 1216)),
        ((1216, 832), (1216, 832)),
        ((4000, 3000), (1152, 896)),
        ((3000, 4000), (896, 1152)),
        ((1920, 1080), (1344, 768)),
        ((20000, 1000), (2048, 512)),
    ],
)
def test_sdxl_gets_its_usual_shapes(size: tuple[int, int], bucket: tuple[int, int]) -> None:
    assert choose_bucket(*size, recipe_of(1024)) == bucket


def test_sd15_gets_its_usual_shapes() -> None:
    assert choose_bucket(2000, 3000, recipe_of(512)) == (384, 640)
    assert choose_bucket(3000, 3000, recipe_of(512)) == (512, 512)


@given(
    width=SIDES,
    height=SIDES,
    resolution=st.sampled_from([256, 512, 768, 1000, 1024]),
    step=st.sampled_from([8, 32, 64]),
)
def test_every_bucket_keeps_all_limits(width: int, height: int, resolution: int, step: int) -> None:
    recipe = recipe_of(resolution, images={"bucket_step": step})
    bucket = choose_bucket(width, height, recipe)
    if bucket is None:
        assert min(width, height) * 1.25 < step
        return
    assert bucket[0] % step == bucket[1] % step == 0
    assert bucket[0] * bucket[1] <= resolution**2
    assert enlargement(width, height, bucket) <= 1.25
    assert max(bucket) <= resolution * 2
    if min(width, height) >= resolution * 2:
        assert min(bucket) >= resolution // 2 // step * step


@given(width=SIDES, height=SIDES)
def test_no_other_allowed_shape_loses_less(width: int, height: int) -> None:
    """Against a search through all shapes that fill the area or reach the enlargement limit as far as steps allow."""
    recipe = recipe_of(512)
    bucket = choose_bucket(width, height, recipe)
    widest, tallest = (min(int(side * 1.25) // 64 * 64, 1024) for side in (width, height))
    if bucket is None or not (widest >= 256 and tallest >= 256):
        return
    shapes = [
        (w, h)
        for w in range(256, widest + 1, 64)
        for h in range(256, tallest + 1, 64)
        if w * h <= 512**2 and (h + 64 > tallest or w * (h + 64) > 512**2 or w + 64 > widest or (w + 64) * h > 512**2)
    ]
    assert crop_loss(width, height, bucket) <= min(crop_loss(width, height, shape) for shape in shapes) + 1e-9


def test_small_pictures_get_smaller_buckets_not_larger_pixels() -> None:
    recipe = recipe_of(1024)
    assert choose_bucket(300, 400, recipe) == (320, 448)
    assert choose_bucket(300, 400, recipe_of(1024, images={"max_upscale": 1.0})) == (256, 384)
    assert choose_bucket(300, 400, recipe_of(1024, images={"max_upscale": 16.0})) == (896, 1152)
    assert choose_bucket(51, 500, recipe) is None
    assert choose_bucket(52, 52, recipe) == (64, 64)


def test_without_buckets_all_is_square() -> None:
    recipe = recipe_of(512, images={"buckets": False})
    assert choose_bucket(3000, 1000, recipe) == (512, 512)
    assert choose_bucket(3000, 300, recipe) == (320, 320)
    assert choose_bucket(3000, 30, recipe) is None


def test_stated_limits_hold() -> None:
    recipe = recipe_of(1024, images={"bucket_min": 696, "bucket_max": 1304})
    assert choose_bucket(9000, 1000, recipe) == (1280, 704)


def test_an_unresolved_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match="resolved"):
        choose_bucket(512, 512, RecipeConfig())


def test_crop_loss_is_the_share_of_area() -> None:
    assert crop_loss(200, 100, (64, 64)) == pytest.approx(0.5)
    assert crop_loss(100, 150, (512, 512)) == pytest.approx(1 / 3)
    assert math.isclose(crop_loss(64, 96, (128, 192)), 0.0)
