"""A good job file becomes a Job: encodings, paths, overrides, and older schemas."""

from pathlib import Path
from typing import Any

import pytest

from trainer.config import load
from trainer.config.job import SCHEMA
from trainer.config.load import load_job, parse_job
from trainer.config.optimizers.kinds import AdamWConfig, ProdigyConfig
from trainer.config.paths import is_base_path
from trainer.config.resolve import identity
from trainer.config.write import dump_job
from trainer.errors import JobError

GOOD = """
schema = 1
name = "gemälde"
[base]
model = "models/base.safetensors"
[[dataset.folders]]
path = "pictures"
[[dataset.folders]]
path = "../häuser und wälder"
kind = "regularization"
[recipe]
epochs = 4
alpha = 8
[recipe.optimizer]
beta2 = 0.99
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_job_loads_with_and_without_byte_order_mark(tmp_path: Path, encoding: str, newline: str) -> None:
    (tmp_path / "job.toml").write_text(GOOD, encoding=encoding, newline=newline)
    job = load_job(tmp_path / "job.toml")
    assert job.name == "gemälde"
    assert job.recipe.alpha == 8.0
    assert job.recipe.rank == 16
    assert job.recipe.optimizer == AdamWConfig(beta2=0.99)


def test_a_frozen_text_is_read_in_place_of_the_file_and_named_as_it(tmp_path: Path) -> None:
    path = tmp_path / "ein ü.toml"
    path.write_text("name = 'later'", encoding="utf-8")
    frozen = load_job(path, ["recipe.alpha=2"], text=GOOD)
    assert (frozen.name, frozen.recipe.alpha, frozen.output.runs) == ("gemälde", 2.0, str(tmp_path / "runs"))
    path.unlink()
    assert load_job(path, text=GOOD).base.model == str(tmp_path / "models" / "base.safetensors")
    for broken in (GOOD + "rank = ", GOOD.replace("alpha = 8", "alpha = -8")):
        with pytest.raises(JobError, match=r"ein ü\.toml"):
            load_job(path, text=broken)


def test_paths_are_counted_from_the_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mit leer zeichen"
    folder.mkdir()
    (folder / "job.toml").write_text(GOOD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    job = load_job(
        Path("mit leer zeichen") / "job.toml",
        ["base.vae=vae.safetensors", "base.continue_from=x/a.safetensors", "dataset.folders.1.mask_folder=masks"],
    )
    assert job.base.model == str(folder / "models" / "base.safetensors")
    assert job.base.vae == str(folder / "vae.safetensors")
    assert job.base.continue_from == str(folder / "x" / "a.safetensors")
    assert [each.path for each in job.dataset.folders] == [
        str(folder / "pictures"),
        str(tmp_path / "häuser und wälder"),
    ]
    assert [each.mask_folder for each in job.dataset.folders] == [None, str(folder / "masks")]
    assert job.output.runs == str(folder / "runs")


def test_absolute_and_home_paths_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "me"))
    job = parse_job(GOOD, "job.toml", tmp_path, [f"base.model='{tmp_path / 'b.safetensors'}'", "output.runs=~/runs"])
    assert job.base.model == str(tmp_path / "b.safetensors")
    assert job.output.runs == str(tmp_path / "me" / "runs")


@pytest.mark.parametrize(
    ("model", "is_path"),
    [
        ("runwayml/stable-diffusion-v1-5", False),
        ("https://example.org/base.safetensors", False),
        ("./owner/name", True),
        ("../base", True),
        ("/models/base", True),
        (".\\models\\base", True),
        ("C:\\models\\base", True),
        ("C:/models/base", True),
        ("~/base", True),
        ("owner/base.safetensors", True),
        ("owner/base.CKPT", True),
        ("base", True),
        ("models/sd/base", True),
        ("here/folder", True),
    ],
)
def test_base_is_a_path_or_an_id(tmp_path: Path, model: str, is_path: bool) -> None:
    (tmp_path / "here" / "folder").mkdir(parents=True)
    assert is_base_path(model, tmp_path) is is_path


def test_hub_ids_and_links_are_left_as_they_are(tmp_path: Path) -> None:
    for model in ("owner/name", "https://example.org/a.safetensors"):
        assert parse_job(GOOD, "job.toml", tmp_path, [f"base.model={model}"]).base.model == model


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    job = parse_job(
        GOOD,
        "job.toml",
        tmp_path,
        [
            "recipe.rank=32",
            "recipe.learning_rate = 5e-5",
            "recipe.images.flip=true",
            "recipe.layers=all",
            "recipe.captions.prefix='a, b'",
            "dataset.folders.1.repeats=3",
            'fit.gradient_checkpointing=["down_blocks.0", "mid_block"]',
            "report.validation.timesteps=[10]",
            "name=new name",
        ],
    )
    assert (job.recipe.rank, job.recipe.learning_rate, job.recipe.images.flip) == (32, 5e-5, True)
    assert (job.recipe.layers, job.recipe.captions.prefix) == ("all", "a, b")
    assert [folder.repeats for folder in job.dataset.folders] == [None, 3]
    assert job.fit.gradient_checkpointing == ("down_blocks.0", "mid_block")
    assert job.report.validation.timesteps == (10,)
    assert job.name == "new name"


def test_an_overriding_length_replaces_the_one_of_the_file(tmp_path: Path) -> None:
    recipe = parse_job(GOOD, "job.toml", tmp_path, ["recipe.steps=100"]).recipe
    assert (recipe.steps, recipe.epochs, recipe.images_seen) == (100, None, None)


def test_an_override_may_change_the_optimizer(tmp_path: Path) -> None:
    text = GOOD.replace("[recipe.optimizer]\nbeta2 = 0.99", "")
    recipe = parse_job(
        text, "job.toml", tmp_path, ["recipe.optimizer.name=prodigy", "recipe.optimizer.d_coef=0.5"]
    ).recipe
    assert recipe.optimizer == ProdigyConfig(d_coef=0.5)


def test_a_whole_warm_up_is_steps_and_a_fraction_a_share(tmp_path: Path) -> None:
    assert parse_job(GOOD, "job.toml", tmp_path, ["recipe.schedule.warmup=100"]).recipe.schedule.warmup == 100
    assert parse_job(GOOD, "job.toml", tmp_path, ["recipe.schedule.warmup=0.05"]).recipe.schedule.warmup == 0.05


def test_older_schemas_are_migrated_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Made-up older versions: -1 called the rank "dim", 0 had it at the top.
    def to_zero(data: dict[str, Any]) -> dict[str, Any]:
        return {**{key: value for key, value in data.items() if key != "dim"}, "rank": data["dim"]}

    def to_one(data: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in data.items() if key != "rank"}
        return {**kept, "recipe": {**data.get("recipe", {}), "rank": data["rank"]}}

    monkeypatch.setitem(load.MIGRATIONS, -1, to_zero)
    monkeypatch.setitem(load.MIGRATIONS, 0, to_one)
    older = parse_job(GOOD.replace("schema = 1", "schema = 0\nrank = 5"), "job.toml", tmp_path)
    oldest = parse_job(GOOD.replace("schema = 1", "schema = -1\ndim = 5"), "job.toml", tmp_path)
    assert older == oldest == parse_job(GOOD, "job.toml", tmp_path, ["recipe.rank=5"])
    assert oldest.schema_version == SCHEMA


def test_migration_leaves_the_present_schema_alone() -> None:
    data = {"schema": SCHEMA, "name": "x"}
    assert load.migrate(data) is data


@pytest.mark.parametrize("schema", ["", "schema = 1"])
def test_a_job_of_schema_1_ignores_mask_files_as_it_did_then(tmp_path: Path, schema: str) -> None:
    old = GOOD.replace("schema = 1", schema)
    assert parse_job(old, "job.toml", tmp_path).dataset.masks == "none"
    assert parse_job(old, "job.toml", tmp_path, ["dataset.masks=auto"]).dataset.masks == "auto"
    stated = old.replace("[[dataset.folders]]", '[dataset]\nmasks = "files"\n[[dataset.folders]]', 1)
    assert parse_job(stated, "job.toml", tmp_path).dataset.masks == "files"
    frozen = dump_job(parse_job(old, "job.toml", tmp_path), comments=False)
    assert parse_job(frozen, "job.toml", tmp_path).dataset.masks == "none"
    frozen_then = frozen.replace(f"schema = {SCHEMA}", "schema = 1")
    assert identity(parse_job(frozen_then, "job.toml", tmp_path)) == identity(parse_job(frozen, "job.toml", tmp_path))


def test_a_new_job_uses_mask_files(tmp_path: Path) -> None:
    assert parse_job(GOOD.replace("schema = 1", "schema = 2"), "job.toml", tmp_path).dataset.masks == "auto"
    assert load.migrate({"name": "x"}) == {"name": "x", "schema": SCHEMA}
    assert load.migrate({"dataset": 3}) == {"dataset": 3, "schema": SCHEMA}


def test_a_gap_in_the_chain_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(load.MIGRATIONS, -1, lambda data: data)
    with pytest.raises(JobError, match="Schema 0"):
        load.migrate({"schema": -1})
