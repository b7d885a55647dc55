"""Presets travel unchanged: written, read, shared, added and applied; the built-in ones say why."""

import base64
import re
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from tests.support.tables import recipes
from trainer import cli
from trainer.cli import presets as commands
from trainer.config.base import Family
from trainer.config.effectless import effectless
from trainer.config.fit import FitConfig
from trainer.config.identity import flat
from trainer.config.load import load_job, parse_job
from trainer.config.presets import shelf
from trainer.config.presets.applying import compared, recipe_overrides
from trainer.config.presets.making import preset_of_job
from trainer.config.presets.preset import MACHINE_KEYS, Preset
from trainer.config.presets.reading import load_preset, parse_preset
from trainer.config.presets.texts import text_fault
from trainer.config.presets.writing import dump_preset
from trainer.config.recipe import RecipeConfig
from trainer.config.resolve import Machine, resolve_job
from trainer.errors import JobError
from trainer.files.assets import preset_path

RECIPES = sorted(preset_path("recipes").glob("*.toml"))
KINDS = ("character", "concept", "likeness", "style")
CPU = Machine("cpu", None, None, True, 4)
JOB = """schema = 1
name = "mine"
[base]
model = "owner/name"
[[dataset.folders]]
path = "pictures"
"""


def preset(**values: Any) -> Preset:
    data = {"schema": 1, "name": "gouache", "base": {"family": "sdxl"}, "recipe": {"rank": 8}} | values
    return Preset.model_validate(data)


def stated(section: Any) -> dict[str, Any]:
    """What a table states, by dotted key; stating nothing in a table is stating nothing."""
    data = section.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return {key: value for key, value in flat(data, "") if value != []}


@st.composite
def presets(draw: st.DrawFn) -> Preset:
    odd = st.sampled_from(["Zoë", "日本語", '"quoted"', "#", "a\\u0041", "a = b"])
    text = st.text(max_size=20).filter(lambda found: text_fault(found) is None) | odd
    recipe = draw(recipes())
    recipe["captions"] |= {
        key: draw(text) for key in ("prefix", "suffix", "keep_separator") if key in recipe["captions"]
    }
    recipe["captions"].pop("separator", None)
    data = {
        "schema": 1,
        "name": draw(st.sampled_from(["soft gouache", "日本語", "a.b", "Größe 1"])),
        "author": draw(text),
        "notes": draw(st.lists(text, max_size=3).map("\n".join)),
        "trigger_words": draw(st.lists(text.filter(bool), max_size=3)),
        "base": {"family": draw(st.sampled_from(get_args(Family)))},
        "recipe": recipe,
        "fit": draw(st.sampled_from([None, {"dtype": "bf16", "micro_batch": 3, "checkpointing": ["mid_block"]}])),
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
        "dtype", "quantise", "vae_dtype", "micro_batch", "checkpointing", "attention", "vae_tiling", "preview_offload",
        "allow_quantised", "deterministic",
    }  # fmt: skip
    assert travelling | set(MACHINE_KEYS) == set(FitConfig.model_fields)


# The recipes that come with Impasto.


def test_there_is_a_recipe_for_each_purpose_and_family() -> None:
    assert {path.stem for path in RECIPES} == {f"{family}-{kind}" for family in get_args(Family) for kind in KINDS}
    found = {(each.preset.base.family, each.preset.name): each for each in shelf.read_shelf().presets}
    for family in get_args(Family):
        for kind in KINDS:
            assert found[family, kind].path.name == f"{family}-{kind}.toml"
            assert found[family, kind].origin == "built-in"
            assert shelf.find_preset(kind.upper(), family) == found[family, kind]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves_and_says_nothing_in_vain(path: Path) -> None:
    made = load_preset(path)
    assert made.recipe is not None
    job = parse_job(JOB, "job.toml", Path(), recipe_overrides(made.recipe))
    frozen = resolve_job(
        job, family=made.base.family, prediction="epsilon", zero_terminal_snr=False, samples_per_epoch=30, machine=CPU
    )
    assert frozen.recipe.resolution == {"sd15": 512, "sdxl": 1024}[made.base.family]
    assert effectless(job, made.base.family) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_line_of_a_recipe_says_why_and_each_number_from_where(path: Path) -> None:
    sources = (
        "kohya", "OneTrainer", "sd-scripts", "invoke-training", "hollowstrawberry", "Kohya Colab", "arXiv",
        "our choice", "PyTorch", "own size", "SD 1.5 itself",
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
    found = shelf.find_preset("style", "sdxl")
    assert found.path == tmp_path / "trainer" / "_presets" / "recipes" / "sdxl-style.toml"


# Finding and keeping.


def test_a_name_means_ones_own_first_and_the_family_decides() -> None:
    mine = preset(name="Style")
    path, backup = shelf.keep_preset(mine)
    assert (path.name, backup) == ("Style.sdxl.toml", None)
    assert shelf.find_preset("style", "sdxl").preset.recipe == mine.recipe
    assert shelf.find_preset("style", "sd15").origin == "built-in"
    with pytest.raises(JobError, match="one for SDXL") as caught:
        shelf.find_preset("style")
    assert "--family" in caught.value.remedy


def test_what_is_not_there_is_told_with_names_that_are_near(tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        shelf.find_preset("sytle", "sdxl")
    assert "Did you mean style?" in caught.value.remedy
    shelf.keep_preset(preset())
    with pytest.raises(JobError, match=r"is for SDXL, but the base is SD 1\.5"):
        shelf.find_preset("gouache", "sd15")
    file = tmp_path / "sent.toml"
    file.write_text(dump_preset(preset()), encoding="utf-8")
    assert shelf.find_preset(str(file), "sdxl").preset == preset()
    with pytest.raises(JobError, match=r"but the base is SD 1\.5"):
        shelf.find_preset(str(file), "sd15")


def test_a_broken_preset_of_ones_own_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    shelf.keep_preset(preset())
    (shelf.presets_folder() / "old.sdxl.toml").write_text("schema = 1\nname = 7\n", encoding="utf-8")
    assert shelf.find_preset("gouache").preset == preset()
    with pytest.raises(JobError, match=r"old\.sdxl\.toml cannot be used"):
        shelf.find_preset("old")
    assert cli.main(["presets", "list"]) == 0
    told = capsys.readouterr().out
    assert "gouache" in told
    assert "Broken: " in told


def test_what_is_replaced_is_kept() -> None:
    first, _ = shelf.keep_preset(preset())
    before = first.read_bytes()
    second, backup = shelf.keep_preset(preset(name="GOUACHE", recipe={"rank": 9}))
    third, other = shelf.keep_preset(preset(recipe={"rank": 10}))
    assert first == second == third
    assert backup is not None
    assert other is not None
    assert backup != other
    assert backup.read_bytes() == before
    assert [each.preset.recipe.rank for each in shelf.read_shelf().presets if each.origin == "yours"] == [10]


def test_the_largest_fit_that_a_card_can_hold_is_chosen() -> None:
    def fit(gigabytes: float) -> shelf.Shelved:
        data = {"name": f"{gigabytes}gb", "recipe": None, "fit": {"dtype": "bf16"}, "card": {"gigabytes": gigabytes}}
        return shelf.Shelved(preset(**data), Path(), "built-in")

    at_hand = shelf.Shelf((fit(8), fit(12), fit(24)), ())
    chosen = {gib: shelf.fit_for(at_hand, "sdxl", int(gib * 1024**3)) for gib in (6, 7.8, 11.6, 15.7, 23.6)}
    names = [each and each.preset.name for each in chosen.values()]
    assert names == [None, "8gb", "12gb", "12gb", "24gb"]
    assert shelf.fit_for(at_hand, "sd15", 24 * 1024**3) is None


# The commands.


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "ein Ordner ü"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def sent(folder: Path, made: Preset, name: str = "sent.toml") -> str:
    (folder / name).write_text(dump_preset(made), encoding="utf-8")
    return str(folder / name)


def answers(monkeypatch: pytest.MonkeyPatch, *given: str) -> list[str]:
    """Put somebody at the terminal who gives these answers; the list is filled with what they were asked."""
    asked: list[str] = []
    left = iter(given)

    def ask(question: str) -> str:
        asked.append(question)
        return next(left)

    monkeypatch.setattr(commands.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(commands.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", ask)
    return asked


def mine() -> dict[str, int]:
    kept = (each for each in shelf.read_shelf().presets if each.origin != "built-in")
    return {each.preset.name: each.preset.recipe.rank for each in kept}


def test_share_then_add_gives_the_same_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("style", "likeness"):
        built_in = shelf.find_preset(name, "sdxl").preset
        words = ["presets", "share", str(preset_path("recipes", f"sdxl-{name}.toml")), "--out", f"{name}.toml"]
        assert cli.main([*words, "--name", f"my {name}", "--author", "Zoë", "--licence", "CC0", "--notes", "soft"]) == 0
        assert cli.main(["presets", "add", f"{name}.toml", "--yes"]) == 0
        added = shelf.find_preset(f"my {name}").preset
        assert stated(added.recipe) == stated(built_in.recipe)
        assert (added.author, added.licence, added.notes) == ("Zoë", "CC0", "soft")
    told = capsys.readouterr().out
    assert "recipe.rank = 32 instead of 16" in told
    assert "There is no NVIDIA card here to fit it to" in told


def test_nobody_is_asked_without_a_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "add", sent(here, preset())]) == 0
    assert mine() == {"gouache": 8}
    assert cli.main(["presets", "add", sent(here, preset())]) == 0
    assert "You have it already" in capsys.readouterr().out
    changed = sent(here, preset(recipe={"rank": 9, "alpha": 2.0}, author="Zoë"))
    assert cli.main(["presets", "add", changed]) == 2
    out, err = capsys.readouterr()
    assert "recipe.rank was 8 and is now 9" in out
    assert "recipe.alpha was not set and is now 2.0" in out
    assert 'author was not set and is now "Zoë"' in out
    assert "--yes to replace yours" in err
    assert "--name" in err
    assert mine() == {"gouache": 8}
    assert cli.main(["presets", "add", changed, "--name", "gouache 2"]) == 0
    assert mine() == {"gouache": 8, "gouache 2": 9}
    assert cli.main(["presets", "add", changed, "--yes"]) == 0
    assert mine() == {"gouache": 9, "gouache 2": 9}
    assert {each.origin for each in shelf.read_shelf().presets} == {"received", "built-in"}
    assert len(shelf.versions_of(shelf.find_preset("gouache").path)) == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (("",), {"gouache": 8}),
        (("n",), {"gouache": 8}),
        (("y",), {"gouache": 9}),
        (("other", "y"), {"gouache": 8, "other": 9}),
        (("other", ""), {"gouache": 8}),
    ],
)
def test_a_taken_name_is_a_choice(
    given: tuple[str, ...], kept: dict[str, int], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.keep_preset(preset())
    asked = answers(monkeypatch, *given)
    assert cli.main(["presets", "add", sent(here, preset(recipe={"rank": 9}))]) == 0
    assert mine() == kept
    assert len(asked) == len(given)
    assert "backup" in asked[0]


def test_the_names_of_built_in_presets_stay_theirs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "add", "--yes", sent(here, preset(name="Style"))]) == 2
    assert "comes with Impasto" in capsys.readouterr().err
    assert mine() == {}


@pytest.mark.parametrize("name", ["../up", "CON", "", "a\x1b[31m", "x" * 200])
def test_no_bad_name_is_given(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "add", "--yes", "--name", name, sent(here, preset())]) == 2
    assert "name: " in capsys.readouterr().err
    assert mine() == {}


def test_show_gives_reasons_and_no_bytes_of_a_picture(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "show", "style", "--family", "sd15"]) == 0
    assert "our choice" in capsys.readouterr().out
    buffer = BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    shelf.keep_preset(preset(preview={"picture": base64.b64encode(buffer.getvalue()).decode()}))
    assert cli.main(["presets", "show", "gouache"]) == 0
    shown = capsys.readouterr().out
    assert "rank = 8" in shown
    assert "iVBOR" not in shown


def test_a_preset_is_checked_by_name_or_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = shelf.keep_preset(preset())
    for word in ("GOUACHE", str(path)):
        assert cli.main(["presets", "check", word]) == 0
        assert capsys.readouterr().out.startswith(f"{path} is a sound preset.\n")
    assert cli.main(["presets", "check", "style"]) == 2
    assert "--family sdxl" in capsys.readouterr().err
    assert cli.main(["presets", "check", "guache"]) == 2
    assert "gouache" in capsys.readouterr().err  # what it is near to
    path.write_text(path.read_text(encoding="utf-8") + "rnak = 4\n", encoding="utf-8")
    assert cli.main(["presets", "check", "gouache"]) == 2
    assert "rnak" in capsys.readouterr().err
    other = here / "gouache.txt"  # any file, as it was sent
    other.write_text(dump_preset(preset()), encoding="utf-8")
    assert cli.main(["presets", "check", other.name]) == 0


def test_a_preset_that_both_families_have_is_shared_by_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "share", "style", "--out", "a.toml"]) == 2
    assert "--family sdxl" in capsys.readouterr().err
    assert cli.main(["presets", "share", "style", "--family", "sdxl", "--out", "a.toml"]) == 0
    assert load_preset(here / "a.toml").recipe == load_preset(preset_path("recipes", "sdxl-style.toml")).recipe


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--out", "a.json"], "does not end in .toml"),
        (["--out", "taken.toml"], "exists already"),
        (["--out", "a.toml", "--notes", "see C:\\x"], "notes: holds what looks like a path"),
        (["--out", "a.toml", "--preview", "taken.toml"], "it is no picture"),
        (["--out", "a.toml", "--preview", "none.png"], "there is no such file"),
        (["--out", "a.toml", "--author", "a" * 500], "author: must be text of at most 100 characters"),
    ],
)
def test_what_cannot_be_shared_is_told_and_not_written(
    words: list[str], expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "taken.toml").write_text("mine", encoding="utf-8")
    shelf.keep_preset(preset())
    assert cli.main(["presets", "share", "gouache", *words]) == 2
    assert expected in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["taken.toml"]
    assert (here / "taken.toml").read_text(encoding="utf-8") == "mine"


def test_sharing_what_is_not_there_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "share", "nothing", "--out", "a.toml"]) == 2
    assert 'no preset called "nothing"' in capsys.readouterr().err


def test_a_job_gives_what_may_travel_and_names_what_stays_behind(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "job.toml").write_text(
        """schema = 1
name = "Größe: 1"
[base]
model = "owner/name"
family = "sdxl"
[[dataset.folders]]
path = "/home/me/secret pictures"
trigger = "grs"
[recipe]
rank = 8
captions.prefix = "from /home/me/x"
[fit]
device = "cpu"
dtype = "fp32"
[output]
author = "Zoë"
description = "token hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
[report.previews]
prompts = [{prompt = "grs, a lake", seed = 3}, {prompt = "~/x"}]
""",
        encoding="utf-8",
    )
    assert cli.main(["presets", "share", "job.toml", "--fit", "--out", "a.toml"]) == 0
    text = (here / "a.toml").read_text(encoding="utf-8")
    for private in ("home", "secret", "hf_", "device", "~"):
        assert private not in text
    made = load_preset(here / "a.toml")
    assert (made.name, made.author, made.trigger_words) == ("Größe- 1", "Zoë", ("grs",))
    assert made.base.name == "owner/name"
    assert stated(made.recipe) == {"rank": 8}
    assert [(each.prompt, each.seed) for each in made.examples] == [("grs, a lake", 3)]
    assert stated(made.fit) == {"dtype": "fp32"}
    told = capsys.readouterr().out
    for key in ("notes", "recipe.captions.prefix", "examples.1.prompt"):
        assert f"  {key}: holds what looks like" in told


def test_a_job_that_states_no_recipe_gives_all_of_it() -> None:
    made = preset_of_job(parse_job(JOB, "job.toml", Path()), "sd15").preset
    assert made.recipe == RecipeConfig()
    assert made.recipe.model_fields_set >= {"rank", "alpha", "learning_rate", "optimizer"}
    assert compared(made, made) == []


def test_an_empty_text_states_nothing_that_could_differ() -> None:
    facts = {"schema": 1, "name": "small", "base": {"family": "sd15"}, "recipe": {"rank": 4}}
    without = Preset.model_validate(facts)
    with_example = Preset.model_validate(facts | {"examples": [{"prompt": "a cat", "negative": ""}]})
    assert compared(without, with_example) == ['examples.0.prompt was not set and is now "a cat"']


def test_a_job_whose_base_is_not_here_must_tell_the_family(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "job.toml").write_text(JOB, encoding="utf-8")
    assert cli.main(["presets", "share", "job.toml", "--out", "a.toml"]) == 2
    assert "does not tell whether its base is SD 1.5 or SDXL" in capsys.readouterr().err


def test_new_writes_the_recipe_of_a_preset(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "pictures").mkdir()
    Image.new("RGB", (600, 600)).save(here / "pictures" / "a.png")
    words = ["new", "--base", "owner/name", "--pictures", "pictures", "--recipe", "style"]
    assert cli.main([*words, "without"]) == 2
    assert "--family" in capsys.readouterr().err
    assert not (here / "without").exists()
    assert cli.main([*words, "with", "--family", "sd15"]) == 0
    job = load_job(here / "with" / "job.toml")
    assert stated(job.recipe) == stated(shelf.find_preset("style", "sd15").preset.recipe)
    shelf.keep_preset(preset())
    assert cli.main(["new", "--base", "o/n", "--pictures", "pictures", "--recipe", "gouache", "short"]) == 0
    assert stated(load_job(here / "short" / "job.toml").recipe) == {"rank": 8, "pictures_seen": 1600}


def test_a_preset_without_a_recipe_gives_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.keep_preset(preset(recipe=None, fit={"dtype": "bf16"}))
    (here / "pictures").mkdir()
    Image.new("RGB", (600, 600)).save(here / "pictures" / "a.png")
    words = ["new", "--base", "owner/name", "--pictures", "pictures", "--recipe", "gouache", "x"]
    assert cli.main(words) == 2
    assert "holds a fit and no recipe" in capsys.readouterr().err
