"""One table knows what kohya's sd-scripts, OneTrainer and diffusers call our settings, and messages ask it first."""

import re
from pathlib import Path

import pytest

from trainer.config.field_names import (
    FIELD_NAMES,
    FIELD_VALUES,
    RELATED,
    UNSUPPORTED,
    has_name,
    keys_called,
    meant_by,
    value_called,
)
from trainer.config.job import Job
from trainer.config.load import parse_job
from trainer.config.schema import choices, fields
from trainer.errors import JobError

GOOD = 'schema = 1\nname = "a"\n[base]\nmodel = "own/er"\n[[dataset.folders]]\npath = "pictures"\n'
KEYS = {re.sub(r"\[\w+\]", "", found.key): found for found in fields(Job)}
# Called the same everywhere, or there is nothing like it elsewhere.
OURS = {
    # A folder's settings are those of the recipe and the dataset, where their other names are known.
    *(key for key in KEYS if key.startswith(("dataset.folders.*.captions.", "dataset.folders.*.images."))),
    *(f"dataset.folders.*.{name}" for name in ("lines", "caption_sources", "masks", "resolutions", "timestep_min",
                                               "timestep_max")),
    "schema", "preset", "dataset.lines", "dataset.background", "dataset.linked_folders", "dataset.max_megapixels",
    "recipe.text_encoder_2.rank", "recipe.text_encoder_2.alpha", "recipe.text_encoder_2.stop_after",
    "recipe.rank_dropout", "recipe.module_dropout",
    "recipe.lokr_factor", "recipe.tlora_min_rank",
    "recipe.blocks.*.match", "recipe.blocks.*.rank", "recipe.blocks.*.alpha",
    "recipe.schedule.decay_type", "recipe.schedule.step_rules",
    "recipe.caption_padding", "recipe.objective.huber_schedule", "recipe.objective.huber_scale",
    *(f"recipe.objective.{name}" for name in ("v_pred_like_loss", "noise_offset_random_strength",
                                              "adaptive_noise_scale", "timestep_bias_multiplier",
                                              "timestep_bias_portion", "timestep_bias_begin", "timestep_bias_end")),
    "fit.allow_quantized", "fit.cuda_graphs", "fit.channels_last", "fit.fp16_accumulation", "fit.deterministic",
    "fit.vae_encode_tiling",
    *(f"report.previews.prompts.*.{name}" for name in ("prompt", "width", "height", "seed", "weights")),
    "report.previews.max_share", "report.validation.timesteps", "report.max_skipped", "output.tag_frequency",
}  # fmt: skip


def complaint(text: str, *overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        parse_job(GOOD + text, "job.toml", Path(), overrides)
    return "\n".join(caught.value.problems)


def test_every_setting_has_its_names_or_needs_none():
    settings = {
        key for key, found in KEYS.items()
        if found.values not in ("a table",) and not key.startswith(("fallbacks", "fit.int8_products"))
    } - {"report.previews", "recipe.optimizer"}  # fmt: skip
    # Arguments of optimizers are passed on to their classes, mostly by the same name.
    arguments = {key for key in settings if key.startswith("recipe.optimizer.")}
    assert settings - set(FIELD_NAMES) - arguments == OURS
    assert set(FIELD_NAMES) - set(KEYS) == set()


def test_every_value_of_another_program_is_one_that_the_key_takes():
    for key, values in FIELD_VALUES.items():
        full = key if key in KEYS else key.replace("folders.", "folders.*.").replace("prompts.", "prompts.*.")
        assert set(values.values()) <= set(choices(KEYS[full].annotation)), key


def test_no_name_elsewhere_is_one_of_ours_in_another_place():
    """Else a right key would be called a wrong one."""
    ours = {key.rpartition(".")[2] for key in KEYS}
    assert [name for names in FIELD_NAMES.values() for name in names if name in ours] == []
    assert not set(UNSUPPORTED) & {key.rpartition(".")[2] for key in KEYS}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[recipe]\nnetwork_dim = 8", "recipe.network_dim: unknown key (did you mean rank?)"),
        ("[recipe]\nunet_lr = 1e-4", "(did you mean learning_rate?)"),
        ("[recipe]\ntext_encoder_lr = 1e-4", "(did you mean recipe.text_encoder.learning_rate?)"),
        ("[recipe]\nmax_train_epochs = 4", "(did you mean epochs?)"),
        ("[fit]\nmixed_precision = 'bf16'", "(did you mean dtype?)"),
        ("[fit]\nactivation_checkpointing = true", "(did you mean gradient_checkpointing?)"),
        ("[recipe]\nip_noise_gamma = 0.1", "(did you mean recipe.objective.input_perturbation?)"),
        ("[recipe]\nnum_repeats = 3", "(did you mean repeats in [[dataset.folders]]?)"),
        ("[recipe]\nnetwork_args = ['conv_dim=4']", "set these as keys of [recipe]"),
        ("[recipe]\nadapter = 'glora'", "this method is not supported"),
        ("[recipe]\nadapter = 'locon'", "(did you mean lora?)"),
        ("[recipe.schedule]\nkind = 'cosine_with_restarts'", "(did you mean restarts?)"),
        ("[recipe.optimizer]\nname = 'AdamW8bit'", "(did you mean adamw8bit?)"),
        ("[recipe.optimizer]\nname = 'PagedAdamW8bit'", "(did you mean paged_adamw8bit?)"),
        ("[recipe]\nrnak = 8", "(did you mean rank?)"),
    ],
)  # fmt: skip
def test_messages_name_our_key_or_value(text, expected):
    assert expected in complaint(text)


def test_options_of_the_command_line_are_asked_too():
    assert "(did you mean rank?)" in complaint("", "recipe.network_dim=8")
    assert "(did you mean recipe.rank?)" in complaint("", "network_dim=8")
    assert "(did you mean euler_a?)" in complaint("", 'report.previews.prompts=[{prompt="a", sampler="euler a"}]')


@pytest.mark.parametrize("word", ["network_dim", "--network_dim", "--network-dim", "ss_network_dim", "Network_Dim"])
def test_a_name_is_found_however_it_is_written(word):
    assert next(keys_called(word)) == "recipe.rank"


def test_values_are_found_by_the_end_of_a_key_where_that_is_enough():
    assert value_called("sampler", "Euler a") == "euler_a"
    assert value_called("kind", "reg") is None


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("network_dim", "recipe.rank"),
        ("--lr_warmup_steps", "recipe.schedule.warmup"),
        ("seed", "recipe.seed"),
        ("rank", None),  # of the UNet or of a text encoder
        ("gradient_accumulation_steps", None),
        ("num_repeats", None),  # of one folder
        ("sprocket", None),
    ],
)
def test_a_name_means_one_key_if_its_values_mean_the_same(word, key):
    assert meant_by(word) == key


def test_keys_whose_values_mean_something_else_are_in_the_table():
    assert [word for word in RELATED if next(keys_called(word), None) is None] == []
    assert "(did you mean recipe.effective_batch? recipe.effective_batch is the batch size times" in complaint(
        "", "gradient_accumulation_steps=4"
    )


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("recipe.rank", "network dim", True),
        ("recipe.rank", "dim", True),
        ("recipe.rank", "etwork", False),
        ("recipe.rank", "", False),
        ("recipe.learning_rate", "unet_l", True),
        ("recipe.nothing", "network_dim", False),
    ],
)
def test_a_search_finds_names_from_the_start_of_a_word_of_theirs(key, text, expected):
    assert has_name(key, text) is expected
