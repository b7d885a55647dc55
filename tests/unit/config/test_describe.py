"""Every key is documented, and what it may hold is said in words."""

import pytest

from trainer.config.job import Job
from trainer.config.optimizers.kinds import OPTIMIZERS
from trainer.config.schema import KeyDescription, fields

KEYS: dict[str, KeyDescription] = {found.key: found for found in fields(Job)}


@pytest.mark.parametrize("found", KEYS.values(), ids=KEYS.keys())
def test_every_key_is_documented(found: KeyDescription) -> None:
    assert len(found.doc.split()) >= 3, f"{found.key} says nothing: {found.doc!r}"
    assert len(found.doc) <= 120, "a tooltip is one line"
    assert found.doc.endswith("."), found.doc
    assert found.doc[0].isupper() or found.doc[0].isdigit()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("recipe.rank", "a whole number from 1 to 1024"),
        ("recipe.alpha", "a number above 0 and up to 4096"),
        ("recipe.dropout", "a number of at least 0 and below 1"),
        ("recipe.resolution", "a whole number from 64 to 4096, a multiple of 8"),
        ("recipe.schedule.warmup", "a number of at least 0"),
        ("recipe.images.flip", "true or false"),
        ("recipe.layers", '"attention", "linear" or "all"'),
        ("recipe.adapter", '"lora", "tlora", "dora", "loha", "lokr" or "oft"'),
        ("recipe.token_chunks", "75, 150 or 225"),
        ("base.model", "text"),
        ("base.zero_terminal_snr", '"auto" or true or false'),
        ("dataset.background", 'text such as "#ffffff"'),
        ("dataset.folders", "a list of tables"),
        ("report.validation.timesteps", "a list, each item a whole number from 0 to 999"),
        ("recipe.optimizer[prodigy].d_coef", "a number above 0 and up to 100"),
    ],
)
def test_values_in_words(key: str, values: str) -> None:
    assert KEYS[key].values == values


def test_every_optimizer_is_described() -> None:
    kinds = KEYS["recipe.optimizer.name"].values.replace('"', "").replace(" or ", ", ").split(", ")
    assert kinds == list(OPTIMIZERS)
    for kind in kinds:
        assert any(key.startswith(f"recipe.optimizer[{kind}].") for key in KEYS)


def test_defaults_and_required() -> None:
    assert KEYS["base.model"].required
    assert KEYS["recipe.rank"].default == 16
    assert KEYS["recipe.optimizer.name"].default == "adamw"
    assert not KEYS["recipe.resolution"].required
    assert KEYS["recipe.resolution"].default is None


@pytest.mark.parametrize(
    ("key", "help_text"),
    [
        ("captions.prefix", "Text added before every caption (kohya: caption_prefix); default: as in the recipe."),
        # What follows the semicolon there is about the recipe's own default.
        (
            "captions.keep_separator",
            "Tags before this mark, such as |||, are never shuffled or dropped; default: as in the recipe.",
        ),
        ("images.flip", "Mirror half of the images at random (kohya: flip_aug); default: as in the recipe."),
    ],
)
def test_a_setting_of_a_folder_explains_what_it_does(key: str, help_text: str) -> None:
    assert KEYS[f"dataset.folders.*.{key}"].doc == help_text


def test_no_help_only_refers_to_another_key() -> None:
    assert [key for key, found in KEYS.items() if found.doc.startswith("Like ")] == []
