"""Everything a base can state about its process: absent, supported, unsupported, unknown, and of the wrong type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forecasts import known_job
from tests.support.raw import base_shapes, write_shapes
from tests.unit.files.test_identify import change_json, diffusers_folder
from trainer.errors import BaseModelError
from trainer.files.identify import BaseIdentity, identify_base
from trainer.files.statements import METADATA, SCHEDULER, YAML
from trainer.memory.planner.request import request_of_job

NOISE, V, V_ZERO, RECTIFIED = ("epsilon", False), ("v", False), ("v", True), ("flow", False)
# Outcomes in which the user decides, by what is left open.
ASKS_PREDICTION, ASKS_ZERO_SNR = (None, False), ("epsilon", None)
FLOW, EDM, IMAGE, DISTILLED = "flow matching", "an EDM process", "prediction of the image itself", "a distilled model"

# Key, value, outcome: what the base is, or a text of the refusal.
SCHEDULERS: list[tuple[str, Any, Any]] = [
    ("_class_name", "EulerDiscreteScheduler", NOISE),
    ("_class_name", "DPMSolverMultistepScheduler", NOISE),
    ("_class_name", "FlowMatchEulerDiscreteScheduler", RECTIFIED),
    ("_class_name", "FlowMatchHeunDiscreteScheduler", FLOW),
    ("_class_name", "EDMEulerScheduler", EDM),
    ("_class_name", "EDMDPMSolverMultistepScheduler", EDM),
    ("_class_name", "LCMScheduler", DISTILLED),
    ("_class_name", "TCDScheduler", DISTILLED),
    ("_class_name", "CMStochasticIterativeScheduler", DISTILLED),
    ("_class_name", "SomebodysScheduler", ASKS_PREDICTION),
    ("_class_name", 7, ASKS_PREDICTION),
    ("prediction_type", "epsilon", NOISE),
    ("prediction_type", "v_prediction", V),
    ("prediction_type", "v-prediction", V),
    ("prediction_type", "sample", IMAGE),
    ("prediction_type", "flow_prediction", RECTIFIED),
    ("prediction_type", "flow", RECTIFIED),
    ("prediction_type", "something", ASKS_PREDICTION),
    ("prediction_type", "", ASKS_PREDICTION),
    ("prediction_type", None, ASKS_PREDICTION),
    ("prediction_type", ["epsilon"], ASKS_PREDICTION),
    ("predict_epsilon", True, NOISE),
    ("predict_epsilon", False, IMAGE),
    ("predict_epsilon", "false", ASKS_PREDICTION),
    ("beta_schedule", "scaled_linear", NOISE),
    ("beta_schedule", "linear", 'Impasto supports only "scaled_linear"'),
    ("beta_schedule", "squaredcos_cap_v2", 'Impasto supports only "scaled_linear"'),
    ("beta_schedule", "mine", 'Impasto supports only "scaled_linear"'),
    ("beta_schedule", None, 'Impasto supports only "scaled_linear"'),
    ("beta_start", 0.00085, NOISE),
    ("beta_start", 0.0001, "Impasto supports only 0.00085"),
    ("beta_start", "0.00085", "Impasto supports only 0.00085"),
    ("beta_end", 0.012, NOISE),
    ("beta_end", 0.02, "Impasto supports only 0.012"),
    ("beta_end", True, "Impasto supports only 0.012"),
    ("num_train_timesteps", 1000, NOISE),
    ("num_train_timesteps", 500, "Impasto supports only 1000"),
    ("num_train_timesteps", "1000", "Impasto supports only 1000"),
    ("trained_betas", None, NOISE),
    ("trained_betas", [0.1, 0.2], "Impasto supports only null"),
    ("trained_betas", "none", "Impasto supports only null"),
    ("rescale_betas_zero_snr", False, NOISE),
    ("rescale_betas_zero_snr", True, ("epsilon", True)),  # refused with a reason when the job is resolved
    ("rescale_betas_zero_snr", "false", ASKS_ZERO_SNR),
    ("rescale_betas_zero_snr", "true", ASKS_ZERO_SNR),
    ("rescale_betas_zero_snr", 0, ASKS_ZERO_SNR),
    ("rescale_betas_zero_snr", None, ASKS_ZERO_SNR),
    ("use_flow_sigmas", False, NOISE),
    ("use_flow_sigmas", True, FLOW),
    ("use_flow_sigmas", "false", ASKS_PREDICTION),
    ("use_dynamic_shifting", False, NOISE),
    ("use_dynamic_shifting", True, FLOW),
    ("use_dynamic_shifting", 1, ASKS_PREDICTION),
    ("timestep_type", "discrete", NOISE),
    ("timestep_type", "continuous", EDM),
    ("timestep_type", "other", ASKS_PREDICTION),
    ("timestep_type", False, ASKS_PREDICTION),
    ("sigma_min", None, NOISE),
    ("sigma_min", 0.002, ASKS_PREDICTION),
    ("sigma_min", "0.002", ASKS_PREDICTION),
    ("sigma_max", None, NOISE),
    ("sigma_max", 120.0, ASKS_PREDICTION),
    ("sigma_max", [], ASKS_PREDICTION),
    ("sigma_data", 0.5, ASKS_PREDICTION),  # a key that none of the supported schedulers has
    ("shift", 3.0, ASKS_PREDICTION),
    ("timestep_spacing", "anything", NOISE),  # only how images are sampled
]
METADATA_VALUES: list[tuple[str, Any, Any]] = [
    ("modelspec.prediction_type", "epsilon", NOISE),
    ("modelspec.prediction_type", "v", ("v", None)),
    ("modelspec.prediction_type", "v-prediction", ("v", None)),
    ("modelspec.prediction_type", "V_Prediction", ("v", None)),
    ("modelspec.prediction_type", "flow", RECTIFIED),
    ("modelspec.prediction_type", "rectified flow", RECTIFIED),
    ("modelspec.prediction_type", "edm", EDM),
    ("modelspec.prediction_type", "x0", IMAGE),
    ("modelspec.prediction_type", "something", ASKS_PREDICTION),
    ("modelspec.prediction_type", "", ASKS_PREDICTION),
    ("ss_zero_terminal_snr", "False", NOISE),
    ("ss_zero_terminal_snr", "None", NOISE),
    ("ss_zero_terminal_snr", "maybe", ASKS_ZERO_SNR),
    ("ss_zero_terminal_snr", "0", ASKS_ZERO_SNR),
]
YAML_LINES: list[tuple[str, str, Any]] = [
    ("parameterization", "parameterization: eps", NOISE),
    ("parameterization", 'parameterization: "v"  # as published', ("v", None)),
    ("parameterization", "parameterization: x0", IMAGE),
    ("parameterization", "parameterization: other", ASKS_PREDICTION),
    ("parameterization", "parameterization: 1", ASKS_PREDICTION),
    ("scaling", "target: sgm.modules.diffusionmodules.denoiser_scaling.EpsScaling", NOISE),
    ("scaling", "target: sgm.modules.diffusionmodules.denoiser_scaling.VScaling", ("v", None)),
    ("scaling", "target: sgm.modules.diffusionmodules.denoiser_scaling.VScalingWithEDMcNoise", EDM),
    ("scaling", "target: sgm.modules.diffusionmodules.denoiser_scaling.EDMScaling", EDM),
    ("scaling", "target: mine.OtherScaling", ASKS_PREDICTION),
    ("discretization", "target: sgm.modules.diffusionmodules.discretizer.LegacyDDPMDiscretization", NOISE),
    ("discretization", "target: sgm.modules.diffusionmodules.discretizer.EDMDiscretization", EDM),
    ("discretization", "target: mine.OtherDiscretization", ASKS_PREDICTION),
    ("sampling", "target: sgm.modules.diffusionmodules.sigma_sampling.DiscreteSampling", NOISE),
    ("sampling", "target: sgm.modules.diffusionmodules.sigma_sampling.EDMSampling", EDM),
    ("sampling", "target: mine.OtherSampling", ASKS_PREDICTION),
    ("linear_start", "linear_start: 0.00085", NOISE),
    ("linear_start", "linear_start: 0.0015", "Impasto supports only 0.00085"),
    ("linear_start", 'linear_start: "0.00085"', "Impasto supports only 0.00085"),
    ("linear_end", "linear_end: 0.0120", NOISE),
    ("linear_end", "linear_end: 0.0195", "Impasto supports only 0.012"),
    ("linear_end", "linear_end: high", "Impasto supports only 0.012"),
    ("beta_schedule", "beta_schedule: linear", NOISE),
    ("beta_schedule", "beta_schedule: cosine", 'Impasto supports only "linear"'),
    ("beta_schedule", "beta_schedule: 3", 'Impasto supports only "linear"'),
    ("timesteps", "- timesteps: 1000", NOISE),
    ("timesteps", "timesteps: 500", "Impasto supports only 1000"),
    ("timesteps", "timesteps: many", "Impasto supports only 1000"),
    ("num_idx", "num_idx: 1000", NOISE),
    ("num_idx", "num_idx: 250", "Impasto supports only 1000"),
    ("num_idx", "num_idx: true", "Impasto supports only 1000"),
    *(
        (key, f"parameterization: v\n{key}: {text}", outcome)
        for key in ("zero_terminal_snr", "rescale_betas_zero_snr", "ztsnr", "zsnr")
        for text, outcome in (("true", V_ZERO), ("False", V), ('"false"', ("v", None)), ("1", ("v", None)))
    ),
]


def outcome_of(base: Path) -> tuple[Any, Any] | str:
    """What a base is found to be, or the sentence and remedy with which it is refused."""
    try:
        identity = identify_base(base)
    except BaseModelError as error:
        assert error.code == "base.process_unsupported"
        assert error.sentence.startswith(f'Could not use "{base}": ')
        return f"{error.sentence} {error.remedy}"
    assert_explained(identity)
    return identity.prediction, identity.zero_terminal_snr


def assert_explained(identity: BaseIdentity) -> None:
    if identity.prediction is None or (identity.prediction == "epsilon" and identity.zero_terminal_snr is None):
        assert "which is unknown" in identity.evidence[-1] or "nothing inside" in identity.evidence[-1]


def check(found: tuple[Any, Any] | str, key: str, expected: Any) -> None:
    if isinstance(expected, str):
        assert isinstance(found, str), f"not refused: {found}"
        assert expected in found and key in found
    else:
        assert found == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return diffusers_folder(tmp_path_factory.mktemp("bases") / "m")


@pytest.mark.parametrize(("key", "value", "expected"), SCHEDULERS)
def test_each_value_of_a_scheduler_config(folder: Path, key: str, value: Any, expected: Any) -> None:
    config = folder / "scheduler" / "scheduler_config.json"
    published = config.read_text(encoding="utf-8")
    try:
        change_json(config, {key: value})
        check(outcome_of(folder), key, expected)
    finally:
        config.write_text(published, encoding="utf-8")


@pytest.mark.parametrize("key", sorted(SCHEDULER))
def test_a_scheduler_config_may_leave_out_any_key(folder: Path, key: str) -> None:
    config = folder / "scheduler" / "scheduler_config.json"
    published = config.read_text(encoding="utf-8")
    try:
        rest = {name: value for name, value in json.loads(published).items() if name != key}
        config.write_text(json.dumps(rest), encoding="utf-8")
        assert outcome_of(folder) == NOISE
    finally:
        config.write_text(published, encoding="utf-8")


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["diffusers", "PNDMScheduler"], NOISE),
        ([None, None], NOISE),
        (None, NOISE),
        (["diffusers", "FlowMatchEulerDiscreteScheduler"], RECTIFIED),
        (["diffusers", "FlowMatchHeunDiscreteScheduler"], FLOW),
        (["mine", "OtherScheduler"], ASKS_PREDICTION),
        ("PNDMScheduler and more", ASKS_PREDICTION),
        (["diffusers"], ASKS_PREDICTION),
    ],
)
def test_the_scheduler_that_a_folder_names(folder: Path, named: Any, expected: Any) -> None:
    (folder / "model_index.json").write_text(json.dumps({"scheduler": named}), encoding="utf-8")
    check(outcome_of(folder), "_class_name", expected)


@pytest.mark.parametrize(("key", "value", "expected"), METADATA_VALUES)
def test_each_value_of_a_single_files_metadata(tmp_path: Path, key: str, value: str, expected: Any) -> None:
    check(outcome_of(write_shapes(tmp_path / "m.safetensors", base_shapes("sdxl"), {key: value})), key, expected)


@pytest.mark.parametrize(("key", "lines", "expected"), YAML_LINES)
def test_each_line_of_a_yaml(tmp_path: Path, key: str, lines: str, expected: Any) -> None:
    base = write_shapes(tmp_path / "m.safetensors", base_shapes("sd15"))
    text = "model:\n  params:\n    verbose: false\n" + "".join(f"    {line}\n" for line in lines.split("\n"))
    base.with_suffix(".yaml").write_text(text, encoding="utf-8")
    check(outcome_of(base), key, expected)


def test_a_statement_counts_even_where_another_decides(tmp_path: Path) -> None:
    """A marker says what a file predicts; its metadata may not contradict that with another process."""
    marked = base_shapes("sdxl") | {"v_pred": (0,), "ztsnr": (0,)}
    for value, expected in (("edm", EDM), ("what", (None, True))):
        path = write_shapes(tmp_path / f"{value}.safetensors", marked, {"modelspec.prediction_type": value})
        check(outcome_of(path), "modelspec.prediction_type", expected)


def test_every_statement_is_tried() -> None:
    assert {key for key, *_ in SCHEDULERS} >= set(SCHEDULER)
    assert {key for key, *_ in METADATA_VALUES} == set(METADATA)
    assert {key for key, *_ in YAML_LINES} == set(YAML)


def test_a_plan_reports_what_a_training_would_ask_or_refuse(tmp_path: Path) -> None:
    base = diffusers_folder(tmp_path / "m", "sdxl")
    config = base / "scheduler" / "scheduler_config.json"
    job = known_job(tmp_path / "job", "sdxl")
    on_base = (f"base.model={base}", "base.family=auto")
    change_json(config, {"prediction_type": "something"})
    (asked,) = [e for e in request_of_job(job, on_base, "8GB").obstacles if e.code == "base.undecided"]
    assert 'prediction_type = "something"' in asked.sentence and "base.prediction" in asked.remedy
    answered = request_of_job(job, (*on_base, "base.prediction=v", "base.zero_terminal_snr=false"), "8GB")
    assert not [e for e in answered.obstacles if e.code == "base.undecided"]
    change_json(config, {"prediction_type": "sample"})
    with pytest.raises(BaseModelError, match=IMAGE) as refused:
        request_of_job(job, on_base, "8GB")
    assert "Choose" in refused.value.remedy
