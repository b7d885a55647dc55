"""Labels and defaults of settings as forms show them."""

from collections import Counter

import pytest

from app.core.jobs.settings import full_title, setting, settings, title_of


@pytest.mark.parametrize(
    ("key", "label", "full"),
    [
        ("recipe.learning_rate", "UNet learning rate", "UNet learning rate"),
        ("learning_rate", "UNet learning rate", "UNet learning rate"),
        ("recipe.optimizer.name", "Optimizer", "Optimizer"),
        ("recipe.text_encoder.rank", "Rank", "Text encoder › Rank"),
        ("recipe.images.crop", "Crop", "Images › Crop"),
        ("dataset.folders.0.weight", "Loss weight", "Loss weight"),
    ],
)
def test_a_label_is_the_schemas_or_follows_from_the_key(key: str, label: str, full: str) -> None:
    assert title_of(key) == label
    assert full_title(key) == full


def test_labels_are_unique_within_a_table_and_short() -> None:
    count = Counter((each.table, each.kind, each.title) for each in settings())
    assert [found for found, number in count.items() if number > 1] == []
    assert max(len(each.title) for each in settings()) <= 30


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("recipe.images.bucket_min", "half the resolution"),
        ("recipe.resolution", "512 (SDXL: 1024)"),
        ("fit.dtype", "bf16, fp16 on GPUs without it, or fp32 on the CPU"),
        ("recipe.rank", ""),
    ],
)
def test_the_default_of_an_empty_setting_is_read_off_its_help(key: str, default: str) -> None:
    assert setting(key).described_default == default
