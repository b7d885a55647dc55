"""Presets made of what LoRA files say of themselves: kohya's keys as sd-scripts writes them, and our own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file

from trainer import cli
from trainer.config.presets.creating import CreatedPreset, preset_of_lora
from trainer.config.presets.exchange import load_preset
from trainer.config.presets.kohya import LoraParts, recipe_of_metadata
from trainer.config.presets.preset import RECIPE_KEY
from trainer.config.recipe import RecipeConfig
from trainer.errors import ImpastoError

SHA = "31e35c80fc4829d14f90153f4c74cd59c90b779f6afe05a74cd6120b893f7e5b"

# As sd-scripts 0.9 wrote them for a folder of pictures (--train_data_dir): every value is str() of Python's.
FOLDER = {
    "ss_session_id": "2847261837", "ss_training_started_at": "1706350417.3", "ss_output_name": "mika_v2",
    "ss_learning_rate": "0.0001", "ss_text_encoder_lr": "5e-05", "ss_unet_lr": "0.0001",
    "ss_num_train_images": "300", "ss_num_reg_images": "0", "ss_num_batches_per_epoch": "150", "ss_num_epochs": "10",
    "ss_gradient_checkpointing": "False", "ss_gradient_accumulation_steps": "1", "ss_max_train_steps": "1500",
    "ss_lr_warmup_steps": "75", "ss_lr_scheduler": "cosine_with_restarts", "ss_network_module": "networks.lora",
    "ss_network_dim": "32", "ss_network_alpha": "16.0", "ss_network_dropout": "None", "ss_mixed_precision": "fp16",
    "ss_full_fp16": "False", "ss_v2": "False", "ss_base_model_version": "sd_v1", "ss_clip_skip": "2",
    "ss_max_token_length": "225", "ss_cache_latents": "True", "ss_seed": "1234", "ss_lowram": "True",
    "ss_noise_offset": "0.0357", "ss_multires_noise_iterations": "None", "ss_multires_noise_discount": "0.3",
    "ss_adaptive_noise_scale": "None", "ss_zero_terminal_snr": "False", "ss_training_comment": "None",
    "ss_sd_scripts_commit_hash": "48d368fa",
    "ss_optimizer": "bitsandbytes.optim.adamw.AdamW8bit(weight_decay=0.1,betas=(0.9, 0.99))",
    "ss_max_grad_norm": "1.0", "ss_caption_dropout_rate": "0.0", "ss_caption_dropout_every_n_epochs": "0",
    "ss_caption_tag_dropout_rate": "0.1", "ss_face_crop_aug_range": "None", "ss_prior_loss_weight": "1.0",
    "ss_min_snr_gamma": "5.0", "ss_scale_weight_norms": "None", "ss_ip_noise_gamma": "None",
    "ss_debiased_estimation": "False", "ss_noise_offset_random_strength": "False",
    "ss_ip_noise_gamma_random_strength": "False", "ss_loss_type": "l2", "ss_huber_schedule": "snr", "ss_huber_c": "0.1",
    "ss_batch_size_per_device": "2", "ss_total_batch_size": "2", "ss_resolution": "(512, 512)",
    "ss_color_aug": "False", "ss_flip_aug": "True", "ss_random_crop": "False", "ss_shuffle_caption": "True",
    "ss_enable_bucket": "True", "ss_bucket_no_upscale": "True", "ss_min_bucket_reso": "256",
    "ss_max_bucket_reso": "1024", "ss_keep_tokens": "1", "ss_dataset_dirs": '{"10_secret folder": {"n_repeats": 10}}',
    "ss_reg_dataset_dirs": "{}", "ss_tag_frequency": '{"10_secret folder": {"mika": 30}}',
    "ss_bucket_info": '{"buckets": {}}', "ss_sd_model_name": "animefull-final.safetensors",
    "ss_sd_model_hash": "a1535d0a42", "ss_new_sd_model_hash": SHA, "ss_vae_name": "kl-f8.safetensors",
}  # fmt: skip

# For a dataset file (--dataset_config), SDXL, Prodigy and convolutions.
DATASETS = {
    "ss_learning_rate": "1.0", "ss_text_encoder_lr": "[0.5, 0.25]", "ss_unet_lr": "1.0",
    "ss_gradient_accumulation_steps": "2", "ss_max_train_steps": "2000", "ss_lr_warmup_steps": "0",
    "ss_lr_scheduler": "constant", "ss_network_module": "networks.lora", "ss_network_dim": "16",
    "ss_network_alpha": "8", "ss_network_dropout": "0.1", "ss_clip_skip": "None", "ss_max_token_length": "None",
    "ss_seed": "42", "ss_noise_offset": "None", "ss_multires_noise_iterations": "8",
    "ss_multires_noise_discount": "0.4", "ss_adaptive_noise_scale": "0.003", "ss_base_model_version": "sdxl_base_v1-0",
    "ss_optimizer": "prodigyopt.prodigy.Prodigy(decouple=True,weight_decay=0.01,d_coef=0.8,"
    "use_bias_correction=True,safeguard_warmup=True,betas=(0.9, 0.99))",
    "ss_caption_dropout_every_n_epochs": "2",
    "ss_max_grad_norm": "0.0", "ss_scale_weight_norms": "1.0", "ss_min_snr_gamma": "0", "ss_loss_type": "huber",
    "ss_huber_schedule": "snr", "ss_huber_c": "0.2", "ss_debiased_estimation": "True",
    "ss_network_args": '{"conv_dim": "8", "conv_alpha": "4", "rank_dropout": "0.05", "loraplus_unet_lr_ratio": "16"}',
    "ss_datasets": json.dumps([
        {"is_dreambooth": True, "batch_size_per_device": 3, "resolution": [1024, 1024], "enable_bucket": True,
         "min_bucket_reso": 512, "max_bucket_reso": 2048, "tag_frequency": {}, "subsets": [
             {"is_reg": True, "shuffle_caption": False},
             {"is_reg": False, "shuffle_caption": True, "keep_tokens": 2, "keep_tokens_separator": "|||",
              "flip_aug": False, "random_crop": True, "enable_wildcard": True, "caption_prefix": "art, ",
              "secondary_separator": ";;;"}]}]),
    "ss_sd_model_name": "/content/models/ponyDiffusionV6XL.safetensors",
    "ss_sd_model_hash": "e577480b65", "modelspec.title": "Gouache/XL", "modelspec.author": "Zoë",
    "modelspec.trigger_phrase": "gch, soft light", "modelspec.license": "CC-BY-4.0",
    "modelspec.description": "Made in C:\\Users\\zoe\\lora",
}  # fmt: skip

SD15 = {
    "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k": 768,
    "lora_te_text_model_encoder_layers_0_mlp_fc1": 768,
}
SDXL = {
    "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k": 2048,
    "lora_te1_text_model_encoder_layers_0_mlp_fc1": 768,
    "lora_te2_text_model_encoder_layers_0_mlp_fc1": 1280,
}
PROJECTION = {"lora_unet_down_blocks_0_attentions_0_proj_in": 320}
UNET_ONLY = {name: width for name, width in SDXL.items() if "unet" in name}


def lora(folder: Path, layers: dict[str, int], metadata: dict[str, str], rank: int = 4, name: str = "a") -> Path:
    weights = {}
    for layer, width in layers.items():
        weights[f"{layer}.lora_down.weight"] = np.zeros((rank, width), np.float16)
        weights[f"{layer}.lora_up.weight"] = np.zeros((320, rank), np.float16)
        weights[f"{layer}.alpha"] = np.array(rank, np.float16)
    path = folder / f"{name}.safetensors"
    save_file(weights, path, metadata)
    return path


def recipe(made: CreatedPreset) -> dict[str, Any]:
    assert made.preset.recipe is not None
    found: dict[str, Any] = made.preset.recipe.model_dump(mode="json", exclude_unset=True)
    return found


def test_a_folder_trained_sd15_lora_is_read_as_it_was_trained(tmp_path: Path) -> None:
    made = preset_of_lora(lora(tmp_path, SD15, FOLDER, rank=32))
    assert recipe(made) == {
        "layers": "linear",
        "rank": 32,
        "alpha": 16.0,
        "learning_rate": 1e-4,
        "text_encoder": {"learning_rate": 5e-5},
        "optimizer": {"name": "adamw8bit", "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99},
        "schedule": {"kind": "restarts", "warmup": 75},
        "steps": 1500,
        "effective_batch": 2,
        "max_grad_norm": 1.0,
        "clip_skip": 2,
        "token_chunks": 225,
        "caption_padding": "limit",
        "resolution": 512,
        "images": {"buckets": True, "bucket_min": 256, "bucket_max": 1024, "max_upscale": 1.0, "flip": True},
        "captions": {"shuffle": True, "keep_tokens": 1, "dropout": 0.0, "tag_dropout": 0.1},
        "objective": {
            "loss": "mse",
            "min_snr_gamma": 5.0,
            "debiased_estimation": False,
            "noise_offset": 0.0357,
            "prior_weight": 1.0,
        },
        "seed": 1234,
    }
    preset = made.preset
    assert (preset.name, preset.base.family) == ("mika_v2", "sd15")
    assert (preset.base.name, preset.base.sha256) == ("animefull-final.safetensors", SHA)
    assert made.left_out == ()
    assert "schedule.cycles" in made.not_found  # sd-scripts does not write how many
    assert "captions.prefix" in made.not_found
    assert not {"rank", "steps", "optimizer.name", "clip_skip", "text_encoder_2.learning_rate"} & set(made.not_found)


def test_a_dataset_file_trained_sdxl_lora_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    made = preset_of_lora(lora(tmp_path, SDXL, DATASETS))
    found = recipe(made)
    assert found["optimizer"] == {
        "name": "prodigy",
        "weight_decay": 0.01,
        "safeguard_warmup": True,
        "bias_correction": True,
        "d_coef": 0.8,
        "beta1": 0.9,
        "beta2": 0.99,
    }
    assert (found["layers"], found["conv_rank"], found["conv_alpha"]) == ("all", 8, 4.0)
    assert (found["dropout"], found["rank_dropout"]) == (0.1, 0.05)
    assert found["max_weight_norm"] == 1.0
    assert found["text_encoder"] == found["text_encoder_2"] == {"learning_rate": 1.0}
    assert (found["effective_batch"], found["resolution"], found["token_chunks"]) == (6, 1024, 75)
    assert found["images"] == {
        "buckets": True, "bucket_min": 512, "bucket_max": 2048, "crop": "random", "flip": False,
    }  # fmt: skip
    assert found["captions"] == {
        "shuffle": True, "keep_tokens": 2, "keep_separator": "|||", "wildcards": True, "prefix": "art, ",
        "secondary_separator": ";;;", "dropout_every_epochs": 2,
    }  # fmt: skip
    assert found["objective"] == {
        "loss": "huber", "huber_c": 0.2, "huber_schedule": "snr", "adaptive_noise_scale": 0.003,
        "multires_iterations": 8, "multires_discount": 0.4,
        "debiased_estimation": True,
    }  # fmt: skip
    assert "clip_skip" not in found
    named = [each.partition(": ")[0] for each in made.left_out]
    assert named == [
        "ss_network_args.loraplus_text_encoder_lr_ratio",
        "ss_optimizer.decouple",
        "ss_text_encoder_lr",
        "ss_text_encoder_lr",
        "notes",
        "recipe.lora_plus_ratio",  # Prodigy has one rate
    ]
    preset = made.preset
    assert (preset.name, preset.author, preset.license, preset.notes) == ("Gouache-XL", "Zoë", "CC-BY-4.0", "")
    assert preset.trigger_words == ("gch", "soft light")
    assert (preset.base.name, preset.base.sha256) == ("ponyDiffusionV6XL.safetensors", None)


def told(**metadata: str) -> dict[str, Any]:
    parts = LoraParts("sdxl", unet=True, text_encoder=False, text_encoder_2=False, ranks=(4,))
    return recipe_of_metadata(metadata, parts).recipe


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch.optim.adamw.AdamW", {"name": "adamw"}),
        ("bitsandbytes.optim.adamw.PagedAdamW8bit", {"name": "paged_adamw8bit"}),
        ("lion_pytorch.lion_pytorch.Lion", {"name": "lion", "weight_decay": 0.0}),
        ("bitsandbytes.optim.lion.Lion8bit(weight_decay=0.2)", {"name": "lion8bit", "weight_decay": 0.2}),
        (
            "transformers.optimization.Adafactor(scale_parameter=False,relative_step=False,warmup_init=False)",
            {"name": "adafactor", "scale_parameter": False, "relative_step": False, "warmup_init": False},
        ),
        ("schedulefree.adamw_schedulefree.AdamWScheduleFree", {"name": "schedulefree", "weight_decay": 0.0}),
        (
            "prodigyopt.prodigy.Prodigy(d_coef=2.0)",  # with the defaults of its class, which are not those of a recipe
            {
                "name": "prodigy",
                "weight_decay": 0.0,
                "safeguard_warmup": False,
                "bias_correction": False,
                "d_coef": 2.0,
            },
        ),
        (
            "pytorch_optimizer.optimizer.came.CAME(weight_decay=0.01,betas=(0.9, 0.99, 0.999))",
            {"name": "came", "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.99, "beta3": 0.999},
        ),
        (
            "prodigyplus.prodigy_plus_schedulefree.ProdigyPlusScheduleFree(use_stableadamw=False,d_coef=0.5)",
            {"name": "prodigy_plus_schedulefree", "stable_steps": False, "d_coef": 0.5},
        ),
        (
            "dadaptation.dadapt_adam.DAdaptAdam(use_bias_correction=True)",
            {"name": "dadapt_adam", "weight_decay": 0.0, "bias_correction": True},
        ),
        ("schedulefree.RAdamScheduleFree", {"name": "radam_schedulefree", "weight_decay": 0.0}),
        (
            "pytorch_optimizer.optimizer.lamb.Lamb(weight_decay=0.1,betas=(0.9, 0.99),lr=5,x=1)",
            {"name": "other", "optimizer": "lamb", "args": {"weight_decay": 0.1, "betas": [0.9, 0.99]}},
        ),
        ("adamw8bit", {"name": "adamw8bit"}),
        ("dadaptation.experimental.dadapt_adam_preprint.DAdaptAdamPreprint(decouple=True)", None),
        ("__import__('os').system('x')", None),
        ("torch.optim.adamw.AdamW(weight_decay=__import__('os'),eps=1e-06)", {"name": "adamw", "eps": 1e-06}),
    ],
)
def test_optimizers_are_told_by_their_class(text: str, expected: dict[str, Any] | None) -> None:
    assert told(ss_optimizer=text).get("optimizer") == expected


@pytest.mark.parametrize(
    ("text", "warmup", "expected"),
    [
        ("constant", "100", {"kind": "constant", "warmup": 0}),
        ("constant_with_warmup", "100", {"kind": "constant", "warmup": 100}),
        ("cosine", "0.05", {"kind": "cosine", "warmup": 0.05}),
        ("cosine", "None", {"kind": "cosine"}),
        ("cosine_with_min_lr", "10", {"kind": "cosine", "warmup": 10}),
        ("inverse_sqrt", "100", {"kind": "inverse_sqrt", "warmup": 100}),
        ("warmup_stable_decay", "0.1", {"kind": "warmup_stable_decay", "warmup": 0.1}),
        ("piecewise_constant", "0", {"kind": "piecewise", "warmup": 0}),
        ("nonsense", "0", None),
    ],
)
def test_schedules_are_told_with_their_warm_up(text: str, warmup: str, expected: dict[str, Any] | None) -> None:
    assert told(ss_lr_scheduler=text, ss_lr_warmup_steps=warmup).get("schedule") == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"algo": "locon", "rs_lora": "True"}', True), ('{"rs_lora": "False"}', None), ("{}", None)],
)
def test_rank_stabilized_loras_of_lycoris_keep_their_scale(arguments: str, expected: bool | None) -> None:
    assert told(ss_network_args=arguments).get("rank_stabilized") is expected


@pytest.mark.parametrize(
    ("arguments", "expected", "noted"),
    [
        ('{"algo": "locon"}', {}, ""),
        ('{"algo": "loha"}', {"adapter": "loha"}, ""),
        ('{"algo": "lokr", "factor": "8"}', {"adapter": "lokr", "lokr_factor": 8}, ""),
        ('{"algo": "lokr", "factor": "-1"}', {"adapter": "lokr"}, ""),
        ('{"algo": "diag-oft"}', {"adapter": "oft"}, ""),
        ('{"algo": "locon", "dora_wd": "True", "wd_on_output": "False"}', {"adapter": "dora"}, ""),
        ('{"algo": "locon", "dora_wd": true}', {"adapter": "dora"}, "ss_network_args.wd_on_output"),
        ('{"algo": "loha", "dora_wd": "True"}', {"adapter": "loha"}, "ss_network_args.dora_wd"),
        ('{"algo": "glora"}', {}, "ss_network_args.algo: glora is not supported"),
    ],
)
def test_algorithms_of_lycoris_are_told(arguments: str, expected: dict[str, Any], noted: str, tmp_path: Path) -> None:
    made = preset_of_lora(lora(tmp_path, UNET_ONLY, {"ss_learning_rate": "0.001", "ss_network_args": arguments}))
    found = recipe(made)
    assert {key: found[key] for key in ("adapter", "lokr_factor") if key in found} == expected
    assert (noted in " ".join(made.left_out)) if noted else "algo" not in " ".join(made.left_out)


def test_a_part_that_is_not_in_the_file_was_not_trained(tmp_path: Path) -> None:
    rates = {"ss_learning_rate": "0.001", "ss_text_encoder_lr": "[1e-05, 1e-05]", "ss_unet_lr": "None"}
    found = recipe(preset_of_lora(lora(tmp_path, UNET_ONLY, rates)))
    assert found["learning_rate"] == 0.001
    assert found["text_encoder"] == found["text_encoder_2"] == {"learning_rate": 0.0}


def test_where_no_layer_tells_the_family_the_metadata_do(tmp_path: Path) -> None:
    assert preset_of_lora(lora(tmp_path, PROJECTION, FOLDER)).preset.base.family == "sd15"


def test_minimal_metadata_give_what_they_hold_and_name_the_rest(tmp_path: Path, capsys: Any) -> None:
    # What sd-scripts keeps under --no_metadata.
    least = {
        "ss_v2": "False", "ss_base_model_version": "sd_v1", "ss_network_module": "networks.lora",
        "ss_network_dim": "Dynamic", "ss_network_alpha": "Dynamic",
    }  # fmt: skip
    path = lora(tmp_path, SD15, least, rank=8, name="klein ü")
    made = preset_of_lora(path)
    assert recipe(made)["rank"] == 8
    assert {"alpha", "learning_rate", "optimizer.name", "steps", "resolution"} <= set(made.not_found)
    assert cli.main(["presets", "share", str(path), "--out", str(tmp_path / "out.toml")]) == 0
    said = capsys.readouterr().out
    assert "Not found, so a job keeps its own value:" in said
    assert "  learning_rate\n" in said
    assert load_preset(tmp_path / "out.toml").name == "klein ü"


def test_our_own_lora_gives_its_whole_recipe(tmp_path: Path) -> None:
    whole = RecipeConfig.model_validate(
        {
            "rank": 4,
            "steps": 9,
            "learning_rate": 1.0,
            "optimizer": {"name": "prodigy", "d_coef": 0.5},
            "captions": {"suffix": "x"},
        }
    )
    metadata = FOLDER | {RECIPE_KEY: whole.model_dump_json(by_alias=True, exclude_none=True)}
    Image.linear_gradient("L").save(tmp_path / "a.png")
    made = preset_of_lora(lora(tmp_path, SD15, metadata))
    assert made.preset.recipe == whole
    assert (made.left_out, made.not_found) == ((), ())
    assert made.preset.preview is not None


@pytest.mark.parametrize(("layers", "listed"), [(SD15, False), (SDXL, True)])
def test_our_own_lora_tells_of_the_encoders_that_its_family_has(
    layers: dict[str, int], listed: bool, tmp_path: Path
) -> None:
    metadata = FOLDER | {RECIPE_KEY: RecipeConfig(rank=4, steps=9).model_dump_json(by_alias=True, exclude_none=True)}
    found = recipe(preset_of_lora(lora(tmp_path, layers, metadata)))
    assert ("text_encoder_2" in found) == listed and "text_encoder" in found


@pytest.mark.parametrize(
    ("written", "ratio", "noted"),
    [
        ({"loraplus_lr_ratio": "8"}, 8.0, False),
        ({"loraplus_lr_ratio": "0"}, None, False),
        ({"loraplus_unet_lr_ratio": "16"}, 16.0, True),  # the text encoders have none there
        ({"loraplus_text_encoder_lr_ratio": "16"}, None, True),
        ({"loraplus_lr_ratio": "4", "loraplus_unet_lr_ratio": "16"}, 16.0, True),
    ],
)
def test_one_lora_plus_ratio_is_taken_for_all_parts(
    written: dict[str, str], ratio: float | None, noted: bool, tmp_path: Path
) -> None:
    made = preset_of_lora(lora(tmp_path, SD15, FOLDER | {"ss_network_args": json.dumps(written)}))
    assert recipe(made).get("lora_plus_ratio") == ratio
    assert any("loraplus_text_encoder_lr_ratio" in each for each in made.left_out) == noted


def test_a_schedule_whose_rules_are_not_in_the_file_costs_the_schedule_alone(tmp_path: Path) -> None:
    made = preset_of_lora(lora(tmp_path, SD15, FOLDER | {"ss_lr_scheduler": "piecewise_constant"}, rank=32))
    assert recipe(made)["rank"] == 32 and "kind" not in recipe(made).get("schedule", {})
    assert any("step_rules" in each for each in made.left_out)


HOSTILE = {
    "huge JSON": {"ss_datasets": "[" * 50_000},
    "JSON of other things": {"ss_datasets": '[{"subsets": 3, "resolution": {"a": 1}}]', "ss_network_args": "[1]"},
    "terminal codes": {"ss_lr_scheduler": "\x1b]0;x\x07", "ss_optimizer": "\x1b[31m", "ss_output_name": "\x1b[31mred"},
    "numbers without end": {"ss_network_dim": "9" * 5000, "ss_seed": "1e400", "ss_unet_lr": "nan"},
    "names of paths": {"ss_output_name": "../../x", "ss_sd_model_name": "C:\\models\\x\\y.safetensors"},
    "out of range": {"ss_network_dim": "100000", "ss_noise_offset": "7", "ss_max_grad_norm": "-3"},
    "arguments that are no numbers": {"ss_optimizer": "AdamW(x={[]},weight_decay=[1],name=5,eps={},betas=({[]},1))"},
    "strange sizes": {"ss_keep_tokens": "-3", "ss_resolution": "(1, 2)", "ss_lr_warmup_steps": "-5"},
    "huge sizes": {"ss_resolution": "(99999999, 0)", "ss_min_bucket_reso": "9" * 40},
    "our own key broken": {RECIPE_KEY: "{" * 40_000, "ss_network_dim": "4"},
    "our own key hostile": {RECIPE_KEY: '{"rank": 100000, "path": "/etc/x", "optimizer": {"name": "os.system"}}'},
    "words without end": {"modelspec.trigger_phrase": "a," * 5000, "modelspec.description": "a " * 9000},
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_metadata_make_a_sound_preset_or_a_sentence(kind: str, tmp_path: Path, capsys: Any) -> None:
    path = lora(tmp_path, SD15, {"ss_network_dim": "4"} | HOSTILE[kind])
    code = cli.main(["presets", "share", str(path), "--out", str(tmp_path / "out.toml")])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert all(letter.isprintable() or letter == "\n" for letter in out)
    made = load_preset(tmp_path / "out.toml")
    assert made.recipe is not None
    assert "/" not in made.name
    assert "models" not in made.base.name


def test_no_resolution_is_made_of_a_part_of_a_number(tmp_path: Path, capsys: Any) -> None:
    path = lora(tmp_path, SD15, {"ss_network_dim": "4", "ss_resolution": "(99999999, 0)"})
    assert cli.main(["presets", "share", str(path), "--out", str(tmp_path / "out.toml")]) == 0
    assert "99999999x0" in capsys.readouterr().out
    made = load_preset(tmp_path / "out.toml")
    assert made.recipe is not None and made.recipe.resolution is None


@settings(max_examples=150)
@given(
    st.dictionaries(
        st.sampled_from([*FOLDER, "ss_datasets", "ss_network_args"]),
        st.sampled_from([*FOLDER.values(), "[]", "{}", '[{"subsets": [7]}]', "(,)", "[[1e-5]]", "-0.0", "inf", "1_000"])
        | st.text(max_size=20),
    )
)
def test_any_metadata_map_without_a_fault(metadata: dict[str, str]) -> None:
    parts = LoraParts("sd15", unet=True, text_encoder=True, text_encoder_2=False, ranks=())
    json.dumps(recipe_of_metadata(metadata, parts).recipe)


@pytest.mark.parametrize(
    ("layers", "metadata", "expected"),
    [
        (SD15, {}, "has no training metadata"),
        (PROJECTION, FOLDER | {"ss_base_model_version": "sd_v2_768_v"}, "not for SD 1.5 or SDXL"),
    ],
)
def test_what_tells_too_little_is_refused(
    layers: dict[str, int], metadata: dict[str, str], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ImpastoError, match=expected):
        preset_of_lora(lora(tmp_path, layers, metadata))


@pytest.mark.parametrize(
    ("arguments", "tensors", "adapter"),
    [
        ({"algo": "loha"}, {"hada_w1_a": (40, 8), "hada_w1_b": (8, 24)}, "loha"),
        ({"algo": "lokr", "factor": "4"}, {"lokr_w1": (4, 6), "lokr_w2_a": (10, 8), "lokr_w2_b": (8, 4)}, "lokr"),
        ({"algo": "diag-oft"}, {"oft_blocks": (10, 4, 4)}, "oft"),
        ({"algo": "locon", "dora_wd": "True"}, {"lora_down.weight": (8, 24), "dora_scale": (1, 24)}, "dora"),
    ],
)
def test_files_of_other_kinds_of_adapter_have_recipes_too(
    arguments: dict[str, str], tensors: dict[str, tuple[int, ...]], adapter: str, tmp_path: Path
) -> None:
    whole = {f"lora_unet_mid.{role}": np.zeros(shape, np.float16) for role, shape in tensors.items()}
    metadata = FOLDER | {"ss_network_args": json.dumps(arguments)}
    save_file(whole, tmp_path / "a.safetensors", metadata)
    found = recipe(preset_of_lora(tmp_path / "a.safetensors"))
    assert (found["adapter"], found["rank"]) == (adapter, 32)
