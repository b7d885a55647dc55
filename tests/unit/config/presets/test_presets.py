"""Presets travel unchanged: written, read and applied; the built-in ones say why; what lies on the shelf."""

import re
import tomllib
import zipfile
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.presets import JOB, preset, stated
from tests.support.tables import recipes
from trainer import cli
from trainer.config.base import Family
from trainer.config.checks import settings_without_effect
from trainer.config.fit import FitConfig
from trainer.config.load import parse_job
from trainer.config.presets import library
from trainer.config.presets.exchange import load_preset, parse_preset
from trainer.config.presets.library import recipe_overrides
from trainer.config.presets.preset import MACHINE_KEYS, Preset, dump_preset, text_fault
from trainer.config.recipe import RecipeConfig
from trainer.config.resolve import Machine, resolve_job
from trainer.errors import JobError
from trainer.files.assets import preset_path

RECIPES = sorted(preset_path("recipes").glob("*.toml"))
KINDS = ("character", "concept", "likeness", "style")
CPU = Machine("cpu", None, None, True, 4)


@st.composite
def presets(draw: st.DrawFn) -> Preset:
    odd = st.sampled_from(["Zoë", "日本語", '"quoted"', "#", "a\\u0041", "a = b"])
    text = st.text(max_size=20).filter(lambda found: text_fault(found) is None) | odd
    recipe = draw(recipes())
    recipe["captions"] |= {
        key: draw(text) for key in ("prefix", "suffix", "keep_separator") if key in recipe["captions"]
    }
    for key in ("separator", "secondary_separator"):
        recipe["captions"].pop(key, None)
    data = {
        "schema": 2,
        "name": draw(st.sampled_from(["soft gouache", "日本語", "a.b", "Größe 1"])),
        "author": draw(text),
        "notes": draw(st.lists(text, max_size=3).map("\n".join)),
        "trigger_words": draw(st.lists(text.filter(bool), max_size=3)),
        "base": {"family": draw(st.sampled_from(get_args(Family)))},
        "recipe": recipe,
        "fit": draw(
            st.sampled_from([None, {"dtype": "bf16", "micro_batch": 3, "gradient_checkpointing": ["mid_block"]}])
        ),
        "examples": draw(st.lists(st.fixed_dictionaries({"prompt": text.filter(bool)}), max_size=2)),
    }
    try:
        return Preset.model_validate({key: value for key, value in data.items() if value is not None})
    except ValidationError:
        assume(False)
        raise


@settings(max_examples=40)
@given(presets())
def test_every_preset_survives_writing_reading_and_being_taken_by_a_job(made: Preset) -> None:
    read = parse_preset(dump_preset(made), "file")
    assert stated(read) == stated(made)
    assert read.recipe == made.recipe
    assert made.recipe is not None
    job = parse_job(JOB, "job.toml", Path(), recipe_overrides(made.recipe))
    assert stated(job.recipe) == stated(made.recipe)


def test_what_a_recipe_leaves_open_stays_as_the_job_has_it() -> None:
    job = JOB + '[recipe]\nseed = 7\nepochs = 3\nalpha = 2\n[recipe.optimizer]\nname = "lion"\nbeta2 = 0.5\n'
    recipe = RecipeConfig.model_validate(
        {"rank": 8, "steps": 9, "optimizer": {"name": "prodigy"}, "learning_rate": 1.0}
    )
    taken = parse_job(job, "job.toml", Path(), [*recipe_overrides(recipe), "recipe.rank=4"]).recipe
    assert (taken.seed, taken.alpha, taken.rank) == (7, 2.0, 4)
    assert (taken.steps, taken.epochs) == (9, None)
    assert stated(taken.optimizer) == {"name": "prodigy"}


def test_every_key_of_a_fit_travels_or_belongs_to_a_machine() -> None:
    travelling = {
        "dtype", "quantize", "vae_dtype", "micro_batch", "gradient_checkpointing", "attention", "vae_tiling",
        "stream", "preview_offload", "vae_encode_tiling", "text_encoder_batch_size",
        "allow_quantized", "cuda_graphs", "compile", "channels_last", "fp16_accumulation", "deterministic",
    }  # fmt: skip
    assert travelling | set(MACHINE_KEYS) == set(FitConfig.model_fields)


# The recipes that come with Impasto.


def test_there_is_a_recipe_for_each_purpose_and_family() -> None:
    assert {path.stem for path in RECIPES} == {f"{family}-{kind}" for family in get_args(Family) for kind in KINDS}
    found = {(each.preset.base.family, each.preset.name): each for each in library.read_library().presets}
    for family in get_args(Family):
        for kind in KINDS:
            assert found[family, kind].path.name == f"{family}-{kind}.toml"
            assert found[family, kind].origin == "built-in"
            assert library.find_preset(kind.upper(), family) == found[family, kind]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves_and_says_nothing_in_vain(path: Path) -> None:
    made = load_preset(path)
    assert made.recipe is not None
    job = parse_job(JOB, "job.toml", Path(), recipe_overrides(made.recipe))
    frozen = resolve_job(
        job, family=made.base.family, prediction="epsilon", zero_terminal_snr=False, samples_per_epoch=30, machine=CPU
    )
    assert frozen.recipe.resolution == {"sd15": 512, "sdxl": 1024}[made.base.family]
    assert settings_without_effect(job, made.base.family) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_line_of_a_recipe_says_why_and_each_number_from_where(path: Path) -> None:
    sources = (
        "kohya", "OneTrainer", "sd-scripts", "invoke-training", "hollowstrawberry", "Kohya Colab", "arXiv",
        "our choice", "PyTorch", "native resolution", "SD 1.5 itself",
    )  # fmt: skip
    lines = path.read_text(encoding="utf-8").split("[recipe]")[1].splitlines()
    explained = 0
    for number, line in enumerate(lines):
        key, equals, value = line.partition(" = ")
        if line.startswith("#") or not equals:
            continue
        comment = ""
        for above in reversed(lines[:number]):
            if not above.startswith("# "):
                break
            comment = f"{above} {comment}"
        assert len(comment) > 30, f"{key} is not explained"
        if re.search(r"\d", value):
            assert any(source in comment.replace("# ", "") for source in sources), f"{key} = {value} has no source"
        explained += 1
    assert explained >= 15


def test_the_readme_knows_every_source_that_the_recipes_name() -> None:
    readme = preset_path("README.md").read_text(encoding="utf-8")
    named = ("kohya's SDXL guide", "kohya_ss' presets", "OneTrainer's presets", "hollowstrawberry's notebook")
    for source in (*named, "sd-scripts", "Kohya Colab issue 150", "invoke-training"):
        assert f"| {source} |" in readme


def test_the_wheel_holds_the_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in an installed wheel, where pyproject.toml's force-include puts them beside the modules.
    included = tomllib.loads((preset_path().parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert included["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]["presets"] == "trainer/_presets"
    with zipfile.ZipFile(tmp_path / "wheel.zip", "w") as wheel:
        for path in preset_path().rglob("*.*"):
            wheel.write(path, Path("trainer/_presets") / path.relative_to(preset_path()))
    zipfile.ZipFile(tmp_path / "wheel.zip").extractall(tmp_path)
    monkeypatch.setattr("trainer.files.assets._PACKAGE", tmp_path / "trainer")
    found = library.find_preset("style", "sdxl")
    assert found.path == tmp_path / "trainer" / "_presets" / "recipes" / "sdxl-style.toml"


# Finding and keeping.


def test_a_name_means_ones_own_first_and_the_family_decides() -> None:
    mine = preset(name="Style")
    path, backup = library.save_preset(mine)
    assert (path.name, backup) == ("Style.sdxl.toml", None)
    assert library.find_preset("style", "sdxl").preset.recipe == mine.recipe
    assert library.find_preset("style", "sd15").origin == "built-in"
    with pytest.raises(JobError, match="one for SDXL") as caught:
        library.find_preset("style")
    assert "--family" in caught.value.remedy


def test_what_is_not_there_is_told_with_names_that_are_near(tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        library.find_preset("sytle", "sdxl")
    assert "Did you mean style?" in caught.value.remedy
    library.save_preset(preset())
    with pytest.raises(JobError, match=r"is for SDXL, but the base is SD 1\.5"):
        library.find_preset("gouache", "sd15")
    file = tmp_path / "sent.toml"
    file.write_text(dump_preset(preset()), encoding="utf-8")
    assert library.find_preset(str(file), "sdxl").preset == preset()
    with pytest.raises(JobError, match=r"but the base is SD 1\.5"):
        library.find_preset(str(file), "sd15")


def test_a_broken_preset_of_ones_own_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    library.save_preset(preset())
    (library.presets_folder() / "old.sdxl.toml").write_text("schema = 1\nname = 7\n", encoding="utf-8")
    assert library.find_preset("gouache").preset == preset()
    with pytest.raises(JobError, match=r"Could not use the preset .*old\.sdxl\.toml"):
        library.find_preset("old")
    assert cli.main(["presets", "list"]) == 0
    told = capsys.readouterr().out
    assert "gouache" in told
    assert "Broken: " in told


def test_what_is_replaced_is_kept() -> None:
    first, _ = library.save_preset(preset())
    before = first.read_bytes()
    second, backup = library.save_preset(preset(name="GOUACHE", recipe={"rank": 9}))
    third, other = library.save_preset(preset(recipe={"rank": 10}))
    assert first == second == third
    assert backup is not None
    assert other is not None
    assert backup != other
    assert backup.read_bytes() == before
    assert [each.preset.recipe.rank for each in library.read_library().presets if each.origin == "yours"] == [10]


def test_the_largest_fit_that_a_card_can_hold_is_chosen() -> None:
    def fit(gigabytes: float) -> library.PresetEntry:
        data = {"name": f"{gigabytes}gb", "recipe": None, "fit": {"dtype": "bf16"}, "gpu": {"gigabytes": gigabytes}}
        return library.PresetEntry(preset(**data), Path(), "built-in")

    at_hand = library.PresetLibrary((fit(8), fit(12), fit(24)), ())
    chosen = {gib: library.fit_for(at_hand, "sdxl", int(gib * 1024**3)) for gib in (6, 7.8, 11.6, 15.7, 23.6)}
    names = [each and each.preset.name for each in chosen.values()]
    assert names == [None, "8gb", "12gb", "12gb", "24gb"]
    assert library.fit_for(at_hand, "sd15", 24 * 1024**3) is None
