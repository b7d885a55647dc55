"""What is doubtful with a base is told, and only there."""

from pathlib import Path

import pytest

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
