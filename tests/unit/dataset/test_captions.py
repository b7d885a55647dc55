"""What a showing reads: trigger, prefix and suffix, dropout, wildcards, tags kept, shuffled and dropped."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from trainer.config.recipe import CaptionConfig
from trainer.dataset.sampling import choose_wildcards, compose_caption, holds_trigger, without_randomness


def compose(
    caption: str | tuple[str, ...], seed: int = 0, trigger: str = "", words: str = "", **settings: object
) -> str:
    captions = caption if isinstance(caption, tuple) else (caption,) if caption else ()
    config = CaptionConfig.model_validate(settings)
    return compose_caption(captions, trigger, words, config, np.random.default_rng(seed))


def many(caption: str | tuple[str, ...], count: int = 200, **settings: object) -> list[str]:
    return [compose(caption, seed, **settings) for seed in range(count)]  # type: ignore[arg-type]


def test_a_caption_stays_as_it_is_written() -> None:
    assert compose("A  photo of a cat,sitting ;, on a mat.") == "A  photo of a cat,sitting ;, on a mat."


@pytest.mark.parametrize(
    ("caption", "trigger", "expected"),
    [
        ("a cat", "zwx", "zwx, a cat"),
        ("a photo of zwx", "zwx", "a photo of zwx"),
        ("a photo of ZWX.", "zwx", "a photo of ZWX."),
        ("zwxcat", "zwx", "zwx, zwxcat"),
        ("a (zwx:1.2) cat", "zwx", "a (zwx:1.2) cat"),
        ("", "zwx", "zwx"),
        ("a c++ book", "c++", "a c++ book"),
    ],
)
def test_trigger_first_unless_the_caption_holds_it(caption: str, trigger: str, expected: str) -> None:
    assert compose(caption, trigger=trigger) == expected


@pytest.mark.parametrize(
    ("trigger", "words", "expected"),
    [("", "", ""), ("zwx", "", "zwx"), ("", "dog", "dog"), ("zwx", "dog", "zwx, dog"), ("sks", "sks dog", "sks dog")],
)
def test_without_a_caption_trigger_and_class_words(trigger: str, words: str, expected: str) -> None:
    assert compose("", trigger=trigger, words=words) == expected


def test_prefix_and_suffix_with_a_space() -> None:
    assert compose("a cat", prefix="photo of", suffix="at night") == "photo of a cat at night"
    assert compose("a cat", trigger="zwx", prefix="photo of") == "photo of zwx, a cat"
    assert compose("a cat", trigger="zwx", prefix="zwx style,") == "zwx style, a cat"
    assert compose("", prefix="photo", suffix="!") == "photo !"


def test_dropout_takes_everything_about_as_often_as_asked() -> None:
    texts = Counter(many("a cat", 2000, trigger="zwx", prefix="photo of", dropout=0.3))
    assert set(texts) == {"", "photo of zwx, a cat"}
    assert 520 < texts[""] < 680  # 600 expected, four standard deviations either way


@pytest.mark.parametrize(
    ("caption", "settings", "expected"),
    [
        (("one", "two", "three"), {}, {"one", "two", "three"}),
        ("a, of zwx, b", {"trigger": "zwx", "tag_dropout": 1.0}, {"of zwx"}),
        ("a; b; c,d", {"separator": ";", "keep_tokens": 1, "shuffle": True}, {"a; b; c,d", "a; c,d; b"}),
    ],
    ids=["all alternatives are used", "a trigger inside the caption is not dropped", "another separator"],
)
def test_which_texts_a_caption_becomes(
    caption: str | tuple[str, ...], settings: dict[str, object], expected: set[str]
) -> None:
    assert set(many(caption, **settings)) == expected


def test_wildcards_in_all_forms() -> None:
    assert set(many("a {red|green|} {cat}", wildcards=True)) == {"a red {cat}", "a green {cat}", "a  {cat}"}
    assert set(many("{a {b|c}|d}", wildcards=True)) == {"a b", "a c", "d"}
    assert compose("{a|b}") == "{a|b}"
    assert choose_wildcards("}{ {|", np.random.default_rng(0)) == "}{ {|"


def test_shuffle_reaches_every_order_and_loses_nothing() -> None:
    assert len(set(many("a, b, c", shuffle=True))) == 6
    assert all(sorted(text.split(", ")) == ["a", "b", "c"] for text in many("a,b ,, c", shuffle=True))


def test_kept_tags_stay_in_front() -> None:
    texts = many("a, b, c, d", keep_tokens=2, shuffle=True, tag_dropout=0.5)
    assert all(text.startswith("a, b") for text in texts)
    assert {"a, b", "a, b, c, d", "a, b, d, c", "a, b, c", "a, b, d"} == set(texts)


def test_the_marks_keep_what_stands_before_the_first_and_after_the_second() -> None:
    texts = set(many("a, b ||| c, d ||| e", keep_separator="|||", keep_tokens=3, shuffle=True))
    assert texts == {"a, b, c, d, e", "a, b, d, c, e"}
    assert compose("a ||| b", keep_separator="|||") == "a, b"
    assert compose("a, b", keep_separator="|||") == "a, b"


def test_a_secondary_separator_keeps_tags_together_and_becomes_a_tag_separator() -> None:
    """As in sd-scripts `process_caption`, the last replacement inserts the separator without a space."""
    orders = {"a,b, c, d", "a,b, d, c", "c, a,b, d", "d, a,b, c", "c, d, a,b", "d, c, a,b"}
    assert set(many("a;;;b, c, d", secondary_separator=";;;", shuffle=True)) == orders
    dropped = set(many("a;;;b, c", secondary_separator=";;;", tag_dropout=0.5))
    assert dropped == {"a,b, c", "a,b", "c", ""}
    kept = set(many("a;;;b, c, d", secondary_separator=";;;", keep_tokens=1, shuffle=True))
    assert kept == {"a,b, c, d", "a,b, d, c"}
    assert compose("a;;;b|c", secondary_separator=";;;", separator="|") == "a|b|c"


def warmed(tags: list[str], step: int, steps: int, least: int) -> list[str]:
    """Return the tags of a step, by sd-scripts' lines in `process_caption` (train_util.py at 48d368fa)."""
    if not step < steps:
        return tags
    return tags[: math.floor(step * ((len(tags) - least) / steps)) + least]


@pytest.mark.parametrize(("count", "least", "keep"), [(9, 1, 0), (9, 3, 2), (4, 0, 0), (2, 5, 0), (1, 1, 1)])
def test_the_token_warm_up_cuts_captions_off_as_sd_scripts_does(count: int, least: int, keep: int) -> None:
    tags = [f"t{number}" for number in range(count)]
    config = CaptionConfig(token_warmup_step=16, token_warmup_min=least, keep_tokens=keep)
    for step in range(20):  # sixteenths are exact, so that sd-scripts' rounding is the same
        text = compose_caption((",".join(tags),), "", "", config, np.random.default_rng(0), (step, 16))
        assert text == ", ".join(tags[:keep] + warmed(tags[keep:], step, 16, least))


def test_the_token_warm_up_comes_before_shuffling_and_keeps_the_trigger() -> None:
    config = CaptionConfig(token_warmup_step=0.5, shuffle=True)
    assert (config.warmup_steps(30), config.warmup_steps(None)) == (15, 0)
    drawn = {
        compose_caption(("a, b, c, zwx, d",), "zwx", "", config, np.random.default_rng(seed), (5, 15))
        for seed in range(50)
    }
    assert drawn == {", ".join(order) for order in permutations(["a", "b", "zwx"])}
    assert compose_caption(("a, b",), "zwx", "", config, np.random.default_rng(0), (0, 15)) == "zwx, a"
    whole = compose_caption(("a,b, c",), "", "", without_randomness(config), np.random.default_rng(0))
    assert whole == "a,b, c"


def test_a_trigger_put_first_is_never_shuffled_or_dropped() -> None:
    texts = many("a, b, c", trigger="zwx", shuffle=True, tag_dropout=0.9)
    assert all(text.startswith("zwx") for text in texts)
    assert "zwx" in texts
    prefixed = many("a, b", trigger="zwx", prefix="photo, of", shuffle=True)
    assert set(prefixed) == {"photo, of zwx, a, b", "photo, of zwx, b, a"}


def test_tag_dropout_about_as_often_as_asked() -> None:
    tags = ", ".join(f"t{number}" for number in range(20))
    kept = sum(len(text.split(", ")) for text in many(tags, 500, tag_dropout=0.25))
    assert 7300 < kept < 7700  # 7500 of 10,000 expected


def test_the_text_depends_on_the_stream_alone() -> None:
    settings = {"shuffle": True, "tag_dropout": 0.3, "dropout": 0.1, "wildcards": True}
    assert many("a, {b|c}, d, e", **settings) == many("a, {b|c}, d, e", **settings)


def test_without_chance_nothing_moves() -> None:
    config = CaptionConfig(shuffle=True, dropout=1.0, tag_dropout=1.0, prefix="p")
    assert compose_caption(("a, b",), "", "", without_randomness(config), np.random.default_rng(0)) == "p a, b"


def test_words_are_whole() -> None:
    assert holds_trigger("a zwx, b", "zwx")
    assert not holds_trigger("a zwxy", "zwx")
    assert not holds_trigger("a_zwx_b", "zwx")
