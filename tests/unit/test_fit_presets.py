"""Fit presets are what the planner finds, and fit their cards with margin; it is asked with the tapes that ship."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.built_in import FAMILIES, GIGABYTES, SYSTEMS, built_in
from tests.bench.make_fits import RECIPE, file_name, preset_text
from tests.bench.ship_traces import read_index
from trainer.config.base import Family
from trainer.config.presets.reading import load_preset
from trainer.config.presets.shelf import fit_for, read_shelf
from trainer.files.assets import asset_path, preset_path
from trainer.memory.cards import find_card
from trainer.memory.course import Course
from trainer.memory.forecast import run_through
from trainer.memory.store import TapeStore
from trainer.memory.subject import complete_fit, library_versions
from trainer.memory.traces import Traces

EVERY = [(family, gigabytes) for family in FAMILIES for gigabytes in GIGABYTES]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    if tuple(read_index(asset_path("traces"))["versions"]) != library_versions():
        pytest.skip("the shipped traces were made with other versions of the libraries")

    def missing() -> None:
        raise AssertionError("a trace does not ship: run python -m tests.bench.ship_traces")

    return Traces(TapeStore(tmp_path_factory.mktemp("traces"), asset_path("traces")), missing)


def test_there_is_one_for_every_family_and_size_in_the_order_of_cards() -> None:
    names = [file_name(family, gigabytes) for family, gigabytes in EVERY]
    assert {path.name for path in preset_path("fits").glob("*.toml")} == set(names)
    built_in = [each for each in read_shelf().presets if each.origin == "built-in"]
    assert [each.path.name for each in built_in if each.preset.card is not None] == names


@pytest.mark.parametrize(("family", "gigabytes"), EVERY)
def test_a_preset_is_what_the_planner_finds(family: Family, gigabytes: int, traces: Traces) -> None:
    path = preset_path("fits", file_name(family, gigabytes))
    assert path.read_text(encoding="utf-8") == preset_text(family, gigabytes, traces), (
        "run python -m tests.bench.make_fits"
    )


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(("family", "gigabytes"), EVERY)
def test_a_preset_fits_its_card_with_margin(family: Family, gigabytes: int, system: str, traces: Traces) -> None:
    fit = load_preset(preset_path("fits", file_name(family, gigabytes))).fit
    assert fit is not None
    question = built_in(family, RECIPE, gigabytes, system)
    situation = question.situation
    assert situation.margin > 0
    subject = replace(question.subject, fit=complete_fit(fit))
    playing = run_through(Course(subject, traces, question.occasions, situation.rate), situation, situation.budget)
    assert playing.failure is None
    assert playing.reserved <= situation.budget


@pytest.mark.parametrize(("family", "gigabytes"), EVERY)
def test_a_card_finds_the_preset_of_its_size(family: Family, gigabytes: int) -> None:
    found = fit_for(read_shelf(), family, find_card(f"{gigabytes}GB").total_bytes)
    assert found is not None
    assert found.path.name == file_name(family, gigabytes)
