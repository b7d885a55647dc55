"""What is written loads as what was meant: dumps for every job, and the first job file for every machine."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.tables import recipes, tables
from trainer.config.fit import FitConfig
from trainer.config.job import SCHEMA, Job
from trainer.config.load import parse_job
from trainer.config.resolve import Machine
from trainer.config.schema import choices, fields
from trainer.config.write import dump_job, new_job_text

CPU = Machine("cpu", None, None, True, 4)
CARD = Machine("cuda:0", "NVIDIA GeForce RTX 3060", 12 * 1024**3, True, 8)
OLD_CARD = Machine("cuda:0", "NVIDIA GeForce GTX 1070", 8 * 1024**3, False, 8)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    data = draw(tables(Job)) | {"schema": SCHEMA, "recipe": draw(recipes())}
    data["report"]["saving"].pop("every_epochs", None)
    data["dataset"]["folders"] = [
        {**each, "kind": "train", "path": f"{each['path']}/{number}"}
        for number, each in enumerate(data["dataset"]["folders"])
    ]
    try:
        return Job.model_validate(data)
    except ValidationError:
        assume(False)
        raise


def reload(text: str) -> Job:
    """Read without touching paths: a dump holds any text there, loading makes them absolute."""
    import tomllib

    return Job.model_validate(tomllib.loads(text))


@settings(max_examples=30)
@given(job=jobs(), comments=st.booleans())
def test_every_job_survives_writing_and_reading(job: Job, comments: bool) -> None:
    assert reload(dump_job(job, comments=comments)) == job


def minimal(**updates: Any) -> Job:
    return Job.model_validate(
        {"name": "x", "base": {"model": "a/b"}, "dataset": {"folders": [{"path": "p"}]}} | updates
    )


def test_absent_values_are_left_out_and_explained_in_comments() -> None:
    assert "min_snr_gamma" not in dump_job(minimal(), comments=False)
    commented = dump_job(minimal(), comments=True)
    assert "# min_snr_gamma = <a number above 0 and up to 100>" in commented
    assert (
        "# Balances easy and hard timesteps (kohya: min_snr_gamma, diffusers: snr_gamma); typically 5; default: off."
        in commented
    )


def test_comments_stand_above_what_they_explain_and_are_short() -> None:
    commented = dump_job(minimal(), comments=True)
    assert "# The base model.\n[base]\n" in commented
    unwrapped = commented.replace("\n# ", " ")
    assert " One of constant, linear, cosine, restarts, polynomial, rex, inverse_sqrt, " in unwrapped
    assert " piecewise.\nkind = " in unwrapped
    assert max(map(len, commented.splitlines())) <= 120
    lines = commented.splitlines()
    bare = [line for line in lines if line and not line.startswith("#")]
    assert bare == [line for line in dump_job(minimal(), comments=False).splitlines() if line]


def test_dump_is_stable() -> None:
    text = dump_job(minimal(), comments=True)
    assert dump_job(reload(text), comments=True) == text


@pytest.mark.parametrize("machine", [CPU, CARD, OLD_CARD], ids=["cpu", "12 GB", "8 GB without bf16"])
@pytest.mark.parametrize("family", ["sd15", "sdxl", None])
def test_a_new_job_loads(tmp_path: Path, machine: Machine, family: Any) -> None:
    folder = tmp_path / "mein stil"
    text = new_job_text(
        name="mein stil",
        base="owner/name",
        images=tmp_path / "bilder",
        folder=folder,
        family=family,
        machine=machine,
        trigger="ohwx stil",
        count=20,
    )
    job = parse_job(text, "job.toml", folder)
    assert job.name == "mein stil"
    assert job.base.model == "owner/name"
    assert job.dataset.folders[0].path == str(tmp_path / "bilder")
    assert job.dataset.folders[0].trigger == "ohwx stil"
    assert 'path = "../bilder"' in text
    assert job.recipe.images_seen == 2000
    assert (job.recipe.rank, job.recipe.alpha, job.recipe.learning_rate) == (16, 16.0, 1e-4)
    assert job.recipe.resolution == {"sd15": 512, "sdxl": 1024, None: None}[family]
    assert job.recipe.text_encoder.learning_rate == (5e-5 if family == "sd15" else 0.0)
    assert [prompt.prompt for prompt in job.report.previews.prompts] == [
        "ohwx stil",
        "ohwx stil, a house by a lake",
        "a house by a lake",
    ]


def test_a_new_job_leaves_its_fit_to_the_plan_and_says_what_to_expect(tmp_path: Path) -> None:
    """A key that is written is a constraint, so that none may be written unasked."""

    def text(machine: Machine, expected: FitConfig | None) -> str:
        pictures, folder = tmp_path / "p", tmp_path / "job"
        made = new_job_text(
            name="x", base="a/b", images=pictures, folder=folder, family="sdxl", machine=machine, expected=expected
        )
        assert parse_job(made, "job.toml", folder).fit == FitConfig()
        return made

    told = text(CARD, FitConfig(dtype="bf16", gradient_checkpointing=("mid_block",)))
    assert "Typical plan for NVIDIA GeForce RTX 3060 with 12 GB:" in told
    assert '#   dtype = "bf16"  # Precision of the base' in told
    assert '#   gradient_checkpointing = ["mid_block"]  # Gradient checkpointing' in told
    assert "#   micro_batch = " not in told
    assert "Typical plan" not in text(CPU, None)


def test_a_new_job_names_every_key_that_it_leaves_out(tmp_path: Path) -> None:
    made = new_job_text(name="x", base="a/b", images=tmp_path, folder=tmp_path / "j", family="sd15", machine=CARD)
    for key in ("recipe.optimizer.name", "recipe.schedule.kind", "recipe.images.flip", "report.saving.keep"):
        assert f"#   {key} = " in made
    assert "#   recipe.rank = " not in made


def test_paths_of_a_new_job_lead_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    far = tmp_path / "models" / "sd" / "base.safetensors"
    for base in ("base.safetensors", "models/sd/base.safetensors", str(far)):
        made = new_job_text(name="x", base=base, images=Path("p"), folder=Path("deep/er/job"), family=None, machine=CPU)
        job = parse_job(made, "job.toml", tmp_path / "deep/er/job")
        assert Path(job.base.model) == tmp_path / base
        assert Path(job.dataset.folders[0].path) == tmp_path / "p"


def test_a_new_job_lists_every_setting_with_its_choices(tmp_path):
    text = new_job_text(
        name="a", base="own/er", images=tmp_path, folder=tmp_path, family="sdxl",
        machine=Machine("cpu", None, None, bf16=True, cores=4),
    )  # fmt: skip
    loaded = Job.model_validate(tomllib.loads(text))
    for found in fields(Job):
        key = found.key.replace(f"[{loaded.recipe.optimizer.name}]", "").replace(".*", ".0")
        if (
            "[" in key
            or found.values in ("a table", "a list of tables")
            or key.startswith(("fallbacks", "fit.int8_pr", "dataset.folders.0.captions.", "dataset.folders.0.images."))
        ):
            continue
        name = key.rpartition(".")[2]
        line = next((line for line in text.splitlines() if line.startswith((f"#   {key} = ", f"{name} = "))), None)
        assert line is not None, key
        if line.startswith("#"):
            assert [word for word in choices(found.annotation) if word not in line] == []
    # Keys of the recipe that folders can set are explained once, so that the file stays short enough to be edited.
    for table in ("captions", "images"):
        assert f"#   [dataset.folders.{table}]  # " in text
