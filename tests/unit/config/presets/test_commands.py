"""The commands around presets: shared, added, shown, checked, made of jobs and taken by new ones."""

import base64
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from tests.support.presets import JOB, preset, stated
from trainer import cli
from trainer.cli import presets
from trainer.config.load import load_job, parse_job
from trainer.config.presets import library
from trainer.config.presets.creating import preset_of_job
from trainer.config.presets.exchange import load_preset
from trainer.config.presets.library import compared
from trainer.config.presets.preset import Preset, dump_preset
from trainer.config.recipe import RecipeConfig
from trainer.files.assets import preset_path

pytestmark = pytest.mark.usefixtures("quick_commands")


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

    monkeypatch.setattr(presets.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(presets.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", ask)
    return asked


def mine() -> dict[str, int]:
    kept = (each for each in library.read_library().presets if each.origin != "built-in")
    return {each.preset.name: each.preset.recipe.rank for each in kept}


def test_share_then_add_gives_the_same_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("style", "likeness"):
        built_in = library.find_preset(name, "sdxl").preset
        words = ["presets", "share", str(preset_path("recipes", f"sdxl-{name}.toml")), "--out", f"{name}.toml"]
        assert cli.main([*words, "--name", f"my {name}", "--author", "Zoë", "--license", "CC0", "--notes", "soft"]) == 0
        assert cli.main(["presets", "add", f"{name}.toml", "--yes"]) == 0
        added = library.find_preset(f"my {name}").preset
        assert stated(added.recipe) == stated(built_in.recipe)
        assert (added.author, added.license, added.notes) == ("Zoë", "CC0", "soft")
    told = capsys.readouterr().out
    assert "recipe.rank = 32 instead of 16" in told
    assert "On the CPU: about " in told and "This is an estimate, which may be off by 50%." in told


def test_nobody_is_asked_without_a_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "add", sent(here, preset())]) == 2
    assert "with --yes" in capsys.readouterr().err
    assert mine() == {}
    assert cli.main(["presets", "add", "--yes", sent(here, preset())]) == 0
    assert mine() == {"gouache": 8}
    assert cli.main(["presets", "add", sent(here, preset())]) == 0
    assert "You already have this preset" in capsys.readouterr().out
    changed = sent(here, preset(recipe={"rank": 9, "alpha": 2.0}, author="Zoë"))
    assert cli.main(["presets", "add", changed]) == 2
    out, err = capsys.readouterr()
    assert "recipe.rank was 8 and is now 9" in out
    assert "recipe.alpha was not set and is now 2.0" in out
    assert 'author was not set and is now "Zoë"' in out
    assert "with --yes" in err
    assert "--name" in err
    assert mine() == {"gouache": 8}
    assert cli.main(["presets", "add", changed, "--name", "gouache 2", "--yes"]) == 0
    assert mine() == {"gouache": 8, "gouache 2": 9}
    assert cli.main(["presets", "add", changed, "--yes"]) == 0
    assert mine() == {"gouache": 9, "gouache 2": 9}
    assert {each.origin for each in library.read_library().presets} == {"received", "built-in"}
    assert len(library.versions_of(library.find_preset("gouache").path)) == 1


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
    library.save_preset(preset())
    asked = answers(monkeypatch, *given)
    assert cli.main(["presets", "add", sent(here, preset(recipe={"rank": 9}))]) == 0
    assert mine() == kept
    assert len(asked) == len(given)
    assert "backed up" in asked[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["add", "--yes", "style.toml"], "comes with Impasto"),
        (["share", "nothing", "--out", "a.toml"], 'no preset called "nothing"'),
        (["share", "job.toml", "--out", "a.toml"], "its base may be SD 1.5 or SDXL"),
    ],
    ids=[
        "the names of built-in presets stay theirs",
        "what is not there cannot be shared",
        "a job whose base is not here must name the family",
    ],
)
def test_what_cannot_be_added_or_shared_is_refused(
    words: list[str], expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent(here, preset(name="Style"), "style.toml")
    (here / "job.toml").write_text(JOB, encoding="utf-8")
    assert cli.main(["presets", *words]) == 2
    assert expected in capsys.readouterr().err
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
    library.save_preset(preset(preview={"image": base64.b64encode(buffer.getvalue()).decode()}))
    assert cli.main(["presets", "show", "gouache"]) == 0
    shown = capsys.readouterr().out
    assert "rank = 8" in shown
    assert "iVBOR" not in shown


def test_a_preset_is_checked_by_name_or_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = library.save_preset(preset())
    for word in ("GOUACHE", str(path)):
        assert cli.main(["presets", "check", word]) == 0
        assert capsys.readouterr().out.startswith(f"{path} is a valid preset.\n")
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
        (["--out", "taken.toml"], "already exists"),
        (["--out", "a.toml", "--notes", "see C:\\x"], "notes: contains what looks like a path"),
        (["--out", "a.toml", "--preview", "taken.toml"], "it is not a readable image"),
        (["--out", "a.toml", "--preview", "none.png"], "there is no such file"),
        (["--out", "a.toml", "--author", "a" * 500], "author: has 500 characters; at most 100 are allowed"),
    ],
)
def test_what_cannot_be_shared_is_told_and_not_written(
    words: list[str], expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "taken.toml").write_text("mine", encoding="utf-8")
    library.save_preset(preset())
    assert cli.main(["presets", "share", "gouache", *words]) == 2
    assert expected in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["taken.toml"]
    assert (here / "taken.toml").read_text(encoding="utf-8") == "mine"


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
        assert f"  {key}: contains what looks like" in told


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


def test_new_writes_the_recipe_of_a_preset(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "pictures").mkdir()
    Image.new("RGB", (600, 600)).save(here / "pictures" / "a.png")
    words = ["new", "--base", "owner/name", "--images", "pictures", "--recipe", "style"]
    assert cli.main([*words, "without"]) == 2
    assert "--family" in capsys.readouterr().err
    assert not (here / "without").exists()
    assert cli.main([*words, "with", "--family", "sd15"]) == 0
    job = load_job(here / "with" / "job.toml")
    assert stated(job.recipe) == stated(library.find_preset("style", "sd15").preset.recipe)
    library.save_preset(preset())
    assert cli.main(["new", "--base", "o/n", "--images", "pictures", "--recipe", "gouache", "short"]) == 0
    assert stated(load_job(here / "short" / "job.toml").recipe) == {"rank": 8, "images_seen": 1600}


def test_a_preset_without_a_recipe_gives_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library.save_preset(preset(recipe=None, fit={"dtype": "bf16"}))
    (here / "pictures").mkdir()
    Image.new("RGB", (600, 600)).save(here / "pictures" / "a.png")
    words = ["new", "--base", "owner/name", "--images", "pictures", "--recipe", "gouache", "x"]
    assert cli.main(words) == 2
    assert "has a fit but no recipe" in capsys.readouterr().err
