"""What is doubtful with a base is told, and only there."""

from pathlib import Path

import pytest

from trainer.config.base import Family
from trainer.config.checks import doubtful
from trainer.config.load import parse_job

MINIMAL = 'name = "x"\n[base]\nmodel = "owner/name"\n[[dataset.folders]]\npath = "pictures"\n'


@pytest.mark.parametrize(
    ("settings", "zero_terminal_snr", "told"),
    [
        (["recipe.objective.debiased_estimation=true"], True, True),
        (["recipe.objective.debiased_estimation=true"], False, False),
        (["recipe.objective.debiased_estimation=true", "recipe.objective.timestep_max=998"], True, False),
        (["recipe.objective.min_snr_gamma=5"], True, False),
    ],
)
def test_debiased_weights_on_a_base_that_knows_pure_noise(settings, zero_terminal_snr, told):
    job = parse_job(MINIMAL, "job.toml", Path("/jobs"), settings)
    keys = [key for key, _ in doubtful(job, zero_terminal_snr=zero_terminal_snr)]
    assert keys == (["recipe.objective.debiased_estimation"] if told else [])


@pytest.mark.parametrize(
    ("settings", "prediction", "doubted"),
    [
        (["scale_v_pred_loss=true", "min_snr_gamma=5"], "v", ["min_snr_gamma"]),
        (["scale_v_pred_loss=true", "min_snr_gamma=5"], None, []),
        (["scale_v_pred_loss=true"], "v", []),
        (["scale_v_pred_loss=true"], "epsilon", ["scale_v_pred_loss"]),
        (["v_pred_like_loss=0.5"], "v", ["v_pred_like_loss"]),
        (["v_pred_like_loss=0.5"], "epsilon", []),
    ],
)
def test_weights_for_another_prediction_are_doubtful(settings, prediction, doubted):
    overrides = [f"recipe.objective.{setting}" for setting in settings]
    job = parse_job(MINIMAL, "job.toml", Path("/jobs"), overrides)
    found = [key for key, _ in doubtful(job, zero_terminal_snr=False, prediction=prediction)]
    assert found == [f"recipe.objective.{key}" for key in doubted]


@pytest.mark.parametrize(
    ("settings", "doubted"),
    [
        (['report.previews.prompts=[{prompt="a"}, {prompt="a (cat:1.3)"}]'], ["report.previews.prompts.1.prompt"]),
        (['report.previews.prompts=[{prompt="a", negative="(cat:1.3)"}]'], ["report.previews.prompts.0.prompt"]),
        (['report.previews.prompts=[{prompt="a (cat:1.3)"}]', "recipe.weighted_captions=true"], []),
        (['report.previews.prompts=[{prompt="a (cat:1.3)", weights=true}]'], []),
        (['report.previews.prompts=[{prompt="saber (fate)"}]'], []),
    ],
)
def test_weights_of_prompts_that_are_read_as_text_are_doubtful(settings, doubted):
    job = parse_job(MINIMAL, "job.toml", Path("/jobs"), settings)
    assert [key for key, _ in doubtful(job, zero_terminal_snr=False)] == doubted


@pytest.mark.parametrize("settings", [[], ["fit.compile=true"], ["fit.compile=true", "fit.channels_last=true"]])
def test_forecasts_do_not_foresee_some_experiments(settings):
    job = parse_job(MINIMAL, "job.toml", Path("/jobs"), settings)
    told = doubtful(job, zero_terminal_snr=False)
    assert [f"{key}=true" for key, _ in told] == settings
    assert all(reason.startswith("forecasts count ") for _, reason in told)


@pytest.mark.parametrize(
    ("settings", "doubted"),
    [
        (["patience=9"], True),
        (["patience=8"], False),  # ten validations: the first sets the lowest loss, the ninth ends the run
        (["patience=3", "every=20"], False),
        (["patience=3", "every=25"], True),
        (["patience=4", "every=20"], True),
    ],
)
def test_patience_that_outlasts_the_run_is_doubtful(settings: list[str], doubted: bool) -> None:
    overrides = ["recipe.steps=100", *(f"report.validation.{setting}" for setting in settings)]
    keys = [
        key for key, _ in doubtful(parse_job(MINIMAL, "job.toml", Path("/jobs"), overrides), zero_terminal_snr=False)
    ]
    assert keys == (["report.validation.patience"] if doubted else [])


@pytest.mark.parametrize(("adapter", "rank", "doubted"), [("oft", 17, False), ("oft", 18, True), ("lokr", 64, False)])
def test_ranks_that_give_rotations_no_larger_blocks_are_doubtful(adapter: str, rank: int, doubted: bool) -> None:
    overrides = [f"recipe.adapter={adapter}", f"recipe.rank={rank}"]
    found = doubtful(parse_job(MINIMAL, "job.toml", Path("/jobs"), overrides), zero_terminal_snr=False)
    assert [key for key, _ in found] == ["recipe.rank"] * doubted


@pytest.mark.parametrize(
    ("settings", "doubted"),
    [
        (["adapter=tlora", "rank=1"], "adapter"),
        (["adapter=tlora", "rank=1", 'blocks=[{match="unet.*", rank=2}]'], None),
        (["adapter=lora", "rank=1"], None),
        (["adapter=lokr", "lokr_factor=1000"], "lokr_factor"),  # above all sizes' roots, and divides none
        (["adapter=lokr", "lokr_factor=90"], "lokr_factor"),  # 10240 = 80 * 128 with and without it
        (["adapter=lokr", "lokr_factor=640"], None),  # 640 = 1 * 640, not 20 * 32
        (["adapter=lokr", "lokr_factor=8"], None),
        (["adapter=lokr"], None),
        (["adapter=loha", "lokr_factor=1000"], None),  # reported as without effect
    ],
)
def test_adapters_whose_setting_changes_no_layer_are_doubtful(settings: list[str], doubted: str | None) -> None:
    overrides = [f"recipe.{setting}" for setting in settings]
    found = doubtful(parse_job(MINIMAL, "job.toml", Path("/jobs"), overrides), zero_terminal_snr=False)
    assert [key for key, _ in found] == ([f"recipe.{doubted}"] if doubted else [])


@pytest.mark.parametrize(
    ("arguments", "doubted"),
    [("scale_parameter=true", True), ("scale_parameter=true, relative_step=true", False), ("beta1=0.9", False)],
)
def test_an_adafactor_that_hardly_moves_new_weights_is_doubtful(arguments: str, doubted: bool) -> None:
    overrides = [f'recipe.optimizer={{name="adafactor", {arguments}}}', "recipe.schedule={kind='constant', warmup=0}"]
    found = doubtful(parse_job(MINIMAL, "job.toml", Path("/jobs"), overrides), zero_terminal_snr=False)
    assert [key for key, _ in found] == ["recipe.optimizer.scale_parameter"] * doubted


@pytest.mark.parametrize(
    ("rate", "family", "doubted"), [("0", "sdxl", True), ("0", "sd15", False), ("1e-4", "sdxl", False)]
)
def test_an_sdxl_lora_of_text_encoders_alone_is_doubtful(rate: str, family: Family, doubted: bool) -> None:
    settings = [f"recipe.learning_rate={rate}", "recipe.text_encoder.learning_rate=1e-4"]
    job = parse_job(MINIMAL, "job.toml", Path("/jobs"), settings)
    found = dict(doubtful(job, zero_terminal_snr=False, family=family))
    assert list(found) == (["recipe.learning_rate"] if doubted else [])
    assert all("InvokeAI" in reason for reason in found.values())
