"""The methods command lists everything that a recipe can choose, with where it comes from."""

import json

import pytest

from trainer.cli import main
from trainer.config.job import Job
from trainer.config.methods import ADAPTERS, LOSSES, SCHEDULES
from trainer.config.optimizers.kinds import OPTIMIZERS
from trainer.config.optimizers.others import OTHERS
from trainer.config.schema import choices, fields

KEYS = {
    "recipe.adapter": ADAPTERS,
    "recipe.optimizer.name": OPTIMIZERS,
    "recipe.schedule.kind": SCHEDULES,
    "recipe.objective.loss": LOSSES,
}


def test_every_choice_of_a_recipe_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    accepted = {found.key: choices(found.annotation) for found in fields(Job)}
    assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["methods"]
    for key, methods in KEYS.items():
        assert [each["name"] for each in listed if each["key"] == key] == list(methods)
        assert set(methods) == set(accepted[key])
    described = [each for each in listed if each["kind"] != "other"]
    assert all(each[key] for each in described for key in ("title", "purpose", "source"))
    assert {each["name"] for each in listed if each["kind"] == "other"} == set(OTHERS)
    adamw = next(each for each in listed if each["name"] == "adamw")
    assert adamw["state_bytes_per_number"] == pytest.approx(8.0, abs=0.001)  # two fp32 averages and a step counter
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    assert all(str(each["purpose"]) in text for each in described)
    assert all(name in text for name in OTHERS)


def test_names_in_other_trainers_are_lowercase_and_belong_to_one_optimizer() -> None:
    names = [*OPTIMIZERS, *(word for kind in OPTIMIZERS.values() for word in kind.method.names)]
    assert len(set(names)) == len(names)
    assert [word for word in names if word != word.lower()] == []
