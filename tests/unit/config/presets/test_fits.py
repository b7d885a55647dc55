"""Fit presets are what the planner finds, fit their cards with margin and take what they took: by tapes that ship."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.built_in import FAMILIES, GIGABYTES
from tests.benchmarks.make_fits import file_name, preset_text
from tests.benchmarks.ship_traces import read_index
from tests.golden import peaks
from trainer.cli.planning import request_for_preset
from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.presets.library import fit_for, read_library
from trainer.errors import JobError
from trainer.files.assets import asset_path, preset_path
from trainer.memory.device.gpu_specs import find_gpu
from trainer.memory.forecast.forecast import Simulation
from trainer.memory.planner.planner import SMALLER, plan
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import library_versions

GOLDEN = json.loads(peaks.FILE.read_text(encoding="utf-8"))
EVERY = [(family, gigabytes) for family in FAMILIES for gigabytes in GIGABYTES]
# Systems differ in the GPU memory that is free and in the allocator's settings: one GPU of each family shows that.
ROWS = [
    pytest.param(
        row, id=row.name, marks=pytest.mark.slow if row.system == "Linux" and row.gigabytes > GIGABYTES[0] else ()
    )
    for row in peaks.preset_rows()
]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceLibrary:
    if tuple(read_index(asset_path("traces"))["versions"]) != library_versions():
        pytest.skip("the shipped traces were made with other versions of the libraries")

    def missing() -> None:
        raise AssertionError("a trace does not ship: run python -m tests.benchmarks.ship_traces")

    return TraceLibrary(TraceStore(tmp_path_factory.mktemp("traces"), asset_path("traces")), missing)


def test_there_is_one_for_every_family_and_size_in_the_order_of_cards() -> None:
    names = [file_name(family, gigabytes) for family, gigabytes in EVERY]
    assert {path.name for path in preset_path("fits").glob("*.toml")} == set(names)
    built_in = [each for each in read_library().presets if each.origin == "built-in"]
    assert [each.path.name for each in built_in if each.preset.gpu is not None] == names


@pytest.mark.parametrize(("family", "gigabytes"), EVERY)
def test_a_preset_is_what_the_planner_finds(family: Family, gigabytes: int, traces: TraceLibrary) -> None:
    path = preset_path("fits", file_name(family, gigabytes))
    assert path.read_text(encoding="utf-8") == preset_text(family, gigabytes, traces), (
        "run python -m tests.benchmarks.make_fits"
    )


@pytest.mark.parametrize("row", ROWS)
def test_a_preset_fits_its_card_with_margin_and_takes_what_it_took(row: peaks.Golden, traces: TraceLibrary) -> None:
    situation = row.question.device_state
    assert situation.margin > 0
    playing = peaks.play(row.question, peaks.preset_fit(row.family, row.gigabytes), traces)
    assert playing.failure is None
    assert playing.reserved <= situation.budget
    assert_golden(row, playing)


@pytest.mark.parametrize("row", peaks.other_rows(), ids=lambda row: row.name)
def test_other_recipes_take_what_they_took(row: peaks.Golden, traces: TraceLibrary) -> None:
    fit = FitConfig.model_validate(GOLDEN[row.name]["fit"])
    playing = peaks.play(row.question, fit, traces)
    assert playing.failure is None
    assert_golden(row, playing)


def test_the_golden_peaks_are_of_these_rows() -> None:
    assert list(GOLDEN) == [row.name for row in (*peaks.preset_rows(), *peaks.other_rows())]


def assert_golden(row: peaks.Golden, playing: Simulation) -> None:
    golden = {key: GOLDEN[row.name][key] for key in ("allocated", "reserved")}
    assert peaks.peaks_of(playing) == pytest.approx(golden, rel=peaks.TOLERANCE), "run python -m tests.golden.peaks"


@pytest.mark.parametrize(("family", "gigabytes"), EVERY)
def test_a_card_finds_the_preset_of_its_size(family: Family, gigabytes: int) -> None:
    found = fit_for(read_library(), family, find_gpu(f"{gigabytes}GB").total_bytes)
    assert found is not None
    assert found.path.name == file_name(family, gigabytes)


def test_a_recipe_without_a_job_can_be_changed() -> None:
    changed = ["recipe.rank=16", "recipe.resolution=768", "fit.stream=none"]
    found = request_for_preset("sdxl", "character", "4GB", changed)
    assert found.written.stream == "none"
    assert {(bucket.width, bucket.height) for bucket in found.workload.buckets} == {(768, 768)}
    recipe = found.workload.recipe
    assert (recipe.rank, recipe.conv_rank, recipe.images.bucket_max) == (16, 16, 1536)  # the last two follow
    with pytest.raises(JobError, match=r"--set: recipe\.rnk: unknown key \(did you mean rank\?\)"):
        request_for_preset("sdxl", "character", "4GB", ["recipe.rnk=16"])


def test_a_smaller_plan_is_found_behind_faster_ones_that_are_too_large(traces: TraceLibrary) -> None:
    """The first candidates checkpoint fewer blocks, and reserve more than the share that a smaller plan may take."""
    found = request_for_preset("sdxl", "style", "8GB")
    planned = plan(found.workload, found.written, found.device_state, traces, found.counts)
    assert planned.pick is not None and planned.smaller is not None and not planned.smallest
    assert planned.smaller.fit.gradient_checkpointing == "full"
    assert planned.smaller.forecast.reserved <= SMALLER * found.device_state.budget
