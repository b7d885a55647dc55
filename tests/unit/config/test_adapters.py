"""Which settings each type of adapter takes, refuses and leaves to the planner."""

from __future__ import annotations

import pytest

from tests.unit.config.test_effectless import job
from trainer.config.checks import without_effect
from trainer.config.methods import ADAPTERS
from trainer.config.recipe import RecipeConfig
from trainer.config.schema import choices
from trainer.errors import JobError


def test_every_adapter_is_in_the_registry() -> None:
    assert set(ADAPTERS) == set(choices(RecipeConfig.model_fields["adapter"].annotation))
    assert all(method.loads_in for method in ADAPTERS.values())


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["recipe.adapter=lokr", "recipe.dropout=0.1"], "recipe.dropout: needs a low-rank product"),
        (["recipe.adapter=loha", "recipe.rank_dropout=0.1"], "recipe.rank_dropout: needs a low-rank product"),
        (["recipe.adapter=oft", "recipe.module_dropout=0.1"], "recipe.module_dropout: needs a low-rank product"),
        (["recipe.adapter=loha", "recipe.lora_plus_ratio=4"], "recipe.lora_plus_ratio: needs a low-rank product"),
        (["recipe.adapter=dora", "recipe.max_weight_norm=1"], "recipe.max_weight_norm: cannot be used"),
        (["recipe.adapter=oft", "recipe.rank_stabilized=true"], "recipe.rank_stabilized: cannot be used"),
        (
            ["recipe.adapter=tlora", "recipe.learning_rate=0", "recipe.text_encoder.learning_rate=1e-4"],
            'recipe.adapter: is "tlora", which masks ranks of the UNet',
        ),
        (["recipe.adapter=dora", "fit.stream=full"], "fit.stream: cannot be used"),
        (["recipe.adapter=glora"], "this method is not supported; recipe.adapter is lora"),
    ],
)
def test_settings_that_an_adapter_cannot_follow_are_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(JobError) as caught:
        job(*overrides)
    assert problem in "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe.adapter=dora", "recipe.dropout=0.1", "recipe.lora_plus_ratio=4", "recipe.rank_stabilized=true"],
        ["recipe.adapter=tlora", "recipe.max_weight_norm=1", "recipe.module_dropout=0.1", "recipe.tlora_min_rank=2"],
        ["recipe.adapter=lokr", "recipe.lokr_factor=8", "fit.stream=full"],
    ],
)
def test_settings_that_it_can_follow_are_not(overrides: list[str]) -> None:
    job(*overrides)


def test_the_form_disables_what_an_adapter_refuses() -> None:
    refused = {"dropout", "rank_dropout", "module_dropout", "lora_plus_ratio", "max_weight_norm", "rank_stabilized"}
    off = {key.removeprefix("recipe.") for key, _ in without_effect(job("recipe.adapter=oft"), "sdxl")}
    assert refused | {"alpha", "lokr_factor", "tlora_min_rank"} <= off
    off = {key.removeprefix("recipe.") for key, _ in without_effect(job("recipe.adapter=lora"), "sdxl")}
    assert not off & (refused | {"alpha"})


def test_the_planner_does_not_stream_a_base_that_dora_measures() -> None:
    assert job("recipe.adapter=dora").stated_fit.stream == "none"
    assert job("recipe.adapter=lokr").stated_fit.stream is None
    assert job("recipe.adapter=lokr", "fit.stream=full").stated_fit.stream == "full"
