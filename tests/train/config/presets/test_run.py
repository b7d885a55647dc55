"""A recipe's way through a real run: job, run, preset, and the job of somebody else; and out of the LoRA itself."""

import hashlib
from pathlib import Path

import pytest

from tests.support.jobs import photographs, write_job
from tests.support.presets import stated
from tests.support.tiny import tiny_base
from trainer import cli
from trainer.base.source import open_base
from trainer.config.base import BaseConfig
from trainer.config.load import load_job
from trainer.config.presets.creating import hash_of_base
from trainer.config.presets.exchange import load_preset
from trainer.config.recipe import TextEncoderConfig
from trainer.files.weights import digest_file
from trainer.protocol.run_directory import RunDirectory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zwei Künstler")


def test_a_run_and_its_lora_give_the_recipe_that_trains_the_same_again(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    base = tiny_base("sd15", folder / "base", form="single", depth=1)
    pictures = photographs(folder / "pictures", count=4)
    job = write_job(folder / "job", base, pictures, name="first")
    assert cli.main(["train", str(job), "--set", "recipe.steps=2", "--set", "recipe.captions.shuffle=true"]) == 0
    run = RunDirectory.open(folder / "job" / "runs" / "first")
    frozen = load_job(run.job)

    assert cli.main(["presets", "share", str(run.path), "--fit", "--out", "run.toml"]) == 0
    shared = load_preset(folder / "run.toml")
    recipe = frozen.recipe.model_copy(update={"text_encoder_2": TextEncoderConfig()})  # SD 1.5 has none
    typed = load_job(job, ["recipe.steps=2", "recipe.captions.shuffle=true"]).recipe
    assert stated(shared.recipe) == stated(typed)  # as it was typed, and nothing that was resolved from it
    assert shared.fit is not None
    assert (shared.fit.device, shared.fit.threads, shared.fit.dtype) == (None, None, "fp32")
    assert shared.trigger_words == ("sks",)
    assert shared.base.sha256 == digest_file(Path(frozen.base.model))
    assert shared.base.name == Path(frozen.base.model).name
    assert [example.prompt for example in shared.examples] == ["sks, a cat"]
    assert shared.preview is not None
    assert str(folder) not in (folder / "run.toml").read_text(encoding="utf-8")

    lora = run.output / "first.safetensors"
    assert cli.main(["presets", "share", str(lora), "--out", "lora.toml"]) == 0
    told = load_preset(folder / "lora.toml")
    assert told.recipe == recipe
    assert told.trigger_words == ("sks",)
    assert told.base == shared.base
    assert told.preview is not None

    assert cli.main(["presets", "add", "--yes", "run.toml", "--name", "sent"]) == 0
    other = write_job(folder / "other", base, pictures, name="second")
    assert cli.main(["train", str(other), "--recipe", "sent"]) == 0
    again = RunDirectory.open(folder / "other" / "runs" / "second")
    assert load_job(again.job).recipe == frozen.recipe
    weights = [(each.output / f"{each.name}.safetensors").read_bytes() for each in (run, again)]
    lengths = [int.from_bytes(data[:8], "little") for data in weights]
    assert weights[0][8 + lengths[0] :] == weights[1][8 + lengths[1] :]

    assert cli.main(["train", str(job), "--set", "recipe.images_seen=8", "--set", "name=seen"]) == 0
    seen = RunDirectory.open(folder / "job" / "runs" / "seen")
    assert cli.main(["presets", "share", str(seen.path), "--out", "seen.toml"]) == 0
    shared = load_preset(folder / "seen.toml")
    assert shared.recipe is not None
    assert (shared.recipe.images_seen, shared.recipe.steps) == (8, None)
    assert cli.main(["resume", str(seen.path), "--steps", "9"]) == 0  # then its length is what was asked for last
    assert cli.main(["presets", "share", str(seen.path), "--out", "longer.toml"]) == 0
    shared = load_preset(folder / "longer.toml")
    assert shared.recipe is not None
    assert (shared.recipe.images_seen, shared.recipe.steps) == (None, 9)

    capsys.readouterr()
    assert cli.main(["train", str(other), "--recipe", str(folder / "sdxl.toml")]) == 2
    text = (folder / "run.toml").read_text(encoding="utf-8").replace('family = "sd15"', 'family = "sdxl"')
    (folder / "sdxl.toml").write_text(text, encoding="utf-8")
    assert cli.main(["train", str(other), "--recipe", str(folder / "sdxl.toml")]) == 2
    assert "is for SDXL, but the base is SD 1.5" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_base_in_a_folder_is_known_by_what_sha256sum_prints_of_it(family, folder):
    base = tiny_base(family, folder / family, form="folder")
    files = open_base(BaseConfig(model=str(base), family=family)).files
    weights = sorted([*base.glob("text_encoder*/*.safetensors"), *base.glob("unet/*.safetensors")])
    printed = "".join(f"{digest_file(path)}  {path.relative_to(base).as_posix()}\n" for path in weights)
    found = hash_of_base(files, base.name)
    assert found == hashlib.sha256(printed.encode()).hexdigest()
    with_another_vae = {path: digest for path, digest in files.items() if not path.startswith("vae/")}
    assert hash_of_base({**with_another_vae, "nice.vae.safetensors": "0" * 64}, base.name) == found
    assert hash_of_base({**files, "unet/diffusion_pytorch_model.safetensors": "0" * 64}, base.name) != found
    assert hash_of_base({}, base.name) is None
