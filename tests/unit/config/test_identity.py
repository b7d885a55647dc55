"""What may change between the attempts of a run, and how what may not is told."""

import json
from pathlib import Path

import pytest

from trainer.config.job import Job
from trainer.config.load import parse_job
from trainer.config.resolve import Machine, differences, identity, resolve_job

TEXT = """
name = "x"
[base]
model = "owner/name"
[[dataset.folders]]
path = "pictures"
"""


def frozen(*overrides: str) -> Job:
    made = parse_job(TEXT, "job.toml", Path("/jobs"), overrides)
    machine = Machine("cpu", None, None, True, 2)
    facts = {"family": "sd15", "prediction": "epsilon", "zero_terminal_snr": False}
    return resolve_job(made, samples_per_epoch=20, machine=machine, **facts)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("recipe.rank=32", "recipe.rank was 16 and is now 32"),
        ("recipe.images.flip=true", "recipe.images.flip was false and is now true"),
        ("recipe.objective.min_snr_gamma=5", "recipe.objective.min_snr_gamma was not set and is now 5.0"),
        ("base.revision=v2", 'base.revision was not set and is now "v2"'),
        ("dataset.folders.0.repeats=2", "dataset.folders.0.repeats was not set and is now 2"),
        ("recipe.optimizer.name=lion", 'recipe.optimizer.name was "adamw" and is now "lion"'),
        ("fit.dtype=bf16", 'fit.dtype was "fp32" and is now "bf16"'),
        ("fit.quantize=nf4", 'fit.quantize was "none" and is now "nf4"'),
    ],
)
def test_changes_of_what_is_learned_are_told(override: str, sentence: str) -> None:
    assert sentence in differences(identity(frozen()), identity(frozen(override)))


@pytest.mark.parametrize(
    "override",
    [
        "recipe.steps=9",
        "recipe.epochs=3",
        "fit.micro_batch=1",
        "fit.gradient_checkpointing=full",
        "report.tensorboard=true",
        "name=y",
    ],
)
def test_length_fit_and_report_may_change(override: str) -> None:
    assert differences(identity(frozen()), identity(frozen(override))) == []


def test_identity_survives_json() -> None:
    found = identity(frozen("report.validation.timesteps=[5]"))
    assert json.loads(json.dumps(found)) == found


def test_a_folder_more_is_told() -> None:
    more = parse_job(TEXT + "[[dataset.folders]]\npath = 'b'\n", "job.toml", Path("/jobs"))
    old, new = identity(frozen()), identity(more)
    where = str(Path("/jobs/b").absolute())
    assert f'dataset.folders.1.path was not set and is now "{where}"' in differences(old, new)
