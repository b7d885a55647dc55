"""The length of a run in steps, epochs and images seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.recipe import RecipeConfig
from trainer.config.resolve import Length, length_of, resolve_length, steps_per_epoch


def test_the_three_measures_in_one_sentence() -> None:
    assert str(resolve_length(RecipeConfig(epochs=30), 160)) == "1,200 steps = 30 epochs = about 4,800 images seen"
    assert str(resolve_length(RecipeConfig(steps=1), 4)) == "1 step = 1 epoch = about 4 images seen"
    assert str(resolve_length(RecipeConfig(steps=5), 10)) == "5 steps = 1.7 epochs = about 18 images seen"


@pytest.mark.parametrize(
    ("recipe", "samples", "expected"),
    [
        (RecipeConfig(steps=100), 10, Length(100, 100 / 3, 334)),
        (RecipeConfig(epochs=2), 10, Length(6, 2.0, 20)),
        (RecipeConfig(epochs=2, effective_batch=16), 10, Length(2, 2.0, 20)),
        (RecipeConfig(images_seen=20), 10, Length(6, 2.0, 20)),
        (RecipeConfig(images_seen=21), 10, Length(7, 7 / 3, 24)),
        (RecipeConfig(images_seen=1), 10, Length(1, 1 / 3, 4)),
    ],
)
def test_stated_lengths(recipe: RecipeConfig, samples: int, expected: Length) -> None:
    assert resolve_length(recipe, samples) == expected


@pytest.mark.parametrize(
    ("samples", "pictures"), [(1, 1_600), (20, 2_000), (60, 6_000), (500, 8_000), (10_000, 10_000)]
)
def test_default_length(samples: int, pictures: int) -> None:
    length = resolve_length(RecipeConfig(effective_batch=1), samples)
    assert (length.steps, length.images) == (pictures, pictures)


@given(samples=st.integers(1, 300), batch=st.integers(1, 40), steps=st.integers(1, 2000))
def test_pictures_are_those_of_the_batches_dealt(samples: int, batch: int, steps: int) -> None:
    epoch = [batch] * (samples // batch) + ([samples % batch] if samples % batch else [])
    assert len(epoch) == steps_per_epoch(samples, batch)
    assert length_of(steps, samples, batch).images == sum(epoch[step % len(epoch)] for step in range(steps))


@given(samples=st.integers(1, 300), batch=st.integers(1, 40), wanted=st.integers(1, 5000))
def test_the_fewest_steps_that_show_enough(samples: int, batch: int, wanted: int) -> None:
    steps = resolve_length(RecipeConfig(images_seen=wanted, effective_batch=batch), samples).steps
    assert length_of(steps, samples, batch).images >= wanted
    assert steps == 1 or length_of(steps - 1, samples, batch).images < wanted
