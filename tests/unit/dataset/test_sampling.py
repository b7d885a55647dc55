"""Effective batches, windows and micro-conditioning: what each step of a run sees."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.images import make_picture, recipe_of
from trainer.config.recipe import RecipeConfig
from trainer.dataset.image import ImageRecord
from trainer.dataset.sampling import (
    EpochBatches,
    Sample,
    batched_shapes,
    caption_lengths,
    crop_window,
    draw_sample,
    epoch_samples,
    micro_batches,
    micro_conditioning,
    padded_tokens,
    plain_sample,
    samples_per_epoch,
    steps_per_epoch,
    usual_shape,
)

BUCKETS = ((128, 128), (64, 192), (192, 64))
CHANCY = recipe_of(
    128,
    effective_batch=4,
    seed=3,
    images={"crop": "random", "flip": True},
    captions={"shuffle": True, "dropout": 0.1},
)


def pictures_of(*counts: int, **facts: object) -> list[ImageRecord]:
    """So many pictures for each bucket, numbered through."""
    buckets = [bucket for bucket, count in zip(BUCKETS, counts, strict=False) for _ in range(count)]
    return [
        make_picture(number, bucket=bucket, width=200, height=300, captions=("a, b, c, d",), **facts)
        for number, bucket in enumerate(buckets)
    ]


def showing(sample: Sample) -> tuple[str, int]:
    return sample.image.id, sample.repeat


@given(
    counts=st.tuples(*[st.integers(0, 13)] * 3).filter(any),
    repeats=st.integers(1, 3),
    size=st.integers(1, 9),
    epoch=st.integers(0, 5),
)
def test_an_epoch_shows_everything_once_in_as_few_steps_as_can_be(
    counts: tuple[int, int, int], repeats: int, size: int, epoch: int
) -> None:
    pictures = pictures_of(*counts, repeats=repeats)
    recipe = recipe_of(128, effective_batch=size)
    batches = EpochBatches(pictures, recipe, epoch)
    shown = Counter(showing(sample) for batch in batches for sample in batch)
    assert shown == Counter({(picture.id, repeat): 1 for picture in pictures for repeat in range(repeats)})
    total = sum(counts) * repeats
    assert len(batches) == -(-total // size) == steps_per_epoch(pictures, recipe)
    assert samples_per_epoch(pictures) == total
    assert sorted(len(batch) for batch in batches)[1:] == [size] * (len(batches) - 1)
    pure = sum(count * repeats // size for count in counts)
    assert sum(len({sample.image.bucket for sample in batch}) == 1 for batch in batches if len(batch) == size) >= pure


def test_every_nth_epoch_has_no_captions() -> None:
    """As in sd-scripts, which counts epochs from 1: `current_epoch % caption_dropout_every_n_epochs == 0`."""
    (image,) = pictures_of(1, trigger="zwx")
    recipe = recipe_of(128, captions={"dropout_every_epochs": 3, "prefix": "art"})
    captions = [draw_sample(image, recipe, epoch, 0).caption for epoch in range(7)]
    assert captions == [*["art zwx, a, b, c, d"] * 2, "", *["art zwx, a, b, c, d"] * 2, "", "art zwx, a, b, c, d"]
    plain = recipe.replaced(captions=recipe.captions.replaced(dropout_every_epochs=None))
    assert plain_sample(image, recipe) == plain_sample(image, plain)
    long = replace(image, captions=("cat " * 100,))
    varied = recipe.replaced(token_chunks=225, caption_padding="caption")
    assert [draw_sample(long, varied, epoch, 0).tokens for epoch in (1, 2)] == [150, 75]
    assert caption_lengths(long, varied).shortest == 75


def test_captions_grow_with_the_steps_of_the_run() -> None:
    pictures = pictures_of(6, 4)
    recipe = recipe_of(128, effective_batch=4, steps=8, captions={"token_warmup_step": 0.75, "token_warmup_min": 0})
    batches = [batch for epoch in range(3) for batch in EpochBatches(pictures, recipe, epoch)]
    counts = [{len(sample.caption.split(", ")) if sample.caption else 0 for sample in batch} for batch in batches]
    assert counts == [{step * 4 // 6} for step in range(6)] + [{4}] * 3
    assert draw_sample(pictures[0], recipe, 0, 0).caption == "a, b, c, d"


def test_batches_do_not_depend_on_the_lengths_that_captions_grow_to() -> None:
    """The step of a sample follows from its batch, so the batch cannot follow from the step's caption."""
    words = {"captions": (", ".join(f"tag number {number}" for number in range(40)),)}
    long = [replace(picture, **words) for picture in pictures_of(5, 0)]
    short = [replace(picture, id=f"{number:064}") for number, picture in enumerate(pictures_of(3, 0))]
    lengths = {"effective_batch": 4, "steps": 20, "token_chunks": 225, "caption_padding": "caption"}
    plain = recipe_of(128, **lengths, captions={"shuffle": True})
    grown = recipe_of(128, **lengths, captions={"shuffle": True, "token_warmup_step": 20})
    for epoch in range(3):
        same = [
            [[showing(sample) for sample in batch] for batch in EpochBatches(long + short, recipe, epoch)]
            for recipe in (plain, grown)
        ]
        assert same[0] == same[1]
    shown = [sample for epoch in range(10) for batch in EpochBatches(long, grown, epoch) for sample in batch]
    assert [sample.tokens for sample in shown] == [padded_tokens(sample.caption, grown) for sample in shown]
    assert {sample.tokens for sample in shown} == {75, 150, 225}


def test_a_bucket_fills_its_own_batches_while_it_can() -> None:
    batches = EpochBatches(pictures_of(9, 6, 3), recipe_of(128, effective_batch=4), 0)
    pure = Counter(batch[0].image.bucket for batch in batches if len({s.image.bucket for s in batch}) == 1)
    assert pure[BUCKETS[0]] >= 2
    assert pure[BUCKETS[1]] >= 1
    assert len(batches) == 5


def test_leftovers_of_many_buckets_share_batches() -> None:
    pictures = pictures_of(1, 1, 1)
    batches = EpochBatches(pictures, recipe_of(128, effective_batch=4), 0)
    assert [len(batch) for batch in batches] == [3]
    assert {sample.image.bucket for sample in batches[0]} == set(BUCKETS)


def test_batches_do_not_depend_on_the_order_or_names_of_files() -> None:
    pictures = pictures_of(9, 6, 3, repeats=2)
    renamed = [replace(picture, path=Path(f"elsewhere/{99 - n}.jpg")) for n, picture in enumerate(pictures)][::-1]

    def seen(batches: list[tuple[Sample, ...]]) -> list[list[object]]:
        return [[(showing(s), s.caption, s.window, s.flip) for s in batch] for batch in batches]

    assert seen(EpochBatches(pictures, CHANCY, 2)) == seen(EpochBatches(renamed, CHANCY, 2))


def test_epochs_and_seeds_deal_differently() -> None:
    pictures = pictures_of(12)
    first = [[showing(s) for s in batch] for batch in EpochBatches(pictures, CHANCY, 0)]
    assert first == [[showing(s) for s in batch] for batch in EpochBatches(pictures, CHANCY, 0)]
    assert first != [[showing(s) for s in batch] for batch in EpochBatches(pictures, CHANCY, 1)]
    assert first != [[showing(s) for s in batch] for batch in EpochBatches(pictures, CHANCY.replaced(seed=4), 0)]


def test_mixed_batches_come_at_any_time_of_the_epoch() -> None:
    pictures = pictures_of(8, 9, 1)
    places = {
        place
        for epoch in range(40)
        for place, batch in enumerate(EpochBatches(pictures, CHANCY, epoch))
        if len({sample.image.bucket for sample in batch}) > 1
    }
    assert places == set(range(5))


@given(counts=st.tuples(*[st.integers(0, 9)] * 3).filter(any), size=st.integers(1, 5))
def test_micro_batches_split_by_bucket_and_lose_nothing(counts: tuple[int, int, int], size: int) -> None:
    for batch in EpochBatches(pictures_of(*counts), recipe_of(128, effective_batch=7), 0):
        parts = micro_batches(batch, size)
        assert sorted(map(showing, batch)) == sorted(showing(sample) for part in parts for sample in part)
        assert all(len({sample.image.bucket for sample in part}) == 1 and len(part) <= size for part in parts)
        held = Counter(sample.image.bucket for sample in batch)
        assert len(parts) == sum(-(-number // size) for number in held.values())


def test_regularization_matches_the_training_showings() -> None:
    trained = pictures_of(4, repeats=3)
    few = [make_picture(100 + n, kind="regularization") for n in range(5)]
    shown = Counter(picture.id for picture, _ in epoch_samples([*trained, *few], 0) if picture.kind != "train")
    assert sum(shown.values()) == 12
    assert sorted(shown.values()) == [2, 2, 2, 3, 3]
    assert samples_per_epoch([*trained, *few]) == 24
    assert steps_per_epoch([*trained, *few], recipe_of(128, effective_batch=5)) == 5


def test_more_regularization_pictures_than_needed_are_all_used_over_the_epochs() -> None:
    trained = pictures_of(4)
    many = [make_picture(100 + n, kind="regularization") for n in range(10)]
    epochs = [
        [picture.id for picture, _ in epoch_samples([*trained, *many], epoch) if picture.kind != "train"]
        for epoch in range(5)
    ]
    assert [len(set(shown)) for shown in epochs] == [4] * 5
    assert Counter(id for shown in epochs for id in shown) == Counter({picture.id: 2 for picture in many})


def test_repeats_weigh_regularization_pictures_in_the_ring() -> None:
    pictures = [
        *pictures_of(6),
        make_picture(7, kind="regularization", repeats=2),
        make_picture(8, kind="regularization"),
    ]
    shown = Counter(picture.id for picture, _ in epoch_samples(pictures, 0) if picture.kind != "train")
    assert sorted(shown.values()) == [2, 4]


def test_validation_pictures_are_never_shown() -> None:
    pictures = [*pictures_of(3), make_picture(9, kind="validation")]
    assert samples_per_epoch(pictures) == 3
    assert all(picture.kind == "train" for picture, _ in epoch_samples(pictures, 0))


def test_two_files_of_the_same_bytes_never_share_a_stream() -> None:
    one = make_picture(1, repeats=2, width=300)
    other = replace(one, path=Path("copy.png"), repeats=3)
    samples = [draw_sample(picture, CHANCY, 0, repeat) for picture, repeat in epoch_samples([one, other], 0)]
    assert sorted(sample.repeat for sample in samples) == [0, 1, 2, 3, 4]


def test_a_sample_is_a_function_of_seed_epoch_content_and_repeat() -> None:
    picture = make_picture(5, width=400, height=200, captions=("a, b, c, d, e, f",))
    moved = replace(picture, path=Path("other.png"))
    sample = draw_sample(picture, CHANCY, 3, 1)
    assert replace(draw_sample(moved, CHANCY, 3, 1), image=picture) == sample
    others = [
        draw_sample(picture, CHANCY, 4, 1),
        draw_sample(picture, CHANCY, 3, 2),
        draw_sample(picture, CHANCY.replaced(seed=4), 3, 1),
    ]
    assert all((other.caption, other.window) != (sample.caption, sample.window) for other in others)


def test_settings_of_one_stream_do_not_move_the_others() -> None:
    picture = make_picture(5, width=400, height=200, captions=("a, b, c, d, e, f",))
    plain = CHANCY.replaced(captions={})
    assert draw_sample(picture, plain, 0, 0).window == draw_sample(picture, CHANCY, 0, 0).window
    assert draw_sample(picture, plain, 0, 0).flip == draw_sample(picture, CHANCY, 0, 0).flip


def test_half_of_the_showings_are_mirrored_and_crops_reach_all_places() -> None:
    picture = make_picture(5, width=130, height=128)
    samples = [draw_sample(picture, CHANCY, epoch, 0) for epoch in range(600)]
    assert 240 < sum(sample.flip for sample in samples) < 360
    assert {sample.window[0] for sample in samples} == {0, 1, 2}


def test_images_are_turned_and_jittered_as_often_and_as_far_as_they_may() -> None:
    picture = make_picture(5, width=400, height=200)
    lively = CHANCY.replaced(images={"crop": "random", "flip": True, "rotation": 4, "color_jitter": True})
    samples = [draw_sample(picture, lively, epoch, 0) for epoch in range(2000)]
    assert {sample.angle for sample in samples} == {*range(-4, 5)}
    hues, gammas = ([s for s in samples if s.hue], [s for s in samples if s.gamma != 1.0])
    assert not {id(sample) for sample in hues} & {id(sample) for sample in gammas}
    assert 250 < len(hues) < 410 and 220 < len(gammas) < 380  # a sixth of the samples each, but for shifts of 0
    assert {sample.hue for sample in hues} == {*range(-16, 17)} - {0}
    assert {sample.gamma for sample in gammas} == {round(1 + step / 100, 2) for step in range(-5, 6) if step}
    for sample in samples[:50]:
        plain = draw_sample(picture, CHANCY, sample.epoch, 0)
        assert (plain.caption, plain.window, plain.flip) == (sample.caption, sample.window, sample.flip)
        assert plain.pixels == (plain.window, picture.bucket, plain.flip)  # as cached before there were such changes
        assert (sample.pixels == plain.pixels) == (not sample.angle and not sample.hue and sample.gamma == 1.0)
    assert plain_sample(picture, lively).pixels == plain_sample(picture, CHANCY).pixels


def test_plain_samples_know_no_chance() -> None:
    picture = make_picture(5, width=400, height=200, captions=("a, b, c, d",), trigger="zwx")
    sample = plain_sample(picture, CHANCY)
    assert (sample.caption, sample.window, sample.flip) == ("zwx, a, b, c, d", (100, 0, 200, 200), False)


@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    bucket=st.sampled_from([(64, 64), (832, 1216), (1216, 832)]),
    crop=st.sampled_from([None, (0.0, 0.0, 0.5, 1.0), (0.25, 0.1, 0.9, 0.4), (0.9999, 0.9999, 1.0, 1.0)]),
    across=st.floats(0, 1),
    down=st.floats(0, 1),
)
def test_windows_lie_inside_and_have_the_shape_of_the_bucket(
    width: int,
    height: int,
    bucket: tuple[int, int],
    crop: tuple[float, float, float, float] | None,
    across: float,
    down: float,
) -> None:
    picture = make_picture(width=width, height=height, bucket=bucket, crop=crop)
    x, y, wide, high = picture.region()
    left, top, window_width, window_height = crop_window(picture, across, down)
    assert 0 <= x <= left
    assert left + window_width <= x + wide <= width
    assert 0 <= y <= top
    assert top + window_height <= y + high <= height
    assert window_width == wide or window_height == high
    assert abs(window_width - window_height * bucket[0] / bucket[1]) <= 1.5 or min(window_width, window_height) == 1


def test_centre_windows() -> None:
    assert crop_window(make_picture(width=300, height=200, bucket=(64, 64)), 0.5, 0.5) == (50, 0, 200, 200)
    assert crop_window(make_picture(width=200, height=300, bucket=(64, 64)), 0.5, 0.5) == (0, 50, 200, 200)
    cropped = make_picture(width=400, height=400, bucket=(64, 128), crop=(0.5, 0.0, 1.0, 0.5))
    assert crop_window(cropped, 0.5, 0.5) == (250, 0, 100, 200)


def conditioning(picture: ImageRecord, window: tuple[int, int, int, int], *, flip: bool = False) -> tuple[int, ...]:
    return micro_conditioning(Sample(picture, 0, 0, "", window, flip))


def test_micro_conditioning_by_hand() -> None:
    """A picture of 3000×2000, scaled to 1536×1024 for a bucket of 1024: center crop begins 256 pixels from the left."""
    picture = make_picture(width=3000, height=2000, bucket=(1024, 1024))
    assert conditioning(picture, (500, 0, 2000, 2000)) == (2000, 3000, 0, 256, 1024, 1024)
    assert conditioning(picture, (0, 0, 2000, 2000)) == (2000, 3000, 0, 0, 1024, 1024)
    assert conditioning(picture, (0, 0, 2000, 2000), flip=True) == (2000, 3000, 0, 512, 1024, 1024)
    tall = make_picture(width=2000, height=3000, bucket=(1024, 1024))
    assert conditioning(tall, (0, 500, 2000, 2000)) == (3000, 2000, 256, 0, 1024, 1024)
    turned = Sample(picture, 0, 0, "", (500, 0, 2000, 2000), flip=False, angle=45)
    # Of the sides, 1 / sqrt(2) is left: 1414 pixels, from 793 and 293 on, become 1024.
    assert micro_conditioning(turned) == (2000, 3000, 212, 574, 1024, 1024)
    portrait = make_picture(width=832, height=2432, bucket=(832, 1216))
    assert conditioning(portrait, (0, 1000, 832, 1216), flip=True) == (2432, 832, 1000, 0, 1216, 832)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_effective_batch_alone_decides_the_steps(size: int) -> None:
    assert steps_per_epoch(pictures_of(5, 4, 3), recipe_of(128, effective_batch=size)) == -(-12 // size)


def test_unresolved_recipes_can_be_sampled() -> None:
    assert len(EpochBatches(pictures_of(3), RecipeConfig(), 0)) == 1


LENGTHS = recipe_of(128, effective_batch=4, token_chunks=150, caption_padding="caption", captions={"dropout": 0.2})


def pictures_with_captions(*tokens: int) -> list[ImageRecord]:
    return [
        make_picture(number, bucket=BUCKETS[number % 2], captions=("cat " * count,))
        for number, count in enumerate(tokens)
    ]


@pytest.mark.parametrize(("count", "tokens"), [(0, 75), (75, 75), (76, 150), (150, 150), (151, 150), (400, 150)])
def test_a_caption_is_padded_to_the_length_it_needs(count: int, tokens: int) -> None:
    (picture,) = pictures_with_captions(count)
    plain = LENGTHS.replaced(captions=RecipeConfig().captions)
    assert draw_sample(picture, plain, 0, 0).tokens == plain_sample(picture, plain).tokens == tokens
    assert draw_sample(picture, plain.replaced(caption_padding="limit"), 0, 0).tokens == 150
    assert draw_sample(picture, plain.replaced(caption_padding=None), 0, 0).tokens == 150, "from an earlier version"
    assert padded_tokens("\U00013000" * 40, plain) == 150, "a letter may take several tokens"


def test_lengths_are_part_of_the_shape_of_a_batch() -> None:
    pictures = pictures_with_captions(*[10, 100] * 9, 10, 10, 100)
    batches = EpochBatches(pictures, LENGTHS, 1)
    shown = Counter(sample.image.id for batch in batches for sample in batch)
    assert set(shown.values()) == {1} and len(shown) == len(pictures)
    assert len(batches) == steps_per_epoch(pictures, LENGTHS)
    assert {sample.tokens for batch in batches for sample in batch if not sample.caption} == {75}, "a dropped caption"
    mixed = [batch for batch in batches if len({sample.shape for sample in batch}) > 1]
    assert len(mixed) <= 3, "full batches have one shape"
    for batch in batches:
        for size in (1, 2, 4):
            parts = micro_batches(batch, size)
            assert all(len({sample.shape for sample in part}) == 1 for part in parts)
            assert Counter(sample.image.id for part in parts for sample in part) == Counter(s.image.id for s in batch)


def test_shapes_are_known_without_drawing_samples() -> None:
    plain = LENGTHS.replaced(captions=RecipeConfig().captions)
    pictures = pictures_with_captions(*[10, 100] * 9, 10, 10, 100)
    shapes = batched_shapes(pictures, plain, 2, lambda picture: usual_shape(picture, plain))
    assert shapes == [[sample.shape for sample in batch] for batch in EpochBatches(pictures, plain, 2)]
