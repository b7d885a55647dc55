"""The comparison with other trainers, at tiny size: what it writes for them, and how one is watched."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

from tests.benchmarks import rivals, rivals_check
from tests.benchmarks.rivals import Outcome, lay_out, run, table
from tests.benchmarks.rivals_settings import RIVALS, Place, Rival, Settings, ours
from trainer.base.source import open_base
from trainer.config.base import BaseConfig
from trainer.config.load import load_job

SETTINGS = Settings(resolution=64, batch=2, steps=7, small=True, device="cpu")

# A trainer of a few lines: PyTorch's own optimizer, more steps than needed, and before them some of another optimizer.
LOOP = """
import sys, torch
sys.modules.update(dict.fromkeys(("trainer", "tests")))  # there are none, or they are others
forecast = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(5, device="meta"))])
for step in range(50):
    forecast.step()
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.AdamW([weight])
for step in range(1000):
    print("step", step)
    weight.square().sum().backward()
    optimizer.step()
sys.exit(7)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return lay_out(tmp_path_factory.mktemp("rivals"), SETTINGS)


@pytest.mark.slow
def test_both_forms_of_the_base_hold_one_model_that_loads(place: Place) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(place.diffusers, add_watermarker=False)
    assert pipeline.tokenizer("a cat").input_ids[0] == 49406
    other = open_base(BaseConfig(model=str(place.single))).load_unet(torch.float32, "cpu")
    for (name, one), (_, two) in zip(
        sorted(pipeline.unet.named_parameters()), sorted(other.named_parameters()), strict=True
    ):
        assert torch.equal(one, two), name
    assert all(weight.isfinite().all() for weight in other.parameters())


def test_pictures_lie_as_each_trainer_wants_them(place: Place) -> None:
    assert len(list(place.pictures.glob("*.png"))) == len(list(place.pictures.glob("*.txt"))) == rivals.PICTURES
    lines = (place.listed / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    named = {json.loads(line)["file_name"]: json.loads(line)["text"] for line in lines}
    assert {path.name for path in place.listed.glob("*.png")} == named.keys()
    assert (place.pictures / "03.txt").read_text(encoding="utf-8") == named["03.png"]
    assert (place.repeated / "1000_pictures" / "03.png").read_bytes() == (place.pictures / "03.png").read_bytes()


def test_all_are_told_the_same(place: Place, tmp_path: Path) -> None:
    """Rank, rate, size, batch size and length, whatever each trainer calls them."""
    here = replace(place, folder=tmp_path)
    job = load_job(Path(ours("linear").command(SETTINGS, here, tmp_path)[-1]))
    assert (job.recipe.rank, job.recipe.layers, job.recipe.effective_batch) == (16, "linear", 2)
    assert (job.fit.gradient_checkpointing, job.fit.micro_batch, job.recipe.resolution) == ("none", 2, 64)
    assert not job.fit.cuda_graphs
    assert load_job(Path(ours("linear", graphs=True).command(SETTINGS, here, tmp_path)[-1])).fit.cuda_graphs
    for key in ("diffusers", "sd_scripts", "unsloth"):
        words = RIVALS["sdxl"][key].command(SETTINGS, here, tmp_path)
        values = [word.partition("=")[2] for word in words]
        assert {"16", "0.0001", "64", "2"} <= set(values), key
        assert not any(word.strip("-") == "gradient_checkpointing" for word in words)
    RIVALS["sdxl"]["onetrainer"].command(SETTINGS, here, tmp_path)
    written = json.loads((tmp_path / "onetrainer.json").read_text(encoding="utf-8"))
    assert (written["lora_rank"], written["batch_size"], written["resolution"], written["learning_rate"]) == (
        16,
        2,
        "64",
        1e-4,
    )


def test_on_a_card_ours_runs_with_graphs_too() -> None:
    """Before the others, so that an interrupted run has both."""
    here = {"unsloth": Path(), "onetrainer": Path()}
    plain = ["Impasto, attention", "Impasto, linear"]
    both = ["Impasto, attention", "Impasto, attention, graphs", "Impasto, linear", "Impasto, linear, graphs"]
    for graphs, names in ((False, plain), (True, both)):
        order = rivals._in_order("sdxl", here, graphs=graphs)
        assert [rival.name for rival, _ in order][: len(names)] == names
        assert [rival.name for rival, path in order if path is None] == [
            RIVALS["sdxl"]["diffusers"].name,
            RIVALS["sdxl"]["sd_scripts"].name,
        ]


@pytest.mark.slow
def test_of_sd15_there_are_a_base_of_its_own_and_the_trainers_that_know_it(tmp_path: Path) -> None:
    settings = replace(SETTINGS, family="sd15")
    place = lay_out(tmp_path, settings)
    pipeline = StableDiffusionPipeline.from_pretrained(place.diffusers, requires_safety_checker=False)
    other = open_base(BaseConfig(model=str(place.single)))
    assert other.family == "sd15" and pipeline.tokenizer("a cat").input_ids[0] == 49406
    for name, weight in other.load_unet(torch.float32, "cpu").state_dict().items():
        assert torch.equal(weight, pipeline.unet.state_dict()[name]), name
    scripts = {key: rival.command(settings, place, tmp_path) for key, rival in RIVALS["sd15"].items()}
    assert Path(scripts["diffusers"][0]).name == "train_text_to_image_lora.py"
    assert Path(scripts["sd_scripts"][0]).name == "train_network.py"
    written = json.loads((tmp_path / "onetrainer.json").read_text(encoding="utf-8"))
    assert written["model_type"] == "STABLE_DIFFUSION_15" and "sd 1.5" in scripts["onetrainer"][1]
    assert "unsloth" not in scripts


def test_a_trainer_is_watched_until_it_has_stepped_often_enough(place: Place, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    rival = Rival("a loop", "attention", lambda settings, place, checkout: [str(checkout / "loop.py")])
    outcome = run(rival, SETTINGS, place, tmp_path, 120.0)
    assert not outcome.failure and outcome.pictures_per_second is not None and outcome.pictures_per_second > 0
    # Operations: square, sum; the initial gradient of one, twice the weight, their product, and adding to the last
    # gradient. The sum and the one are saved, four bytes each.
    assert (outcome.trained, outcome.operations, outcome.kept) == (3, 7, 8)


@pytest.mark.slow
def test_one_that_ends_before_it_is_counted_keeps_its_time_and_says_why(place: Place, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP.replace("range(1000)", f"range({SETTINGS.steps})"), encoding="utf-8")
    rival = Rival("a loop", "attention", lambda settings, place, checkout: [str(checkout / "loop.py")])
    outcome = run(rival, SETTINGS, place, tmp_path, 120.0)
    assert outcome.pictures_per_second and outcome.operations is None
    assert outcome.failure == f"not counted: step {SETTINGS.steps - 1}"
    assert "| not counted: step 6 |" in table([outcome], "a card", SETTINGS)


def test_of_one_that_failed_the_last_words_are_told(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert rivals._last_words(log) == "it said nothing"
    log.write_bytes("first\nno model | here, ü\n \n".encode())
    assert rivals._last_words(log) == "no model / here, ü"


def test_the_table_compares_with_ours_on_the_same_layers() -> None:
    outcomes = [
        Outcome("Impasto, attention", 1, "attention", 6.0, 3 << 20, 4 << 20, 5678, 1234, 2 << 20),
        Outcome("Impasto, linear", 1, "linear", 5.0),
        Outcome("Impasto, linear, graphs", 1, "linear", 10.0),
        Outcome("one", 1, "attention", 2.0),
        Outcome("other", 1, "linear", 4.0),
        Outcome("none", 4, "linear", failure="No module named 'x'"),
    ]
    lines = table(outcomes, "a card", SETTINGS).splitlines()[-6:]
    assert len({line.count("|") for line in lines}) == 1
    assert lines[0] == "| Impasto, attention | attention | 5,678 | 1 | 6.00 | 1.00 × | 1,234 | 2 | 3 | 4 |"
    assert "0.50 ×" in lines[2] and "3.00 ×" in lines[3] and "1.25 ×" in lines[4] and "No module named" in lines[5]


def test_what_a_trainer_lacks_is_stood_in_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = rivals_check.Absent()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, absent])
    with pytest.raises(ImportError) as library:
        importlib.import_module("no_such_library.part")
    absent.stand_in_for(library.value)
    part = importlib.import_module("no_such_library.part")
    thing = part.Thing
    assert issubclass(type("Derived", (thing,), {}), thing) and callable(thing.Inner)
    with pytest.raises(ImportError) as name:
        exec("from json import no_such_name", {})
    absent.stand_in_for(name.value)
    exec("from json import no_such_name", {})
    assert absent.names == ["no_such_library", "json with no_such_name"]
    with pytest.raises(ImportError):
        absent.stand_in_for(library.value)
    with pytest.raises(ImportError) as own:
        importlib.import_module("json.no_such_part")
    with pytest.raises(ImportError):
        absent.stand_in_for(own.value)
    del json.no_such_name, sys.modules["no_such_library"], sys.modules["no_such_library.part"]  # type: ignore[attr-defined]


def test_a_trainer_runs_with_its_own_libraries_where_it_has_them(tmp_path: Path) -> None:
    assert rivals._python(tmp_path) == sys.executable
    own = tmp_path / "venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert rivals._python(tmp_path) == str(own)
