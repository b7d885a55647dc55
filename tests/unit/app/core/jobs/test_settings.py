"""Labels and defaults of settings as forms show them."""

from collections import Counter

import pytest

from app.core.jobs.settings import ITEM_NAMES, full_title, setting, settings, title_of


@pytest.mark.parametrize(
    ("key", "label", "full"),
    [
        ("recipe.learning_rate", "UNet learning rate", "UNet learning rate"),
        ("learning_rate", "UNet learning rate", "UNet learning rate"),
        ("recipe.optimizer.name", "Optimizer", "Optimizer"),
        ("recipe.text_encoder.rank", "Rank", "Text encoder › Rank"),
        ("recipe.images.crop", "Crop", "Images › Crop"),
        ("dataset.folders.0.weight", "Loss weight", "Folders 1 › Loss weight"),
        ("report.validation.timesteps.1", "1", "Report › Validation › Timesteps"),
    ],
)
def test_a_label_is_the_schemas_or_follows_from_the_key(key: str, label: str, full: str) -> None:
    assert title_of(key) == label
    assert full_title(key) == full


VALUES = {
    "dataset": {"folders": [{"path": "a/faces"}, {"path": "b/faces"}, {"path": "c/hands"}, {}]},
    "recipe": {"blocks": [{"match": "unet.mid_block.*", "rank": 0}, {"rank": 8}, "no table"]},
    "report": {"previews": {"prompts": [{"prompt": "a lighthouse on a rock at the sea, at night, in a storm"}]}},
}


@pytest.mark.parametrize(
    ("key", "full"),
    [
        ("recipe.blocks.0.rank", "unet.mid_block.* › Rank"),
        ("recipe.blocks.1.rank", "Blocks 2 › Rank"),
        ("recipe.blocks.2", "Blocks 3"),
        ("recipe.blocks.9.alpha", "Blocks 10 › Alpha"),
        ("dataset.folders.0.weight", "faces (1) › Loss weight"),
        ("dataset.folders.1.images.crop", "faces (2) › Images › Crop"),
        ("dataset.folders.2.resolutions.1", "hands › Resolutions"),
        ("dataset.folders.3.path", "Folders 4 › Path"),
        ("report.previews.prompts.0.width", "a lighthouse on a rock at the sea, at ni… › Width"),
        ("recipe.rank", "Rank"),
    ],
)
def test_a_label_names_the_item_that_it_is_of(key: str, full: str) -> None:
    assert full_title(key, VALUES) == full


def test_items_of_every_list_of_tables_have_names() -> None:
    lists = {each.key.partition(".*")[0] for each in settings() if ".*." in each.key}
    assert lists == ITEM_NAMES.keys()
    assert all(setting(f"{table}.*.{name}") for table, name in ITEM_NAMES.items())


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
