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
    ("resolution", "settings", "size", "bucket"),
    [
        pytest.param(1024, {}, (1024, 1024), (1024, 1024), id="SDXL: square"),
        pytest.param(1024, {}, (832, 1216), (832, 1216), id="SDXL: exactly its portrait"),
        pytest.param(1024, {}, (1216, 832), (1216, 832), id="SDXL: exactly its landscape"),
        pytest.param(1024, {}, (4000, 3000), (1152, 896), id="SDXL: 4 to 3"),
        pytest.param(1024, {}, (3000, 4000), (896, 1152), id="SDXL: 3 to 4"),
        pytest.param(1024, {}, (1920, 1080), (1344, 768), id="SDXL: 16 to 9"),
        pytest.param(1024, {}, (20000, 1000), (2048, 512), id="SDXL: a panorama"),
        pytest.param(512, {}, (2000, 3000), (384, 640), id="SD 1.5: 2 to 3"),
        pytest.param(512, {}, (3000, 3000), (512, 512), id="SD 1.5: square"),
        pytest.param(1024, {}, (300, 400), (320, 448), id="a small image has a smaller bucket, not larger pixels"),
        pytest.param(1024, {"max_upscale": 1.0}, (300, 400), (256, 384), id="a small image is not enlarged"),
        pytest.param(1024, {"max_upscale": 16.0}, (300, 400), (896, 1152), id="a small image is enlarged at will"),
        pytest.param(1024, {}, (51, 500), None, id="too small for any bucket"),
        pytest.param(1024, {}, (52, 52), (64, 64), id="just large enough for the smallest bucket"),
        pytest.param(512, {"buckets": False}, (3000, 1000), (512, 512), id="without buckets all is square"),
        pytest.param(512, {"buckets": False}, (3000, 300), (320, 320), id="without buckets a flat image: smaller"),
        pytest.param(512, {"buckets": False}, (3000, 30), None, id="without buckets: too flat"),
        pytest.param(1024, {"bucket_min": 696, "bucket_max": 1304}, (9000, 1000), (1280, 704), id="stated limits hold"),
    ],
)
def test_each_image_has_its_bucket(
    resolution: int, settings: dict[str, object], size: tuple[int, int], bucket: tuple[int, int] | None
) -> None:
    assert choose_bucket(*size, recipe_of(resolution, images=settings)) == bucket


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


def test_an_unresolved_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match="resolved"):
        choose_bucket(512, 512, RecipeConfig())


def test_crop_loss_is_the_share_of_area() -> None:
    assert crop_loss(200, 100, (64, 64)) == pytest.approx(0.5)
    assert crop_loss(100, 150, (512, 512)) == pytest.approx(1 / 3)
    assert math.isclose(crop_loss(64, 96, (128, 192)), 0.0)
