"""Jobs of OneTrainer: each setting has one outcome, and numbers mean what they mean there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainer import cli
from trainer.config.job import Job
from trainer.errors import ImpastoError
from trainer.importers.onetrainer.files import read_config
from trainer.importers.onetrainer.options import FORMER, OPTIONS, TABLES
from trainer.importers.reading import read_job
from trainer.importers.translation import ImportedJob

PINNED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "golden" / "imports" / "onetrainer.json").read_text("utf-8")
)["config"]
LORA = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "own/er"}


def config(**stated: object) -> dict[str, object]:
    """Return a configuration with these settings, which name those in tables as `unet__train`."""
    made: dict[str, Any] = {**LORA, "concepts": [{"path": "cats"}]}
    for name, value in stated.items():
        table, _, key = name.rpartition("__")
        if table:
            made.setdefault(table, {})[key] = value
        else:
            made[name] = value
    return made


def imported(tmp_path: Path, **stated: object) -> ImportedJob:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(**stated)), encoding="utf-8")
    return read_config(path)


def job(tmp_path: Path, **stated: object) -> Job:
    return imported(tmp_path, **stated).job("a")


def outcomes(found: ImportedJob) -> dict[str, str]:
    """Return the outcome of each setting; each has one."""
    count = Counter(setting.name for setting in found.found.settings)
    assert {name: number for name, number in count.items() if number > 1} == {}
    return {setting.name: setting.outcome for setting in found.found.settings}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in flat.items():
        table, _, key = name.rpartition(".")
        (made.setdefault(table, {}) if table else made)[key] = value
    return made


def test_the_settings_and_their_defaults_are_those_of_onetrainer() -> None:
    assert OPTIONS.keys() - PINNED.keys() == {*FORMER.split()}
    assert PINNED.keys() - OPTIONS.keys() == set()
    tables = TABLES.split()
    plain = {name: value for name, value in PINNED.items() if name not in tables}
    # An empty text there is none here.
    assert {name: OPTIONS[name].default for name in plain} == {
        name: None if value == "" else value for name, value in plain.items()
    }


def test_a_whole_configuration_has_one_outcome_for_each_setting(tmp_path: Path) -> None:
    whole = {**PINNED, "training_method": "LORA", "__version": 11, "concepts": [{"path": "cats"}]}
    path = tmp_path / "whole.json"
    path.write_text(json.dumps(nested(whole)), encoding="utf-8")
    found = read_job(path)
    assert outcomes(found).keys() == whole.keys()
    assert "unavailable" not in outcomes(found).values()
    assert found.job("a").recipe.alpha == 1.0


# Values that OneTrainer accepts, for settings whose other values depend on the program.
OTHER = {
    "model_type": "STABLE_DIFFUSION_XL_10_BASE", "training_method": "LORA", "loss_weight_fn": "P2", "ema": "GPU",
    "learning_rate_scheduler": "COSINE", "timestep_distribution": "LOGIT_NORMAL", "resolution": "768", "ema_decay": 0.5,
    "loss_scaler": "BOTH", "learning_rate_scaler": "BOTH", "optimizer.optimizer": "LION", "peft_type": "LOHA",
    "max_noising_strength": 0.5, "huber_delta": 0.5, "learning_rate_min_factor": 0.5, "dropout_probability": 0.5,
    "layer_filter": "attn", "layer_filter_preset": "attn-mlp", "unet.weight_dtype": "NFLOAT_4",
}  # fmt: skip
EXTRA = {name: "STEP" for name in PINNED if name.endswith("_unit")} | OTHER


def changed(name: str) -> object:
    default = PINNED[name]
    if name in EXTRA:
        return EXTRA[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, dict | list) or name in TABLES.split():
        return None if name in ("concepts", "samples") else {"a": 1}
    return (
        "other" if isinstance(default, str) else 0.5 if isinstance(default, float) or default is None else default + 1
    )


@pytest.mark.parametrize("family", ["STABLE_DIFFUSION_15", "STABLE_DIFFUSION_XL_10_BASE"])
def test_each_setting_has_one_outcome_whatever_it_is(family: str, tmp_path: Path) -> None:
    for name in PINNED:
        value = changed(name)
        stated = {**LORA, "model_type": family, name: value, "concepts": [{"path": "cats"}]}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(nested(stated)), encoding="utf-8")
        found = read_config(path)
        assert outcomes(found).keys() == stated.keys(), name
        found.job("a")


def test_the_defaults_of_the_program_are_those_of_the_job(tmp_path: Path) -> None:
    recipe = job(tmp_path).recipe
    assert (recipe.rank, recipe.alpha, recipe.learning_rate, recipe.epochs) == (16, 1.0, 3e-6, 100)
    assert (recipe.schedule.kind, recipe.schedule.warmup) == ("constant", 200)
    assert (recipe.resolution, recipe.effective_batch, recipe.max_grad_norm) == (512, 1, 1.0)
    # Both are trained, for 30 of 100 epochs.
    assert (recipe.text_encoder.learning_rate, recipe.text_encoder.stop_after) == (3e-6, 0.3)
    assert (recipe.text_encoder_2.learning_rate, recipe.text_encoder_2.stop_after) == (3e-6, 0.3)
    assert recipe.layers == "all" and (recipe.conv_rank, recipe.conv_alpha) == (16, 1.0)


def test_rates_are_scaled_and_gradients_clipped_as_there(tmp_path: Path) -> None:
    recipe = job(
        tmp_path,
        learning_rate=1e-4,
        text_encoder__learning_rate=4e-5,
        text_encoder_2__train=False,
        learning_rate_scaler="BOTH",
        loss_scaler="BATCH",
        batch_size=8,
        gradient_accumulation_steps=2,
        clip_grad_norm=1.0,
    ).recipe
    # The rate is multiplied by the root of 8 x 2, and the loss, so also the gradient before it is clipped, by 8.
    assert recipe.learning_rate == pytest.approx(4e-4)
    assert recipe.text_encoder.learning_rate == pytest.approx(1.6e-4)
    assert recipe.text_encoder_2.learning_rate == 0.0
    assert (recipe.effective_batch, recipe.max_grad_norm) == (16, 0.125)


def test_steps_are_batches_there_and_steps_of_the_optimizer_here(tmp_path: Path) -> None:
    made = job(
        tmp_path,
        gradient_accumulation_steps=4,
        learning_rate_warmup_steps=200,
        sample_after=100,
        sample_after_unit="STEP",
        save_every=2,
        save_every_unit="EPOCH",
        backup_after=1000,
        backup_after_unit="STEP",
        text_encoder__stop_training_after=600,
        text_encoder__stop_training_after_unit="STEP",
    )
    assert made.recipe.schedule.warmup == 50
    assert made.report.previews.every == 25
    assert made.report.saving.every_epochs == 2
    assert made.report.saving.checkpoint_every == 250
    assert made.recipe.text_encoder.stop_after == 150


def test_a_warmup_up_to_1_is_a_share(tmp_path: Path) -> None:
    assert job(tmp_path, learning_rate_warmup_steps=0.1).recipe.schedule.warmup == 0.1


def test_the_average_decays_as_much_in_as_many_steps(tmp_path: Path) -> None:
    decay = job(tmp_path, ema="CPU", ema_decay=0.99, ema_update_step_interval=5).recipe.ema_decay
    assert decay is not None and decay**5 == pytest.approx(0.99)


def test_several_resolutions_are_each_folders_and_epochs_have_as_many_images(tmp_path: Path) -> None:
    made = job(tmp_path, resolution="512,768", epochs=10)
    # OneTrainer draws one of the two for each image and epoch; here each image is used at both.
    assert made.recipe.epochs == 5
    assert [folder.resolutions for folder in made.dataset.folders] == [(512, 768)]


@pytest.mark.parametrize(
    ("stated", "loss", "mix"),
    [
        ({}, "mse", None),
        ({"mse_strength": 0.0, "mae_strength": 1.0}, "l1", None),
        ({"mse_strength": 0.5, "log_cosh_strength": 0.5}, "mse", "mse:0.5,log_cosh:0.5"),
        ({"mse_strength": 0.0, "huber_strength": 1.0}, "huber", "huber:0.5"),
    ],
)
def test_losses(stated: dict[str, object], loss: str, mix: str | None, tmp_path: Path) -> None:
    objective = job(tmp_path, **stated).recipe.objective
    assert (objective.loss, objective.loss_mix) == (loss, mix)


def test_noise_timesteps_and_weights_of_the_loss(tmp_path: Path) -> None:
    objective = job(
        tmp_path,
        loss_weight_fn="MIN_SNR_GAMMA",
        loss_weight_strength=3.0,
        offset_noise_weight=0.05,
        min_noising_strength=0.1,
        max_noising_strength=0.9,
        masked_training=True,
        unmasked_probability=0.2,
    ).recipe.objective
    assert (objective.min_snr_gamma, objective.noise_offset) == (3.0, 0.05)
    assert (objective.timestep_min, objective.timestep_max) == (100, 899)  # the upper end is exclusive there
    assert (objective.unmasked_weight, objective.unmasked_probability) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("preset", "filters", "layers", "entries"),
    [
        ("attn-mlp", None, "linear", None),
        ("attn-only", None, "attention", None),
        ("full", None, "all", None),
        ("custom", "attentions", "linear", None),
        (
            "custom",
            "down_blocks.1.attentions, mid_block",
            "all",
            ["unet.*down_blocks.1.attentions*", "unet.*mid_block*"],
        ),
    ],
)
def test_layer_filters(
    preset: str, filters: str | None, layers: str, entries: list[str] | None, tmp_path: Path
) -> None:
    stated = {"layer_filter_preset": preset} | ({"layer_filter": filters} if filters else {})
    recipe = job(tmp_path, **stated).recipe
    assert recipe.layers == layers
    blocks = [(block.match, block.rate_factor) for block in recipe.blocks or ()]
    assert blocks == ([("unet.*", 0.0), *((entry, 1.0) for entry in entries)] if entries else [])


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"optimizer": "ADAMW"}, {"name": "adamw", "weight_decay": 0.01}),
        ({"optimizer": "ADAM"}, {"name": "adamw", "weight_decay": 0.0}),
        ({"optimizer": "ADAMW_8BIT", "is_paged": True, "beta2": 0.99}, {"name": "paged_adamw8bit", "beta2": 0.99}),
        (
            {"optimizer": "PRODIGY", "d_coef": 0.5, "growth_rate": "inf", "use_bias_correction": True},
            {"name": "prodigy", "d_coef": 0.5, "bias_correction": True, "safeguard_warmup": False, "weight_decay": 0.0},
        ),
        ({"optimizer": "ADAFACTOR"}, {"name": "adafactor", "scale_parameter": False, "relative_step": False}),
        ({"optimizer": "SCHEDULE_FREE_ADAMW"}, {"name": "schedulefree", "warmup_steps": 200, "weight_decay": 0.01}),
        ({"optimizer": "MUON", "momentum": 0.9}, {"name": "other", "optimizer": "muon"}),
        ({"optimizer": "DADAPT_SGD"}, {"name": "adamw"}),
    ],
)
def test_optimizers(stated: dict[str, object], expected: dict[str, object], tmp_path: Path) -> None:
    found = imported(tmp_path, **{f"optimizer__{name}": value for name, value in stated.items()})
    optimizer = found.job("a").recipe.optimizer.model_dump()
    assert {name: optimizer[name] for name in expected} == expected
    is_known = stated["optimizer"] != "DADAPT_SGD"
    assert (outcomes(found)["optimizer.optimizer"] == "carried") == is_known


def test_concepts_and_samples_are_found_in_the_folder_of_the_program(tmp_path: Path) -> None:
    """A configuration names both relative to the program's folder, where it is in another one."""
    for name, content in (
        ("training_concepts/concepts.json", [{"path": "D:\\cats"}, {"path": "D:\\all", "type": "PRIOR_PREDICTION"}]),
        (
            "training_samples/samples.json",
            [
                {"prompt": "a cat", "negative_prompt": "blurry", "width": 833, "height": 1216, "seed": 7,
                 "diffusion_steps": 25, "cfg_scale": 5.0, "noise_scheduler": "DPMPP_KARRAS"},
                {"prompt": "off", "enabled": False},
            ],
        ),
        ("workspace/run/config.json", {**LORA, "base_model_name": "D:\\models\\sdxl.safetensors"}),
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
    made = read_job(tmp_path / "workspace/run/config.json", moved=[("d:\\", "/mnt/d")]).job("a")
    assert made.base.model == str(Path("/mnt/d/models/sdxl.safetensors"))
    assert [(folder.path, folder.kind) for folder in made.dataset.folders] == [
        (str(Path("/mnt/d/cats")), "train"),
        (str(Path("/mnt/d/all")), "regularization"),
    ]
    assert made.recipe.objective.prior_prediction is True
    (prompt,) = made.report.previews.prompts
    assert (prompt.prompt, prompt.negative, prompt.width, prompt.height) == ("a cat", "blurry", 832, 1216)
    assert (prompt.seed, prompt.steps, prompt.guidance, prompt.sampler) == (7, 25, 5.0, "dpmpp_2m_karras")


@pytest.mark.parametrize(
    ("stated", "word"),
    [
        ({"model_type": "FLUX_DEV_1"}, "FLUX_DEV_1"),
        ({"training_method": "FINE_TUNE"}, "FINE_TUNE"),
        ({"batch_size": 0}, "batch_size"),
        ({"resolution": "big"}, "resolution"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"samples": [3]}, "samples"),
        ({"lora_rank": 10**6}, "rank"),
    ],
)
def test_what_cannot_be_imported_is_said(stated: dict[str, object], word: str, tmp_path: Path) -> None:
    with pytest.raises(ImpastoError, match=word):
        job(tmp_path, **stated)


def test_the_command_line_reports_it_and_hides_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stated = config(secrets={"huggingface_token": "hf_hidden"}, lora_alpha=8, future_setting=1)
    Path("config.json").write_text(json.dumps(stated), encoding="utf-8")
    assert cli.main(["new", "cat", "--from", "config.json"]) == 0
    said = capsys.readouterr().out
    assert "lora_alpha = 8 → recipe.alpha = 8" in said
    assert "future_setting = 1; OneTrainer has no setting of this name" in said
    assert "hf_hidden" not in said + Path("cat/job.toml").read_text("utf-8")
